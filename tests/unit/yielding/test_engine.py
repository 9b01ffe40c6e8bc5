"""The engine over doubles of its seams: every phase in order, each of them failing, undone."""

from __future__ import annotations

import itertools
import logging
import threading

import pytest
from support.fake_clock import FakeClock
from support.yield_parts import SIZE, FakeFinder, LoopingJob, World

from gpumem_otel.core.model import DeviceStats
from gpumem_otel.core.yields import (
    Found,
    OperationState,
    Phase,
    RestoreRequest,
    Stays,
    YieldLevel,
    YieldRequest,
    YieldState,
)
from gpumem_otel.errors import YieldFailedError, YieldRefusedError

TENSORS = YieldRequest(level=YieldLevel.TENSORS)
ALL = {
    "parameter": SIZE, "gradient": SIZE, "optimizer_state": 2 * SIZE, "activation": SIZE,
}  # fmt: skip


def ended(world: World, operation_id: str):
    """Wait until an operation has ended."""
    engine = world.engine
    while engine.operation(operation_id).state is OperationState.RUNNING:
        engine.wait(engine.status.version, 5.0)
    return engine.operation(operation_id)


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


@pytest.mark.parametrize("call", ["restore", "copy_back", "copy_back within", "verify"])
def test_a_restore_that_is_interrupted_is_finished_first(call):
    world = World()
    world.engine.yield_(YieldRequest(verify=True))
    world.faults.now[call] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        world.engine.restore()
    assert world.engine.status.state is YieldState.RUNNING
    assert world.all_on_device
    assert world.engine.status.operation.state is OperationState.DONE


@pytest.mark.parametrize("call", ["find", "admit", "copy_out", *WITHIN_FREE, "checkpoint"])
def test_a_yield_that_is_interrupted_is_undone_first(call):
    world = World()
    world.faults.now[call] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        world.engine.yield_(YieldRequest())
    assert world.engine.status.state is YieldState.RUNNING
    assert world.all_on_device
    world.engine.yield_(YieldRequest())
    world.engine.restore()


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


def test_commands_that_repeat_give_the_operation_that_is_there():
    world = World()
    with LoopingJob(world.safe_points):
        first = world.engine.submit(TENSORS, "a")
        done = ended(world, first.id)
        assert world.engine.submit(TENSORS, "b") == done
        assert world.engine.yield_(TENSORS).operation == first.id
        with pytest.raises(YieldRefusedError, match="something else was yielded"):
            world.engine.submit(YieldRequest(level=YieldLevel.TENSORS, keep=("parameter",)), "b")
        back = ended(world, world.engine.submit(RestoreRequest(), "a").id)
        assert world.engine.submit(RestoreRequest(), "b") == back


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
        with pytest.raises(YieldRefusedError, match="does just that"):
            world.engine.yield_(TENSORS)
        go.set()
        assert ended(world, operation.id).state is OperationState.DONE
        world.engine.restore()


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


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (YieldRequest(discard=("gradient",)), "contents of 'gradient' can not be thrown away"),
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
    with pytest.raises(YieldRefusedError, match=r"2 ranks.*not part of this version"):
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
    world.finder.found = Found(tuple(world.movables), (), {0: "a captured graph lives there"})
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
    world.finder.found = Found(tuple(world.movables), (), {0: "a captured graph lives there"})
    with pytest.raises(YieldRefusedError, match=said):
        world.engine.yield_(request_)
    assert world.all_on_device
    assert not world.offload.reserved


def test_a_graph_on_a_device_that_was_not_asked_for_is_no_reason():
    world = World()
    world.finder.found = Found(tuple(world.movables), (), {1: "a captured graph lives there"})
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
    world.faults.now["keeper"] = YieldRefusedError("driver checkpoint: not permitted (800)")
    report = world.engine.yield_(YieldRequest())
    assert report.level is YieldLevel.TENSORS
    assert report.notes == (
        "tensors alone, the context stays: driver checkpoint: not permitted (800)",
    )
    assert world.checkpoint.state == "running"
    world.engine.restore()
    world.faults.now["keeper"] = YieldRefusedError("driver checkpoint: not permitted (800)")
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


def test_callbacks_are_asked_in_order_and_told_in_reverse():
    world = World()
    said = []
    for name in "ab":
        world.callbacks.add(
            lambda name=name: said.append(f"before {name}"),
            lambda name=name: said.append(f"after {name}"),
            None,
            5.0,
        )
    world.engine.yield_(TENSORS)
    assert said == ["before a", "before b"]
    world.engine.restore()
    assert said == ["before a", "before b", "after b", "after a"]


def test_a_callback_that_raises_refuses_and_those_before_it_are_told():
    world = World()
    said = []
    world.callbacks.add(lambda: said.append("a"), lambda: said.append("after a"), None, 5.0)

    def broken() -> None:
        raise ValueError("saving a checkpoint")

    remove = world.callbacks.add(broken, lambda: said.append("after broken"), None, 5.0)
    with pytest.raises(YieldRefusedError, match=r"broken raised ValueError.*saving a checkpoint"):
        world.engine.yield_(TENSORS)
    assert said == ["a", "after a"]
    assert world.finder.asked == []
    remove()
    world.engine.yield_(TENSORS)
    world.engine.restore()


def test_a_callback_that_takes_too_long_refuses():
    world = World()
    go, said = threading.Event(), []
    world.callbacks.add(lambda: go.wait(10), lambda: said.append("after"), None, 0.05)
    with pytest.raises(YieldRefusedError, match=r"took longer than 0.05 s"):
        world.engine.yield_(TENSORS)
    assert said == ["after"]
    go.set()


def test_an_after_restore_that_raises_is_a_note_and_the_job_goes_on():
    world = World()

    def broken() -> None:
        raise KeyError("x")

    world.callbacks.add(None, broken, None, 5.0)
    world.engine.yield_(TENSORS)
    report = world.engine.restore()
    assert report.state is YieldState.RUNNING
    assert "after_restore" in report.notes[0]
    assert "KeyError" in report.notes[0]


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


def test_a_lease_that_the_keeper_ended_brings_the_tensors_back_too():
    world = World()
    world.engine.yield_(YieldRequest(lease_seconds=1000.0))
    assert world.checkpoint.leases == [1000.0]
    world.checkpoint.state = "running"
    world.checkpoint.on_restored(None)
    while world.engine.status.state is not YieldState.RUNNING:
        world.engine.wait(world.engine.status.version, 5.0)
    assert world.all_on_device
    assert not world.gate.closed


def test_the_residual_adds_up_to_what_the_device_says():
    world = World(driver=False)
    world.finder.found = Found(
        tuple(world.movables), (Stays(0, "foreign", 3 * SIZE, "exported through DLPack"),)
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
