"""Signals whose handler raises so many times, however many arrive as one."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

__all__ = ["Interrupts", "SecondInterrupt", "interrupt", "once", "until_it_waits"]


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


def interrupt():
    """Of the main thread."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def once(interrupts):
    """At the first call alone."""
    left = [interrupts]
    return lambda *_: left.pop()() if left else None


def until_it_waits() -> None:
    """The main thread, for the end of what it asked for: in the same line five times over."""
    seen = []
    while len(seen) < 5 or len(set(seen[-5:])) > 1 or not seen[-1][0].endswith("signal_safe.py"):
        frame = sys._current_frames()[threading.main_thread().ident]
        seen.append((frame.f_code.co_filename, frame.f_lineno))
        threading.Event().wait(0.001)


class SecondInterrupt:
    """Raises in the n-th line of the main thread that waits, counted from the first interrupt."""

    FILES = (
        "operation_waiter.py", "interrupts.py", "signal_safe.py", "safepoint.py", "engine.py",
        "yields.py",
    )  # fmt: skip

    def __init__(self, line: int) -> None:
        self.line, self.seen, self.first = line, 0, False
        self.where = ""

    def __enter__(self):
        self._before = signal.signal(signal.SIGINT, self._handler)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)
        signal.signal(signal.SIGINT, self._before)

    def _handler(self, number, frame):
        self.first = True
        raise KeyboardInterrupt("first")

    def _trace(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if path.name not in self.FILES or path.parent.name not in {"yielding", "engine", "api"}:
            return None
        if self.first and event == "line":
            self.seen += 1
            if self.seen == self.line:
                self.where = f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt("second")
        return self._trace
