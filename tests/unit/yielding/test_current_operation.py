"""Which command is a repetition of which, in every state."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.base.counters import Counters
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.engine.operations import CurrentOperation, StatusTracker
from gpumem_otel.yielding.values import (
    Operation,
    OperationState,
    RestoreRequest,
    YieldLevel,
    YieldRequest,
    YieldState,
)

HAD = YieldRequest(lease_seconds=60.0)

SAME = [
    HAD,
    replace(HAD, lease_seconds=None),
    replace(HAD, wait_seconds=1.0),
    replace(HAD, deadline_seconds=5.0),
    replace(HAD, disk_dir="/scratch"),
]
OTHER = [
    (replace(HAD, level=YieldLevel.TENSORS), "with level auto, not tensors"),
    (replace(HAD, devices=(1,)), "with devices all, not 1"),
    (replace(HAD, classes=("cache",)), "with classes all, not cache"),
    (replace(HAD, keep=("input", "cache")), "with keep none, not input+cache"),
    (replace(HAD, discard=("cache",)), "with discard none, not cache"),
    (replace(HAD, lease_seconds=9.0), "with lease_seconds 60.0, not 9.0"),
    (replace(HAD, verify=True), "with verify False, not True"),
    (replace(HAD, assume_private=True), "with assume_private False, not True"),
    (replace(HAD, release_host=True), "with release_host False, not True"),
]


class World:
    """One whose tracker is in the state that a test says."""

    def __init__(self) -> None:
        self.tracker = StatusTracker(SystemClock(), Counters())
        self.current = CurrentOperation(self.tracker)
        self._ids = map("op-{}".format, range(1, 10))

    def begin(self, request) -> Operation:
        kind = "restore" if isinstance(request, RestoreRequest) else "yield"
        operation = Operation(id=next(self._ids), kind=kind, state=OperationState.RUNNING)
        self.tracker.put(operation)
        self.current.begin(operation, request)
        return operation

    def done(self, request, state) -> Operation:
        """It was asked for, and has led to this state."""
        operation = self.begin(request)
        self.current.running = None
        self.current.remember(operation)
        self.tracker.enter(state)
        return operation

    def refused(self, request) -> str:
        with pytest.raises(YieldRefusedError) as caught:
            self.current.repeated(request)
        return str(caught.value)


@pytest.fixture
def world():
    return World()


def test_in_the_beginning_there_is_nothing_to_restore(world):
    assert world.current.repeated(HAD) is None
    answer = world.current.repeated(RestoreRequest())
    assert (answer.id, answer.state) == ("", OperationState.DONE)
    assert answer.report.notes == ("nothing was yielded",)


@pytest.mark.parametrize("asked", SAME)
def test_a_yield_that_is_met_by_the_one_that_runs_or_is_done(world, asked):
    running = world.begin(HAD)
    assert world.current.repeated(asked) is running
    world = World()
    done = world.done(HAD, YieldState.YIELDED)
    assert world.current.repeated(asked) is done


@pytest.mark.parametrize(("asked", "said"), OTHER)
def test_a_yield_that_asks_for_more_or_for_another(world, asked, said):
    running = world.begin(HAD)
    assert world.refused(asked) == f"yield: yield {running.id} runs; wait for it"
    world = World()
    world.done(HAD, YieldState.YIELDED)
    assert world.refused(asked) == f"yield: memory is yielded already, {said}; restore first"


def test_what_the_first_does_beyond_what_the_second_asks(world):
    full = replace(HAD, verify=True, assume_private=True, release_host=True)
    done = world.done(full, YieldState.YIELDED)
    assert world.current.repeated(HAD) is done


def test_a_dry_run_is_no_yield(world):
    look = replace(HAD, dry_run=True)
    running = world.begin(HAD)
    assert world.refused(look) == f"yield: yield {running.id} runs; wait for it"
    world = World()
    looking = world.begin(look)
    assert world.current.repeated(look) is looking
    assert world.refused(HAD) == f"yield: yield {looking.id} runs; wait for it"
    world = World()
    world.done(HAD, YieldState.YIELDED)
    assert world.refused(look) == "yield: the state is yielded; restore first"
    world = World()
    world.done(look, YieldState.RUNNING)
    assert world.current.repeated(HAD) is None


def test_one_kind_is_not_the_other(world):
    running = world.begin(RestoreRequest())
    assert world.current.repeated(RestoreRequest(wait_seconds=1.0)) is running
    assert world.refused(HAD) == f"yield: restore {running.id} runs; wait for it"
    world = World()
    running = world.begin(YieldRequest())
    assert world.refused(RestoreRequest()) == f"restore: yield {running.id} runs; wait for it"


def test_a_restore_of_other_classes_waits_for_the_one_that_runs(world):
    running = world.begin(RestoreRequest(classes=("parameter",)))
    assert world.current.repeated(RestoreRequest(classes=("parameter",))) is running
    for other in (None, ("gradient",)):
        said = world.refused(RestoreRequest(classes=other))
        assert said == f"restore: restore {running.id} runs; wait for it"


def test_a_restore_of_what_is_back_is_the_last_one(world):
    world.done(HAD, YieldState.YIELDED)
    assert world.current.repeated(RestoreRequest()) is None
    done = world.done(RestoreRequest(), YieldState.RUNNING)
    assert world.current.repeated(RestoreRequest()) is done
    assert world.current.repeated(HAD) is None


def test_a_yield_of_which_a_part_is_back(world):
    world.done(HAD, YieldState.YIELDED)
    world.current.yielded = None
    said = "yield: the state is yielded: a part of it is back already; restore first"
    assert world.refused(HAD) == said


def test_where_something_is_lost_the_reason_is_said(world):
    world.done(HAD, YieldState.FAILED)
    world.tracker.update(reason="device 0 is lost")
    assert world.refused(HAD) == "yield: the state is failed: device 0 is lost; restore first"
    assert world.current.repeated(RestoreRequest()) is None


def test_which_operation_runs(world):
    assert not world.current.runs("op-1")
    world.begin(HAD)
    assert world.current.runs("op-1")
    assert not world.current.runs("op-2")


def test_a_refusal_names_no_more_than_is_known(world):
    """Its entry may have left the tracker."""
    world.current.running = ("op-0", HAD)
    assert re.fullmatch("restore: operation op-0 runs; .*", world.refused(RestoreRequest()))
