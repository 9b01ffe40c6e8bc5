"""Where the job's thread stops, who may stop, and that it is always let go."""

from __future__ import annotations

import os
import threading

import pytest
from support.interrupts import SecondInterrupt, interrupt, once, until_it_waits
from support.yield_parts import LoopingJob, World

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.engine.safepoint import SafePoints
from gpumem_otel.yielding.values import (
    OperationState,
    RestoreRequest,
    YieldLevel,
    YieldRequest,
    YieldState,
)

TENSORS = YieldRequest(level=YieldLevel.TENSORS)
CLOCK = SystemClock()


def never() -> bool:
    return False


def test_the_jobs_thread_stops_and_goes_on():
    points = SafePoints()
    with LoopingJob(points) as job:
        parked = points.park(10.0, clock=CLOCK, stop=never)
        assert parked.thread is job.thread
        turns = job.turns
        assert points.owner is job.thread
        parked.let_go()
        job.goes_on()
        assert job.turns > turns


def test_another_thread_never_stops_and_is_named():
    points = SafePoints()
    ready, end = threading.Event(), threading.Event()

    def owner() -> None:
        points.reached()
        ready.set()
        end.wait(10)

    first = threading.Thread(target=owner, name="trainer")
    first.start()
    assert ready.wait(10)
    with LoopingJob(points) as job:
        with pytest.raises(YieldRefusedError, match="thread 'job' reached one, and not 'trainer'"):
            points.park(0.2, clock=CLOCK, stop=never)
        job.goes_on()
        end.set()
        first.join()
        # it has ended: whoever reaches one now is the job
        parked = points.park(10.0, clock=CLOCK, stop=never)
        assert parked.thread is job.thread
        parked.let_go()


def test_a_moment_that_is_none_is_passed_and_said():
    why = ["a stream captures a graph"]
    points = SafePoints(lambda: why[0])
    with LoopingJob(points):
        with pytest.raises(YieldRefusedError, match=r"none in 0.2 s, since a stream captures"):
            points.park(0.2, clock=CLOCK, stop=never)
        why[0] = ""
        points.park(10.0, clock=CLOCK, stop=never).let_go()


def test_the_calling_thread_is_none_while_a_stream_captures():
    points = SafePoints(lambda: "a stream captures a graph")
    with pytest.raises(YieldRefusedError, match="a stream captures a graph; try again"):
        points.here()


def test_a_job_without_any_is_told_what_to_call():
    with pytest.raises(YieldRefusedError, match=r"has not reached one yet.*gpumem_otel\.step\(\)"):
        SafePoints().park(0.05, clock=CLOCK, stop=never)


def test_a_request_that_is_given_up_stops_nobody():
    points = SafePoints()
    with pytest.raises(YieldRefusedError, match="given up"):
        points.park(10.0, clock=CLOCK, stop=lambda: True)
    points.reached()  # returns: nobody waits any more


def test_two_requests_at_once_are_refused():
    points = SafePoints()
    inside, end = threading.Event(), threading.Event()

    def stop() -> bool:
        inside.set()
        return end.is_set()

    def first() -> None:
        with pytest.raises(YieldRefusedError, match="given up"):
            points.park(10.0, clock=CLOCK, stop=stop)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(YieldRefusedError, match="another request waits"):
        points.park(10.0, clock=CLOCK, stop=never)
    end.set()
    thread.join()


def test_a_forked_child_never_stops():
    points = SafePoints()
    points.reached()
    points._asked = object()  # a request of the parent's at the moment of the fork
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            points.reached()
            os.write(write, b"passed")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"passed"
    os.waitpid(child, 0)
    points._asked = None


def test_a_command_stops_the_job_until_it_is_restored():
    world = World()
    with LoopingJob(world.safe_points) as job:
        done = world.engine.submit(TENSORS, "test")
        while world.engine.operation(done.id).state is OperationState.RUNNING:
            world.engine.wait(world.engine.status.version, 5.0)
        assert world.engine.phases.parked.thread is job.thread
        turns = job.turns
        assert all(one.device is None for one in world.storages)
        world.engine.submit(RestoreRequest(), "test")
        while world.engine.status.state is not YieldState.RUNNING:
            world.engine.wait(world.engine.status.version, 5.0)
        job.goes_on()
        assert job.turns > turns
        assert world.all_on_device


@pytest.mark.parametrize("call", ["find", "admit", "copy_out", "free"])
def test_a_command_that_fails_lets_the_job_go(call):
    world = World()
    with LoopingJob(world.safe_points) as job:
        world.faults.now[call] = RuntimeError("broken")
        with pytest.raises(YieldRefusedError, match="broken"):
            world.engine.yield_(TENSORS)
        job.goes_on()


