"""Operations of the main thread on a thread of ours."""

from __future__ import annotations

import contextvars
import gc
import signal
import threading
import weakref

import pytest

from gpumem_otel.yielding.apart import run_apart

NAME = contextvars.ContextVar("NAME", default="")


def nobody():
    raise AssertionError("nothing was interrupted")


def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_it_runs_elsewhere_and_sees_the_callers_context():
    NAME.set("of the caller")
    ended = run_apart(lambda: (threading.current_thread().name, NAME.get()), nobody)
    assert ended.result() == ("gpumem-otel-yield", "of the caller")
    assert ended.interrupt is None


def test_another_thread_than_the_main_one_does_it_itself():
    found = []

    def ask():
        found.append(run_apart(threading.get_ident, nobody).result() == threading.get_ident())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(20)
    assert found == [True]


def test_without_a_thread_it_is_done_here(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert run_apart(threading.current_thread, nobody).result() is threading.main_thread()


def test_an_error_is_raised_and_keeps_nothing_that_the_operation_held():
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
            run_apart(action, nobody).result()
        del error
        assert kept[0]() is None
    finally:
        gc.enable()


def test_an_interrupt_waits_for_the_end_and_is_told():
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

    ended = run_apart(action, interrupted)
    assert isinstance(ended.interrupt, KeyboardInterrupt)
    assert ended.result() == "done"
    assert told == [threading.main_thread()] * 2


def test_the_third_interrupt_gets_through(caplog):
    go, ended, told = threading.Event(), threading.Event(), threading.Event()

    def action():
        for _ in range(3):
            interrupt()
            told.wait(0.2)  # signals of one kind that wait are one
        go.wait(20)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        run_apart(action, lambda: None)
    assert not ended.is_set()
    go.set()
    assert ended.wait(20)
    assert "the job goes on WITHOUT its memory" in caplog.text


@pytest.mark.parametrize("began", [False, True])
def test_an_interrupt_as_the_thread_starts(monkeypatch, began):
    start, told = threading.Thread.start, []

    def interrupted(thread):
        if began:
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    go = threading.Event()
    ended = run_apart(lambda: go.wait(20), lambda: told.append(go.set()))
    assert isinstance(ended.interrupt, KeyboardInterrupt)
    if began and ended.results:
        assert ended.result() is True
        assert told == [None]
    else:
        assert (ended.results, ended.error) == ([], None)
