"""A line for the log from a thread that may be interrupted at any moment."""

from __future__ import annotations

import threading
from _thread import start_new_thread
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpumem_otel.yielding.latch import Latch

if TYPE_CHECKING:
    from gpumem_otel.logs import NamedLogger

__all__ = ["log_aside"]


def log_aside(
    log: NamedLogger, level: int, message: str, *arguments: object, wait_seconds: float = 0.0
) -> None:
    """Log it on a thread of ours.

    A handler of `logging` takes and lets go of its lock in Python, and so does the start of a
    `threading.Thread`: what a signal handler raises between two of those lines leaves it taken, and
    every other thread waits for it for ever. Here is one call alone, which does its work in C.

    Args:
        log: whose line it is.
        level: of `logging`.
        message: for `arguments`.
        arguments: of the message.
        wait_seconds: until it is written, at most: the process may end right after.
    """
    written = Latch()
    with suppress(RuntimeError):  # no thread can be started
        start_new_thread(_begin, (written, log, level, message, arguments))
        written.wait(wait_seconds)


def _begin(*line: Any) -> None:
    """On a thread that `threading` does not know, and would make an entry for that stays."""
    with suppress(RuntimeError):
        threading.Thread(target=_log, args=line, name="gpumem-otel-log", daemon=True).start()


def _log(
    written: Latch, log: NamedLogger, level: int, message: str, arguments: tuple[object, ...]
) -> None:
    try:
        log.log(level, message, *arguments)
    except Exception:  # the job's handlers and filters
        return
    finally:
        written.set()
