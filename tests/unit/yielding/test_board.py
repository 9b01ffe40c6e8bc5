"""What watchers are told of an operation while it runs."""

from __future__ import annotations

from support.fake_clock import FakeClock

from gpumem_otel.core.counters import Counters
from gpumem_otel.core.yields import Operation, OperationState
from gpumem_otel.yielding.board import Board


def test_progress_is_told_ten_times_a_second_and_its_end_always():
    clock = FakeClock()
    board = Board(clock, Counters())
    board.put(Operation(id="op-1", kind="yield", state=OperationState.RUNNING))
    told = []
    for seconds, done in ((0.0, 1), (0.05, 2), (0.04, 3), (0.02, 4), (0.0, 5), (0.0, 9), (0.0, 9)):
        clock.advance(seconds)
        version = board.status.version
        board.progress(done, 9)
        if board.status.version != version:
            told.append((board.status.operation.done_bytes, board.status.operation.total_bytes))
    assert told == [(1, 9), (4, 9), (9, 9), (9, 9)]
    assert board.operation("op-1").done_bytes == 9


def test_progress_of_no_operation_is_nobodys():
    board = Board(FakeClock(), Counters())
    before = board.status
    board.progress(1, 2)
    assert board.status is before
