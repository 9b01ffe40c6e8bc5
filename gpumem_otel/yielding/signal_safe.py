"""An event, a claim, threads and log lines that stay whole when a signal handler raises.

Python runs signal handlers on the main thread, between any two of its lines. Locks of `threading`
and `logging` are taken and released in Python: a handler that raises in between leaves one locked
forever. Everything here does that in C, or on another thread.
"""

from __future__ import annotations

import threading
import time
from _thread import start_new_thread
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.base.logs import NamedLogger

_SLICE_SECONDS: Final = 0.5
"""A signal that the kernel gives to another thread does not interrupt a wait of the main thread,
which alone runs handlers: they run after this time at the latest. SIGCONT is often one of these."""


class SafeEvent:
    """A `threading.Event` that cannot be cleared."""

    def __init__(self) -> None:
        self._set = False
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it, and wake all threads that wait."""
        self._set = True
        self._wakeups.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set, or for so long; whether it is set.

        Raises:
            BaseException: what a signal handler raised, on the main thread.
        """
        ends = None if seconds is None else time.monotonic() + seconds
        while not self._set:
            left = _SLICE_SECONDS
            if ends is not None:
                left = min(ends - time.monotonic(), left)
                if left <= 0:
                    return False
            try:
                self._wakeups.get(timeout=left)
            except Empty:
                continue
            self._wakeups.put(None)  # for the next thread that waits
        return True


class Claim(dict[None, str]):
    """Belongs to whoever asks first. A dict, so that making one runs no Python code."""

    def goes_to(self, name: str) -> bool:
        """Whether it belongs to this name; decided in one step, and the same each time."""
        return self.setdefault(None, name) == name


def start_thread(action: Callable[[], object], name: str) -> None:
    """Run it on a daemon thread, which is started in one call that does its work in C.

    Raises:
        RuntimeError: no thread can be started.
    """
    start_new_thread(_start, (action, name))


def log_on_thread(
    log: NamedLogger, level: int, message: str, *arguments: object, wait_seconds: float = 0.0
) -> None:
    """Log it on another thread; leave it out where none can be started.

    Args:
        log: the logger.
        level: of `logging`.
        message: for `arguments`.
        arguments: of the message.
        wait_seconds: how long to wait until it is written: the process may end right after.
    """
    written = SafeEvent()
    with suppress(RuntimeError):
        start_thread(partial(_log_held, written, log, level, message, arguments), "gpumem-otel-log")
        written.wait(wait_seconds)


def _start(action: Callable[[], object], name: str) -> None:
    """`threading` does not know the calling thread, and would keep an entry for it."""
    try:
        threading.Thread(target=action, name=name, daemon=True).start()
    except RuntimeError:  # there was room for this thread alone
        action()


def _log_held(
    written: SafeEvent, log: NamedLogger, level: int, message: str, arguments: tuple[object, ...]
) -> None:
    try:
        log.log(level, message, *arguments)
    except Exception:  # of the job's handlers and filters
        return
    finally:
        written.set()
