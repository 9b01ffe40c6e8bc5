"""An operation on a thread of ours, while the main thread that asked for it waits.

Python runs signal handlers on the main thread, between any two of its lines. What one raises (a
Ctrl-C, the end that a launcher asks for) leaves half done whatever those lines were at: a lock of
`threading` taken for ever, a thread that was started and that nobody knows, host memory that is
pinned and belongs to nobody. So no line of an operation runs there.
"""

from __future__ import annotations

import contextvars
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from gpumem_otel.logs import named_logger
from gpumem_otel.yielding.latch import Latch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Ended", "run_apart"]

_log = named_logger("gpumem_otel.yield")

_PATIENCE: Final = 2
"""Interrupts that wait for the end of the operation; the next one gets through."""

_THREAD: Final = "thread"
_CALLER: Final = "caller"

_Result = TypeVar("_Result")


@dataclass(slots=True)
class Ended(Generic[_Result]):
    """How it ended.

    Attributes:
        results: what it returned, the only item.
        error: what it raised.
        interrupt: what a signal handler raised in the caller meanwhile, the first of it.
    """

    results: list[_Result] = field(default_factory=list)
    error: BaseException | None = None
    interrupt: BaseException | None = None

    def result(self) -> _Result:
        """What it returned; raises what it raised, once."""
        error, self.error = self.error, None
        if error is None:
            return self.results[0]
        try:
            raise error
        finally:
            del error  # a circle of frames would keep what they hold


def run_apart(action: Callable[[], _Result], interrupted: Callable[[], object]) -> Ended[_Result]:
    """Do it; returns when it has ended, interrupts or not.

    Called by another thread than the main one, or where none can be started, it is done right here.

    Args:
        action: sees the caller's context variables.
        interrupted: told on the main thread that it is waited for after an interrupt; once more
            where that was interrupted.

    Raises:
        BaseException: the third interrupt: the caller goes on, and so does the operation.
    """
    ended: Ended[_Result] = Ended()
    done, started = Latch(), False
    turn: dict[str, str] = {}
    context = contextvars.copy_context()

    def run() -> None:
        # an interrupt may hit the start of the thread: setdefault says in one step who begins
        if turn.setdefault("who", _THREAD) == _THREAD:
            _do(context, action, ended)
            done.set()

    try:
        if threading.current_thread() is threading.main_thread():
            threading.Thread(target=run, name="gpumem-otel-yield", daemon=True).start()
            started = True
    except RuntimeError:
        _log.debug("no thread can be started, for one at the interpreter's end")
    except BaseException as error:
        ended.interrupt = error
    if not started and turn.setdefault("who", _CALLER) == _CALLER:
        if ended.interrupt is None:
            _do(context, action, ended)
        return ended
    _wait(ended, done, interrupted)
    return ended


def _do(context: contextvars.Context, action: Callable[[], _Result], ended: Ended[_Result]) -> None:
    try:
        ended.results.append(context.run(action))
    except BaseException as error:
        ended.error = error


def _wait(ended: Ended[_Result], done: Latch, interrupted: Callable[[], object]) -> None:
    times, told = int(ended.interrupt is not None), False
    while not done.is_set():
        try:
            if times and not told:
                interrupted()
                told = True
            done.wait()
        except BaseException as error:  # noqa: PERF203 - waits, and is seldom interrupted
            times += 1
            ended.interrupt = ended.interrupt or error
            if times > _PATIENCE:
                _log.error("%s: the job goes on WITHOUT its memory", type(error).__name__)
                raise
