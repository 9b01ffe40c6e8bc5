"""Which level a request comes to, and which requests come to none."""

from __future__ import annotations

import threading

import pytest
from support.yield_parts import SIZE, World, ended

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.values import ScanResult, YieldLevel, YieldRequest, YieldState

TENSORS = YieldRequest(level=YieldLevel.TENSORS)
ALL = {
    "parameter": SIZE, "gradient": SIZE, "optimizer_state": 2 * SIZE, "activation": SIZE,
}  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (YieldRequest(discard=("gradient",)), "discard holds 'gradient', which is none of"),
        (YieldRequest(keep=("parameter",), classes=("parameter",)), "both to stay and to go"),
        (YieldRequest(level=YieldLevel.PROCESS, devices=(0,)), "the driver takes all devices"),
        (YieldRequest(level=YieldLevel.PROCESS, keep=("buffer",)), "the driver takes all devices"),
    ],
)
def test_requests_that_can_not_be_meant_are_refused_by_name(request_, said):
    world = World()
    with pytest.raises(YieldRefusedError, match=said):
        world.engine.yield_(request_)
    assert world.engine.status.state is YieldState.RUNNING


@pytest.mark.parametrize("level", YieldLevel)
def test_more_than_one_rank_is_refused_at_every_level(level):
    world = World()
    world.ranks = 2
    with pytest.raises(YieldRefusedError, match=r"2 ranks.*cannot stop all of them"):
        world.engine.yield_(YieldRequest(level=level))
    assert world.finder.asked == []
    world.engine.phases.prepare(
        YieldRequest(level=level), here=world.safe_points.here, coordinated=True
    )
    world.engine.phases.rollback()
    assert world.all_on_device


def test_not_while_an_out_of_memory_is_handled():
    world = World()
    world.why_not_now = "an out-of-memory is being handled"
    with pytest.raises(YieldRefusedError, match="out-of-memory is being handled; try again"):
        world.engine.yield_(YieldRequest())


def test_with_a_captured_graph_auto_is_the_driver_alone():
    world = World()
    world.finder.found = ScanResult(tuple(world.movables), (), {0: "a captured graph lives there"})
    report = world.engine.yield_(YieldRequest())
    assert report.level is YieldLevel.PROCESS
    assert not report.moved_bytes
    assert report.notes == ("device 0: a captured graph lives there: the driver alone takes it",)
    assert world.checkpoint.state == "checkpointed"
    assert all(one.device for one in world.storages)
    world.engine.restore()
    assert world.checkpoint.state == "running"


@pytest.mark.parametrize(
    ("request_", "driver", "said"),
    [
        (TENSORS, "", "captured graph.*level 'auto'"),
        (YieldRequest(), "driver 535 is older than 570", "captured graph.*driver 535"),
        (YieldRequest(devices=(0,)), "", "captured graph.*all of a process only"),
        (YieldRequest(discard=("buffer",)), "", "captured graph.*leave discard out"),
    ],
)
def test_with_a_captured_graph_and_no_driver_nothing_goes(request_, driver, said):
    world = World()
    world.checkpoint.why_not = driver
    world.finder.found = ScanResult(tuple(world.movables), (), {0: "a captured graph lives there"})
    with pytest.raises(YieldRefusedError, match=said):
        world.engine.yield_(request_)
    assert world.all_on_device
    assert not world.offload.reserved


def test_a_graph_on_a_device_that_was_not_asked_for_is_no_reason():
    world = World()
    world.finder.found = ScanResult(tuple(world.movables), (), {1: "a captured graph lives there"})
    report = world.engine.yield_(YieldRequest(devices=(0,), level=YieldLevel.TENSORS))
    assert dict(report.moved_bytes) == ALL


def test_without_a_driver_auto_is_tensors_alone_and_says_why():
    world = World(driver=False)
    report = world.engine.yield_(YieldRequest())
    assert report.level is YieldLevel.TENSORS
    assert "the context stays" in report.notes[0]
    with pytest.raises(YieldRefusedError, match="not bring this process back"):
        World(driver=False).engine.yield_(YieldRequest(level=YieldLevel.PROCESS))


def test_a_helper_that_does_not_start_is_known_before_anything_is_freed():
    world = World()
    world.faults.now["helper"] = YieldRefusedError("driver checkpoint: not permitted (800)")
    report = world.engine.yield_(YieldRequest())
    assert report.level is YieldLevel.TENSORS
    assert report.notes == (
        "tensors alone, the context stays: driver checkpoint: not permitted (800)",
    )
    assert world.checkpoint.state == "running"
    world.engine.restore()
    world.faults.now["helper"] = YieldRefusedError("driver checkpoint: not permitted (800)")
    with pytest.raises(YieldRefusedError, match="not permitted"):
        world.engine.yield_(YieldRequest(level=YieldLevel.PROCESS))


def test_the_driver_alone_needs_no_safe_point():
    world = World()
    world.safe_points._owner = threading.main_thread()
    world.safe_points._unsafe = lambda: "never"
    operation = ended(world, world.engine.submit(YieldRequest(level=YieldLevel.PROCESS), "t").id)
    assert operation.report.level is YieldLevel.PROCESS
    assert world.finder.asked == []
    assert world.gate.closed
    world.engine.restore()


def test_the_driver_is_not_asked_to_go_before_our_own_reads_have_ended():
    world = World()
    world.gate.stuck = True
    with pytest.raises(YieldRefusedError, match="a read of ours did not end"):
        world.engine.yield_(YieldRequest())
    assert world.checkpoint.leases == []
    assert world.all_on_device
