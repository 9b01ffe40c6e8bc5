"""An event, and whose turn it is, that interrupts can not break."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import Final

__all__ = ["Latch", "Turn"]

_SLICE_SECONDS: Final = 0.5
"""How late a signal is handled that the kernel gave to another thread: then nothing interrupts the
wait of the main thread, which alone runs handlers. SIGCONT to a stopped process is such a one."""


class Latch:
    """Opens once, for all who wait.

    `threading.Event` takes and lets go of its lock in Python: what a signal handler raises between
    two of those lines leaves it taken, and every other thread waits for it for ever. A
    `SimpleQueue` does both in C.
    """

    def __init__(self) -> None:
        self._open = False
        self._told: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Whether it is open."""
        return self._open

    def set(self) -> None:
        """Open it."""
        self._open = True
        self._told.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Until it is open, at most so long; whether it is.

        Raises:
            BaseException: what a signal handler raised, on the main thread.
        """
        ends = None if seconds is None else time.monotonic() + seconds
        while not self._open:
            left = _SLICE_SECONDS
            if ends is not None:
                left = min(ends - time.monotonic(), left)
                if left <= 0:
                    return False
            try:
                self._told.get(timeout=left)
            except Empty:
                continue
            self._told.put(None)  # the next who waits
        return True


class Turn(dict[None, str]):
    """Goes to whoever asks for it first, and stays with it.

    A dict, so that no line of ours runs when one is made.
    """

    def goes_to(self, who: str) -> bool:
        """Whether it is this one's: said in one step, whoever else asks; the same each time."""
        return self.setdefault(None, who) == who
