"""The real driver level and gate within the engine: a helper, and a driver that is a file."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
from support import fake_driver, yield_parts
from support.fake_driver import CHECKPOINT, GIB, LOCK, RESTORE, UNLOCK, CUresult, Device
from support.yield_parts import World

from gpumem_otel.base.gate import QuietGate
from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.driver.checkpoint import DriverCheckpoint
from gpumem_otel.yielding.driver.helper_client import HelperSettings
from gpumem_otel.yielding.values import RestoreRequest, YieldLevel, YieldRequest, YieldState

PROCESS = YieldRequest(level=YieldLevel.PROCESS)


@pytest.fixture
def device(tmp_path, monkeypatch):
    path = tmp_path / "device.json"
    monkeypatch.setenv(fake_driver.VARIABLE, str(path))
    return Device(path)


@pytest.fixture
def world(device, monkeypatch):
    settings = HelperSettings(
        driver="support.fake_driver",
        nvml="support.fake_driver",
        environ=os.environ,
        first_pause_seconds=0.01,
        longest_pause_seconds=0.05,
    )
    driver = DriverCheckpoint(environ={}, settings=settings, call_seconds=20.0)
    monkeypatch.setattr(yield_parts, "FakeCheckpoint", lambda faults: driver)
    monkeypatch.setattr(yield_parts, "FakeGate", QuietGate)
    yield World()
    device.set(others=0, plans={})
    driver._garbage.let_go()
    link = driver._link
    driver.close()
    assert link is None or link.join(10)


def until(world, state):
    """Wait until the engine is there."""
    end = time.monotonic() + 30
    while (status := world.engine.status).state is not state and time.monotonic() < end:
        world.engine.wait(status.version, 1.0)
    assert world.engine.status.state is state


@pytest.mark.parametrize("level", [YieldLevel.PROCESS, YieldLevel.AUTO])
def test_there_and_back(world, device, level):
    gone = world.engine.yield_(YieldRequest(level=level))
    assert (gone.state, device["state"], world.gate.enter()) == (YieldState.YIELDED, 2, False)
    assert gone.phases[-1].size_bytes == 8 * GIB
    back = world.engine.restore()
    assert (back.state, device["state"]) == (YieldState.RUNNING, 0)
    assert world.gate.enter()
    world.gate.leave()
    assert world.all_on_device
    assert device.names == [LOCK, CHECKPOINT, RESTORE, UNLOCK]


@pytest.mark.parametrize("level", [YieldLevel.PROCESS, YieldLevel.AUTO])
@pytest.mark.parametrize(
    ("call", "what"),
    [
        (LOCK, CUresult.CUDA_ERROR_NOT_READY),
        (CHECKPOINT, CUresult.CUDA_ERROR_OUT_OF_MEMORY),
        (CHECKPOINT, "die"),
    ],
)
def test_a_call_that_fails_leaves_everything_as_it_was(world, device, level, call, what):
    device.plan(call, what)
    with pytest.raises(YieldRefusedError):
        world.engine.yield_(YieldRequest(level=level))
    assert (world.engine.status.state, device["state"]) == (YieldState.RUNNING, 0)
    assert not world.gate.closed
    assert world.all_on_device
    assert world.checkpoint.helper_pid is None
    world.engine.yield_(YieldRequest(level=level))
    world.engine.restore()
    assert world.all_on_device


def test_without_a_helper_auto_is_tensors_alone_and_process_is_refused(world, device):
    device.plan("cuInit", *[CUresult.CUDA_ERROR_UNKNOWN] * 2)
    with pytest.raises(YieldRefusedError, match="CUDA_ERROR_UNKNOWN"):
        world.engine.yield_(PROCESS)
    gone = world.engine.yield_(YieldRequest(level=YieldLevel.AUTO))
    assert (gone.state, gone.level, device.names) == (YieldState.YIELDED, YieldLevel.TENSORS, [])
    assert any("CUDA_ERROR_UNKNOWN" in note for note in gone.notes)
    assert not world.gate.closed
    world.engine.restore()
    assert world.all_on_device


def test_a_helper_that_can_not_be_started_is_named_in_the_refusal_and_in_the_note(world, device):
    checkpoint = world.checkpoint
    checkpoint._settings = replace(checkpoint._settings, python="/nowhere/python")
    why = (
        "driver checkpoint: its helper process could not be started: "
        "[Errno 2] No such file or directory: '/nowhere/python'"
    )
    with pytest.raises(YieldRefusedError) as refused:
        world.engine.yield_(PROCESS)
    assert str(refused.value) == why
    gone = world.engine.yield_(YieldRequest(level=YieldLevel.AUTO))
    assert (gone.state, gone.level, device.names) == (YieldState.YIELDED, YieldLevel.TENSORS, [])
    assert gone.notes == (f"tensors alone, the context stays: {why}",)
    world.engine.restore()
    assert world.all_on_device


def test_a_reader_that_does_not_leave_refuses(world, device, monkeypatch):
    monkeypatch.setattr("gpumem_otel.yielding.engine.driver_phases.GATE_SECONDS", 0.01)
    world.gate.enter()
    with pytest.raises(YieldRefusedError, match="a read of ours did not end"):
        world.engine.yield_(PROCESS)
    world.gate.leave()
    assert (device.names, world.gate.closed) == ([], False)


@pytest.mark.parametrize("level", [YieldLevel.PROCESS, YieldLevel.AUTO])
def test_a_lease_brings_everything_back(world, device, level):
    world.engine.yield_(YieldRequest(level=level, lease_seconds=0.2))
    until(world, YieldState.RUNNING)
    assert (device["state"], world.gate.closed, world.all_on_device) == (0, False, True)
    assert device.names == [LOCK, CHECKPOINT, RESTORE, UNLOCK]


def test_a_guest_is_waited_for_and_named(world, device):
    world.engine.yield_(PROCESS)
    device.set(others=9 * GIB)
    with pytest.raises(YieldRefusedError, match="1024 MiB more must become free"):
        world.engine.restore(RestoreRequest(wait_seconds=0.05))
    assert (world.engine.status.state, world.gate.closed) == (YieldState.YIELDED, True)
    device.set(others=0)
    world.engine.restore()
    assert (world.engine.status.state, world.gate.closed) == (YieldState.RUNNING, False)


def test_a_helper_that_is_killed_costs_nothing(world, device):
    world.engine.yield_(YieldRequest())
    os.kill(world.checkpoint.helper_pid, signal.SIGKILL)
    world.engine.restore()
    assert (device["state"], world.gate.closed, world.all_on_device) == (0, False, True)


def test_what_is_lost_is_failed_and_the_gate_stays_closed(world, device):
    world.engine.yield_(PROCESS)
    device.plan(RESTORE, CUresult.CUDA_ERROR_NOT_SUPPORTED)
    with pytest.raises(YieldFailedError, match="end it and start it from its last checkpoint"):
        world.engine.restore()
    assert world.engine.status.state is YieldState.FAILED
    assert world.gate.closed, "a thread of the job may hold the allocator for ever"


def test_a_process_that_ends_while_it_is_held_comes_back_once_there_is_room(world, device):
    world.engine.yield_(PROCESS)
    device.set(others=9 * GIB)
    world.engine.close(0.05)
    assert device["state"] == 2
    link = world.checkpoint._link
    device.set(others=0)
    assert link.join(20)
    assert device["state"] == 0
