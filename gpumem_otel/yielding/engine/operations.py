"""The status of yields, the operations, which one runs, and which one a command repeats."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.engine.messages import kind_of
from gpumem_otel.yielding.request_fields import Repeat, Seconds, fields_of
from gpumem_otel.yielding.values import (
    Operation,
    OperationState,
    Phase,
    RestoreRequest,
    YieldReport,
    YieldRequest,
    YieldState,
    YieldStatus,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.protocols import Clock
    from gpumem_otel.yielding.request_fields import RequestField

PhaseEnded: TypeAlias = "Callable[[Operation | None, Phase, int, int, str], object]"
"""(operation, phase, began, ended, failure): nanoseconds since 1970, "" where it did not fail."""

_log = named_logger("gpumem_otel.yield")

_MOST_OPERATIONS: Final = 100
_PROGRESS_SECONDS: Final = 0.1


class StatusTracker:
    """The status, its versions, and the last hundred operations; without torch or CUDA.

    Args:
        clock: time.
        counters: takes `yield_transitions` by state, `yield_seconds` by phase, and
            `yield_operations` by kind and outcome.

    Attributes:
        on_phase: called for each phase when its operation has ended, since the job may be stopped
            until then.
        on_operation: called for each operation when it has ended, with the time of that.
    """

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._clock = clock
        self._counters = counters
        self._changed = threading.Condition()
        self._operations: OrderedDict[str, Operation] = OrderedDict()
        self._progress_at = float("-inf")
        self._held_calls: list[Callable[[], object]] = []
        self.on_phase: list[PhaseEnded] = []
        self.on_operation: list[Callable[[Operation, int], object]] = []
        self.status = YieldStatus(since_ns=clock.time_ns())

    @property
    def state(self) -> YieldState:
        """The current state."""
        return self.status.state

    def update(self, **changes: Any) -> None:
        """Change fields of the status, and wake all who wait for a change."""
        with self._changed:
            self.status = replace(self.status, version=self.status.version + 1, **changes)
            self._changed.notify_all()

    def enter(self, state: YieldState, why: str = "", **changes: Any) -> None:
        """Go into another state."""
        before = self.status.state
        if state is not before:
            changes["since_ns"] = self._clock.time_ns()
            self._counters.add("yield_transitions", state=state.value)
            level = _log.error if state is YieldState.FAILED else _log.info
            level("%s -> %s%s", before.value, state.value, f": {why}" if why else "")
        self.update(state=state, **changes)

    def wait(self, version: int, seconds: float) -> YieldStatus:
        """The status once its version is another, or after so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.status.version != version, max(seconds, 0.0))
            return self.status

    # operations

    def put(self, operation: Operation) -> None:
        """Store an operation as it is now."""
        with self._changed:
            self._operations[operation.id] = operation
            while len(self._operations) > _MOST_OPERATIONS:
                self._operations.popitem(last=False)
        self.update(operation=operation)

    def operation(self, operation_id: str) -> Operation | None:
        """One of the last hundred."""
        with self._changed:
            return self._operations.get(operation_id)

    def end(
        self,
        operation: Operation,
        outcome: OperationState,
        state: YieldState,
        *,
        error: str,
        report: YieldReport | None,
        **changes: Any,
    ) -> Operation:
        """An operation has ended and left this state, in one change of the status.

        Returns:
            The operation, for `notify`.
        """
        operation = replace(operation, state=outcome, phase=None, error=error, report=report)
        self._counters.add("yield_operations", kind=operation.kind, outcome=outcome.value)
        level = _log.info if outcome is OperationState.DONE else _log.warning
        level(
            "%s %s asked by %s: %s%s",
            operation.kind,
            operation.id,
            operation.who or "unknown",
            outcome.value,
            f": {error}" if error else "",
        )
        with self._changed:
            self._operations[operation.id] = operation
        self.enter(state, error, operation=operation, **changes)
        return operation

    def notify(self, ended: Operation) -> None:
        """Call the listeners, which may take long: hold no lock, and nothing waits for it."""
        calls, self._held_calls = self._held_calls, []
        now_ns = self._clock.time_ns()
        calls += [partial(listen, ended, now_ns) for listen in self.on_operation]
        for call in calls:
            _call(call)

    def progress(self, done: int, total: int) -> None:
        """Show the progress of the running operation: ten times a second at most, and its end."""
        operation = self.status.operation
        now = self._clock.monotonic()
        if operation is None or (now - self._progress_at < _PROGRESS_SECONDS and done < total):
            return
        self._progress_at = now
        self.put(replace(operation, done_bytes=done, total_bytes=total))

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Time a phase, also one that fails."""
        started, began_ns = self._clock.monotonic(), self._clock.time_ns()
        failure = ""
        operation = self.status.operation
        runs = operation is not None and operation.state is OperationState.RUNNING
        if operation is not None and runs:
            self.put(replace(operation, phase=phase, done_bytes=0, total_bytes=0))
        _log.debug("phase %s begins", phase.value)
        try:
            yield
        except BaseException as error:
            failure = str(error) or type(error).__name__
            raise
        finally:
            seconds = self._clock.monotonic() - started
            self._counters.add("yield_seconds", seconds, phase=phase.value)
            spent = dict(self.status.phase_seconds)
            spent[phase.value] = spent.get(phase.value, 0.0) + seconds
            self.update(phase_seconds=MappingProxyType(spent))
            _log.debug("phase %s took %.3f s", phase.value, seconds)
            ended_ns = began_ns + round(seconds * 1e9)
            calls = [
                partial(listen, operation, phase, began_ns, ended_ns, failure)
                for listen in self.on_phase
            ]
            if runs:
                self._held_calls += calls
            else:  # of a coordinator: no operation ends later
                for call in calls:
                    _call(call)


def _call(call: Callable[[], object]) -> None:
    """A listener must not change how an operation ends."""
    try:
        call()
    except Exception:
        _log.debug("a listener failed", exc_info=True)


class CurrentOperation:
    """The operation that runs; its owner holds a lock from `repeated` to `begin`.

    Args:
        tracker: knows the operations.

    Attributes:
        running: id and request of the operation, None where none runs.
        yielded: the request for what is yielded now; None where a part of it is back.
    """

    def __init__(self, tracker: StatusTracker) -> None:
        self._tracker = tracker
        self._last: dict[str, str] = {}
        self.running: tuple[str, YieldRequest | RestoreRequest] | None = None
        self.yielded: YieldRequest | None = None

    def runs(self, operation_id: str) -> bool:
        """Whether this is the operation that runs."""
        running = self.running
        return running is not None and running[0] == operation_id

    def begin(self, operation: Operation, request: YieldRequest | RestoreRequest) -> None:
        """It runs from now on."""
        self.running = (operation.id, request)
        if isinstance(request, YieldRequest):
            self.yielded = request

    def remember(self, operation: Operation) -> None:
        """It is the last one of its kind."""
        self._last[operation.kind] = operation.id

    def repeated(self, request: YieldRequest | RestoreRequest) -> Operation | None:
        """The operation that a command repeats; None where it is another, and can be begun.

        Raises:
            YieldRefusedError: it cannot begin now.
        """
        if self.running is not None:
            return self._as_running(request, *self.running)
        state = self._tracker.state
        if isinstance(request, RestoreRequest):
            return self._last_of("restore") if state is YieldState.RUNNING else None
        if state is YieldState.RUNNING:
            return None
        if state is YieldState.YIELDED and not request.dry_run and self.yielded is not None:
            other = _other_than(self.yielded, request)
            if not other:
                return self._last_of("yield")
            raise YieldRefusedError(f"yield: memory is yielded already, {other}; restore first")
        reason = self._tracker.status.reason
        if state is YieldState.YIELDED and self.yielded is None:
            reason = "a part of it is back already"
        raise YieldRefusedError(
            f"yield: the state is {state.value}{': ' if reason else ''}{reason}; restore first"
        )

    def _as_running(
        self,
        request: YieldRequest | RestoreRequest,
        operation_id: str,
        running: YieldRequest | RestoreRequest,
    ) -> Operation | None:
        operation = self._tracker.operation(operation_id)
        if _asks_same(running, request):
            return operation
        kind = operation.kind if operation is not None else "operation"
        raise YieldRefusedError(f"{kind_of(request)}: {kind} {operation_id} runs; wait for it")

    def _last_of(self, kind: str) -> Operation:
        last = self._tracker.operation(self._last.get(kind, ""))
        if last is not None:
            return last
        report = YieldReport(state=self._tracker.state, notes=("nothing was yielded",))
        return Operation(id="", kind=kind, state=OperationState.DONE, report=report)


def _asks_same(had: YieldRequest | RestoreRequest, asked: YieldRequest | RestoreRequest) -> bool:
    """Whether an operation for the first request also answers the second."""
    return type(had) is type(asked) and not _other_than(had, asked)


def _other_than(had: YieldRequest | RestoreRequest, asked: YieldRequest | RestoreRequest) -> str:
    """In what the first request does not answer the second, "" where it does."""
    for name, field in fields_of(type(asked)).items():
        before, now = getattr(had, name), getattr(asked, name)
        left_out = field.repeat is Repeat.LEFT_OUT and now == field.default
        if before != now and field.repeat is not Repeat.ALWAYS and not left_out:
            return f"with {name} {_shown(before, field)}, not {_shown(now, field)}"
    return ""


def _shown(value: object, field: RequestField) -> str:
    if value is None:
        return "none" if isinstance(field.kind, Seconds) else "all"
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return str(getattr(value, "value", value))
