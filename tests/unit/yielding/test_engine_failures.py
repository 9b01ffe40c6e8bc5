"""What fails in a phase is undone, and where that is not possible the state says so."""

from __future__ import annotations

import threading

import pytest
from support.fake_clock import FakeClock
from support.yield_parts import SIZE, LoopingJob, World, ended

from gpumem_otel.base.profile import DeviceStats
from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.values import OperationState, YieldLevel, YieldRequest, YieldState

TENSORS = YieldRequest(level=YieldLevel.TENSORS)
WITHIN_FREE = ("free", "free within", "free at its end")


@pytest.mark.parametrize("call", ["find", "admit", "copy_out", *WITHIN_FREE, "lock", "checkpoint"])
@pytest.mark.parametrize(
    "error", [YieldRefusedError("no"), RuntimeError("CUDA error"), YieldFailedError("half")]
)
def test_whatever_fails_is_undone_and_the_next_yield_works(call, error):
    world = World()
    world.faults.now[call] = error
    with pytest.raises(YieldRefusedError, match=r"no|CUDA error|half"):
        world.engine.yield_(YieldRequest())
    assert world.engine.status.state is YieldState.RUNNING
    assert world.all_on_device
    assert not world.offload.reserved
    assert not world.gate.closed
    assert world.checkpoint.state == "running"
    began = call not in {"find", "admit"}
    outcome = OperationState.FAILED if began else OperationState.REFUSED
    assert world.engine.status.operation.state is outcome
    assert world.engine.yield_(YieldRequest()).state is YieldState.YIELDED
    world.engine.restore()
    assert world.all_on_device


def test_a_yield_whose_undoing_finds_the_device_taken_stays_and_comes_back_by_itself():
    world = World(clock=FakeClock())
    told = []
    world.callbacks.add(None, None, told.append, 5.0)
    world.faults.now["lock"] = YieldRefusedError("driver: no")
    world.offload.room = False
    freed = threading.Event()
    world.clock.on_wait.append(
        lambda: threading.current_thread().name == "gpumem-otel-lease" and freed.wait(10)
    )

    with pytest.raises(YieldFailedError, match=r"driver: no; and undoing it: .*missing.* yielded"):
        world.engine.yield_(YieldRequest())
    assert world.engine.status.state is YieldState.YIELDED
    assert "missing" in world.engine.status.reason
    assert len(told) == 1
    assert world.nothing_lost
    world.offload.room = True
    freed.set()
    while world.engine.status.state is not YieldState.RUNNING:
        world.engine.wait(world.engine.status.version, 5.0)
    assert world.all_on_device


@pytest.mark.parametrize("call", ["restore", "copy_back", "copy_back within"])
def test_a_restore_that_fails_leaves_all_on_the_host_and_can_be_repeated(call):
    world = World()
    evicted = []
    world.callbacks.add(None, None, evicted.append, 5.0)
    world.engine.yield_(YieldRequest())
    world.faults.now[call] = YieldRefusedError("device 0: 5 bytes are missing")
    with pytest.raises(YieldRefusedError, match="5 bytes"):
        world.engine.restore()
    status = world.engine.status
    assert (status.state, status.reason) == (YieldState.YIELDED, "device 0: 5 bytes are missing")
    assert status.operation.state is OperationState.REFUSED
    assert evicted == ["device 0: 5 bytes are missing"]
    assert world.nothing_lost
    world.engine.restore()
    assert world.all_on_device
    assert world.engine.status.reason == ""


def test_contents_that_differ_are_a_failure_and_the_thread_stays_where_it_is():
    world = World()
    with LoopingJob(world.safe_points) as job:
        operation = world.engine.submit(YieldRequest(verify=True), "test")
        assert ended(world, operation.id).state is OperationState.DONE
        world.faults.now["verify"] = YieldFailedError("parameter: storage 0 differs")
        with pytest.raises(YieldFailedError, match="differs; the state is failed, the job must"):
            world.engine.restore()
        assert world.engine.status.state is YieldState.FAILED
        assert world.engine.phases.parked.thread is job.thread
        with pytest.raises(YieldRefusedError, match="failed: parameter: storage 0 differs"):
            world.engine.yield_(TENSORS)
        world.engine.restore()  # nothing differs after all
        assert world.engine.status.state is YieldState.RUNNING
        job.goes_on()


def test_checksums_that_can_not_be_compared_are_a_note():
    world = World()
    world.engine.yield_(YieldRequest(verify=True))
    world.faults.now["verify"] = RuntimeError("no room for sums")
    report = world.engine.restore()
    assert (report.state, report.checksums) == (YieldState.RUNNING, "")
    assert report.notes == ("checksums could not be compared: no room for sums",)


def test_a_restore_that_fails_when_all_is_back_leaves_no_lease_and_no_residual():
    world = World()
    world.usage = (
        DeviceStats(
            device=0, allocated_bytes=0, requested_bytes=0, active_bytes=0, reserved_bytes=0,
            device_used_bytes=9 * SIZE, process_used_bytes=0,
        ),
    )  # fmt: skip
    world.engine.yield_(YieldRequest(level=YieldLevel.PROCESS, lease_seconds=60.0))
    status = world.engine.status
    assert status.lease_expiry_ns > 0
    assert dict(status.residual_bytes) == {"other_process": 9 * SIZE}
    bring_back = world.checkpoint.restore

    def late(wait_seconds):
        bring_back(wait_seconds)
        raise RuntimeError("the answer was cut off")

    world.checkpoint.restore = late
    with pytest.raises(YieldFailedError, match="cut off"):
        world.engine.restore()
    status = world.engine.status
    assert status.state is YieldState.RUNNING
    assert (status.lease_expiry_ns, dict(status.residual_bytes)) == (0, {})


def test_the_driver_losing_the_process_is_a_failure():
    world = World()

    def lose(*_):
        world.checkpoint.state = "failed"
        raise YieldFailedError("driver: unlock said 401")

    world.checkpoint.lock_and_checkpoint = lose
    with pytest.raises(YieldFailedError, match=r"401.*failed"):
        world.engine.yield_(YieldRequest())
    assert world.engine.status.state is YieldState.FAILED
    assert world.gate.closed, "nothing of ours may call CUDA now"