def test_an_interrupt_while_yielded_brings_the_memory_back_first():
    """As a signal handler does it: an exception out of the wait, on the stopped thread."""
    world = World()
    with LoopingJob(world.safe_points) as job:
        world.engine.yield_(TENSORS)
        parked = world.engine.phases.parked
        go, raised = parked.go, threading.Event()

        class Interrupts:
            def wait(self, seconds: float) -> bool:
                if not raised.is_set():
                    raised.set()
                    raise KeyboardInterrupt
                return go.wait(seconds)

            is_set, set = go.is_set, go.set

        # the next wait of the stopped thread raises; the one that it is in is ended
        parked.go = Interrupts()
        world.safe_points._wait_on(parked, KeyboardInterrupt())
        assert world.engine.status.state is YieldState.RUNNING
        assert world.all_on_device
        assert world.engine.operation(world.engine.status.operation.id).who == "signal"
        job.thread.join(10)
        assert isinstance(job.error, KeyboardInterrupt), "and then it is raised"


def trains_on(world: World, operation_id: str) -> None:
    """The job, on this thread, until it stops for the operation or that has failed."""
    while world.engine.operation(operation_id).state is not OperationState.FAILED:
        world.safe_points.reached()


def test_a_second_interrupt_in_whichever_line_leaves_nothing_away():
    """Of the stopped thread: the job goes on with its memory."""

    def ended(*_):
        until_it_waits()
        interrupt()

    unsafe, lines = [], 0
    while True:
        world, again = World(), SecondInterrupt(lines + 1)
        world.safe_points.reached()
        world.engine.watch(lambda *_: None, once(ended))
        with again, pytest.raises(KeyboardInterrupt):
            trains_on(world, world.engine.submit(TENSORS, "test").id)
        if not (world.engine.status.state is YieldState.RUNNING and world.all_on_device):
            unsafe.append(again.where)
        if again.seen and not again.where:
            break
        lines += bool(again.seen)  # the first may hit the tracing, which ends it
        while world.engine._current.running is not None:
            threading.Event().wait(0.001)
        world.engine.restore()
    assert unsafe == []
    assert lines > 15


def test_a_thread_at_work_refuses_by_its_name():
    world = World()
    world.works = "thread 'prefetch': another thread is at work in load (data.py:3)"
    with LoopingJob(world.safe_points) as job:
        with pytest.raises(YieldRefusedError, match=r"'prefetch'.*gpumem_otel\.participant\(\)"):
            world.engine.yield_(TENSORS)
        job.goes_on()
        assert world.finder.asked == []


def test_counters_that_move_while_the_job_stands_still_refuse():
    world = World()
    counts = iter(range(1000))
    world.parts.quiescence._counters = lambda: {0: (next(counts), 0)}
    with (
        LoopingJob(world.safe_points),
        pytest.raises(YieldRefusedError, match="memory of device 0 is allocated or freed while"),
    ):
        world.engine.yield_(TENSORS)


def test_a_thread_that_begins_to_work_during_the_copy_is_seen_before_anything_is_freed():
    world = World()

    def begins() -> None:
        world.works = "thread 'saves' works"

    world.offload.during_copy = begins
    with LoopingJob(world.safe_points) as job:
        with pytest.raises(YieldRefusedError, match="'saves' works"):
            world.engine.yield_(TENSORS)
        job.goes_on()
    assert world.all_on_device
    assert not world.offload.reserved


def test_a_thread_that_was_just_woken_is_seen_once_it_had_time_to_begin():
    world = World()
    order = []

    def who_else(parked, known, glance):
        order.append("glance" if glance else "look")
        return "" if glance else "thread 'saves' works"

    world.parts.quiescence._who_else = who_else
    world.parts.quiescence._counters = lambda: order.append("count") or {}
    with (
        LoopingJob(world.safe_points),
        pytest.raises(YieldRefusedError, match="'saves' works"),
    ):
        world.engine.yield_(TENSORS)
    assert order[:4] == ["glance", "count", "look", "count"]
    assert world.finder.asked == []


def test_a_thread_that_is_soon_done_is_waited_for():
    world = World()
    seen = iter(["thread 'pin' works", "thread 'pin' works"])
    world.parts.quiescence._who_else = lambda *_: next(seen, "")
    with LoopingJob(world.safe_points):
        assert world.engine.yield_(TENSORS).state is YieldState.YIELDED
        world.engine.restore()
