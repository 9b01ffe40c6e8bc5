"""The engine over doubles of its seams: commands, what they report, and who hears of it."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest
from support.yield_parts import SIZE, FakeFinder, LoopingJob, World, ended

from gpumem_otel.base.profile import DeviceStats
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.values import (
    OperationState,
    Phase,
    RestoreRequest,
    ScanResult,
    Unmovable,
    YieldLevel,
    YieldRequest,
    YieldState,
)

TENSORS = YieldRequest(level=YieldLevel.TENSORS)
ALL = {
    "parameter": SIZE, "gradient": SIZE, "optimizer_state": 2 * SIZE, "activation": SIZE,
}  # fmt: skip


def test_a_yield_and_a_restore_of_all_say_what_they_moved(caplog):
    world = World()
    caplog.set_level(logging.INFO, logger="gpumem_otel.yield")

    gone = world.engine.yield_(YieldRequest())
    assert gone.state is YieldState.YIELDED
    assert gone.level is YieldLevel.AUTO
    assert dict(gone.moved_bytes) == ALL
    assert [one.phase for one in gone.phases] == [Phase.PREPARE, Phase.RELEASE, Phase.CHECKPOINT]
    assert [one.size_bytes for one in gone.phases] == [0, 5 * SIZE, 7]
    assert gone.host_bytes == 5 * SIZE
    assert world.checkpoint.state == "checkpointed"
    assert world.gate.closed
    assert all(one.device is None for one in world.storages)
    assert world.engine.status.moved_bytes == 5 * SIZE
    assert world.engine.status.state is YieldState.YIELDED

    back = world.engine.restore()
    assert back.state is YieldState.RUNNING
    assert dict(back.moved_bytes) == ALL
    assert [one.phase for one in back.phases] == [Phase.RESTORE, Phase.RELOAD]
    assert not world.gate.closed
    assert world.all_on_device
    status = world.engine.status
    assert (status.state, status.moved_bytes, status.reason) == (YieldState.RUNNING, 0, "")
    assert set(status.phase_seconds) == {"prepare", "release", "checkpoint", "restore", "reload"}
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in said if " -> " in line] == [
        "running -> yielding", "yielding -> yielded",
        "yielded -> restoring", "restoring -> running",
    ]  # fmt: skip
    assert world.counters.get("yield_transitions", state="yielded") == 1
    assert world.counters.get("yield_operations", kind="yield", outcome="done") == 1


def test_commands_that_repeat_give_the_operation_that_is_there():
    world = World()
    with LoopingJob(world.safe_points):
        first = world.engine.submit(TENSORS, "a")
        done = ended(world, first.id)
        assert world.engine.submit(TENSORS, "b") == done
        assert world.engine.yield_(TENSORS).operation == first.id
        for more, said in (
            ({"level": YieldLevel.AUTO}, "with level tensors, not auto"),
            ({"keep": ("parameter",)}, "with keep none, not parameter"),
            ({"devices": (0, 1)}, r"with devices all, not 0\+1"),
            ({"lease_seconds": 5.0}, "with lease_seconds none, not 5.0"),
            ({"verify": True}, "with verify False, not True"),
        ):
            with pytest.raises(YieldRefusedError, match=f"yielded already, {said}; restore first"):
                world.engine.submit(replace(TENSORS, **more), "b")
        back = ended(world, world.engine.submit(RestoreRequest(), "a").id)
        assert world.engine.submit(RestoreRequest(), "b") == back


def test_a_yield_of_which_a_part_is_back_is_not_there_any_more():
    world = World()
    world.engine.yield_(TENSORS)
    world.engine.restore(RestoreRequest(classes=("parameter",)))
    with pytest.raises(YieldRefusedError, match="a part of it is back already; restore first"):
        world.engine.yield_(TENSORS)
    world.engine.restore()
    world.engine.yield_(TENSORS)
    world.engine.restore()


def test_a_repeated_lease_is_the_one_that_runs():
    world = World()
    leased = replace(TENSORS, lease_seconds=1000.0)
    first = world.engine.yield_(leased)
    assert world.engine.yield_(leased).operation == first.operation
    assert world.engine.yield_(TENSORS).operation == first.operation
    with pytest.raises(YieldRefusedError, match="with lease_seconds 1000"):
        world.engine.yield_(replace(TENSORS, lease_seconds=5.0))
    world.engine.restore()


def test_why_a_restore_waits_is_said_meanwhile():
    world = World()
    world.engine.yield_(TENSORS)
    copy_back, said = world.offload.copy_back, []

    def waits(*arguments):
        world.offload.on_waiting("device 0: waits for room, 5 B of 9 B are missing")
        said.append((world.engine.status.state, world.engine.status.reason))
        return copy_back(*arguments)

    world.offload.copy_back = waits
    world.engine.restore()
    reason = "device 0: waits for room, 5 B of 9 B are missing"
    assert said == [(YieldState.RESTORING, reason)]
    assert world.engine.status.reason == ""


def test_a_restore_of_what_never_went_is_done_at_once():
    world = World()
    operation = world.engine.submit(RestoreRequest(), "a")
    assert operation.state is OperationState.DONE
    assert world.engine.restore().notes == ("nothing was yielded",)
    assert world.engine.status.version == 0


def test_one_operation_at_a_time():
    world = World()
    with LoopingJob(world.safe_points):
        inside, go = threading.Event(), threading.Event()

        def during() -> None:
            inside.set()
            go.wait(10)

        world.offload.during_copy = during
        operation = world.engine.submit(TENSORS, "a")
        assert inside.wait(10)
        assert world.engine.status.state is YieldState.YIELDING
        assert world.engine.submit(TENSORS, "b").id == operation.id
        with pytest.raises(YieldRefusedError, match=f"restore: yield {operation.id} runs"):
            world.engine.submit(RestoreRequest(), "b")
        with pytest.raises(YieldRefusedError, match="is running; wait for it"):
            world.engine.yield_(TENSORS)
        go.set()
        assert ended(world, operation.id).state is OperationState.DONE
        world.engine.restore()


def test_a_dry_run_says_all_and_changes_nothing():
    world = World(environ={"SLURM_JOB_ID": "7"})
    world.offload.bytes_per_second = float(SIZE)
    asked = []
    world.callbacks.add(lambda: asked.append(1), None, None, 5.0)
    report = world.engine.yield_(
        YieldRequest(level=YieldLevel.TENSORS, dry_run=True, discard=("optimizer_state",))
    )
    assert dict(report.moved_bytes) == {"parameter": SIZE, "gradient": SIZE, "activation": SIZE}
    assert dict(report.discarded_bytes) == {"optimizer_state": 2 * SIZE}
    assert (report.operation, report.state) == ("", YieldState.RUNNING)
    assert report.expected_seconds == 3.0
    assert report.host_bytes == 3 * SIZE
    assert report.dangers == ("Slurm: the job's time limit goes on",)
    assert asked == []
    assert world.all_on_device
    assert not world.offload.reserved
    assert world.engine.status.state is YieldState.RUNNING
    assert world.counters.get("yield_transitions", state="yielding") == 0


def test_staged_restore_brings_classes_back_one_by_one():
    world = World()
    world.engine.yield_(YieldRequest(lease_seconds=1000.0))
    first = world.engine.restore(RestoreRequest(classes=("parameter",)))
    assert first.state is YieldState.YIELDED
    assert dict(first.moved_bytes) == {"parameter": SIZE}
    assert first.notes == ("still away: activation, gradient, optimizer_state",)
    assert world.engine.status.lease_expiry_ns > 0
    assert world.storages[0].device == world.storages[0].content
    assert world.storages[1].device is None
    rest = world.engine.restore()
    assert rest.state is YieldState.RUNNING
    assert dict(rest.moved_bytes) == {k: v for k, v in ALL.items() if k != "parameter"}
    assert world.engine.status.lease_expiry_ns == 0
    assert world.all_on_device


def test_what_is_discarded_is_zero_afterwards_and_nothing_else():
    world = World()
    gone = world.engine.yield_(
        YieldRequest(classes=("gradient",), discard=("optimizer_state",), level=YieldLevel.TENSORS)
    )
    assert dict(gone.moved_bytes) == {"gradient": SIZE}
    assert dict(gone.discarded_bytes) == {"optimizer_state": 2 * SIZE}
    assert world.storages[0].device is not None
    back = world.engine.restore()
    assert dict(back.discarded_bytes) == {"optimizer_state": 2 * SIZE}
    assert [one.device for one in world.storages] == [
        "bytes 0", "bytes 1", "zeros", "zeros", "bytes 4",
    ]  # fmt: skip


def test_the_residual_adds_up_to_what_the_device_says():
    world = World(driver=False)
    world.finder.found = ScanResult(
        tuple(world.movables), (Unmovable(0, "foreign", 3 * SIZE, "exported through DLPack"),)
    )
    world.usage = (
        DeviceStats(
            device=0, allocated_bytes=0, requested_bytes=0, active_bytes=0,
            reserved_bytes=6 * SIZE, device_used_bytes=100 * SIZE, process_used_bytes=60 * SIZE,
        ),
    )  # fmt: skip
    report = world.engine.yield_(YieldRequest(keep=("parameter",)))
    assert dict(report.residual_bytes) == {
        "foreign": 3 * SIZE, "kept": SIZE, "context": 54 * SIZE, "other_process": 40 * SIZE,
        "unknown": 2 * SIZE,
    }  # fmt: skip
    assert sum(report.residual_bytes.values()) == 100 * SIZE
    assert dict(world.engine.status.residual_bytes) == dict(report.residual_bytes)


def test_who_watches_hears_of_every_change():
    world = World()
    with LoopingJob(world.safe_points):
        seen = []
        version = world.engine.status.version
        operation = world.engine.submit(TENSORS, "a")
        while not seen or seen[-1].state is not YieldState.YIELDED:
            status = world.engine.wait(version, 5.0)
            assert status.version > version
            version = status.version
            seen.append(status)
        assert seen[-1].operation.id == operation.id
        assert seen[-1].operation.state is OperationState.DONE
        assert world.engine.wait(version, 0.0).version == version
        world.engine.restore()


def test_only_the_last_hundred_operations_are_known():
    world = World()
    ids = []
    for _ in range(51):
        ids.append(world.engine.yield_(TENSORS).operation)
        ids.append(world.engine.restore().operation)
    assert [world.engine.operation(one) is None for one in ids] == [True] * 2 + [False] * 100


def test_the_end_of_the_process_takes_back_what_the_driver_holds():
    world = World()
    world.engine.yield_(YieldRequest())
    world.engine.close(1.0)
    assert world.checkpoint.state == "running"
    assert world.offload.closed == 1
    held = World()
    held.engine.yield_(TENSORS)
    held.engine.close(1.0)
    assert held.engine.status.state is YieldState.YIELDED, "nobody waits for them"
    assert held.offload.closed == 0
    held.engine.restore()
    assert held.offload.closed == 1, "host memory goes once it holds nothing"


def test_a_finder_that_finds_nothing_yields_nothing_and_comes_back():
    world = World(driver=False)
    world.finder.found = FakeFinder(world.faults, []).found
    report = world.engine.yield_(TENSORS)
    assert (report.state, dict(report.moved_bytes)) == (YieldState.YIELDED, {})
    assert world.engine.status.state is YieldState.YIELDED
    assert world.engine.restore().state is YieldState.RUNNING
