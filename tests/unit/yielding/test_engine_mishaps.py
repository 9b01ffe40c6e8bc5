"""What comes at the worst moment: interrupts, threads that cannot start, leases that are over."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from types import SimpleNamespace

import pytest
from support.fake_clock import FakeClock
from support.yield_parts import SIZE, LoopingJob, World

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding import callbacks
from gpumem_otel.yielding.values import (
    OperationState,
    RestoreRequest,
    YieldLevel,
    YieldRequest,
    YieldState,
)

TENSORS = YieldRequest(level=YieldLevel.TENSORS)
THROWN = YieldRequest(level=YieldLevel.TENSORS, discard=("optimizer_state",))
STATE = "contents of optimizer_state were thrown away already and are zeros now"


def until(world: World, state: YieldState) -> None:
    while (status := world.engine.status).state is not state:
        world.engine.wait(status.version, 5.0)


def on_a_thread(call) -> None:
    thread = threading.Thread(target=call, name="monitor")
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


# whose call is the safe point


def test_before_the_first_safe_point_only_the_main_thread_speaks_for_the_job():
    world = World()
    refused = []

    def monitor() -> None:
        with pytest.raises(YieldRefusedError, match="the job has not reached one yet") as error:
            world.engine.yield_(YieldRequest(level=YieldLevel.TENSORS, wait_seconds=0.05))
        refused.append(error)

    on_a_thread(monitor)
    assert refused
    assert world.all_on_device
    assert world.finder.asked == []
    assert world.safe_points.owner is None
    with LoopingJob(world.safe_points) as job:
        on_a_thread(lambda: world.engine.yield_(TENSORS))
        assert world.engine.phases.parked.thread is job.thread
        world.engine.restore()


@pytest.mark.parametrize("fails", [True, False])
def test_a_thread_is_the_jobs_once_a_call_of_its_own_has_succeeded(fails):
    world = World()
    if fails:
        world.faults.now["free"] = YieldRefusedError("no")
        with pytest.raises(YieldRefusedError, match="no"):
            world.engine.yield_(TENSORS)
        assert world.safe_points.owner is None
        return
    world.engine.yield_(YieldRequest(level=YieldLevel.TENSORS, dry_run=True))
    assert world.safe_points.owner is None
    world.engine.yield_(TENSORS)
    assert world.safe_points.owner is threading.current_thread()
    world.engine.restore()


# what is thrown away


@pytest.mark.parametrize("call", ["lock", "checkpoint", "helper"])
def test_nothing_is_thrown_away_before_the_driver_is_done(call):
    world = World()
    request = YieldRequest(discard=("optimizer_state",))
    world.faults.now[call] = YieldRefusedError("driver: no")
    if call == "helper":  # known before anything goes: the tensors go alone
        assert world.engine.yield_(request).level is YieldLevel.TENSORS
    else:
        with pytest.raises(YieldRefusedError, match="driver: no"):
            world.engine.yield_(request)
        assert world.all_on_device
        assert (world.engine.status.state, world.engine.status.reason) == (YieldState.RUNNING, "")
        world.engine.yield_(request)
    assert [one.host for one in world.storages] == ["bytes 0", "bytes 1", None, None, "bytes 4"]
    assert world.engine.status.moved_bytes == 3 * SIZE
    world.engine.restore()
    assert [one.device for one in world.storages][2:4] == ["zeros", "zeros"]


def test_a_deadline_that_the_driver_misses_throws_nothing_away():
    clock = FakeClock()
    world = World(clock=clock)
    checkpoint = world.checkpoint.lock_and_checkpoint

    def slow(*arguments):
        clock.advance(20.0)
        return checkpoint(*arguments)

    world.checkpoint.lock_and_checkpoint = slow
    with pytest.raises(YieldRefusedError, match="when the driver was done"):
        world.engine.yield_(YieldRequest(deadline_seconds=10.0, discard=("optimizer_state",)))
    assert world.all_on_device


def test_a_dry_run_counts_what_is_kept_until_the_driver_is_done():
    world = World()
    world.offload.bytes_per_second = float(SIZE)
    report = world.engine.yield_(YieldRequest(dry_run=True, discard=("optimizer_state",)))
    assert (report.expected_seconds, report.host_bytes) == (5.0, 5 * SIZE)
    assert dict(report.discarded_bytes) == {"optimizer_state": 2 * SIZE}


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), YieldRefusedError("CUDA error")])
def test_what_was_thrown_away_when_all_is_undone_is_said_everywhere(error):
    world = World()
    told = []
    world.callbacks.add(None, None, told.append, 5.0)
    world.faults.now["free at its end"] = error
    with pytest.raises(YieldFailedError, match=f"CUDA error; {STATE}; all else is as before"):
        world.engine.yield_(THROWN)
    status = world.engine.status
    assert status.state is YieldState.RUNNING
    assert status.reason == status.operation.error == told[0]
    assert status.reason.endswith(f"CUDA error; {STATE}")
    assert status.operation.state is OperationState.FAILED
    assert len(told) == 1
    world.engine.yield_(TENSORS)
    assert world.engine.status.reason == ""
    world.engine.restore()


def test_an_interrupt_after_it_was_thrown_away_is_raised_and_it_is_said():
    world = World()
    told = []
    world.callbacks.add(None, None, told.append, 5.0)
    world.faults.now["free at its end"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        world.engine.yield_(THROWN)
    assert world.engine.status.state is YieldState.RUNNING
    assert world.engine.status.reason == told[0] == f"yield: KeyboardInterrupt(); {STATE}"
    assert [one.device for one in world.storages][:2] == ["bytes 0", "bytes 1"]


def test_what_was_thrown_away_is_said_where_nothing_could_be_undone():
    world = World(clock=FakeClock())
    world.clock.on_wait.append(
        lambda: threading.current_thread().name == "gpumem-otel-lease" and go.wait(10)
    )
    go = threading.Event()
    world.faults.now["free at its end"] = KeyboardInterrupt()
    world.offload.room = False
    with pytest.raises(YieldFailedError, match=r"thrown away already; and undoing it: .*missing"):
        world.engine.yield_(THROWN)
    world.offload.room = True
    go.set()
    until(world, YieldState.RUNNING)


# an operation comes to its end


def test_an_interrupt_while_after_restore_runs_ends_the_restore_and_is_raised():
    """A real one: the main thread waits for a callback when the signal comes."""
    world = World()
    go, told = threading.Event(), []

    def slow() -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        go.wait(30)

    world.callbacks.add(None, lambda: told.append("first"), None, 5.0)
    world.callbacks.add(None, slow, None, 30.0)
    world.engine.yield_(TENSORS)
    try:
        with pytest.raises(KeyboardInterrupt):
            world.engine.restore()
    finally:
        go.set()
    status = world.engine.status
    assert (status.state, status.operation.state) == (YieldState.RUNNING, OperationState.DONE)
    assert told == ["first"], "they are told in reverse, and each of them"
    assert world.engine._current.running is None


@pytest.mark.parametrize("raises", ["finish", "let_go", "where"])
def test_whatever_is_raised_when_a_restore_ends_the_job_goes_on(raises):
    world = World()
    with LoopingJob(world.safe_points) as job:
        world.engine.yield_(TENSORS)
        phases, real = world.engine.phases, getattr(world.engine.phases, raises)
        calls = iter(["raises"])

        def once(*arguments):
            if raises != "where" or not world.offload.away:
                for _ in calls:
                    raise KeyboardInterrupt
            return real(*arguments)

        setattr(phases, raises, once)
        with pytest.raises(KeyboardInterrupt):
            world.engine.restore()
        assert world.engine.status.state is YieldState.RUNNING
        assert world.engine._current.running is None
        job.goes_on()


def test_a_report_that_can_not_be_made_undoes_the_yield():
    world = World()
    sizes = iter([1])

    def world_size() -> int:
        for size in sizes:
            return size
        raise OSError("no such rank")

    world.parts.world_size = world_size
    with LoopingJob(world.safe_points) as job:
        with pytest.raises(YieldRefusedError, match="no such rank; undone, the job goes on"):
            world.engine.yield_(YieldRequest(lease_seconds=1000.0))
        job.goes_on()
    assert world.all_on_device
    assert leases() == []


def leases() -> list[threading.Thread]:
    """Those that run, and not only have not ended yet."""
    found = [one for one in threading.enumerate() if one.name == "gpumem-otel-lease"]
    for one in found:
        one.join(0.2)
    return [one for one in found if one.is_alive()]


@pytest.mark.parametrize("name", ["gpumem-otel-callback", "gpumem-otel-lease"])
def test_a_thread_that_can_not_be_started_is_a_refusal_or_a_note(monkeypatch, name):
    world = World()
    start = threading.Thread.start

    def no_more(thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    world.callbacks.add(None, lambda: None, None, 5.0)
    with LoopingJob(world.safe_points) as job:
        if name == "gpumem-otel-lease":
            monkeypatch.setattr(threading.Thread, "start", no_more)
            with pytest.raises(YieldRefusedError, match="can't start new thread; undone"):
                world.engine.yield_(YieldRequest(lease_seconds=1000.0))
        else:
            world.engine.yield_(TENSORS)
            monkeypatch.setattr(threading.Thread, "start", no_more)
            report = world.engine.restore()
            assert len(report.notes) == 1
            assert "can't start new thread" in report.notes[0]
        job.goes_on()
    assert world.engine.status.state is YieldState.RUNNING
    assert world.all_on_device


class Interrupting(SystemClock):
    """Ctrl-C in whoever commands, when the job's thread has just stopped."""

    def wait(self, event, seconds):
        if event.wait(10):
            raise KeyboardInterrupt
        return False


