"""What threads tell each other by, and what a signal handler raises can not break."""

from __future__ import annotations

import signal
import threading
from queue import SimpleQueue

import pytest
from support.interrupts import until_it_waits

from gpumem_otel.yielding.engine import interrupts as latch_module
from gpumem_otel.yielding.engine.interrupts import Claim, Latch


def test_it_opens_for_all_who_wait_and_for_all_who_come_later():
    latch, told = Latch(), []
    waits = [threading.Thread(target=lambda: told.append(latch.wait(20))) for _ in range(8)]
    for one in waits:
        one.start()
    assert not latch.is_set()
    latch.set()
    for one in waits:
        one.join(20)
    assert told == [True] * 8
    assert latch.is_set()
    latch.set()
    assert latch.wait() is latch.wait(0.0) is True


def test_all_who_wait_are_told_at_once(monkeypatch):
    """None of them has to look for itself."""
    monkeypatch.setattr(latch_module, "_SLICE_SECONDS", 1000.0)
    asleep = threading.Semaphore(0)

    class Told(SimpleQueue):
        def get(self, **more):
            asleep.release()
            return super().get(**more)

    latch, told = Latch(), []
    latch._told = Told()
    waits = [threading.Thread(target=lambda: told.append(latch.wait())) for _ in range(4)]
    for one in waits:
        one.start()
    for _ in waits:
        assert asleep.acquire(timeout=20)
    try:
        latch.set()
        for one in waits:
            one.join(5)
        assert told == [True] * 4
    finally:
        for _ in waits:
            latch._told.put(None)


def test_a_wait_that_is_too_short_says_so():
    latch = Latch()
    assert latch.wait(0.01) is False
    assert latch.wait(0.0) is False
    latch.set()
    assert latch.wait(0.0) is True


class AlarmError(Exception):
    """What the handler raises."""


def test_an_interrupted_wait_leaves_it_as_it_was():
    """Hundreds of real signals, in whichever line they hit."""

    def handler(number, frame):
        raise AlarmError

    before = signal.signal(signal.SIGALRM, handler)
    hits, go, over = 0, threading.Semaphore(0), threading.Event()
    latches: list[Latch] = []

    def opens() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # the main thread's
        while go.acquire() and not over.is_set():
            latches[-1].set()

    thread = threading.Thread(target=opens, daemon=True)
    thread.start()
    try:
        for turn in range(500):
            latch = Latch()
            latches.append(latch)
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + turn % 40 * 1e-6)
                while not latch.wait(5.0):
                    pytest.fail("the alarm never came")
            except AlarmError:
                hits += 1
            go.release()
            assert latch.wait(20), f"turn {turn}"
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
    latch, handled, heard = Latch(), threading.Event(), []

    def handler(number, frame):
        handled.set()
        raise AlarmError

    def gets_it():
        until_it_waits()
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        heard.append(handled.wait(10))
        latch.set()

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=gets_it)
    try:
        thread.start()
        with pytest.raises(AlarmError):
            latch.wait(30)
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
