"""Gives the interpreter lock back while our thread works in pure Python.

A thread that holds the lock makes the training thread wait up to the switch interval (5 ms) at
every torch call. Slices of at most 0.2 ms with a real sleep of 2 ms in between leave a job that
makes many small calls two thirds of its speed while they last; `sleep(0)` leaves it a tenth.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["REST_SECONDS", "SLICE_SECONDS", "Pacer"]

SLICE_SECONDS: Final = 0.0002
REST_SECONDS: Final = 0.002


class Pacer:
    """Counts how long our thread has worked since it last slept, and sleeps when it is due.

    One pacer belongs to one piece of work at a time: `begin()`, any number of `pause()`, `end()`.
    A pause outside of that (from a thread without work under way) does nothing.

    Args:
        now: seconds of a clock that never goes back.
        sleep: called with `rest_seconds`; must really give up the interpreter lock.
        slice_seconds: work after which the next pause sleeps.
        rest_seconds: length of that sleep.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
        slice_seconds: float = SLICE_SECONDS,
        rest_seconds: float = REST_SECONDS,
    ) -> None:
        self._now = now
        self._sleep = sleep
        self._slice_seconds = slice_seconds
        self._rest_seconds = rest_seconds
        self._slice_start: float | None = None
        self._worked_seconds = 0.0

    def begin(self) -> None:
        """Start a piece of work."""
        self._worked_seconds = 0.0
        self._slice_start = self._now()

    def pause(self) -> None:
        """Sleep if the slice is used up. Call it every few dozen items."""
        start = self._slice_start
        if start is None:
            return
        worked = self._now() - start
        if worked < self._slice_seconds:
            return
        self._worked_seconds += worked
        self._sleep(self._rest_seconds)
        self._slice_start = self._now()

    def end(self) -> float:
        """Finish the piece of work.

        Returns:
            Seconds spent working, the sleeps left out: an upper bound of the time that the
            interpreter lock was held.
        """
        if self._slice_start is not None:
            self._worked_seconds += self._now() - self._slice_start
            self._slice_start = None
        return self._worked_seconds
