"""Deadlines and leases of the engine."""

from __future__ import annotations

import itertools
import threading

import pytest
from support.fake_clock import FakeClock
from support.yield_parts import SIZE, World

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.values import OperationState, YieldLevel, YieldRequest, YieldState

TENSORS = YieldRequest(level=YieldLevel.TENSORS)


def test_the_deadline_counts_the_wait_and_undoes():
    clock = FakeClock()
    world = World(clock=clock)
    world.offload.during_copy = lambda: clock.advance(2.0)
    with pytest.raises(YieldRefusedError):
        world.engine.yield_(YieldRequest(level=YieldLevel.TENSORS, deadline_seconds=3.0))
    assert world.all_on_device
    assert world.engine.status.state is YieldState.RUNNING


def test_a_deadline_that_the_driver_misses_undoes_all():
    clock = FakeClock()
    world = World(clock=clock)
    checkpoint = world.checkpoint.lock_and_checkpoint

    def slow(*arguments):
        clock.advance(20.0)
        return checkpoint(*arguments)

    world.checkpoint.lock_and_checkpoint = slow
    with pytest.raises(YieldRefusedError, match="deadline of 10 s was missed when the driver"):
        world.engine.yield_(YieldRequest(deadline_seconds=10.0))
    assert world.checkpoint.state == "running"
    assert world.all_on_device
    assert not world.gate.closed


def test_the_deadline_bounds_the_wait_for_a_safe_point():
    clock = FakeClock()
    world = World(clock=clock)
    world.safe_points._owner = threading.main_thread()  # which reaches none in this test
    errors = []

    def command() -> None:
        try:
            world.engine.yield_(YieldRequest(wait_seconds=60.0, deadline_seconds=1.0))
        except YieldRefusedError as error:
            errors.append(str(error))

    thread = threading.Thread(target=command)
    thread.start()
    thread.join()
    assert "safe point" in errors[0]
    assert 1.0 <= clock.seconds < 1.2
    assert world.engine.status.state is YieldState.RUNNING


def test_a_deadline_that_the_copy_can_not_meet_is_refused_before_it_begins():
    world = World()
    world.offload.bytes_per_second = SIZE / 10
    with pytest.raises(YieldRefusedError, match=r"the copy alone takes 50.0 s"):
        world.engine.yield_(YieldRequest(deadline_seconds=5.0))
    assert not world.offload.items
    assert world.engine.status.operation.state is OperationState.REFUSED


def test_the_lease_restores_and_tries_again_while_a_guest_is_there():
    clock = FakeClock()
    world = World(clock=clock)
    turn, tried = threading.Semaphore(0), threading.Semaphore(0)

    def wait() -> None:
        if threading.current_thread().name == "gpumem-otel-lease":
            tried.release()
            turn.acquire(timeout=10)

    clock.on_wait.append(wait)
    told = []
    world.callbacks.add(None, None, told.append, 5.0)
    world.offload.room = False
    began_ns = clock.now_ns
    world.engine.yield_(YieldRequest(level=YieldLevel.TENSORS, lease_seconds=30.0))
    assert world.engine.status.lease_expiry_ns >= began_ns + 30_000_000_000
    assert tried.acquire(timeout=10)
    times = []
    for _ in range(3):
        times.append(clock.seconds)
        turn.release()
        assert tried.acquire(timeout=10)
        status = world.engine.status
        assert status.state is YieldState.YIELDED
        assert "missing" in status.reason
    assert [round(b - a) for a, b in itertools.pairwise(times)] == [30, 1]
    assert len(told) == 1, "told once for each yield"
    world.offload.room = True
    turn.release()
    while world.engine.status.state is not YieldState.RUNNING:
        world.engine.wait(world.engine.status.version, 5.0)
    assert world.engine.operation(world.engine.status.operation.id).who == "lease"
    assert world.all_on_device


def test_a_restore_in_time_ends_the_lease():
    world = World()
    world.engine.yield_(YieldRequest(lease_seconds=1000.0))
    lease = next(t for t in threading.enumerate() if t.name == "gpumem-otel-lease")
    world.engine.restore()
    lease.join(10)
    assert not lease.is_alive()


def test_a_lease_that_the_helper_ended_brings_the_tensors_back_too():
    world = World()
    world.engine.yield_(YieldRequest(lease_seconds=1000.0))
    assert world.checkpoint.leases == [1000.0]
    world.checkpoint.state = "running"
    world.checkpoint.on_restored(None)
    while world.engine.status.state is not YieldState.RUNNING:
        world.engine.wait(world.engine.status.version, 5.0)
    assert world.all_on_device
    assert not world.gate.closed
