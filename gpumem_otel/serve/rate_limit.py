"""Token buckets: a number at once, and a number a second."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_KEYS: Final = 256


class Buckets:
    """One bucket per key, bounded in number: the one longest unused is forgotten.

    Args:
        burst: how many at once.
        per_second: how many a second in the long run.
        clock: monotonic seconds.
    """

    def __init__(
        self, burst: int, per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = float(burst)
        self._per_second = per_second
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> int:
        """0 where the key may pass now, else whole seconds until it may."""
        now = self._clock()
        left, seen = self._left.pop(key, (self._burst, now))
        left = min(self._burst, left + (now - seen) * self._per_second)
        passes = left >= 1
        self._left[key] = (left - 1 if passes else left, now)
        if len(self._left) > _MAX_KEYS:
            self._left.popitem(last=False)
        return 0 if passes else max(1, math.ceil((1 - left) / self._per_second))
