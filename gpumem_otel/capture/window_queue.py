"""Windows of events one after the other: the allocator records one at a time.

Who wants a window stands in line for it, for a bounded time. Our own windows, which are due at a
moment, go before requests, which come at any: they wait for the one that is open alone, and there
is one in an interval, so that requests get theirs too.

The lock is held for a look at the line and never while anybody waits.
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
"""How long a request waits for its window to begin: for one of 30 s and the reading of it, and for
any of ours at the default interval, of which a window takes 27 s at most."""

_TICK_SECONDS: Final = 0.05
"""So often somebody who waits looks at the line; the end of the wait is heard at once."""

ANOTHER_IS_OPEN: Final = "window: another one is open; try again when it is over"
"""Refusals are counted by their text."""


@dataclass(slots=True, eq=False)
class _Place:
    """Somebody in line.

    Attributes:
        seconds: the longest the window takes.
        own: of ours: it ends when it has seen enough, mostly long before.
        end: by the clock, once it is open.
    """

    seconds: float
    own: bool
    end: float = 0.0


class WindowQueue:
    """The line; from any thread.

    Args:
        clock: time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: _Place | None = None
        self._waiting: list[_Place] = []

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @contextmanager
    def turn(
        self, seconds: float, stop: Waitable, *, wait_seconds: float, own: bool = False
    ) -> Iterator[None]:
        """Wait for those before, and have no other window open meanwhile.

        Args:
            seconds: the longest the window takes.
            stop: ends the wait at once.
            wait_seconds: the longest wait. A request does not begin one where those before asked
                for longer; ours does, since a window also ends when its client goes away or the
                job has made many events.
            own: go before requests.

        Raises:
            BusyError: the turn did not come; says to a request when it may.
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
                elif place in self._waiting:  # else interrupted before it was
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
                raise BusyError("window: the wait for it was ended")

    def _begun(self, place: _Place) -> bool:
        with self._lock:
            if self._open is not None or self._waiting[0] is not place:
                return False
            del self._waiting[0]
            place.end = self._clock.monotonic() + place.seconds
            self._open = place
            return True

    def _ahead(self, place: _Place, now: float) -> tuple[float, float]:
        """Seconds until those before have ended: what requests asked for, and all of it."""
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
