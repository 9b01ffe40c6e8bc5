"""Runs an operation on a thread of ours while the main thread, which asked for it, waits.

Python runs signal handlers on the main thread. What one raises (Ctrl-C, a launcher's SIGTERM) would
leave an operation half done: a lock taken forever, a thread or pinned host memory that nothing
refers to. So no line of an operation runs there.

The job's handlers are not replaced while it waits: `signal.signal` would undo what C code has set
for a signal (faulthandler, asyncio's SA_RESTART, a library's own handler) beyond repair.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import weakref
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from gpumem_otel.base.logs import named_logger
from gpumem_otel.yielding.engine.messages import WITHOUT
from gpumem_otel.yielding.signal_safe import Claim, SafeEvent, log_on_thread, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

_log = named_logger("gpumem_otel.yield")

HELD_INTERRUPTS: Final = 2
"""So many interrupts are held until the operation has ended; the next one is raised at once."""

THREAD_NAME: Final = "gpumem-otel-yield"
"""Of each thread that runs an operation."""

_THREAD: Final = "thread"
_CALLER: Final = "caller"
_NO_THREAD: Final = "new thread"
"""Of "can't start new thread" and "can't create new thread at interpreter shutdown"."""

_Result = TypeVar("_Result")


def graver(first: BaseException | None, error: BaseException) -> BaseException:
    """Which of two interrupts is raised: the first, unless only the second ends the process."""
    if first is None or (isinstance(first, Exception) and not isinstance(error, Exception)):
        return error
    return first


@dataclass(slots=True)
class PendingOperation(Generic[_Result]):
    """An operation that a thread waits for, and how it ended.

    Attributes:
        results: what it returned, the only item.
        error: what it raised.
        interrupt: what a signal handler raised in the waiting thread, see `graver`.
        interrupts: how many there were.
        claim: whether it begins: the thread's, or the caller's who gives it up.
    """

    results: list[_Result] = field(default_factory=list)
    error: BaseException | None = None
    interrupt: BaseException | None = None
    interrupts: int = 0
    done: SafeEvent = field(default_factory=SafeEvent)
    claim: Claim = field(default_factory=Claim)

    def add_interrupt(self, error: BaseException) -> None:
        """A signal handler raised in the waiting thread."""
        self.interrupts += 1
        self.interrupt = graver(self.interrupt, error)

    def result(self) -> _Result:
        """What it returned; raises what it raised, once."""
        error, self.error = self.error, None
        if error is None:
            return self.results[0]
        try:
            raise error
        finally:
            del error  # a circle of frames would keep what they refer to

    def run(self, context: contextvars.Context, action: Callable[[], _Result]) -> None:
        """Run it, and note how it ended."""
        try:
            self.results.append(context.run(action))
        except BaseException as error:
            self.error = error
        self.done.set()


class OperationThread:
    """One thread for all operations of the main thread, since its start can be interrupted."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._has_thread = False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._end = weakref.finalize(self, self._jobs.put, None)
        self._end.atexit = False

    def run(
        self,
        action: Callable[[], _Result],
        pending: PendingOperation[_Result],
        on_interrupt: Callable[[], object],
    ) -> None:
        """Run it, and return when it has ended, interrupts or not.

        On another thread than the main one, or where no thread can be started, it runs right here.

        Args:
            action: sees the caller's context variables.
            pending: takes how it ended.
            on_interrupt: called on the main thread after the first interrupt; once more where the
                call was interrupted.

        Raises:
            BaseException: the third interrupt; the operation goes on.
        """
        if threading.current_thread() is not threading.main_thread():
            pending.run(contextvars.copy_context(), action)
            return
        try:
            self._send(action, pending)
        except BaseException as error:
            pending.add_interrupt(error)
        self.wait(pending, on_interrupt)

    def wait(self, pending: PendingOperation[Any], on_interrupt: Callable[[], object]) -> None:
        """Wait until it has ended; also for a caller whose `run` was interrupted.

        Raises:
            BaseException: the third interrupt.
        """
        reported = False
        while True:
            try:
                if pending.interrupts and not reported:
                    if pending.claim.goes_to(_CALLER):
                        return  # it had not begun, and never will
                    on_interrupt()
                    reported = True
                if pending.done.wait():
                    return
            except BaseException as error:  # noqa: PERF203 - waits, and is seldom interrupted
                pending.add_interrupt(error)
                if pending.interrupts > HELD_INTERRUPTS:
                    name = type(error).__name__
                    log_on_thread(_log, logging.ERROR, WITHOUT, name, wait_seconds=1.0)
                    raise

    def close(self) -> None:
        """End the thread once it has nothing to do; the next operation starts another."""
        end = self._end
        self._reset()
        end()

    def _send(self, action: Callable[[], _Result], pending: PendingOperation[_Result]) -> None:
        context = contextvars.copy_context()

        def job() -> None:
            if pending.claim.goes_to(_THREAD):
                pending.run(context, action)

        try:
            self._have_thread()
        except RuntimeError as error:
            if _NO_THREAD not in str(error):  # a signal handler's
                raise
            _log.debug("no thread can be started, for example because the interpreter ends")
            job()
        else:
            self._jobs.put(job)

    def _have_thread(self) -> None:
        if self._pid != os.getpid():  # a forked child does not have its parent's thread
            self._reset()
        if not self._has_thread:
            start_thread(partial(_serve, self._jobs), THREAD_NAME)
            self._has_thread = True


def _serve(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it refers to the request
    jobs.put(None)  # for a second thread, where an interrupt came right after the start of one
