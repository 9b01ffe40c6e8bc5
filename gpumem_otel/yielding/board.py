"""Where a process stands between yield and restore, for whoever asks; no torch, no CUDA."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpumem_otel.core.yields import Operation, OperationState, Phase, YieldState, YieldStatus
from gpumem_otel.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpumem_otel.core.counters import Counters
    from gpumem_otel.core.ports import Clock
    from gpumem_otel.core.yields import YieldReport

__all__ = ["Board", "PhaseEnded"]

PhaseEnded: TypeAlias = "Callable[[Operation | None, Phase, int, int, str], object]"
"""(operation, phase, began, ended, failure): nanoseconds since 1970, "" where it did not fail."""

_log = named_logger("gpumem_otel.yield")

_MOST_OPERATIONS: Final = 100
_PROGRESS_SECONDS: Final = 0.1


class Board:
    """The status, its versions, and the last hundred operations.

    Args:
        clock: time.
        counters: takes `yield_transitions` by state, `yield_seconds` by phase, and
            `yield_operations` by kind and outcome.

    Attributes:
        on_phase: told of each phase, once its operation has ended where it is one of an operation:
            the job may stand still until then.
        on_operation: told of each operation when it has ended, and when that was.
    """

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._clock = clock
        self._counters = counters
        self._changed = threading.Condition()
        self._operations: OrderedDict[str, Operation] = OrderedDict()
        self._told = float("-inf")
        self._untold: list[Callable[[], object]] = []
        self.on_phase: list[PhaseEnded] = []
        self.on_operation: list[Callable[[Operation, int], object]] = []
        self.status = YieldStatus(since_ns=clock.time_ns())

    @property
    def state(self) -> YieldState:
        """The state now."""
        return self.status.state

    def update(self, **changes: Any) -> None:
        """Change fields of the status; whoever waits hears of it."""
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
        """Note what became of an operation."""
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
        """An operation has ended and left this state: one change for whoever watches.

        Returns:
            What became of it, for `tell`.
        """
        operation = replace(operation, state=outcome, phase=None, error=error, report=report)
        self._counters.add("yield_operations", kind=operation.kind, outcome=outcome.value)
        level = _log.info if outcome is OperationState.DONE else _log.warning
        level(
            "%s %s asked by %s: %s%s",
            operation.kind,
            operation.id,
            operation.who or "nobody",
            outcome.value,
            f": {error}" if error else "",
        )
        with self._changed:
            self._operations[operation.id] = operation
        self.enter(state, error, operation=operation, **changes)
        return operation

    def tell(self, ended: Operation) -> None:
        """Whoever listens may take long: nobody is to wait for it, nor a lock to be held."""
        untold, self._untold = self._untold, []
        for phase in untold:
            _tell(phase)
        for told in self.on_operation:
            _tell(partial(told, ended, self._clock.time_ns()))

    def progress(self, done: int, total: int) -> None:
        """Of the running operation; told ten times a second at most, and the last of it."""
        operation = self.status.operation
        now = self._clock.monotonic()
        if operation is None or (now - self._told < _PROGRESS_SECONDS and done < total):
            return
        self._told = now
        self.put(replace(operation, done_bytes=done, total_bytes=total))

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Time a phase, whatever becomes of it."""
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
            tells = [
                partial(told, operation, phase, began_ns, ended_ns, failure)
                for told in self.on_phase
            ]
            if runs:
                self._untold += tells
            else:  # of a coordinator: no operation ends later
                for told in tells:
                    _tell(told)


def _tell(told: Callable[[], object]) -> None:
    """Whoever listens must not change what becomes of an operation."""
    try:
        told()
    except Exception:
        _log.debug("a listener failed", exc_info=True)
