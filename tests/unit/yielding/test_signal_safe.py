"""An event and a claim that a raising signal handler cannot break."""

from __future__ import annotations

import signal
import threading
from queue import SimpleQueue

import pytest
from support.interrupts import until_it_waits

from gpumem_otel.yielding import signal_safe
from gpumem_otel.yielding.signal_safe import Claim, SafeEvent


def test_it_opens_for_all_who_wait_and_for_all_who_come_later():
    event, told = SafeEvent(), []
    waits = [threading.Thread(target=lambda: told.append(event.wait(20))) for _ in range(8)]
    for one in waits:
        one.start()
    assert not event.is_set()
    event.set()
    for one in waits:
        one.join(20)
    assert told == [True] * 8
    assert event.is_set()
    event.set()
    assert event.wait() is event.wait(0.0) is True


def test_all_who_wait_are_told_at_once(monkeypatch):
    """None of them has to look for itself."""
    monkeypatch.setattr(signal_safe, "_SLICE_SECONDS", 1000.0)
    asleep = threading.Semaphore(0)

    class Wakeups(SimpleQueue):
        def get(self, **more):
            asleep.release()
            return super().get(**more)

    event, told = SafeEvent(), []
    event._wakeups = Wakeups()
    waits = [threading.Thread(target=lambda: told.append(event.wait())) for _ in range(4)]
    for one in waits:
        one.start()
    for _ in waits:
        assert asleep.acquire(timeout=20)
    try:
        event.set()
        for one in waits:
            one.join(5)
        assert told == [True] * 4
    finally:
        for _ in waits:
            event._wakeups.put(None)


def test_a_wait_that_is_too_short_says_so():
    event = SafeEvent()
    assert event.wait(0.01) is False
    assert event.wait(0.0) is False
    event.set()
    assert event.wait(0.0) is True


class AlarmError(Exception):
    """What the handler raises."""


def test_an_interrupted_wait_leaves_it_as_it_was():
    """Hundreds of real signals, in whichever line they hit."""

    def handler(number, frame):
        raise AlarmError

    before = signal.signal(signal.SIGALRM, handler)
    hits, go, over = 0, threading.Semaphore(0), threading.Event()
    events: list[SafeEvent] = []

    def opens() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # the main thread's
        while go.acquire() and not over.is_set():
            events[-1].set()

    thread = threading.Thread(target=opens, daemon=True)
    thread.start()
    try:
        for turn in range(500):
            event = SafeEvent()
            events.append(event)
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + turn % 40 * 1e-6)
                while not event.wait(5.0):
                    pytest.fail("the alarm never came")
            except AlarmError:
                hits += 1
            go.release()
            assert event.wait(20), f"turn {turn}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        over.set()
        go.release()
    assert hits == 500
    thread.join(20)
    assert not thread.is_alive()


def test_a_signal_that_the_kernel_gave_to_another_thread_is_handled_all_the_same():
    """Nothing ends the wait of the main thread for it, which alone runs handlers."""
    event, handled, heard = SafeEvent(), threading.Event(), []

    def handler(number, frame):
        handled.set()
        raise AlarmError

    def gets_it():
        until_it_waits()
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        heard.append(handled.wait(10))
        event.set()

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=gets_it)
    try:
        thread.start()
        with pytest.raises(AlarmError):
            event.wait(30)
    finally:
        thread.join(30)
        signal.signal(signal.SIGUSR1, before)
    assert heard == [True]


def test_a_turn_goes_to_one_of_all_who_ask_at_once_and_stays_there():
    for _ in range(200):
        turn, at_once, told = Claim(), threading.Barrier(2), {}

        def asks(who, turn=turn, at_once=at_once, told=told):
            at_once.wait(20)
            told[who] = turn.goes_to(who)

        threads = [threading.Thread(target=asks, args=(who,)) for who in ("one", "other")]
        for one in threads:
            one.start()
        for one in threads:
            one.join(20)
        assert sorted(told.values()) == [False, True]
        assert {who: turn.goes_to(who) for who in told} == told
