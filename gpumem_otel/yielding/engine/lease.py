"""Brings the memory back by itself when a lease runs out, and tries again where that fails."""

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
        restore: tries to bring the memory back, unless the event that it is given is set (the lease
            was stopped); whether no more is to be done. Must not raise.
        clock: time.
    """

    def __init__(self, restore: Callable[[threading.Event], bool], clock: Clock) -> None:
        self._restore = restore
        self._clock = clock
        self._ends = threading.Event()

    def start(self, seconds: float) -> None:
        """The lease ends in so many seconds, and no earlier one counts."""
        self.stop()
        self._ends = threading.Event()
        threading.Thread(
            target=self._run, args=(self._ends, seconds), name="gpumem-otel-lease", daemon=True
        ).start()

    def try_again(self) -> None:
        """Soon: nobody else would bring the memory back once there is room."""
        try:
            self.start(FIRST_BACK_OFF_SECONDS)
        except RuntimeError as error:  # no thread can be started, for one at the interpreter's end
            _log.warning("a restore is not tried again: %s", error)

    def stop(self) -> None:
        """There is no lease any more."""
        self._ends.set()

    def _run(self, ends: threading.Event, seconds: float) -> None:
        back_off = FIRST_BACK_OFF_SECONDS
        while not self._clock.wait(ends, seconds):
            if self._restore(ends):
                return
            seconds, back_off = back_off, min(back_off * 2, MOST_BACK_OFF_SECONDS)
