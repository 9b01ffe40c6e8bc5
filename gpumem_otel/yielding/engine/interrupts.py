"""An operation on a thread of ours, while the main thread that asked for it waits.

Python runs signal handlers on the main thread, between any two of its lines. What one raises (a
Ctrl-C, the end that a launcher asks for) leaves half done whatever those lines were at: a lock of
`threading` taken for ever, a thread that was started and that nobody knows, host memory that is
pinned and belongs to nobody. So no line of an operation runs there.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import time
import weakref
from _thread import start_new_thread
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from gpumem_otel.base.logs import named_logger
from gpumem_otel.yielding.engine.messages import WITHOUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.base.logs import NamedLogger

# An event, and whose turn it is, that interrupts can not break.

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


class Claim(dict[None, str]):
    """Goes to whoever asks for it first, and stays with it.

    A dict, so that no line of ours runs when one is made.
    """

    def goes_to(self, who: str) -> bool:
        """Whether it is this one's: said in one step, whoever else asks; the same each time."""
        return self.setdefault(None, who) == who


# Threads that are begun by one that may be interrupted at any moment.


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
        begin_aside(partial(_log_held, written, log, level, message, arguments), "gpumem-otel-log")
        written.wait(wait_seconds)


def _begin(action: Callable[[], object], name: str) -> None:
    """On a thread that `threading` does not know, and would make an entry for that stays."""
    try:
        threading.Thread(target=action, name=name, daemon=True).start()
    except RuntimeError:  # there was room for this one alone
        action()


def _log_held(
    written: Latch, log: NamedLogger, level: int, message: str, arguments: tuple[object, ...]
) -> None:
    try:
        log.log(level, message, *arguments)
    except Exception:  # the job's handlers and filters
        return
    finally:
        written.set()


_log = named_logger("gpumem_otel.yield")

PATIENCE: Final = 2
"""Interrupts that wait for the end of the operation; the next one gets through."""

THREAD_NAME: Final = "gpumem-otel-yield"
"""Of each thread that does an operation."""

_THREAD: Final = "thread"
_CALLER: Final = "caller"
_NO_THREAD: Final = "new thread"
"""Of "can't start new thread" and "can't create new thread at interpreter shutdown"."""

_Result = TypeVar("_Result")


def graver(first: BaseException | None, error: BaseException) -> BaseException:
    """Which of two interrupts is raised: the first, but the process's end rather than an error."""
    if first is None or (isinstance(first, Exception) and not isinstance(error, Exception)):
        return error
    return first


@dataclass(slots=True)
class Ended(Generic[_Result]):
    """An operation, and how it ended.

    Attributes:
        results: what it returned, the only item.
        error: what it raised.
        interrupt: what a signal handler raised in the caller meanwhile, see `graver`.
        times: how many there were.
        done: it has ended.
        turn: whose it is to say whether it begins.
    """

    results: list[_Result] = field(default_factory=list)
    error: BaseException | None = None
    interrupt: BaseException | None = None
    times: int = 0
    done: Latch = field(default_factory=Latch)
    turn: Claim = field(default_factory=Claim)

    def interrupted(self, error: BaseException) -> None:
        """One more."""
        self.times += 1
        self.interrupt = graver(self.interrupt, error)

    def result(self) -> _Result:
        """What it returned; raises what it raised, once."""
        error, self.error = self.error, None
        if error is None:
            return self.results[0]
        try:
            raise error
        finally:
            del error  # a circle of frames would keep what they hold

    def run(self, context: contextvars.Context, action: Callable[[], _Result]) -> None:
        """Do it, with its end said whatever it raises."""
        try:
            self.results.append(context.run(action))
        except BaseException as error:
            self.error = error
        self.done.set()


class Apart:
    """The thread, which stays: each start of one on the main thread is open to interrupts."""

    def __init__(self) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._has_thread = False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._end = weakref.finalize(self, self._jobs.put, None)
        self._end.atexit = False

    def run(
        self,
        action: Callable[[], _Result],
        ended: Ended[_Result],
        interrupted: Callable[[], object],
    ) -> None:
        """Do it; returns when it has ended, interrupts or not.

        Called by another thread than the main one, or where none can be started, it is done right
        here.

        Args:
            action: sees the caller's context variables.
            ended: says how.
            interrupted: told on the main thread that it is waited for after an interrupt; once more
                where that was interrupted.

        Raises:
            BaseException: the third interrupt: the caller goes on, and so does the operation.
        """
        if threading.current_thread() is not threading.main_thread():
            ended.run(contextvars.copy_context(), action)
            return
        try:
            self._send(action, ended)
        except BaseException as error:
            ended.interrupted(error)
        self.wait(ended, interrupted)

    def wait(self, ended: Ended[Any], interrupted: Callable[[], object]) -> None:
        """Until it has ended, interrupts or not: the rest of `run`, for whoever fell out of it.

        Raises:
            BaseException: the third interrupt.
        """
        told = False
        while True:
            try:
                if ended.times and not told:
                    if ended.turn.goes_to(_CALLER):
                        return  # it was not begun, and never will be
                    interrupted()
                    told = True
                if ended.done.wait():
                    return
            except BaseException as error:  # noqa: PERF203 - waits, and is seldom interrupted
                ended.interrupted(error)
                if ended.times > PATIENCE:
                    log_aside(_log, logging.ERROR, WITHOUT, type(error).__name__, wait_seconds=1.0)
                    raise

    def close(self) -> None:
        """The thread ends once it has nothing to do; the next operation has another."""
        end = self._end
        self._begin_anew()
        end()

    def _send(self, action: Callable[[], _Result], ended: Ended[_Result]) -> None:
        context = contextvars.copy_context()

        def job() -> None:
            if ended.turn.goes_to(_THREAD):
                ended.run(context, action)

        try:
            self._have_thread()
        except RuntimeError as error:
            if _NO_THREAD not in str(error):  # a signal handler's
                raise
            _log.debug("no thread can be started, for one at the interpreter's end")
            job()
        else:
            self._jobs.put(job)

    def _have_thread(self) -> None:
        if self._pid != os.getpid():  # that of the parent is not here
            self._begin_anew()
        if not self._has_thread:
            begin_aside(partial(_serve, self._jobs), THREAD_NAME)
            self._has_thread = True


def _serve(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # holds what it was given
    jobs.put(None)  # for a second one, where an interrupt came right after its start
