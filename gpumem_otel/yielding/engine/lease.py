"""Restores the memory when a lease ends, and tries again where that fails."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from gpumem_otel.base.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.base.protocols import Clock

_log = named_logger("gpumem_otel.yield")

FIRST_BACK_OFF_SECONDS: Final = 1.0
MOST_BACK_OFF_SECONDS: Final = 60.0


class Lease:
    """One daemon thread while a lease runs.

    Args:
        restore: tries to restore the memory, unless its argument is set (the lease was stopped);
            whether nothing more is to be done. Must not raise.
        clock: time.
    """

    def __init__(self, restore: Callable[[threading.Event], bool], clock: Clock) -> None:
        self._restore = restore
        self._clock = clock
        self._ends = threading.Event()

    def start(self, seconds: float) -> None:
        """Replace the lease by one that ends in so many seconds."""
        self.stop()
        self._ends = threading.Event()
        threading.Thread(
            target=self._run, args=(self._ends, seconds), name="gpumem-otel-lease", daemon=True
        ).start()

    def try_again(self) -> None:
        """Try soon: nothing else would restore the memory once there is room."""
        try:
            self.start(FIRST_BACK_OFF_SECONDS)
        except RuntimeError as error:  # no thread can be started: the interpreter may be ending
            _log.warning("a restore is not tried again: %s", error)

    def stop(self) -> None:
        """End the lease without a restore."""
        self._ends.set()

    def _run(self, ends: threading.Event, seconds: float) -> None:
        back_off = FIRST_BACK_OFF_SECONDS
        while not self._clock.wait(ends, seconds):
            if self._restore(ends):
                return
            seconds, back_off = back_off, min(back_off * 2, MOST_BACK_OFF_SECONDS)
