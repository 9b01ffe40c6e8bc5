"""What watchers are told of an operation while it runs."""

from __future__ import annotations

import pytest
from support.fake_clock import FakeClock

from gpumem_otel.base.counters import Counters
from gpumem_otel.yielding.engine.operations import StatusTracker
from gpumem_otel.yielding.values import Operation, OperationState, Phase, YieldState


def test_progress_is_told_ten_times_a_second_and_its_end_always():
    clock = FakeClock()
    tracker = StatusTracker(clock, Counters())
    tracker.put(Operation(id="op-1", kind="yield", state=OperationState.RUNNING))
    told = []
    for seconds, done in ((0.0, 1), (0.05, 2), (0.04, 3), (0.02, 4), (0.0, 5), (0.0, 9), (0.0, 9)):
        clock.advance(seconds)
        version = tracker.status.version
        tracker.progress(done, 9)
        if tracker.status.version != version:
            told.append((tracker.status.operation.done_bytes, tracker.status.operation.total_bytes))
    assert told == [(1, 9), (4, 9), (9, 9), (9, 9)]
    assert tracker.operation("op-1").done_bytes == 9


def test_progress_of_no_operation_is_nobodys():
    tracker = StatusTracker(FakeClock(), Counters())
    before = tracker.status
    tracker.progress(1, 2)
    assert tracker.status is before


@pytest.fixture
def told():
    """A tracker with a running operation, and what its listeners hear of phases."""
    tracker = StatusTracker(FakeClock(), Counters())
    heard = []
    tracker.on_phase.append(lambda *what: heard.append(what))
    tracker.put(Operation(id="op-1", kind="yield", state=OperationState.RUNNING, total_bytes=7))
    return tracker, heard


def test_a_phase_is_shown_while_it_runs_and_told_when_its_operation_has_ended(told):
    tracker, heard = told
    operation = tracker.status.operation
    with tracker.phase(Phase.RELEASE):
        now = tracker.status.operation
        assert (now.phase, now.done_bytes, now.total_bytes) == (Phase.RELEASE, 0, 0)
    assert heard == []
    ended = tracker.end(
        operation, OperationState.DONE, YieldState.YIELDED, error="", report=None
    )  # fmt: skip
    tracker.notify(ended)
    ((whose, phase, began, over, failure),) = heard
    assert (whose.id, phase, over - began, failure) == ("op-1", Phase.RELEASE, 0, "")


def test_a_phase_of_a_coordinator_is_told_at_once(told):
    """Whose operation is none of the tracker's, or has ended."""
    tracker, heard = told
    operation = tracker.status.operation
    tracker.end(operation, OperationState.DONE, YieldState.YIELDED, error="", report=None)
    with pytest.raises(ValueError), tracker.phase(Phase.RELOAD):
        raise ValueError
    assert [(phase, failure) for _, phase, _, _, failure in heard] == [(Phase.RELOAD, "ValueError")]
    with pytest.raises(ValueError), tracker.phase(Phase.VERIFY):
        raise ValueError("differs")
    assert [failure for *_, failure in heard] == ["ValueError", "differs"]
    assert tracker.status.operation.phase is None
