"""Threads that are begun by one that may be interrupted at any moment."""

from __future__ import annotations

import threading
from _thread import start_new_thread
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from gpumem_otel.yielding.latch import Latch

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.logs import NamedLogger

__all__ = ["begin_aside", "log_aside"]


def begin_aside(action: Callable[[], object], name: str) -> None:
    """Begin it on a thread of ours, in one call that does its work in C.

    The start of a `threading.Thread` takes and lets go of locks in Python: what a signal handler
    raises between two of those lines leaves one taken, and all other threads wait for it for ever.

    Raises:
        RuntimeError: no thread can be started.
    """
    start_new_thread(_begin, (action, name))


def log_aside(
    log: NamedLogger, level: int, message: str, *arguments: object, wait_seconds: float = 0.0
) -> None:
    """Log it on a thread of ours: a handler of `logging` has such a lock too.

    Args:
        log: whose line it is.
        level: of `logging`.
        message: for `arguments`.
        arguments: of the message.
        wait_seconds: until it is written, at most: the process may end right after.
    """
    written = Latch()
    with suppress(RuntimeError):  # no thread can be started
        begin_aside(partial(_log, written, log, level, message, arguments), "gpumem-otel-log")
        written.wait(wait_seconds)


def _begin(action: Callable[[], object], name: str) -> None:
    """On a thread that `threading` does not know, and would make an entry for that stays."""
    try:
        threading.Thread(target=action, name=name, daemon=True).start()
    except RuntimeError:  # there was room for this one alone
        action()


def _log(
    written: Latch, log: NamedLogger, level: int, message: str, arguments: tuple[object, ...]
) -> None:
    try:
        log.log(level, message, *arguments)
    except Exception:  # the job's handlers and filters
        return
    finally:
        written.set()