def test_an_interrupt_as_the_thread_arrives_lets_it_go():
    world = World(clock=Interrupting())
    with LoopingJob(world.safe_points) as job:
        with pytest.raises(KeyboardInterrupt):
            world.safe_points.park(10.0, clock=world.clock, stop=lambda: False)
        job.goes_on()
        with pytest.raises(KeyboardInterrupt):
            world.engine.yield_(TENSORS)
        job.goes_on()
        assert world.engine.phases.parked is None


def test_an_interrupt_right_after_it_arrived_lets_it_go():
    world = World()
    park = world.safe_points.park

    def interrupted(*arguments, **more):
        park(*arguments, **more)
        raise KeyboardInterrupt

    world.safe_points.park = interrupted
    with LoopingJob(world.safe_points) as job:
        with pytest.raises(KeyboardInterrupt):
            world.engine.yield_(TENSORS)
        job.goes_on()


def test_an_error_is_not_the_cause_of_itself():
    world = World()
    world.faults.now["find"] = YieldRefusedError("no")
    with pytest.raises(YieldRefusedError) as refused:
        world.engine.yield_(TENSORS)
    assert refused.value.__cause__ is None
    world.engine.yield_(TENSORS)
    world.faults.now["copy_back"] = YieldRefusedError("no room")
    with pytest.raises(YieldRefusedError) as refused:
        world.engine.restore()
    assert refused.value.__cause__ is None
    world.engine.restore()


