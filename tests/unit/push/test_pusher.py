"""The thread: start, stop, flush, fork, and that nothing it meets ends it."""

from __future__ import annotations

import logging
import os
import threading

import pytest
from support.push_parts import FakeClock, FakeReader, FakeSink, dependencies

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.base.counters import Counters
from gpumem_otel.push.pusher import THREAD_NAME, Pusher
from gpumem_otel.settings.config import ProfileConfig


class Gate(FakeSink):
    """A sink that holds its caller until it is opened."""

    def __init__(self, clock) -> None:
        super().__init__(clock)
        self.entered = threading.Event()
        self.open = threading.Event()

    def push(self, *arguments) -> None:
        self.entered.set()
        assert self.open.wait(10)
        super().push(*arguments)


class Paced(FakeClock):
    """Wakes the thread only as often as the test allows; then time has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = threading.Semaphore(0)
        self.waits = threading.Semaphore(0)

    def wait(self, event, seconds):
        self.waits.release()
        while not event.is_set():
            if self.turns.acquire(timeout=0.01):
                self.pass_seconds(seconds)
                break
        return event.is_set()

    def turn(self, count: int = 1) -> None:
        """Let the thread wake so often, and wait until it sleeps again."""
        for _ in range(count):
            self.turns.release()
            assert self.waits.acquire(timeout=10)


@pytest.fixture
def bench():
    """(clock, reader, sink, pusher), the pusher started and asleep."""
    clock = Paced()
    reader, sink = FakeReader(clock), FakeSink(clock)
    pusher = made(clock, reader, sink)
    pusher.start()
    assert clock.waits.acquire(timeout=10)
    yield clock, reader, sink, pusher
    pusher.stop()


def made(clock, reader, sink, **more) -> Pusher:
    return Pusher(dependencies(clock, reader, sink, **more))


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == THREAD_NAME]


def test_one_daemon_thread(bench):
    *_, pusher = bench
    pusher.start()
    assert threads() == [THREAD_NAME]
    assert pusher.running
    assert all(t.daemon for t in threading.enumerate() if t.name == THREAD_NAME)
    assert pusher.stop()
    assert not pusher.running
    assert threads() == []
    assert pusher.stop()


def test_it_works_off_the_rounds(bench):
    clock, reader, sink, _ = bench
    clock.turn(2)
    assert reader.readings == [("live", 15.0)]
    assert sink.stored == [b"live 0: 1"]


def test_stop_reads_and_sends_once_more(bench):
    _, reader, sink, pusher = bench
    assert pusher.stop()
    assert reader.readings == [("live", 1.0)]
    assert sink.stored == [b"live 0: 1"]


def test_it_can_be_started_again(bench):
    clock, reader, sink, pusher = bench
    pusher.stop()
    pusher.start()
    assert clock.waits.acquire(timeout=10)
    clock.turn(2)
    assert sink.stored == [b"live 0: 1", b"live 0: 2"]
    assert reader.readings[-1] == ("live", 15.0)


def test_stop_does_not_wait_for_a_server():
    clock = FakeClock()
    sink = Gate(clock)
    pusher = made(SystemClock(), FakeReader(clock), sink)
    pusher.start()
    stopper = threading.Thread(target=pusher.flush, args=(10.0,))
    stopper.start()
    assert sink.entered.wait(10)
    assert not pusher.stop(timeout=0.05)
    assert pusher.running
    sink.open.set()
    assert pusher.stop()
    stopper.join()


def test_a_read_out_that_outlasts_the_stop_is_counted():
    clock, counters = FakeClock(), Counters()
    reader, sink = FakeReader(clock), FakeSink(clock)
    entered, done = threading.Event(), threading.Event()
    live = reader.live

    def slow():
        entered.set()
        assert done.wait(10)
        return live()

    reader.live = slow
    pusher = made(SystemClock(), reader, sink, counters=counters)
    pusher.start()
    flushing = threading.Thread(target=pusher.flush, args=(10.0,))
    flushing.start()
    assert entered.wait(10)
    assert not pusher.stop(timeout=0.0)
    assert counters.get("exporter_dropped", reason="shutdown") == 1
    done.set()
    flushing.join()
    assert pusher.stop()
    assert counters.get("exporter_dropped", reason="shutdown") == 1
    assert sink.stored == []


def test_flush_returns_whether_all_was_stored(bench):
    _, reader, sink, pusher = bench
    assert pusher.flush()
    assert sink.stored == [b"live 0: 1"]
    sink.errors = [ValueError("no")]
    assert not pusher.flush()
    assert len(reader.readings) == 2
    pusher.stop()
    assert not pusher.flush()


def test_flush_waits_no_longer_than_its_timeout():
    clock = FakeClock()
    sink = Gate(clock)
    pusher = made(SystemClock(), FakeReader(clock), sink)
    pusher.start()
    assert not pusher.flush(timeout=0.05)
    sink.open.set()
    assert pusher.stop()


def test_calls_from_its_own_thread_do_not_wait_for_it():
    clock, answers = Paced(), []

    def shown(*_):
        answers.append(pusher.flush(60.0))

    pusher = made(clock, FakeReader(clock), FakeSink(clock), on_profiles=(shown,))
    pusher.start()
    assert pusher.flush()
    assert answers == [False]
    assert pusher.stop()


def test_a_defect_of_ours_does_not_end_it(bench, monkeypatch, caplog):
    clock, _, sink, pusher = bench
    caplog.set_level(logging.WARNING, "gpumem_otel")

    def defect():
        raise ZeroDivisionError

    monkeypatch.setattr(pusher._rounds, "turn", defect)
    clock.turn(2)
    assert pusher.running
    monkeypatch.undo()
    clock.turn(3)
    assert sink.stored
    assert pusher._counters.get("exporter_errors", stage="push") == 2
    assert [r.getMessage() for r in caplog.records] == ["profiles: ZeroDivisionError: "]


def test_a_forked_child_is_silent_and_may_start_again(bench):
    clock, *_, pusher = bench
    with pusher._lock:
        pid = os.fork()
        if pid == 0:
            try:
                pusher.abandon_after_fork()
                fine = not pusher.running and pusher.stop() and threads() == []
                fine = fine and not pusher.flush(1.0)
                child = Pusher(pusher._dependencies)
                child.abandon_after_fork()
                child.start()
                fine = fine and child.running and child.stop()
                os._exit(0 if fine else 1)
            except BaseException:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
    clock.turn()
    assert pusher.running


def test_no_thread_to_be_had(monkeypatch):
    clock = FakeClock()
    pusher = made(clock, FakeReader(clock), FakeSink(clock))

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pusher.start()
    assert not pusher.running
    assert pusher.stop()


def test_the_interval_can_be_asked_for(bench):
    *_, pusher = bench
    assert pusher.interval_seconds == ProfileConfig().interval_seconds


def test_the_real_clock():
    clock, event = SystemClock(), threading.Event()
    assert clock.time_ns() > 1_700_000_000 * 10**9
    assert clock.monotonic() <= clock.monotonic()
    assert not clock.wait(event, -1.0)
    event.set()
    assert clock.wait(event, 60.0)


@pytest.mark.parametrize("call", ["flush", "stop"])
def test_a_window_ends_for_a_flush_or_the_end(call):
    """GIVEN a window that would last for ever WHEN a flush or the end is asked for THEN it ends."""
    clock = FakeClock()
    reader, sink = FakeReader(clock), FakeSink(clock)
    entered, ended = threading.Event(), []

    def windowed(kinds, limit_seconds, stop):
        entered.set()
        ended.append(stop.wait(20))
        return dict.fromkeys(kinds, ())

    reader.windowed = windowed
    config = ProfileConfig(kinds=("live", "peak"), interval_seconds=0.2)
    pusher = made(SystemClock(), reader, sink, config=config)
    pusher.start()
    assert entered.wait(20)
    assert pusher.flush(20.0) if call == "flush" else pusher.stop(20.0)
    assert ended[0] is True
    assert pusher.stop(20.0)
