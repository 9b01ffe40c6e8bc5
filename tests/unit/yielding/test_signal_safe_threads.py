"""Threads and log lines that a raising signal handler cannot break."""

from __future__ import annotations

import logging
import threading

import pytest

from gpumem_otel.base.logs import named_logger
from gpumem_otel.yielding.signal_safe import log_on_thread, start_thread

LOG = named_logger("gpumem_otel.test_signal_safe_threads")


def refuse(*_):
    raise RuntimeError("can't start new thread")


def test_it_runs_on_a_thread_of_that_name():
    names, done = [], threading.Event()

    def action():
        names.append((threading.current_thread().name, threading.current_thread().daemon))
        done.set()

    start_thread(action, "gpumem-otel-test")
    assert done.wait(20)
    assert names == [("gpumem-otel-test", True)]


def test_where_there_is_room_for_one_thread_alone_it_is_done_by_that(monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    start_thread(done.set, "gpumem-otel-test")
    assert done.wait(20)


def test_without_a_thread_it_says_so_and_a_line_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr("gpumem_otel.yielding.signal_safe.start_new_thread", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        start_thread(lambda: pytest.fail("there is none"), "gpumem-otel-test")
    log_on_thread(LOG, logging.ERROR, "lost", wait_seconds=20.0)
    assert caplog.text == ""


class Slow(logging.Handler):
    """Writes a line when it may."""

    def __init__(self):
        super().__init__()
        self.go, self.lines = threading.Event(), []

    def emit(self, record):
        self.go.wait(20)
        self.lines.append((record.getMessage(), record.threadName))


def test_a_line_is_waited_for_where_the_process_may_end():
    slow = Slow()
    LOG.logger.addHandler(slow)
    try:
        log_on_thread(LOG, logging.ERROR, "%s of %s", 1, 2)
        assert slow.lines == []
        threading.Timer(0.05, slow.go.set).start()
        log_on_thread(LOG, logging.ERROR, "last", wait_seconds=20.0)
    finally:
        LOG.logger.removeHandler(slow)
    assert ("last", "gpumem-otel-log") in slow.lines


@pytest.mark.timeout(30)
@pytest.mark.parametrize("broken", [False, True])
def test_the_wait_is_over_once_it_is_written_or_can_not_be(caplog, broken):
    class Handler(logging.Handler):
        def handle(self, record):
            if broken:
                raise ValueError("broken")

    handler = Handler()
    LOG.logger.addHandler(handler)
    try:
        log_on_thread(LOG, logging.WARNING, "said", wait_seconds=1000.0)
    finally:
        LOG.logger.removeHandler(handler)
    assert [record.levelname for record in caplog.records] == ([] if broken else ["WARNING"])


def test_a_handler_that_raises_is_the_jobs_own_affair():
    class Broken(logging.Handler):
        def handle(self, record):
            raise ValueError("broken")

    broken = Broken()
    LOG.logger.addHandler(broken)
    try:
        log_on_thread(LOG, logging.ERROR, "said", wait_seconds=20.0)
    finally:
        LOG.logger.removeHandler(broken)