# leases


def test_a_restore_that_is_quicker_than_the_end_of_the_yield_ends_its_lease():
    world = World()
    back = []

    def ended(operation, when_ns) -> None:
        if operation.kind == "yield":
            back.append(world.engine.restore().state)

    world.engine.watch(lambda *_: None, ended)
    world.engine.yield_(YieldRequest(level=YieldLevel.TENSORS, lease_seconds=1000.0))
    assert back == [YieldState.RUNNING]
    assert world.engine._lease._ends.is_set()


def test_a_yield_ends_any_lease_of_before():
    world = World()
    world.engine._lease.start(1000.0)
    (thread,) = leases()
    world.engine.yield_(TENSORS)
    thread.join(10)
    assert not thread.is_alive()
    over = threading.Event()
    over.set()
    assert world.engine._lease_ended(over) is False
    assert world.engine.status.state is YieldState.YIELDED, "it was not its own"
    world.engine.restore()


@pytest.mark.parametrize("who", ["SIGCONT", "signal"])
def test_who_has_nobody_to_ask_again_is_tried_again(who):
    clock = FakeClock()
    world = World(clock=clock)
    go = threading.Event()
    clock.on_wait.append(
        lambda: threading.current_thread().name == "gpumem-otel-lease" and go.wait(10)
    )
    world.engine.yield_(TENSORS)
    world.offload.room = False
    with pytest.raises(YieldRefusedError, match="missing"):
        world.engine.restore(who=who)
    assert len(leases()) == 1
    world.offload.room = True
    go.set()
    until(world, YieldState.RUNNING)
    assert world.engine.status.operation.who == "lease"
    assert world.all_on_device


def test_a_persons_restore_is_not_tried_again():
    world = World()
    world.engine.yield_(TENSORS)
    world.offload.room = False
    with pytest.raises(YieldRefusedError, match="missing"):
        world.engine.restore()
    assert leases() == []
    world.offload.room = True
    world.engine.restore()


@pytest.mark.parametrize("second", [YieldRequest(verify=True), RestoreRequest()])
def test_a_command_that_is_refused_leaves_the_operation_that_runs_alone(second):
    """Other threads of the job may call too."""
    world = World()
    said = []

    def call():
        ask = world.engine.restore if isinstance(second, RestoreRequest) else world.engine.yield_
        with pytest.raises(YieldRefusedError) as caught:
            ask(second)
        said.append(str(caught.value))

    def meanwhile():
        world.offload.during_copy = lambda: None
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert world.engine._current.running is not None

    world.offload.during_copy = meanwhile
    report = world.engine.yield_(TENSORS)
    kind = "restore" if isinstance(second, RestoreRequest) else "yield"
    assert said == [f"{kind}: yield {report.operation} runs; wait for it"]
    assert world.engine.status.state is YieldState.YIELDED
    assert world.engine.operation(report.operation).state is OperationState.DONE
    assert sum(report.moved_bytes.values()) == len(world.storages) * SIZE
    assert sum(world.offload.held_bytes.values()) == len(world.storages) * SIZE
    world.engine.restore()
    assert world.all_on_device


