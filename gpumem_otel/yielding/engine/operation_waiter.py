"""The thread that asks for an operation: it waits for its end, and holds interrupts meanwhile.

What a signal handler raises is held until the operation has ended; a yield is undone, since the job
needs its memory to unwind. Every line here that runs on the main thread may be interrupted.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import GpumemError, YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.engine.interrupts import (
    HELD_INTERRUPTS,
    OperationThread,
    PendingOperation,
)
from gpumem_otel.yielding.engine.messages import gives, way_on
from gpumem_otel.yielding.engine.phases import Urgency
from gpumem_otel.yielding.signal_safe import log_on_thread
from gpumem_otel.yielding.values import RestoreRequest, YieldState

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.yielding.engine.operations import StatusTracker
    from gpumem_otel.yielding.engine.safepoint import SafePoints, StopRequest
    from gpumem_otel.yielding.values import YieldReport, YieldRequest

_log = named_logger("gpumem_otel.yield")


class RunOperation(Protocol):
    """Runs one operation on the calling thread, from its beginning to its end."""

    def __call__(  # noqa: D102 - see the class
        self,
        request: YieldRequest | RestoreRequest,
        who: str,
        *,
        here: Callable[[], StopRequest] | None = None,
        urgency: Urgency,
    ) -> YieldReport: ...


class OperationWaiter:
    """Runs operations for the threads that ask; several may at once.

    Args:
        operate: runs one operation; its urgency is its own, so that an interrupt of this caller
            cancels no other operation.
        safe_points: know the job's thread, and whether it is between two pieces of work.
        tracker: knows whether memory is away.
    """

    def __init__(
        self, operate: RunOperation, safe_points: SafePoints, tracker: StatusTracker
    ) -> None:
        self._operate = operate
        self._safe_points = safe_points
        self._tracker = tracker
        self._thread = OperationThread()

    def safe_point_here(self) -> Callable[[], StopRequest] | None:
        """Gives the calling thread's safe point, or raises why it is at none.

        None where it is not the job's thread; before any thread has reached a safe point, the main
        thread counts as the job's.
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

    def run_and_wait(
        self,
        request: YieldRequest | RestoreRequest,
        who: str,
        here: Callable[[], StopRequest] | None = None,
    ) -> YieldReport:
        """Run the operation, on a thread of ours where the main thread asks for it.

        Raises:
            BaseException: what the operation raised; or what a signal handler raised meanwhile,
                once the operation has ended and a yield was undone as far as possible.
        """
        urgency, failed = Urgency(), None
        pending: PendingOperation[YieldReport] = PendingOperation()
        try:
            try:
                action = partial(self._run_or_undo, request, who, here, urgency)
                self._thread.run(action, pending, partial(_interrupted, urgency))
                if pending.interrupt is None:
                    failed = pending.error
                    return pending.result()
            except BaseException as error:  # an interrupt, in any of these lines
                if error is failed:
                    raise
                pending.add_interrupt(error)
            self._unwind(request, pending, urgency)
        except BaseException as error:  # the second interrupt, in any of those
            if error is failed:
                raise
            pending.add_interrupt(error)
            self._unwind(request, pending, urgency)
        raise pending.interrupt or KeyboardInterrupt()

    def close(self) -> None:
        """End the thread once it has nothing to do; the next operation starts another."""
        self._thread.close()

    def _unwind(
        self,
        request: YieldRequest | RestoreRequest,
        pending: PendingOperation[YieldReport],
        urgency: Urgency,
    ) -> None:
        """Bring the memory back; a second call does nothing more."""
        urgency.interrupt()
        if pending.interrupts <= HELD_INTERRUPTS:
            self._thread.wait(pending, lambda: None)
        away = bool(pending.results) if gives(request) else not pending.done.is_set()
        while away and pending.interrupts <= HELD_INTERRUPTS:
            again: PendingOperation[None] = PendingOperation()
            self._thread.run(self._restore, again, lambda: None)
            if again.done.is_set():
                return
            pending.interrupts += again.interrupts  # it had not begun

    # on the operation's thread

    def _run_or_undo(
        self,
        request: YieldRequest | RestoreRequest,
        who: str,
        here: Callable[[], StopRequest] | None,
        urgency: Urgency,
    ) -> YieldReport:
        report = self._operate(request, who, here=here, urgency=urgency)
        if urgency.cancelled and gives(request):  # too late to give it up
            self._restore()
            raise self._undone()  # no result: that would have to be undone once more
        return report

    def _undone(self) -> GpumemError:
        """For a caller that was not interrupted: the stopped thread was."""
        state = self._tracker.state
        why = "yield: the job was interrupted"
        if state is YieldState.RUNNING:
            return YieldRefusedError(f"{why}; its memory is back, and it goes on as before")
        return YieldFailedError(f"{why}; the state is {state.value}, {way_on(state)}")

    def _restore(self) -> None:
        if self._tracker.state is YieldState.YIELDED:
            try:
                self._operate(RestoreRequest(), "signal", urgency=Urgency(hurried=True))
            except Exception as error:
                _log.warning("after an interrupt: %s", error)


def _interrupted(urgency: Urgency) -> None:
    """On the main thread, which goes on waiting."""
    urgency.interrupt()
    text = "interrupted: raised once the operation has ended; a yield is undone first"
    log_on_thread(_log, logging.WARNING, text)
