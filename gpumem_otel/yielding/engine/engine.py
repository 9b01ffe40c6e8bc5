"""Runs yields and restores of this process's GPU memory, one at a time.

    RUNNING -> YIELDING -> YIELDED -> RESTORING -> RUNNING

A command that repeats the running operation, or asks for the current state, gets that operation. A
yield that cannot be finished is undone completely. A restore that finds no room on the device
changes nothing, reports that, and the lease tries again. In FAILED something is lost: the job stays
stopped, since it would compute with wrong numbers.
"""

from __future__ import annotations

import os
import threading
import uuid
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.engine.interrupts import THREAD_NAME
from gpumem_otel.yielding.engine.lease import Lease
from gpumem_otel.yielding.engine.messages import kind_of, less_of, line_of, way_on
from gpumem_otel.yielding.engine.operation_waiter import OperationWaiter
from gpumem_otel.yielding.engine.operations import CurrentOperation, StatusTracker
from gpumem_otel.yielding.engine.phases import Phases, Urgency
from gpumem_otel.yielding.engine.reports import dry_report, restore_report, yield_report
from gpumem_otel.yielding.signal_safe import start_thread
from gpumem_otel.yielding.values import (
    Operation,
    OperationState,
    RestoreRequest,
    YieldReport,
    YieldRequest,
    YieldState,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.yielding.engine.dependencies import YieldDependencies
    from gpumem_otel.yielding.engine.operations import PhaseEnded
    from gpumem_otel.yielding.engine.safepoint import StopRequest
    from gpumem_otel.yielding.values import PhaseTime, YieldStatus

_log = named_logger("gpumem_otel.yield")

LEASE_WAIT_SECONDS = 10.0
"""How long a lease that has ended waits for device memory in each attempt."""

_BY_THEMSELVES = frozenset({"SIGCONT", "signal"})
"""Sources of a restore that do not ask again where the device has no room."""


class YieldEngine:
    """A `YieldControl`, and the same for the job's own calls.

    Args:
        parts: what moves memory.
        counters: see `StatusTracker`.
        environ: of the process, for what may end a job that is stopped.

    Attributes:
        phases: for a coordinator that runs them one by one; do not mix with the calls here.
    """

    def __init__(
        self, parts: YieldDependencies, *, counters: Counters, environ: Mapping[str, str]
    ) -> None:
        self._parts = parts
        self._environ = environ
        self._clock = parts.clock
        self._tracker = StatusTracker(parts.clock, counters)
        self._current = CurrentOperation(self._tracker)
        self._waiter = OperationWaiter(self._now, parts.safe_points, self._tracker)
        self.phases = Phases(parts, self._tracker)
        self.phases.on_interrupt = self._interrupted
        if parts.checkpoint is not None:
            parts.checkpoint.on_restored = self._driver_restored
            parts.checkpoint.on_waiting = self._driver_waits
        parts.offload.on_waiting = self._waits_for_room
        self._lease = Lease(self._lease_ended, parts.clock)
        self._lock = threading.RLock()
        self._evicted = False
        self._closed = False
        self._pid = os.getpid()

    def watch(self, on_phase: PhaseEnded, on_operation: Callable[[Operation, int], object]) -> None:
        """Call these for each phase and operation that has ended; times in ns since 1970."""
        self._tracker.on_phase.append(on_phase)
        self._tracker.on_operation.append(on_operation)

    # status

    @property
    def status(self) -> YieldStatus:
        """The current status."""
        return self._tracker.status

    def operation(self, operation_id: str) -> Operation | None:
        """See `YieldControl`."""
        return self._tracker.operation(operation_id)

    def wait(self, version: int, seconds: float) -> YieldStatus:
        """See `YieldControl`."""
        return self._tracker.wait(version, seconds)

    # commands

    def submit(self, request: YieldRequest | RestoreRequest, who: str) -> Operation:
        """See `YieldControl`."""
        with self._lock:
            known = self._same(request)
            if known is not None:
                return known
            operation = self._begin(uuid.uuid4().hex, request, who)
        try:
            self._spawn(partial(self._run, operation.id, request))
        except RuntimeError as error:  # no thread can be started: the interpreter may be ending
            self._end(operation.id, OperationState.REFUSED, error=str(error))
            raise YieldRefusedError(f"{operation.kind}: {error}; nothing was moved") from error
        return operation

    def yield_(self, request: YieldRequest, who: str = "job") -> YieldReport:
        """Give memory back, and return once it is free.

        On the job's own thread (the main thread as long as none has reached a safe point) this call
        is the safe point. On another thread it waits for one.

        Raises:
            YieldRefusedError: it cannot be done, and everything is as before.
            YieldFailedError: it ended in another state, which the message names.
            BaseException: what a signal handler raised meanwhile; the yield was undone first, as
                far as the device has room.
        """
        return self._waiter.run_and_wait(request, who, self._waiter.safe_point_here())

    def restore(self, request: RestoreRequest | None = None, who: str = "job") -> YieldReport:
        """Take memory again, and return once it is there.

        Raises:
            YieldRefusedError: not now; everything stays as it is.
            YieldFailedError: something is lost.
            BaseException: what a signal handler raised meanwhile; the restore was finished first.
        """
        return self._waiter.run_and_wait(request or RestoreRequest(), who)

    def close(self, seconds: float) -> None:
        """The process ends, or uninstalls: leave nothing that keeps it from ending. Never raises.

        What the driver holds is restored in any case: the process could not end otherwise. Tensors
        are restored where a stopped thread waits for them; what the job's own thread yielded stays
        away until that thread or the lease restores it. Host memory is freed once nothing is away.
        """
        if self._pid != os.getpid():
            return
        checkpoint = self._parts.checkpoint
        driver = checkpoint is not None and checkpoint.state in {"locked", "checkpointed"}
        parked = self.phases.parked
        if driver or (parked is not None and not parked.here):
            self._lease.stop()
            try:
                self.restore(RestoreRequest(wait_seconds=seconds), who="exit")
            except Exception as error:
                _log.warning("at the end of the process: %s", error)
            if checkpoint is not None:
                # the helper goes on trying: the interpreter's end waits for the driver
                checkpoint.close()
        self._waiter.close()
        with self._lock:
            self._closed = True
            if self._current.running is None:
                self._give_host_back()

    def after_fork_in_child(self) -> None:
        """A forked child holds none of its parent's memory, and must not use its helper."""
        forget = getattr(self._parts.checkpoint, "forget_parent", None)
        if forget is not None:
            forget()

    # operations

    def _now(
        self,
        request: YieldRequest | RestoreRequest,
        who: str,
        *,
        here: Callable[[], StopRequest] | None = None,
        urgency: Urgency | None = None,
        unless: threading.Event | None = None,
    ) -> YieldReport:
        operation_id = uuid.uuid4().hex
        with self._ended_after(operation_id, request):
            with self._lock:
                if unless is not None and unless.is_set():
                    raise YieldRefusedError(f"{kind_of(request)}: its lease is over")
                known = self._same(request)
                if known is not None and known.state is OperationState.RUNNING:
                    raise YieldRefusedError(f"{known.kind}: {known.id} is running; wait for it")
                if known is not None:
                    return known.report or YieldReport(
                        operation=known.id, state=self._tracker.state
                    )
                self._begin(operation_id, request, who, urgency)
            return self._run(operation_id, request, here=here)

    @contextmanager
    def _ended_after(
        self, operation_id: str, request: YieldRequest | RestoreRequest
    ) -> Iterator[None]:
        """Whatever is raised: the operation ends, and the job does not stay stopped."""
        try:
            yield
        finally:
            if self._current.runs(operation_id):
                left = ""
                if isinstance(request, YieldRequest):
                    self._lease.stop()
                    left = self.phases.rollback()
                reason = "" if self.phases.where() is YieldState.RUNNING else f"cut short; {left}"
                self._end(
                    operation_id, OperationState.FAILED, error="it was cut short", reason=reason
                )
                self.phases.let_interrupts_through()

    def _same(self, request: YieldRequest | RestoreRequest) -> Operation | None:
        """The operation that a command repeats; None where it is a new one."""
        if self._pid != os.getpid():
            raise YieldRefusedError("yield: a forked child holds nothing of its parent's memory")
        return self._current.repeated(request)

    def _begin(
        self,
        operation_id: str,
        request: YieldRequest | RestoreRequest,
        who: str,
        urgency: Urgency | None = None,
    ) -> Operation:
        operation = Operation(
            id=operation_id, kind=kind_of(request), state=OperationState.RUNNING, who=who
        )
        self._current.begin(operation, request)
        self.phases.urgency = urgency or Urgency()
        self._tracker.put(operation)
        if isinstance(request, RestoreRequest):
            self._tracker.enter(YieldState.RESTORING, f"asked by {who}")
        elif not request.dry_run:
            self._lease.stop()  # of whatever was yielded before
            self._evicted = False
            self._tracker.enter(
                YieldState.YIELDING, f"asked by {who}", reason="", lease_expiry_ns=0
            )
        return operation

    def _run(
        self,
        operation_id: str,
        request: YieldRequest | RestoreRequest,
        *,
        here: Callable[[], StopRequest] | None = None,
    ) -> YieldReport:
        with self._ended_after(operation_id, request):
            if isinstance(request, RestoreRequest):
                return self._run_restore(operation_id, request)
            return self._run_yield(operation_id, request, here=here)

    def _run_yield(
        self, operation_id: str, request: YieldRequest, *, here: Callable[[], StopRequest] | None
    ) -> YieldReport:
        began = False
        try:
            self.phases.prepare(request, here=here)
            if request.dry_run:
                report = dry_report(self.phases, self._parts, self._environ)
                self.phases.rollback()
                self._end(operation_id, OperationState.DONE, report=report)
                return report
            began = True
            self.phases.release()
            self.phases.checkpoint()
            report = yield_report(operation_id, self.phases, self._parts, self._environ)
            self._parts.safe_points.set_owner(self.phases.parked)
            lease = request.lease_seconds
            expiry = 0 if lease is None else self._clock.time_ns() + round(lease * 1e9)
            if lease is not None:  # before the operation ends: an early restore stops the lease
                self._lease.start(lease)
        except BaseException as error:
            raised = self._undone(operation_id, error, began=began)
            if raised is error:
                raise
            raise raised from error
        self._end(
            operation_id,
            OperationState.DONE,
            report=report,
            residual_bytes=MappingProxyType(dict(self.phases.residual)),
            lease_expiry_ns=expiry,
        )
        return report

    def _undone(self, operation_id: str, error: BaseException, *, began: bool) -> BaseException:
        """Undo a yield; returns what to raise."""
        self._lease.stop()
        left = self.phases.rollback()
        state = self.phases.where()
        message = line_of("yield", error)
        if self.phases.zeroed:
            message += f"; contents of {', '.join(self.phases.zeroed)} were thrown away already"
        if state is YieldState.RUNNING and self.phases.zeroed:
            return self._undone_but_zeros(operation_id, error, message)
        if state is YieldState.RUNNING:
            outcome = OperationState.FAILED if began else OperationState.REFUSED
            self._end(operation_id, outcome, error=message)
            if isinstance(error, YieldRefusedError) or not isinstance(error, Exception):
                return error
            return YieldRefusedError(f"{message}; undone, the job goes on as before")
        reason = f"{message}; and undoing it: {left or 'not possible'}"
        if state is YieldState.YIELDED:
            self._lease.try_again()
        self._end(operation_id, OperationState.FAILED, error=reason, reason=reason)
        self.phases.let_interrupts_through()
        self._evict(reason)
        return YieldFailedError(f"{reason}; the state is {state.value}, {way_on(state)}")

    def _undone_but_zeros(
        self, operation_id: str, error: BaseException, message: str
    ) -> BaseException:
        """The job goes on with other contents: raised in it, whoever asked for the yield."""
        message += " and are zeros now"
        self._end(operation_id, OperationState.FAILED, error=message, reason=message)
        self._evict(message)
        if not isinstance(error, Exception):
            return error
        return YieldFailedError(f"{message}; all else is as before, the state is running")

    def _run_restore(self, operation_id: str, request: RestoreRequest) -> YieldReport:
        phases, offload = self.phases, self._parts.offload
        held = {**offload.held_bytes}
        thrown = {**offload.discarded_bytes}
        phases.times, phases.notes = [], []
        interrupt: BaseException | None = None
        try:
            try:
                self._bring_back(request)
            except Exception:
                raise
            except BaseException as error:  # an interrupt: the job needs its memory to unwind
                interrupt = error
                self._bring_back(request)
        except BaseException as error:
            raised = self._not_restored(operation_id, error)
            if raised is error:
                raise
            raise raised from error
        later = self._finish()
        interrupt = interrupt or later
        state = phases.where()
        if state is YieldState.YIELDED:
            away = ", ".join(sorted({**offload.held_bytes, **offload.discarded_bytes}))
            phases.notes.append(f"still away: {away}")
            self._current.yielded = None  # only a part of it is still yielded
        else:
            self._lease.stop()
        report = restore_report(
            operation_id,
            phases,
            state,
            moved_bytes=less_of(held, offload.held_bytes),
            discarded_bytes=less_of(thrown, offload.discarded_bytes),
        )
        self._end(operation_id, OperationState.DONE, report=report, reason="")
        if interrupt is not None:
            raise interrupt
        return report

    def _bring_back(self, request: RestoreRequest) -> None:
        self.phases.restore(request)
        self.phases.reload(request)
        self.phases.verify()

    def _not_restored(self, operation_id: str, error: BaseException) -> BaseException:
        """A restore failed; returns what to raise."""
        interrupt = self._finish()  # does something where everything is back all the same
        state = self.phases.where()
        operation = self._tracker.operation(operation_id)
        who = "" if operation is None else operation.who
        if state is YieldState.RUNNING:
            self._lease.stop()
        elif state is YieldState.YIELDED and who in _BY_THEMSELVES:
            self._lease.try_again()
        message = line_of("restore", error)
        refused = isinstance(error, YieldRefusedError)
        outcome = OperationState.REFUSED if refused else OperationState.FAILED
        reason = "" if state is YieldState.RUNNING else message
        self._end(operation_id, outcome, error=message, reason=reason)
        if state is not YieldState.RUNNING:
            self.phases.let_interrupts_through()
            self._evict(message)
        if interrupt is not None:
            return interrupt
        if refused or not isinstance(error, Exception):
            return error
        return YieldFailedError(f"{message}; the state is {state.value}, {way_on(state)}")

    def _end(
        self,
        operation_id: str,
        outcome: OperationState,
        *,
        report: YieldReport | None = None,
        error: str = "",
        **changes: object,
    ) -> None:
        """End the operation in one change of the status, then let the job's thread go if possible.

        The state follows from what the host and the driver hold.
        """
        operation = self._tracker.operation(operation_id)
        offload = self._parts.offload
        ended: Operation | None = None
        with self._lock:
            if self._closed:
                self._give_host_back()
            state = self.phases.where()
            if state is YieldState.RUNNING:
                changes |= {"lease_expiry_ns": 0, "residual_bytes": MappingProxyType({})}
            if operation is not None:
                self._current.remember(operation)
                ended = self._tracker.end(
                    operation,
                    outcome,
                    state,
                    error=error,
                    report=report,
                    moved_bytes=sum(offload.held_bytes.values()),
                    **changes,
                )
            self.phases.let_go()
            self._current.running = None  # last: after an interrupt before this, it is done again
        if ended is not None:
            self._tracker.notify(ended)

    def _finish(self) -> BaseException | None:
        """Call `after_restore`; returns what interrupted that, since the operation ends first."""
        try:
            self.phases.finish()
        except BaseException as error:
            return error
        return None

    def _give_host_back(self) -> None:
        if self.phases.where() is not YieldState.RUNNING:
            return
        try:
            self._parts.offload.close()
        except Exception:
            _log.warning("host memory could not be given back", exc_info=True)

    # without a command

    def _lease_ended(self, stopped: threading.Event) -> bool:
        """Restore; whether nothing more is to be done."""
        request = RestoreRequest(wait_seconds=LEASE_WAIT_SECONDS)
        try:
            self._now(request, "lease", unless=stopped)
        except YieldRefusedError as error:
            _log.info("the lease has ended: %s", error)
        except Exception as error:
            _log.warning("the lease has ended: %s", error)
        return self._tracker.state in {YieldState.RUNNING, YieldState.FAILED}

    def _driver_restored(self, took: PhaseTime) -> None:  # noqa: ARG002 - as it is called
        """The helper restored the driver's part when the lease ended: the tensors follow."""
        self._lease.start(0.0)

    def _driver_waits(self, why: str) -> None:
        self._tracker.update(reason=why)
        self._spawn(partial(self._evict, why))

    def _waits_for_room(self, why: str) -> None:
        if self._tracker.state is YieldState.RESTORING:
            self._tracker.update(reason=why)

    def _interrupted(self) -> None:
        """On the stopped thread: a signal handler raised there, and the memory is needed."""
        self.phases.urgency.interrupt()
        start_thread(partial(_quietly, self._restore_for_interrupt), THREAD_NAME)

    def _restore_for_interrupt(self) -> None:
        while (status := self._tracker.status).state not in {YieldState.RUNNING, YieldState.FAILED}:
            if self._current.running is not None:
                self.wait(status.version, 1.0)
                continue
            try:
                self._now(RestoreRequest(), "signal", urgency=Urgency(hurried=True))
            except YieldRefusedError as error:
                parked = self.phases.parked
                if parked is None or parked.stuck:
                    _log.warning("after an interrupt: %s", error)
                    return  # the lease goes on

    def _evict(self, reason: str) -> None:
        """Call `on_evict`, once for each yield: the memory is not back when it should be."""
        if not self._evicted:
            self._evicted = True
            self._parts.callbacks.evict(reason)

    @staticmethod
    def _spawn(action: Callable[[], object]) -> None:
        run = partial(_quietly, action)
        threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()


def _quietly(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:  # its operation reports it
        _log.debug("%s", error)
