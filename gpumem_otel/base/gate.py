"""Keeps our own calls away from torch and CUDA while the driver has this process locked.

A thread of the job that is stopped inside `cudaMalloc` keeps the allocator's mutex. A call for
counters or a snapshot then waits for that mutex with the interpreter lock held: one scrape would
stop all Python until the process is unlocked from outside (6 of 6 times on an H200). So every such
call is made between `enter` and `leave`, and the gate is closed before the process is locked.
"""

from __future__ import annotations

import threading
from typing import Final

_LOOK_SECONDS: Final = 0.002


class QuietGate:
    """Many readers come and go; one closer waits until all have left and admits no more.

    `enter` and `leave` take no lock and cost about 0.1 us together: they stand on the job's own
    threads, may be called within a signal handler or a finalizer, and a forked child inherits no
    lock of another thread. Each is one operation that no other thread can divide: a reader is
    noted before it looks whether the gate is closed, the closer closes it before it looks for
    readers, so one of them sees the other.
    """

    __slots__ = ("_inside", "closed")

    def __init__(self) -> None:
        self._inside: list[None] = []
        self.closed = False
        """Whether readers are turned away; a long reading looks at it and ends early."""

    def enter(self) -> bool:
        """Whether torch and CUDA may be called; if so `leave` must follow."""
        self._inside.append(None)
        if self.closed:
            self._inside.pop()
            return False
        return True

    def leave(self) -> None:
        """The call has returned."""
        self._inside.pop()

    def close(self, timeout: float) -> bool:
        """Turn readers away and wait for those inside.

        Args:
            timeout: seconds; on a busy machine the wait may take a little longer.

        Returns:
            Whether all have left. If not, the gate is open again.
        """
        self.closed = True
        pause = threading.Event()
        for _ in range(max(int(timeout / _LOOK_SECONDS), 1)):
            if not self._inside:
                return True
            pause.wait(_LOOK_SECONDS)
        if not self._inside:
            return True
        self.closed = False
        return False

    def open(self) -> None:
        """Let readers in again."""
        self.closed = False

    def forget_parent(self) -> None:
        """In a forked child: the readers of its parent are not there."""
        self._inside = []
        self.closed = False
