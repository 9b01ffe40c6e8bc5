"""A YieldControl with real state and no GPU: it counts what it moves."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import replace

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.values import (
    Operation,
    OperationState,
    Phase,
    PhaseTime,
    RestoreRequest,
    YieldLevel,
    YieldReport,
    YieldRequest,
    YieldState,
    YieldStatus,
)

GIB = 1 << 30
HELD = {"parameter": 4 * GIB, "optimizer_state": 8 * GIB}
"""What the job has on its device."""


class YieldDouble:
    """Yields and restores two tensor classes; from any thread.

    Args:
        by_hand: operations wait for `advance` and `finish`; else whoever looks finds them done.

    Attributes:
        moves: how often memory really went or came.
        submitted: every (request, who) that was handed in, dry runs and refused ones too.
    """

    def __init__(self, *, by_hand: bool = False) -> None:
        self._by_hand = by_hand
        self._changed = threading.Condition(threading.RLock())
        self._status = YieldStatus(version=1, since_ns=time.time_ns())
        self._operations: OrderedDict[str, Operation] = OrderedDict()
        self._running: tuple[YieldRequest | RestoreRequest, str] | None = None
        self.moves = 0
        self.submitted: list[tuple[YieldRequest | RestoreRequest, str]] = []
        self.waiting = threading.Event()

    def submit(self, request: YieldRequest | RestoreRequest, who: str) -> Operation:
        with self._changed:
            self.submitted.append((request, who))
            if self._running is not None:
                running, identifier = self._running
                if running == request:
                    return self._operations[identifier]
                raise YieldRefusedError(f"operation {identifier} runs: wait for it")
            if isinstance(request, YieldRequest) and request.disk_dir == "/refused":
                raise YieldRefusedError("disk_dir /refused: no space left")
            kind = "yield" if isinstance(request, YieldRequest) else "restore"
            operation = Operation(
                id=f"op-{len(self.submitted)}",
                kind=kind,
                state=OperationState.RUNNING,
                who=who,
                phase=Phase.PREPARE,
                total_bytes=sum(HELD.values()),
            )
            here = YieldState.YIELDED if kind == "yield" else YieldState.RUNNING
            if self._status.state is here and not getattr(request, "dry_run", False):
                return self._keep(replace(operation, state=OperationState.DONE, phase=None))
            state = YieldState.YIELDING if kind == "yield" else YieldState.RESTORING
            if not getattr(request, "dry_run", False):
                self._change(state=state)
            self._running = (request, operation.id)
            return self._keep(operation)

    def operation(self, operation_id: str) -> Operation | None:
        with self._changed:
            self._settle()
            return self._operations.get(operation_id)

    def wait(self, version: int, seconds: float) -> YieldStatus:
        with self._changed:
            self._settle()
            self.waiting.set()
            self._changed.wait_for(lambda: self._status.version != version, seconds)
            return self._status

    def advance(self, phase: Phase, done_bytes: int) -> None:
        """The running operation is so far."""
        with self._changed:
            assert self._running is not None
            operation = self._operations[self._running[1]]
            self._keep(replace(operation, phase=phase, done_bytes=done_bytes))

    def finish(self, error: str = "", state: OperationState = OperationState.REFUSED) -> None:
        """The running operation ends: well, or with an error and nothing moved."""
        with self._changed:
            assert self._running is not None
            request, identifier = self._running
            self._running = None
            operation = replace(self._operations[identifier], phase=None)
            yields = isinstance(request, YieldRequest)
            if error:
                self._change(state=YieldState.RUNNING if yields else YieldState.YIELDED)
                self._keep(replace(operation, state=state, error=error))
                return
            if yields and request.dry_run:
                report = YieldReport(level=YieldLevel.TENSORS, moved_bytes=HELD, dangers=("none",))
            else:
                self.moves += 1
                after = YieldState.YIELDED if yields else YieldState.RUNNING
                phase = Phase.RELEASE if yields else Phase.RELOAD
                report = YieldReport(
                    operation=identifier,
                    state=after,
                    level=YieldLevel.TENSORS,
                    phases=(PhaseTime(phase, 0.25, sum(HELD.values())),),
                    moved_bytes=HELD,
                    residual_bytes={"context": 512 << 20} if yields else {},
                )
                self._change(state=after, moved_bytes=sum(HELD.values()) if yields else 0)
            total = operation.total_bytes
            done = replace(operation, state=OperationState.DONE, done_bytes=total, report=report)
            self._keep(done)

    def _settle(self) -> None:
        if self._running is not None and not self._by_hand:
            self.finish()

    def _keep(self, operation: Operation) -> Operation:
        self._operations[operation.id] = operation
        while len(self._operations) > 100:
            self._operations.popitem(last=False)
        self._change(operation=operation)
        return operation

    def _change(self, **changes) -> None:
        if "state" in changes:
            changes["since_ns"] = time.time_ns()
        self._status = replace(self._status, version=self._status.version + 1, **changes)
        self._changed.notify_all()
