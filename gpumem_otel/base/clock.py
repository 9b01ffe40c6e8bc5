"""The real clock, for those parts that are handed one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpumem_otel.base.protocols import Waitable


class SystemClock:
    """The `Clock` of a running process."""

    def time_ns(self) -> int:
        """Wall clock, nanoseconds since 1970."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def wait(self, event: Waitable, seconds: float) -> bool:
        """Wait for the event, at most so long; True if it is set."""
        return event.wait(max(seconds, 0.0))
