"""What was asked of the engine: which operation runs, and which one a command repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpumem_otel.core.yields import (
    Operation,
    OperationState,
    RestoreRequest,
    YieldReport,
    YieldRequest,
    YieldState,
)
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.wording import kind_of

if TYPE_CHECKING:
    from gpumem_otel.yielding.board import Board

__all__ = ["Docket"]

_MEMORY: Final = ("level", "devices", "classes", "keep", "discard", "dry_run")
"""What says which memory goes, and how."""


class Docket:
    """One operation at a time; its owner holds a lock from `repeated` to `begin`.

    Args:
        board: has what became of operations.

    Attributes:
        running: id and request of the operation that runs, None where none does.
        yielded: of what is yielded, the request; None where a part of it is back.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._last: dict[str, str] = {}
        self.running: tuple[str, YieldRequest | RestoreRequest] | None = None
        self.yielded: YieldRequest | None = None

    def runs(self, operation_id: str) -> bool:
        """Whether this is the operation that runs."""
        running = self.running
        return running is not None and running[0] == operation_id

    def begin(self, operation: Operation, request: YieldRequest | RestoreRequest) -> None:
        """From now on it runs."""
        self.running = (operation.id, request)
        if isinstance(request, YieldRequest):
            self.yielded = request

    def note(self, operation: Operation) -> None:
        """It is the last one of its kind."""
        self._last[operation.kind] = operation.id

    def repeated(self, request: YieldRequest | RestoreRequest) -> Operation | None:
        """The operation that a command repeats; None where it is another, and can be begun.

        Raises:
            YieldRefusedError: it can not be begun now.
        """
        if self.running is not None:
            return self._as_running(request, *self.running)
        state = self._board.state
        if isinstance(request, RestoreRequest):
            return self._last_of("restore") if state is YieldState.RUNNING else None
        if state is YieldState.RUNNING:
            return None
        if state is YieldState.YIELDED and not request.dry_run and self.yielded is not None:
            other = _other_than(self.yielded, request)
            if not other:
                return self._last_of("yield")
            raise YieldRefusedError(
                f"yield: {other} is asked for, and it is yielded already; restore first"
            )
        reason = self._board.status.reason
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
        operation = self._board.operation(operation_id)
        if _asks_same(running, request):
            return operation
        kind = operation.kind if operation is not None else "operation"
        raise YieldRefusedError(f"{kind_of(request)}: {kind} {operation_id} runs; wait for it")

    def _last_of(self, kind: str) -> Operation:
        last = self._board.operation(self._last.get(kind, ""))
        if last is not None:
            return last
        report = YieldReport(state=self._board.state, notes=("nothing was yielded",))
        return Operation(id="", kind=kind, state=OperationState.DONE, report=report)


def _asks_same(had: YieldRequest | RestoreRequest, asked: YieldRequest | RestoreRequest) -> bool:
    """Whether the second of two requests is met where the first one is."""
    if isinstance(had, YieldRequest):
        return isinstance(asked, YieldRequest) and not _other_than(had, asked)
    return isinstance(asked, RestoreRequest) and had.classes == asked.classes


def _other_than(had: YieldRequest, asked: YieldRequest) -> str:
    """What the second asks for and the first does not bring, "" for nothing."""
    for name in _MEMORY:
        before, now = getattr(had, name), getattr(asked, name)
        if before != now:
            return f"{name} {_shown(now)}, where it has {_shown(before)},"
    if asked.lease_seconds is not None and asked.lease_seconds != had.lease_seconds:
        before = "none" if had.lease_seconds is None else f"{had.lease_seconds:g} s"
        return f"a lease of {asked.lease_seconds:g} s, where it has {before},"
    for name in ("verify", "assume_private", "release_host"):
        if getattr(asked, name) and not getattr(had, name):
            return name
    return ""


def _shown(value: object) -> str:
    """As it is asked for; what is not said is all of it."""
    if value is None:
        return "all"
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return str(getattr(value, "value", value))