def test_the_lease_of_what_the_job_gave_back_itself_goes_on_after_uninstall():
    world = World()
    world.engine.yield_(YieldRequest(level=YieldLevel.TENSORS, lease_seconds=1000.0))
    world.engine.close(1.0)
    assert not world.engine._lease._ends.is_set()
    assert world.engine.status.lease_expiry_ns > 0
    world.engine.restore()
    assert world.engine._lease._ends.is_set()


def test_an_interrupt_waits_for_a_partial_restore_and_then_brings_all_back():
    world = World()
    with LoopingJob(world.safe_points) as job:
        world.engine.yield_(TENSORS)
        now, calls = world.engine._now, []

        def overtaken(request, who, **named):
            calls.append(who)
            if len(calls) == 1:  # somebody else was quicker
                world.engine.restore(RestoreRequest(classes=("parameter",)))
                raise YieldRefusedError("restore: restore 5 runs; wait for it")
            return now(request, who, **named)

        world.engine._now = overtaken
        world.engine._restore_for_interrupt()
        assert calls == ["signal", "signal"]
        assert world.engine.status.state is YieldState.RUNNING
        job.goes_on()


def test_the_restore_for_a_stopped_thread_that_is_interrupted_waits_for_no_callback(monkeypatch):
    monkeypatch.setattr(callbacks, "_GRACE_SECONDS", 0.05)
    world, go, threads = World(), threading.Event(), []

    def slow():
        threads.append(threading.current_thread())
        go.wait(60)

    world.callbacks.add(None, slow, None, 50.0)
    with LoopingJob(world.safe_points) as job:
        world.engine.yield_(TENSORS)
        world.engine._restore_for_interrupt()
        (note,) = world.engine.status.operation.report.notes
        assert note.endswith("slow is not waited for (the job is interrupted) and goes on")
        assert threads[0].is_alive()
        go.set()
        threads[0].join(20)
        job.goes_on()


def test_after_an_interrupt_that_finds_no_room_the_next_gets_through():
    world = World()
    with LoopingJob(world.safe_points) as job:
        world.engine.yield_(TENSORS)
        world.offload.room = False
        world.engine._restore_for_interrupt()
        assert world.engine.phases.parked.stuck
        assert len(leases()) == 1
        world.offload.room = True
        world.engine.restore()
        job.goes_on()


# callbacks and listeners


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit()])
def test_a_callback_that_ends_itself_does_not_consent(error):
    world = World()

    def leaves() -> None:
        raise error

    world.callbacks.add(leaves, None, None, 5.0)
    with pytest.raises(YieldRefusedError, match=f"raised {type(error).__name__}"):
        world.engine.yield_(TENSORS)
    assert world.all_on_device


@pytest.mark.parametrize("level", [YieldLevel.TENSORS, YieldLevel.PROCESS])
def test_callbacks_have_the_current_device_of_the_jobs_thread(monkeypatch, level):
    here = threading.local()
    here.device = 3
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: getattr(here, "device", 0),
        set_device=lambda device: setattr(here, "device", device),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    world = World()
    world.usage = (SimpleNamespace(device=5), SimpleNamespace(device=4))
    monkeypatch.setattr("gpumem_otel.yielding.engine.phases.residual_of", lambda *_: {})
    seen = []
    see = lambda: seen.append(cuda.current_device())  # noqa: E731 - the same twice
    world.callbacks.add(see, see, None, 5.0)
    world.engine.yield_(YieldRequest(level=level))
    world.engine.restore()
    assert seen == ([3, 3] if level is YieldLevel.TENSORS else [4, 4])


def test_who_listens_holds_neither_the_job_nor_the_next_command():
    world = World()
    heard, phases = [], []
    with LoopingJob(world.safe_points) as job:

        def phase_ended(operation, phase, *_) -> None:
            phases.append(phase.value)
            if operation.kind == "restore":
                job.goes_on()

        def ended(operation, when_ns) -> None:
            phases.append(operation.kind)
            if operation.kind == "restore":
                job.goes_on()
                on_a_thread(lambda: heard.append(world.engine.submit(RestoreRequest(), "x")))

        world.engine.watch(phase_ended, ended)
        world.engine.yield_(TENSORS)
        done = world.engine.restore()
        assert phases == ["prepare", "release", "yield", "reload", "restore"]
        assert [one.id for one in heard] == [done.operation]
