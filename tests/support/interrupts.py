"""Signals whose handler raises so many times, however many arrive as one."""

from __future__ import annotations

import signal
import threading

__all__ = ["Interrupts"]


class Interrupts:
    """Within, SIGUSR2 raises KeyboardInterrupt in the main thread, the first so many times."""

    def __init__(self, times: int) -> None:
        self.left = times
        self._heard = threading.Event()

    def __enter__(self) -> Interrupts:  # noqa: PYI034 - Self is of Python 3.11
        self._before = signal.signal(signal.SIGUSR2, self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGUSR2, self._before)

    def _handler(self, number: int, frame: object) -> None:
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt

    def send(self) -> None:
        """All of them; returns when the last was raised."""
        main = threading.main_thread().ident
        while self.left:
            left = self.left
            signal.pthread_kill(main, signal.SIGUSR2)
            for _ in range(100):
                if self.left < left:
                    break
                self._heard.wait(0.01)
