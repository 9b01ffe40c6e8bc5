"""Threads that do what is queued, as many at once as there may be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpumem_otel.yielding.copy.workers import WorkerThreads

ROOT = Path(__file__).parents[3]


def test_as_many_at_once_as_there_may_be_also_after_some_were_idle():
    workers = WorkerThreads(4, "gpumem-test")
    workers.do(lambda: None)
    for _ in range(3):
        together = threading.Barrier(4)  # passed by four at once, or by none
        passed = []
        for _ in range(8):
            workers.do(lambda together=together, passed=passed: passed.append(together.wait(20)))
        assert workers.finish() == 0
        assert len(passed) == 8


def test_finishing_waits_for_all_and_leaves_no_thread():
    workers, done = WorkerThreads(3, "gpumem-test"), []
    for number in range(100):
        workers.do(lambda number=number: done.append(number))
    assert workers.finish() == 0
    assert sorted(done) == list(range(100))
    assert not [t for t in threading.enumerate() if t.name.startswith("gpumem-test")]
    workers.do(lambda: done.append("again"))
    workers.finish()
    assert done[-1] == "again"


def test_what_waits_can_be_dropped():
    workers, began, end, done = (
        WorkerThreads(1, "gpumem-test"),
        threading.Event(),
        threading.Event(),
        [],
    )

    def first():
        began.set()
        end.wait(20)
        done.append("first")

    workers.do(first)
    began.wait(20)
    for number in range(5):
        workers.do(lambda number=number: done.append(number))
    threading.Timer(0.05, end.set).start()
    assert workers.finish(drop=True) == 5
    assert done == ["first"]


def test_threads_that_can_not_be_set_up_work_all_the_same(caplog):
    def first():
        raise RuntimeError("no such device")

    workers, done = WorkerThreads(2, "gpumem-test", first), []
    for number in range(5):
        workers.do(lambda number=number: done.append(number))
    workers.finish()
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert "no such device" in caplog.text


@pytest.mark.parametrize("error", [ValueError("job"), SystemExit(3)])
def test_a_job_that_raises_is_logged_and_the_next_is_done(caplog, error):
    def job():
        raise error

    workers, done = WorkerThreads(1, "gpumem-test"), []
    workers.do(job)
    workers.do(lambda: done.append("next"))
    assert workers.finish() == 0
    assert done == ["next"]
    assert caplog.text.count(repr(error)) == 1


def test_without_a_thread_a_job_is_refused_and_not_kept(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    workers, done = WorkerThreads(2, "gpumem-test"), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            workers.do(lambda: done.append("refused"))
        workers.finish()
    workers.do(lambda: done.append("done"))
    workers.finish()
    assert done == ["done"]


def test_after_an_interrupted_wait_what_is_asked_is_done(monkeypatch):
    workers, end, done = WorkerThreads(1, "gpumem-test"), threading.Event(), []
    workers.do(lambda: (end.wait(20), done.append("late")))
    (thread,) = workers._threads
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workers.finish()
    end.set()
    thread.join(0.2)  # it may go on, or end
    workers.do(lambda: done.append("again"))
    workers.finish()
    assert done == ["late", "again"]
    assert not thread.is_alive()


def interrupted(thread, timeout=None):
    raise KeyboardInterrupt


def test_a_job_that_exits_does_not_wait_for_them():
    script = """
import sys, threading, time
from gpumem_otel.yielding.copy.workers import WorkerThreads
workers, began = WorkerThreads(2, "gpumem-test"), threading.Event()
workers.do(lambda: (began.set(), threading.Event().wait()))
began.wait()
print("bye", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "bye\n")
