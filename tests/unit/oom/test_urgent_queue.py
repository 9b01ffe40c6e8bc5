"""Work that cannot wait: in order, on a thread that is there only then, waited for in bounds."""

from __future__ import annotations

import threading

import pytest

from gpumem_otel.oom import urgent_queue
from gpumem_otel.oom.urgent_queue import THREAD_NAME, UrgentQueue


def threads():
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def test_items_are_handled_in_order_and_the_thread_ends():
    seen = []
    work = UrgentQueue(lambda item, seconds: seen.append((item, seconds)), seconds=7.0)
    assert work.wait(0)
    for number in range(5):
        work.put(number)
    assert work.wait(10)
    for thread in threads():
        thread.join(10)
    assert seen == [(number, 7.0) for number in range(5)]
    work.put(5)
    assert work.wait(10)
    assert seen[5] == (5, 7.0)


def test_a_failure_holds_up_nothing(caplog):
    seen = []

    def handle(item, _):
        seen.append(item)
        raise ValueError(item)

    work = UrgentQueue(handle, seconds=1)
    work.put(1)
    work.put(2)
    assert work.wait(10)
    assert seen == [1, 2]
    assert "was not reported" in caplog.text


def test_waiting_has_an_end():
    go_on = threading.Event()
    work = UrgentQueue(lambda *_: go_on.wait(30), seconds=1)
    work.put(1)
    assert not work.wait(0.01)
    go_on.set()
    assert work.wait(10)


def test_more_than_fits_drops_the_oldest():
    started, go_on, seen = threading.Event(), threading.Event(), []

    def handle(item, _):
        started.set()
        go_on.wait(10)
        seen.append(item)

    work = UrgentQueue(handle, seconds=1)
    work.put(-1)
    assert started.wait(10)
    for number in range(100):
        work.put(number)
    go_on.set()
    assert work.wait(10)
    assert seen == [-1, *range(100 - urgent_queue.MAX_WAITING, 100)]


def test_where_no_thread_is_to_be_had_the_caller_does_the_work(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    seen = []
    work = UrgentQueue(lambda item, seconds: seen.append((item, seconds <= 5)), seconds=99)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    work.put("a")
    work.put("b")
    assert seen == []
    assert work.wait(5)
    assert seen == [("a", True), ("b", True)]


@pytest.mark.parametrize("repeat", range(20))
def test_puts_of_many_threads_are_all_handled(repeat):
    seen = []
    work = UrgentQueue(lambda item, _: seen.append(item), seconds=1)
    makers = [threading.Thread(target=work.put, args=(number,)) for number in range(16)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert work.wait(10)
    assert sorted(seen) == list(range(16))


def test_what_waits_already_crowds_out_nothing_and_drops_are_reported():
    started, go_on, seen, dropped = threading.Event(), threading.Event(), [], []

    def handle(item, _):
        started.set()
        go_on.wait(10)
        seen.append(item)

    work = UrgentQueue(handle, seconds=1, on_dropped=lambda: dropped.append(1))
    work.put("first")
    assert started.wait(10)
    work.put("failure")
    for _ in range(100):
        work.put("counted", once=True)
    assert dropped == []
    for number in range(urgent_queue.MAX_WAITING - 1):
        work.put(number)
    assert len(dropped) == 1
    go_on.set()
    assert work.wait(10)
    assert seen == ["first", "counted", *range(urgent_queue.MAX_WAITING - 1)]
