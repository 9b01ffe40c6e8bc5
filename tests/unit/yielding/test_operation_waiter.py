"""Who asks for an operation: whose safe point it is, and signals that come while he waits."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import suppress

import pytest
from support.interrupts import Interrupts, SecondInterrupt, interrupt, once, until_it_waits
from support.yield_parts import LoopingJob, World, ended

from gpumem_otel.api import yields
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


def until_told(world: World) -> None:
    until_interrupted(world.engine.phases.urgency)


def until_interrupted(urgency) -> None:
    while not urgency.cancelled:
        threading.Event().wait(0.01)


@pytest.fixture
def world():
    return World()


def test_no_safe_point_is_said_where_the_operation_asks_for_it(world):
    waiter = world.engine._waiter
    here = waiter.safe_point_here()
    assert here().thread is threading.current_thread()
    world.safe_points._unsafe = lambda: "a stream captures"
    refuses = waiter.safe_point_here()
    for _ in range(2):
        with pytest.raises(YieldRefusedError, match="a stream captures; try again between two"):
            refuses()
    with LoopingJob(world.safe_points):
        assert waiter.safe_point_here() is None, "the job's thread is another"


def test_no_line_of_an_operation_runs_on_the_main_thread(world):
    threads = set()
    world.offload.during_copy = lambda: threads.add(threading.current_thread())
    find = world.finder.find
    world.finder.find = lambda **more: (threads.add(threading.current_thread()), find(**more))[1]
    world.engine.yield_(TENSORS)
    assert world.engine.phases.parked.thread is threading.main_thread()
    world.engine.restore()
    assert threads
    assert threading.main_thread() not in threads


def test_the_jobs_signal_handlers_stay_in_place_while_it_waits(world, monkeypatch):
    """`signal.signal` would undo what C code has set for a signal; Python cannot restore that."""
    replaced, handlers = [], []

    def all_handlers():
        return {number: signal.getsignal(number) for number in signal.valid_signals()}

    world.offload.during_copy = lambda: handlers.append(all_handlers())
    before = all_handlers()
    monkeypatch.setattr(signal, "signal", lambda *call: replaced.append(call))
    world.engine.yield_(TENSORS)
    world.engine.restore()
    assert handlers
    assert all(during == before for during in handlers)
    assert replaced == []


def test_a_yield_that_is_interrupted_is_given_up_and_undone(world):
    def during_copy():
        interrupt()
        until_told(world)
        world.offload.during_copy = lambda: None

    world.offload.during_copy = during_copy
    with pytest.raises(KeyboardInterrupt):
        world.engine.yield_(TENSORS)
    status = world.engine.status
    assert status.state is YieldState.RUNNING
    assert status.operation.state is OperationState.FAILED
    assert "stopped" in status.operation.error
    assert world.all_on_device
    assert world.engine.phases.parked is None
    world.engine.yield_(TENSORS)
    world.engine.restore()


def test_a_yield_that_had_succeeded_is_restored_for_the_unwinding(world):
    def set_owner(parked):  # the last that is done
        interrupt()
        until_told(world)

    world.safe_points.set_owner = set_owner
    with pytest.raises(KeyboardInterrupt):
        world.engine.yield_(TENSORS)
    status = world.engine.status
    assert (status.state, status.operation.kind) == (YieldState.RUNNING, "restore")
    assert status.operation.who == "signal"
    assert world.all_on_device


def test_a_dry_run_that_is_interrupted_restores_nothing(world):
    find = world.finder.find

    def interrupted(**more):
        interrupt()
        return find(**more)

    world.finder.find = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.engine.yield_(YieldRequest(level=YieldLevel.TENSORS, dry_run=True))
    assert world.engine.status.state is YieldState.RUNNING
    assert world.engine.status.operation.kind == "yield"


def test_a_restore_that_is_interrupted_is_finished_first(world):
    world.engine.yield_(TENSORS)
    copy_back = world.offload.copy_back

    def interrupted(*arguments):
        interrupt()
        until_told(world)
        return copy_back(*arguments)

    world.offload.copy_back = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.engine.restore(RestoreRequest(wait_seconds=5.0))
    status = world.engine.status
    assert (status.state, status.operation.state) == (YieldState.RUNNING, OperationState.DONE)
    assert world.all_on_device


def test_a_restore_that_was_interrupted_before_it_began_is_done_all_the_same(world):
    world.engine.yield_(TENSORS)
    thread = world.engine._waiter._thread
    run = thread.run

    def interrupted(*arguments):
        thread.run = run
        raise KeyboardInterrupt

    thread.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.engine.restore()
    status = world.engine.status
    assert (status.state, status.operation.who) == (YieldState.RUNNING, "signal")
    assert world.all_on_device


def test_a_way_back_without_room_is_logged_and_the_memory_not_lost(world, caplog):
    def set_owner(parked):  # the last that is done
        world.offload.room = False
        interrupt()
        until_told(world)

    world.safe_points.set_owner = set_owner
    with pytest.raises(KeyboardInterrupt):
        world.engine.yield_(TENSORS)
    missing = [line for line in caplog.messages if line.startswith("after an interrupt: ")]
    assert len(missing) == 1, "it is tried once, for it waits for room"
    assert missing[0].startswith("after an interrupt: device 0: 1048576 bytes are missing")
    assert world.engine.status.state is YieldState.YIELDED
    assert world.nothing_lost
    world.offload.room = True
    world.engine.restore()
    assert world.all_on_device


@pytest.mark.parametrize(
    ("room", "error", "said"),
    [
        (True, YieldRefusedError, "its memory is back, and it goes on as before"),
        (
            False,
            YieldFailedError,
            "the state is yielded, nothing is lost: restore() once the device has room",
        ),
    ],
)
def test_who_asked_for_a_yield_that_the_stopped_thread_had_undone_is_told(world, room, error, said):
    """The job's thread stands still and was interrupted; whoever asked is another."""

    def set_owner(parked):  # the last that is done
        world.offload.room = room
        world.engine.phases.urgency.interrupt()

    world.safe_points.set_owner = set_owner
    with pytest.raises(error) as caught:
        world.engine.yield_(TENSORS)
    assert str(caught.value) == f"yield: the job was interrupted; {said}"
    assert world.all_on_device is room
    world.offload.room = True
    world.engine.restore()
    assert world.all_on_device


