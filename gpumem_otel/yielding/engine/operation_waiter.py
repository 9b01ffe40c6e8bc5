"""The thread that asks for an operation and waits until it has ended.

A thread of ours does what the main thread asks for (`apart.py`). What a signal handler raises
meanwhile is held until the operation has ended, and a yield is undone: the job's unwinding needs
its memory. Every line here that runs on the main thread may be the one that is interrupted.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import GpumemError, YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.engine.interrupts import PATIENCE, Apart, Ended, log_aside
from gpumem_otel.yielding.engine.messages import gives, way_on
from gpumem_otel.yielding.engine.phases import Urgency
from gpumem_otel.yielding.values import RestoreRequest, YieldState

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.yielding.engine.operations import Board
    from gpumem_otel.yielding.engine.safepoint import SafePoints, StopRequest
    from gpumem_otel.yielding.values import YieldReport, YieldRequest

_log = named_logger("gpumem_otel.yield")


class Operate(Protocol):
    """One operation."""

    def __call__(
        self,
        request: YieldRequest | RestoreRequest,
        who: str,
        *,
        here: Callable[[], StopRequest] | None = None,
        urgency: Urgency,
    ) -> YieldReport:
        """Done by the thread that calls, from its beginning to its end."""
        ...


class Caller:
    """Whichever thread asks; several may at once.

    Args:
        operate: one operation, with an urgency that is its own: an interrupt of this caller
            cancels nobody else's.
        safe_points: know the job's thread, and whether it is between two pieces of work.
        board: says whether memory is away.
    """

    def __init__(self, operate: Operate, safe_points: SafePoints, board: Board) -> None:
        self._operate = operate
        self._safe_points = safe_points
        self._board = board
        self._apart = Apart()

    def stands_here(self) -> Callable[[], StopRequest] | None:
        """Whether the calling thread is at a safe point, said where the operation asks for it.

        None where it is not the job's: as long as none has reached one, the main thread is.
        """
        job = self._safe_points.owner or threading.main_thread()
        if job is not threading.current_thread():
            return None
        try:
            parked = self._safe_points.here()
        except YieldRefusedError as error:
            refusal = error

            def refuse() -> StopRequest:
                raise refusal

            return refuse
        return lambda: parked

    def waits_for(
        self,
        request: YieldRequest | RestoreRequest,
        who: str,
        here: Callable[[], StopRequest] | None = None,
    ) -> YieldReport:
        """The operation, on a thread of ours where the main thread asks for it.

        Raises:
            BaseException: what a signal handler raised meanwhile, once it has ended, and it was
                tried to undo a yield; or what the operation raised.
        """
        urgency, failed = Urgency(), None
        ended: Ended[YieldReport] = Ended()
        try:
            try:
                action = partial(self._now_or_undone, request, who, here, urgency)
                self._apart.run(action, ended, partial(_interrupted, urgency))
                if ended.interrupt is None:
                    failed = ended.error
                    return ended.result()
            except BaseException as error:  # an interrupt, in whichever of these lines
                if error is failed:
                    raise
                ended.interrupted(error)
            self._unwind(request, ended, urgency)
        except BaseException as error:  # the second, in whichever of those
            if error is failed:
                raise
            ended.interrupted(error)
            self._unwind(request, ended, urgency)
        raise ended.interrupt or KeyboardInterrupt()

    def close(self) -> None:
        """The thread of ours ends once it has nothing to do; the next operation has another."""
        self._apart.close()

    def _unwind(
        self,
        request: YieldRequest | RestoreRequest,
        ended: Ended[YieldReport],
        urgency: Urgency,
    ) -> None:
        """The memory first, since the job's unwinding needs it; done twice it is done once."""
        urgency.interrupt()
        if ended.times <= PATIENCE:
            self._apart.wait(ended, lambda: None)
        lacks = bool(ended.results) if gives(request) else not ended.done.is_set()
        while lacks and ended.times <= PATIENCE:
            again: Ended[None] = Ended()
            self._apart.run(self._take_again, again, lambda: None)
            if again.done.is_set():
                return
            ended.times += again.times  # it was not begun

    # on the thread of ours

    def _now_or_undone(
        self,
        request: YieldRequest | RestoreRequest,
        who: str,
        here: Callable[[], StopRequest] | None,
        urgency: Urgency,
    ) -> YieldReport:
        report = self._operate(request, who, here=here, urgency=urgency)
        if urgency.cancelled and gives(request):  # it was too late to give it up
            self._take_again()
            raise self._taken_again()  # no result: that would still have to be undone
        return report

    def _taken_again(self) -> GpumemError:
        """What a caller hears who was not interrupted: it was the thread that stands still."""
        state = self._board.state
        why = "yield: the job was interrupted"
        if state is YieldState.RUNNING:
            return YieldRefusedError(f"{why}; its memory is back, and it goes on as before")
        return YieldFailedError(f"{why}; the state is {state.value}, {way_on(state)}")

    def _take_again(self) -> None:
        """For a caller who was interrupted."""
        if self._board.state is YieldState.YIELDED:
            try:
                self._operate(RestoreRequest(), "signal", urgency=Urgency(hurried=True))
            except Exception as error:
                _log.warning("after an interrupt: %s", error)


def _interrupted(urgency: Urgency) -> None:
    """On the main thread, which waits on."""
    urgency.interrupt()
    first = "interrupted: the operation comes to its end first, a yield is undone"
    log_aside(_log, logging.WARNING, first)
