"""The phases of a yield and a restore, one by one: for the engine, and for a coordinator of ranks.

`rollback` undoes every phase. After each, failed or not, `where()` tells the state by what the host
and the driver hold. Only `let_go` lets the stopped thread go on, and only where everything is back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.copy.gc_control import uncollected
from gpumem_otel.yielding.engine.driver_phases import DriverPhases
from gpumem_otel.yielding.engine.safepoint import StopRequest
from gpumem_otel.yielding.plan import (
    Plan,
    check_request,
    foreign_bytes,
    make_plan,
    probable_part,
    residual_of,
)
from gpumem_otel.yielding.values import Phase, PhaseTime, YieldLevel, YieldState

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.yielding.engine.dependencies import YieldDependencies
    from gpumem_otel.yielding.engine.operations import StatusTracker
    from gpumem_otel.yielding.values import RestoreRequest, YieldRequest

_log = named_logger("gpumem_otel.yield")

ROLLBACK_SECONDS = 30.0
"""How long undoing waits for device memory that was just freed."""


@dataclass(slots=True)
class Urgency:
    """Set by other threads while a yield or restore runs.

    Attributes:
        cancelled: give up what can still be undone.
        hurried: wait only a moment for the job's callbacks.
    """

    cancelled: bool = False
    hurried: bool = False

    def interrupt(self) -> None:
        """The thread that asked was interrupted."""
        self.cancelled = self.hurried = True


class Phases:
    """The state of one yield. Not for use by two threads at once.

    Args:
        parts: what does the work.
        tracker: shows phases and progress.

    Attributes:
        plan: result of the last `prepare`.
        times: of the phases of the current yield or restore.
        notes: for people.
        residual: by cause, after the last yield.
        zeroed: classes that were already thrown away when the last yield had to be undone.
        urgency: of the current yield or restore; a new one for each.
        on_interrupt: called on the stopped thread where a signal handler raised in it.
    """

    def __init__(self, parts: YieldDependencies, tracker: StatusTracker) -> None:
        self._parts = parts
        self._tracker = tracker
        self._driver = DriverPhases(parts)
        self._parked: StopRequest | None = None
        self._freed = False
        self._admitted = False
        self._callbacks_asked = False
        self._thrown_later = False
        self._ends: float | None = None
        self._copying_since: float | None = None
        self.lost = ""
        self.plan: Plan | None = None
        self.times: list[PhaseTime] = []
        self.notes: list[str] = []
        self.residual: dict[str, int] = {}
        self.zeroed: tuple[str, ...] = ()
        self.host_bytes = self.disk_bytes = 0
        self.checksums = ""
        self.urgency = Urgency()
        self.on_interrupt: Callable[[], object] = lambda: None

    # facts

    def where(self) -> YieldState:
        """RUNNING, YIELDED or FAILED, by what the host and the driver hold."""
        driver = self._driver.state
        if driver == "failed" or self.lost:
            return YieldState.FAILED
        return YieldState.YIELDED if self._freed or driver != "running" else YieldState.RUNNING

    @property
    def parked(self) -> StopRequest | None:
        """The stopped thread, None where none is."""
        parked = self._parked
        return parked if parked is not None and parked.thread is not None else None

    def _away(self) -> bool:
        offload = self._parts.offload
        return any(offload.held_bytes.values()) or any(offload.discarded_bytes.values())

    def seconds_left(self) -> float:
        """Until the deadline; infinite where there is none."""
        if self._ends is None:
            return float("inf")
        return self._ends - self._parts.clock.monotonic()

    def _stop(self) -> bool:
        return self.urgency.cancelled or self.seconds_left() <= 0

    def _hurried(self) -> bool:
        return self.urgency.hurried

    def _in_time(self, what: str) -> None:
        """Raises: YieldRefusedError: too late, or given up."""
        if self.urgency.cancelled:
            raise YieldRefusedError(f"yield: given up {what}")
        if self.seconds_left() <= 0:
            deadline = self.plan.request.deadline_seconds if self.plan else None
            raise YieldRefusedError(
                f"yield: the deadline of {deadline or 0:g} s was missed {what}; give it longer"
            )

    # prepare

    def prepare(
        self,
        request: YieldRequest,
        *,
        here: Callable[[], StopRequest] | None = None,
        coordinated: bool = False,
    ) -> Plan:
        """Stop the job, scan, call `before_yield`, reserve. Changes no memory of the job.

        Args:
            request: what is asked for.
            here: gives the safe point of a thread that asks itself; None to wait for one.
            coordinated: all ranks yield together.

        Raises:
            YieldRefusedError: it cannot be done, and why. The caller calls `rollback`.
        """
        parts = self._parts
        self.times, self.notes, self.residual = [], [], {}
        self.plan, self.checksums, self.zeroed = None, "", ()
        self._thrown_later = False
        self._copying_since = None
        started = parts.clock.monotonic()
        seconds = request.deadline_seconds
        self._ends = None if seconds is None else started + seconds
        with self._tracker.phase(Phase.PREPARE):
            self._refuse_at_once(request, coordinated=coordinated)
            refusal = self._driver.refusal(request)
            if request.level is YieldLevel.PROCESS:
                plan = Plan(request=request, level=request.level, driver=True)
                if not request.dry_run:
                    self._ask_callbacks()
            else:
                plan = self._look(request, refusal, here=here)
            self.plan = plan
            self.notes += plan.notes
            self._in_time("before anything was moved")
        self.times.append(PhaseTime(Phase.PREPARE, parts.clock.monotonic() - started))
        return plan

    def _refuse_at_once(self, request: YieldRequest, *, coordinated: bool) -> None:
        if self.where() is not YieldState.RUNNING:
            raise YieldRefusedError("yield: memory is away already; restore first")
        check_request(request)
        size = self._parts.world_size()
        if size > 1 and not coordinated:
            raise YieldRefusedError(
                f"yield: this job has {size} ranks, and the others would wait for this one until "
                "their collectives time out; this version cannot stop all of them together"
            )
        why = self._parts.why_not_now()
        if why:
            raise YieldRefusedError(f"yield: {why}; try again")

    def _look(
        self, request: YieldRequest, refusal: str | None, *, here: Callable[[], StopRequest] | None
    ) -> Plan:
        parts = self._parts
        if here is not None:
            self._parked = here()
        else:
            # stored before the thread stops, so that it is let go in any case
            self._parked = StopRequest(self.on_interrupt)
            parts.safe_points.park(
                min(request.wait_seconds, self.seconds_left()),
                clock=parts.clock,
                stop=self._stop,
                asked=self._parked,
            )
        self.notes += parts.hints()
        if not request.dry_run:
            self._ask_callbacks()
        if self._parked.thread is not None:
            parts.quiescence.check(self._parked.thread)
        why = parts.why_not_now()
        if why:
            raise YieldRefusedError(f"yield: {why}; try again")
        return self._settle(request, refusal)

    def _settle(self, request: YieldRequest, refusal: str | None) -> Plan:
        """The job is stopped: find what can go, and reserve room for it."""
        parts = self._parts
        if self._admitted:  # the last one could not be abandoned
            self._abandon()
        if not request.dry_run:  # copies what will probably go during the scan
            self._admitted = True
            since = parts.clock.monotonic()
            parts.offload.begin(probable_part(parts.finder.probable(), request))
        with uncollected():
            scan = parts.finder.find(assume_private=request.assume_private)
        plan = make_plan(request, scan, refusal)
        expected = self.expected_seconds(plan)
        if expected is not None and expected > self.seconds_left():
            raise YieldRefusedError(
                f"yield: the deadline of {request.deadline_seconds or 0:g} s cannot be met, the "
                f"copy alone takes {expected:.1f} s at the speed of the last; give it longer"
            )
        if not plan.movables and self._admitted:
            self._abandon()
        elif plan.movables:
            self._admitted = True
            # the driver may still refuse after all is freed: nothing is thrown away before that
            self._thrown_later = plan.driver and bool(request.discard)
            held = replace(request, discard=()) if self._thrown_later else request
            self.host_bytes, self.disk_bytes = parts.offload.admit(plan.movables, held)
            if parts.offload.copies_ahead:
                self._copying_since = since
        return plan

    def _ask_callbacks(self) -> None:
        self._callbacks_asked = True
        if self._parked is not None:
            device = self._parked.device
        else:  # the driver alone needs no stopped thread
            device = min((one.device for one in self._parts.usage()), default=None)
        self._parts.callbacks.before(device, self._hurried)

    def expected_seconds(self, plan: Plan) -> float | None:
        """Of the copy, from the speed of the last one; None before there was one."""
        speed = self._parts.offload.bytes_per_second
        size = sum(plan.moved_bytes.values())
        if plan.driver:
            size += sum(plan.discarded_bytes.values())  # kept until the driver is done
        return size / speed if speed > 0 else None

    # release and checkpoint

    def release(self) -> None:
        """Copy to the host, then free on the device.

        Raises:
            YieldRefusedError: nothing was freed. The caller calls `rollback`, as after any error.
        """
        plan = self._planned()
        offload = self._parts.offload
        with self._tracker.phase(Phase.RELEASE):
            started = self._parts.clock.monotonic()
            size = 0
            with self._driver.made_ready(wanted=plan.driver) as errors:
                if plan.movables:
                    size = offload.copy_out(self._tracker.progress, self._stop).size_bytes
            if errors:
                plan = self._without_driver(plan, errors[0])
            self._in_time("while it was copied to the host")
            if not plan.movables:
                self._freed = not plan.driver  # nothing to free, but the job stays stopped
                return
            if self._parked is not None and self._parked.thread is not None:
                self._parts.quiescence.look(self._parked.thread)
            try:
                offload.free()
            except BaseException:  # also an interrupt: some of it may be freed
                self._freed = self._away()
                raise
            self._freed = True
        ended, since = self._parts.clock.monotonic(), self._copying_since
        moving = None if since is None else ended - since
        self.times.append(PhaseTime(Phase.RELEASE, ended - started, size, moving))
        self._hold_account(plan)

    def _without_driver(self, plan: Plan, error: BaseException) -> Plan:
        """The driver's helper does not work; nothing was freed yet."""
        if plan.level is not YieldLevel.AUTO:
            raise error
        self.notes.append(f"tensors alone, the context stays: {error}")
        self.plan = replace(plan, driver=False, level=YieldLevel.TENSORS)
        return self.plan

    def checkpoint(self) -> None:
        """The driver takes what is left, where that is planned; nothing is refused afterwards.

        Raises:
            YieldRefusedError: the driver refused, and the process is as before this phase.
            YieldFailedError: the driver lost it.
        """
        plan = self._planned()
        if plan.driver:
            self._checkpoint(plan)
        if self._thrown_later:
            self._parts.offload.discard(plan.request.discard)

    def _checkpoint(self, plan: Plan) -> None:
        with self._tracker.phase(Phase.CHECKPOINT):
            if not plan.movables:
                self._hold_account(plan)
            self._driver.close_gate()
            left = self.seconds_left()
            self._in_time("before the driver began")
            done = self._driver.take(
                left if left != float("inf") else 600.0, plan.request.lease_seconds
            )
        self.times.append(done)
        self.residual = foreign_bytes(self.residual)
        self._in_time("when the driver was done")

    def _hold_account(self, plan: Plan) -> None:
        self._host_account()
        self.residual = residual_of(plan, self._parts.usage())

    def _host_account(self) -> None:
        offload = self._parts.offload
        self.host_bytes, self.disk_bytes = offload.host_bytes, offload.disk_bytes
        self.notes += [note for note in offload.notes if note not in self.notes]

    def _planned(self) -> Plan:
        if self.plan is None:
            raise YieldRefusedError("yield: nothing was prepared; prepare first")
        return self.plan

    # restore, reload, verify

    def restore(self, request: RestoreRequest) -> None:
        """The driver gives back what it took; does nothing where it took nothing.

        Raises:
            YieldRefusedError: not now; everything stays as it is.
            YieldFailedError: the process's memory is lost.
        """
        self._ends, self.lost = None, ""
        if self._driver.state != "running":
            with self._tracker.phase(Phase.RESTORE):
                took = self._driver.restore(request.wait_seconds)
            self.times += [took] if took is not None else []
        self._driver.open_gate()

    def reload(self, request: RestoreRequest) -> None:
        """Allocate on the device, copy back.

        Raises:
            YieldRefusedError: how much room is missing; this call restored nothing.
        """
        if not self._freed:
            return
        if not self._away():
            self._freed = False
            return
        with self._tracker.phase(Phase.RELOAD):
            self.times.append(
                self._parts.offload.copy_back(
                    request.classes, request.wait_seconds, self._tracker.progress, lambda: False
                )
            )
        self._freed = self._away()
        if not self._freed:
            self._admitted = False
        self._host_account()

    def verify(self) -> None:
        """Compare checksums, where they were asked for and everything is back.

        Raises:
            YieldFailedError: contents differ.
        """
        plan = self.plan
        if plan is None or not plan.request.verify or not plan.movables or self._freed:
            return
        with self._tracker.phase(Phase.VERIFY):
            started = self._parts.clock.monotonic()
            try:
                self.checksums = self._parts.offload.verify()
            except YieldFailedError as error:
                self.lost = str(error)
                raise
            except Exception as error:  # everything is back, and no difference is known
                self.notes.append(f"checksums could not be compared: {error}")
        self.times.append(PhaseTime(Phase.VERIFY, self._parts.clock.monotonic() - started))

    def finish(self) -> None:
        """Call `after_restore` where everything is back; do nothing otherwise."""
        if self.where() is not YieldState.RUNNING:
            return
        if self.plan is not None:  # it would keep storages alive that the job frees
            self.plan = replace(self.plan, movables=(), kept=(), scan=None)
        self._driver.open_gate()
        if self._callbacks_asked:
            self._callbacks_asked = False
            self.notes += self._parts.callbacks.after(self._hurried)

    def let_go(self) -> None:
        """Let the stopped thread go on, where everything is back."""
        parked = self._parked
        if parked is not None and self.where() is YieldState.RUNNING:
            self._parked = None
            parked.let_go()

    def let_interrupts_through(self) -> None:
        """The memory could not be restored: the stopped thread raises its next interrupt."""
        if self._parked is not None:
            self._parked.stuck = True

    # undo

    def rollback(self) -> str:
        """Undo what was done, as far as possible; `where()` tells the state that remains.

        Returns:
            What could not be undone, "" where nothing is left.
        """
        errors: list[str] = []
        driver, offload = self._driver, self._parts.offload
        self.zeroed = tuple(sorted({*offload.discarded_bytes, *offload.zeroed}))
        self._undo(errors, partial(driver.undo, ROLLBACK_SECONDS))
        self._undo(errors, driver.open_gate)
        if self._freed and driver.state == "running":
            back: Any = partial(
                offload.copy_back, None, ROLLBACK_SECONDS, self._tracker.progress, lambda: False
            )
            self._undo(errors, back)
            self._freed = self._away()
            if not self._freed:
                self._admitted = False
                self._undo(errors, self.verify)
        elif self._admitted and not self._freed:
            self._undo(errors, self._abandon)
        self._undo([], self.finish)
        return "; ".join(errors)

    def _abandon(self) -> None:
        self._parts.offload.abandon()
        self._admitted = False

    @staticmethod
    def _undo(errors: list[str], action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:  # also an interrupt: half undone would be worse
            errors.append(str(error) or type(error).__name__)
            _log.warning("undoing a yield: %s", error, exc_info=True)