def test_what_the_jobs_handler_raised_is_what_is_raised(world):
    class EvictedError(Exception):
        pass

    def handler(number, frame):
        raise EvictedError

    def during_copy():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        until_told(world)
        world.offload.during_copy = lambda: None

    world.offload.during_copy = during_copy
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises((EvictedError, KeyboardInterrupt)) as caught:
            world.engine.yield_(TENSORS)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.type is EvictedError
    assert world.all_on_device


def test_a_callback_that_goes_on_is_not_waited_for(world):
    go, threads = threading.Event(), []

    def slow():
        threads.append(threading.current_thread())
        interrupt()
        go.wait(30)

    world.callbacks.add(slow, None, None, 25.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            world.engine.yield_(TENSORS)
        status = world.engine.status
        assert status.operation.error.endswith(
            "slow is not waited for (the job is interrupted); nothing was moved"
        )
        assert threads[0].is_alive()
    finally:
        go.set()
    threads[0].join(20)
    assert world.all_on_device


def test_for_an_interrupted_caller_the_way_back_waits_for_no_callback_either(world, monkeypatch):
    """The yield had succeeded: the restore is one more operation, for a caller who unwinds."""
    monkeypatch.setattr(callbacks, "_GRACE_SECONDS", 0.05)
    go, threads = threading.Event(), []

    def slow():
        threads.append(threading.current_thread())
        go.wait(30)

    def set_owner(parked):  # the last that is done
        interrupt()
        until_told(world)

    world.callbacks.add(None, slow, None, 5.0)
    world.safe_points.set_owner = set_owner
    try:
        with pytest.raises(KeyboardInterrupt):
            world.engine.yield_(TENSORS)
        assert world.all_on_device
        (note,) = world.engine.status.operation.report.notes
        assert note.endswith("slow is not waited for (the job is interrupted) and goes on")
        assert threads[0].is_alive()
    finally:
        go.set()
    threads[0].join(20)


def test_an_interrupt_before_the_operation_began_is_not_forgotten(world):
    """The operation's thread is slow to begin, and finds that it was given up meanwhile."""
    begin, copied = world.engine._begin, []

    def slow(operation_id, request, who, urgency):
        if isinstance(request, YieldRequest):
            interrupt()
            until_interrupted(urgency)  # which is told while nothing runs yet
        return begin(operation_id, request, who, urgency)

    world.engine._begin = slow
    world.offload.during_copy = lambda: copied.append(1)
    with pytest.raises(KeyboardInterrupt):
        world.engine.yield_(TENSORS)
    assert copied == []
    status = world.engine.status
    assert status.state is YieldState.RUNNING
    assert status.operation.kind == "yield"


def test_an_interrupt_cancels_nobody_elses_operation(world):
    with LoopingJob(world.safe_points) as job:
        go, copying = threading.Event(), threading.Event()

        def during_copy():
            copying.set()
            go.wait(20)

        world.offload.during_copy = during_copy
        operation = world.engine.submit(TENSORS, "somebody")
        assert copying.wait(20)
        operate = world.engine._waiter._operate

        def refused(*arguments, urgency, **more):
            interrupt()
            until_interrupted(urgency)
            return operate(*arguments, urgency=urgency, **more)

        world.engine._waiter._operate = refused
        with pytest.raises(KeyboardInterrupt):
            world.engine.restore()
        go.set()
        assert ended(world, operation.id).state is OperationState.DONE
        world.engine._waiter._operate = operate
        world.engine.restore()
        job.goes_on()


def test_after_the_third_the_operation_brings_the_memory_back_by_itself(world):
    go = threading.Event()
    three_times = Interrupts(3)
    free = world.offload.free

    def slow():
        free()
        three_times.send()
        go.wait(20)

    world.offload.free = slow
    with three_times, pytest.raises(KeyboardInterrupt):
        world.engine.yield_(TENSORS)
    assert not world.all_on_device
    go.set()
    while (status := world.engine.status).state is not YieldState.RUNNING:
        world.engine.wait(status.version, 5.0)
    assert world.all_on_device


def test_who_waits_logs_nothing_by_himself(world, caplog):
    """A second interrupt within a handler of `logging` would leave that locked for ever."""
    caplog.set_level(logging.DEBUG)
    go = threading.Event()
    three_times = Interrupts(3)

    def during_copy():
        three_times.send()
        go.wait(20)

    world.offload.during_copy = during_copy
    with three_times, pytest.raises(KeyboardInterrupt):
        world.engine.yield_(TENSORS)
    go.set()
    for told in (
        "a yield is undone first",
        "KeyboardInterrupt: the job goes on WITHOUT its memory",
    ):
        while told not in caplog.text:
            threading.Event().wait(0.01)
    main = threading.main_thread().ident
    assert [r.getMessage() for r in caplog.records if r.thread == main] == []


def arm(world: World, moment: str, again: SecondInterrupt) -> None:
    """Have the next yield interrupted for the first time."""

    def waits():
        until_it_waits()
        interrupt()
        until_told(world)

    def raises():
        again.first = True
        raise KeyboardInterrupt("first")

    def and_raises(*arguments):
        run(*arguments)
        raises_once()

    thread = world.engine._waiter._thread
    run, raises_once = thread.run, once(raises)
    if moment == "while it copies":
        world.offload.during_copy = once(waits)
    elif moment == "when all is away":
        world.safe_points.set_owner = once(waits)  # the last that is done
    else:
        thread.run = and_raises


@pytest.mark.parametrize("moment", ["while it copies", "when all is away", "when it has ended"])
def test_a_second_interrupt_in_whichever_line_leaves_nothing_away(moment):
    """The job goes on with its memory, whatever line of the wait is interrupted again."""
    unsafe, lines = [], 0
    while True:
        world, again = World(), SecondInterrupt(lines + 1)
        arm(world, moment, again)
        with again, pytest.raises(KeyboardInterrupt):
            world.engine.yield_(TENSORS)
        if not (world.engine.status.state is YieldState.RUNNING and world.all_on_device):
            unsafe.append(again.where)
        if again.seen and not again.where:
            break
        lines += bool(again.seen)  # the first may hit the tracing, which ends it
        while world.engine._current.running is not None:
            threading.Event().wait(0.001)
        if world.engine.status.state is YieldState.RUNNING:
            world.engine.yield_(TENSORS)
        world.engine.restore()
    assert unsafe == []
    assert lines > 15


def test_one_interrupt_in_whichever_line_of_the_way_back_leaves_nothing_away(monkeypatch):
    """It may come before the restore has begun: the job unwinds, and needs its memory."""
    unsafe, lines = [], 0
    while True:
        world, again = World(), SecondInterrupt(lines + 1)
        monkeypatch.setattr(yields, "_engine", lambda *_, world=world: (world.engine, False))
        with suppress(KeyboardInterrupt), again, yields.yielded(level="tensors"):
            again.first = True
        if not (world.engine.status.state is YieldState.RUNNING and world.all_on_device):
            unsafe.append(again.where)
        if not again.where:
            break
        lines += 1
    assert unsafe == []
    assert lines > 30
