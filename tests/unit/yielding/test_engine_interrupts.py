"""Interrupts raised within an operation, as where no thread can be started for it."""

from __future__ import annotations

import pytest
from support.yield_parts import World

from gpumem_otel.yielding.values import OperationState, YieldRequest, YieldState

WITHIN_FREE = ("free", "free within", "free at its end")


@pytest.mark.parametrize("call", ["restore", "copy_back", "copy_back within", "verify"])
def test_a_restore_in_which_something_raises_one_is_finished_first(call):
    world = World()
    world.engine.yield_(YieldRequest(verify=True))
    world.faults.now[call] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        world.engine.restore()
    assert world.engine.status.state is YieldState.RUNNING
    assert world.all_on_device
    assert world.engine.status.operation.state is OperationState.DONE


@pytest.mark.parametrize("call", ["find", "admit", "copy_out", *WITHIN_FREE, "checkpoint"])
def test_a_yield_in_which_something_raises_one_is_undone_first(call):
    world = World()
    world.faults.now[call] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        world.engine.yield_(YieldRequest())
    assert world.engine.status.state is YieldState.RUNNING
    assert world.all_on_device
    world.engine.yield_(YieldRequest())
    world.engine.restore()
