"""Slices of work and rests, on a clock that is stopped."""

from __future__ import annotations

import threading

import pytest

from gpumem_otel.capture.gil_pacing import Pacer


class Hands:
    def __init__(self):
        self.seconds = 0.0
        self.slept = []

    def now(self):
        return self.seconds

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.seconds += seconds


@pytest.fixture
def hands():
    return Hands()


@pytest.fixture
def pacer(hands):
    return Pacer(now=hands.now, sleep=hands.sleep)


def test_it_sleeps_two_milliseconds_after_each_slice_of_0_2(pacer, hands):
    pacer.begin()
    for _ in range(10):
        hands.seconds += 0.00005
        pacer.pause()
    assert hands.slept == [0.002, 0.002]
    assert pacer.end() == pytest.approx(0.0005)


def test_sleeps_are_not_work(pacer, hands):
    pacer.begin()
    hands.seconds += 0.3
    pacer.pause()
    hands.seconds += 0.1
    assert pacer.end() == pytest.approx(0.4)


def test_a_pause_without_work_under_way_does_nothing(pacer, hands):
    pacer.pause()
    pacer.begin()
    pacer.end()
    hands.seconds += 5
    pacer.pause()
    assert hands.slept == []
    assert pacer.end() == 0.0


def test_every_piece_of_work_counts_from_zero(pacer, hands):
    for _ in range(2):
        pacer.begin()
        hands.seconds += 0.25
        assert pacer.end() == pytest.approx(0.25)


def test_threads_that_share_a_pacer_have_work_of_their_own(pacer, hands):
    others = []

    def other():
        pacer.pause()  # nothing under way here
        others.append(list(hands.slept))
        pacer.begin()
        hands.seconds += 0.5
        others.append(pacer.end())

    pacer.begin()
    hands.seconds += 0.25
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    pacer.pause()
    assert others == [[], 0.5]
    assert hands.slept == [0.002]
    assert pacer.end() == 0.75  # the clock went on for both
