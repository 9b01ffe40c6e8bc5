"""Releases the interpreter lock regularly while our thread works in pure Python.

A thread that holds the lock makes the training thread wait up to the switch interval (5 ms) at
every torch call. With slices of at most 0.2 ms and sleeps of 2 ms in between, a job of many small
calls keeps two thirds of its speed meanwhile; with `sleep(0)` it keeps a tenth.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

SLICE_SECONDS: Final = 0.0002
REST_SECONDS: Final = 0.002


class Pacer:
    """Measures how long our thread has worked since it last slept, and sleeps when due.

    A piece of work is `begin()`, any number of `pause()`, `end()`, all in one thread. Threads may
    share a pacer, each with its own piece of work; `pause` without one does nothing.

    Args:
        sleep: called with `rest_seconds`; must release the interpreter lock.
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
        self._work = _Work()

    def begin(self) -> None:
        """Start a piece of work of this thread."""
        self._work.seconds = 0.0
        self._work.slice_start = self._now()

    def pause(self) -> None:
        """Sleep if the slice is used up. Call it every few dozen items."""
        work = self._work
        start = work.slice_start
        if start is None:
            return
        worked = self._now() - start
        if worked < self._slice_seconds:
            return
        work.seconds += worked
        self._sleep(self._rest_seconds)
        work.slice_start = self._now()

    def end(self) -> float:
        """Finish this thread's piece of work.

        Returns:
            Seconds of work without the sleeps: an upper bound of the time that the interpreter lock
            was held.
        """
        work = self._work
        if work.slice_start is not None:
            work.seconds += self._now() - work.slice_start
            work.slice_start = None
        return work.seconds


class _Work(threading.local):
    """One per thread."""

    slice_start: float | None = None
    seconds: float = 0.0
