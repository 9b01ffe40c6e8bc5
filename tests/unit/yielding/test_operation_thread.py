"""Operations of the main thread on a thread of ours."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import threading
import weakref

import pytest
from support.interrupts import Interrupts

from gpumem_otel.yielding.engine.interrupts import OperationThread, PendingOperation
from gpumem_otel.yielding.signal_safe import start_thread

NAME = contextvars.ContextVar("NAME", default="")


@pytest.fixture
def run():
    thread = OperationThread()

    def run_it(action, interrupted):
        pending = PendingOperation()
        thread.run(action, pending, interrupted)
        return pending

    yield run_it
    thread.close()  # that its threads end is seen by all tests


def nobody():
    raise AssertionError("nothing was interrupted")


def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_it_runs_elsewhere_and_sees_the_callers_context(run):
    NAME.set("of the caller")
    ended = run(lambda: (threading.current_thread().name, NAME.get()), nobody)
    assert ended.result() == ("gpumem-otel-yield", "of the caller")
    assert ended.interrupt is None


def test_another_thread_than_the_main_one_does_it_itself(run):
    found = []

    def ask():
        found.append(run(threading.get_ident, nobody).result() == threading.get_ident())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(20)
    assert found == [True]


def test_without_a_thread_it_is_done_here(run, monkeypatch):
    def start(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("gpumem_otel.yielding.signal_safe.start_new_thread", start)
    assert run(threading.current_thread, nobody).result() is threading.main_thread()


def test_an_error_is_raised_and_keeps_nothing_that_the_operation_held(run):
    class Held:
        pass

    kept = []

    def action():
        held = Held()
        kept.append(weakref.ref(held))
        raise LookupError("no such thing")

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(LookupError, match="no such thing") as error:
            run(action, nobody).result()
        del error
        assert kept[0]() is None
    finally:
        gc.enable()


def test_an_interrupt_waits_for_the_end_and_is_told(run):
    told, go = [], threading.Event()

    def action():
        interrupt()
        assert go.wait(20)
        return "done"

    def interrupted():
        told.append(threading.current_thread())
        if len(told) == 1:
            interrupt()  # a second one, while the first is told
        go.set()

    ended = run(action, interrupted)
    assert isinstance(ended.interrupt, KeyboardInterrupt)
    assert ended.result() == "done"
    assert told == [threading.main_thread()] * 2


def test_the_third_interrupt_gets_through(run, caplog):
    go, ended, three_times = threading.Event(), threading.Event(), Interrupts(3)

    def action():
        three_times.send()
        go.wait(20)
        ended.set()

    with three_times, pytest.raises(KeyboardInterrupt):
        run(action, lambda: None)
    assert not ended.is_set()
    go.set()
    assert ended.wait(20)
    assert "the job goes on WITHOUT its memory" in caplog.text


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("DataLoader worker died")])
def test_an_interrupt_as_the_thread_starts(run, monkeypatch, began, error):
    told = []

    def interrupted(*thread):
        if began:
            start_thread(*thread)
        raise error

    monkeypatch.setattr("gpumem_otel.yielding.engine.interrupts.start_thread", interrupted)
    ended = run(lambda: pytest.fail("it is never begun"), lambda: told.append(1))
    assert ended.interrupt is error
    assert (ended.results, ended.error, told) == ([], None, [])
    monkeypatch.undo()
    assert run(lambda: "next", nobody).result() == "next"


def test_one_that_ends_the_process_comes_before_an_error(run):
    go = threading.Event()

    def late(number, frame):
        go.set()
        raise SystemExit(143)

    class StepTookTooLongError(Exception):
        pass

    def soon(number, frame):
        raise StepTookTooLongError

    before = [signal.signal(signal.SIGALRM, soon), signal.signal(signal.SIGUSR1, late)]
    main = threading.main_thread().ident
    try:
        ended = run(
            lambda: (signal.pthread_kill(main, signal.SIGALRM), go.wait(20)),
            lambda: go.is_set() or signal.pthread_kill(main, signal.SIGUSR1),
        )
    finally:
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGUSR1, before[1])
    assert isinstance(ended.interrupt, SystemExit)
    assert ended.results


def test_one_thread_does_them_all(run):
    threads = {run(threading.current_thread, nobody).result() for _ in range(5)}
    assert len(threads) == 1


def test_a_forked_child_has_a_thread_of_its_own(run):
    run(threading.get_ident, nobody)
    child = os.fork()
    if not child:
        ended = run(lambda: 7, nobody)
        os._exit(0 if ended.results == [7] else 1)
    assert os.waitpid(child, 0)[1] == 0
