"""Queues requests for event windows, since the allocator records one window at a time.

Waits are bounded. Our own windows, which are due at a fixed time, go before requests: they wait
only for the open window, and there is one per interval, so that requests get their turn too. The
lock is never held while a thread waits.
"""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpumem_otel.errors import BusyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpumem_otel.base.protocols import Clock, Waitable

PULL_WAIT_SECONDS: Final = 35.0
"""How long a request waits for its window to begin: long enough for another window of 30 s and its
reading, and for any of ours at the default interval, which takes 27 s at most."""

_TICK_SECONDS: Final = 0.05
"""Interval at which a waiting thread checks the queue."""

ANOTHER_IS_OPEN: Final = "window: another one is open; try again when it is over"
"""Refusals are counted by their text."""


@dataclass(slots=True, eq=False)
class _Place:
    """A place in the queue.

    Attributes:
        seconds: the longest duration of the window.
        own: one of our own windows, which mostly ends long before.
        end: by the clock, once it is open.
    """

    seconds: float
    own: bool
    end: float = 0.0


class WindowQueue:
    """The queue; from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: _Place | None = None
        self._waiting: list[_Place] = []

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    @contextmanager
    def turn(
        self, seconds: float, stop: Waitable, *, wait_seconds: float, own: bool = False
    ) -> Iterator[None]:
        """Wait for the turn; no other window is open within the block.

        Args:
            seconds: the longest duration of the window.
            stop: ends the wait at once.
            wait_seconds: the longest wait. A request is refused at once if the requests before it
                asked for longer; our own windows wait nevertheless, since windows may end early.
            own: go before requests.

        Raises:
            BusyError: the turn did not come; tells a request when to retry.
        """
        place = _Place(seconds, own)
        try:
            with self._lock:
                self._waiting.insert(self._rank(own), place)
            self._wait(place, stop, self._clock.monotonic() + wait_seconds)
            yield
        finally:
            with self._lock:
                if self._open is place:
                    self._open = None
                elif place in self._waiting:  # else interrupted before it was added
                    self._waiting.remove(place)

    def _rank(self, own: bool) -> int:
        if not own:
            return len(self._waiting)
        return sum(1 for other in self._waiting if other.own)

    def _wait(self, place: _Place, stop: Waitable, until: float) -> None:
        while not self._begun(place):
            now = self._clock.monotonic()
            sure, longest = self._ahead(place, now)
            if now >= until or (now + sure > until and not place.own):
                raise _refusal(place, longest)
            if self._clock.wait(stop, min(until - now, _TICK_SECONDS)):
                raise BusyError("window: the wait was ended")

    def _begun(self, place: _Place) -> bool:
        with self._lock:
            if self._open is not None or self._waiting[0] is not place:
                return False
            del self._waiting[0]
            place.end = self._clock.monotonic() + place.seconds
            self._open = place
            return True

    def _ahead(self, place: _Place, now: float) -> tuple[float, float]:
        """Seconds until the windows before have ended: those of requests, and of all."""
        with self._lock:
            before = self._waiting[: self._waiting.index(place)]
            left = [(other.own, other.seconds) for other in before]
            if self._open is not None:
                left.append((self._open.own, max(self._open.end - now, 0.0)))
        return sum(seconds for own, seconds in left if not own), sum(s for _, s in left)


def _refusal(place: _Place, seconds: float) -> BusyError:
    if place.own:
        return BusyError(ANOTHER_IS_OPEN)
    seconds = max(math.ceil(seconds), 1)
    return BusyError(
        f"window: others come first, for {seconds} s at most, and a request waits for no more than "
        f"{PULL_WAIT_SECONDS:g} s; try again then",
        retry_after_seconds=seconds,
    )
