"""The line of those who want a window: order, bounds, and that nothing stays in it."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from support.fake_clock import FakeClock
from support.listening import WAIT, until

from gpumem_otel.capture.window_queue import PULL_WAIT_SECONDS, WindowQueue
from gpumem_otel.errors import BusyError

NEVER = threading.Event()


class Bench:
    """A line whose first window is closed when a test says."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.turns = WindowQueue(self.clock)
        self.stack = ExitStack()

    def opened(self, seconds: float, *, own: bool = False) -> None:
        """Somebody has a window open."""
        self.stack.enter_context(self.turns.turn(seconds, NEVER, wait_seconds=0, own=own))

    def close_at(self, seconds: float) -> None:
        """It ends then."""
        self.clock.on_wait.append(
            lambda: self.stack.close() if self.clock.seconds >= seconds else None
        )

    def pull(self, seconds: float = 1.0, stop=NEVER, wait: float = PULL_WAIT_SECONDS) -> float:
        """Seconds that a request had to wait."""
        began = self.clock.seconds
        with self.turns.turn(seconds, stop, wait_seconds=wait):
            return self.clock.seconds - began

    def refusal(self, **more) -> BusyError:
        with pytest.raises(BusyError) as caught:
            self.pull(**more)
        assert self.turns.waiting == 0
        return caught.value


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.stack.close()
    assert made.pull() == 0  # whatever happened, nothing stands in the way afterwards


def test_nobody_waits_for_nothing(bench):
    assert bench.pull(300) == 0
    assert bench.pull(300, wait=0) == 0


@pytest.mark.parametrize("own", [False, True])
def test_a_request_waits_until_the_open_window_has_ended(bench, own):
    bench.opened(30, own=own)
    bench.close_at(10)
    assert bench.pull(300) == pytest.approx(10, abs=0.11)


def test_a_wait_that_would_be_too_long_is_none(bench):
    """GIVEN a request of 300 s WHEN another comes after 100 s THEN it gets the time to retry."""
    bench.opened(300)
    bench.clock.advance(100.5)
    error = bench.refusal()
    assert bench.clock.seconds == 100.5
    assert error.retry_after_seconds == 200
    assert str(error) == (
        "window: others come first, for 200 s at most, and a request waits for no more than "
        "35 s; try again then"
    )


def test_one_of_ours_may_end_at_any_moment_and_is_waited_for_up_to_the_bound(bench):
    bench.opened(200, own=True)
    error = bench.refusal()
    assert bench.clock.seconds == pytest.approx(PULL_WAIT_SECONDS)
    assert error.retry_after_seconds == 165


def test_a_window_that_should_have_ended_is_waited_for_up_to_the_bound(bench):
    """GIVEN a read-out that hangs THEN no request waits for it without end."""
    bench.opened(1)
    error = bench.refusal()
    assert bench.clock.seconds == pytest.approx(PULL_WAIT_SECONDS)
    assert error.retry_after_seconds == 1


def test_what_others_in_line_asked_for_counts(bench):
    """GIVEN 20 s open and 20 s in line WHEN a third comes THEN it is refused, the second not."""
    bench.opened(20)
    refused = []

    def third():
        bench.clock.on_wait.remove(third)
        with pytest.raises(BusyError) as caught:
            bench.pull(1)
        refused.append(caught.value.retry_after_seconds)
        bench.close_at(20)

    bench.clock.on_wait.append(third)
    assert bench.pull(20) == pytest.approx(20, abs=0.11)
    assert refused == [40]


def test_what_one_of_ours_says_is_always_the_same(bench):
    """It is counted by its text."""
    bench.opened(300)
    for _ in range(2):
        with (
            pytest.raises(BusyError) as caught,
            bench.turns.turn(5, NEVER, wait_seconds=10, own=True),
        ):
            pass
        assert str(caught.value) == "window: another one is open; try again when it is over"
        bench.clock.advance(7)
    assert bench.clock.seconds == pytest.approx(2 * (10 + 7))


def test_one_of_ours_waits_for_a_long_request_that_ends_early(bench):
    bench.opened(300)
    bench.close_at(4)
    with bench.turns.turn(5, NEVER, wait_seconds=10, own=True):
        assert bench.clock.seconds == pytest.approx(4, abs=0.11)


def test_who_goes_away_leaves_the_line_at_once(bench):
    bench.opened(20)
    stop = threading.Event()
    bench.clock.on_wait.append(lambda: stop.set() if bench.clock.seconds >= 3 else None)
    assert str(bench.refusal(stop=stop)) == "window: the wait was ended"
    assert bench.clock.seconds == pytest.approx(3, abs=0.11)


def test_an_error_within_a_turn_gives_it_back(bench):
    with pytest.raises(ZeroDivisionError), bench.turns.turn(300, NEVER, wait_seconds=0):
        raise ZeroDivisionError


class QuickClock(FakeClock):
    """Looks a thousand times a second; for threads."""

    def wait(self, event, seconds):
        return event.wait(min(seconds, 0.001))


def test_ours_go_first_and_requests_as_they_came():
    turns, order, threads = WindowQueue(QuickClock()), [], []

    def stand(name, *, own=False):
        def work():
            with turns.turn(1, NEVER, wait_seconds=WAIT, own=own):
                order.append(name)

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        until(lambda: turns.waiting == len(threads))

    with turns.turn(1, NEVER, wait_seconds=0):
        stand("first")
        stand("second")
        stand("ours", own=True)
        stand("ours too", own=True)
        stand("third")
        assert order == []
    for thread in threads:
        thread.join(WAIT)
    assert order == ["ours", "ours too", "first", "second", "third"]


def test_there_is_one_at_a_time_whoever_comes_and_goes():
    turns, gone = WindowQueue(QuickClock()), threading.Event()
    lock, had, within = threading.Lock(), [], []

    def work(number):
        for round_ in range(20):
            stop = gone if (number + round_) % 3 == 0 else NEVER
            try:
                with turns.turn(0, stop, wait_seconds=WAIT, own=number == 0):
                    within.append(number)
                    assert within == [number]
                    within.pop()
            except BusyError:
                assert stop is gone
            with lock:
                had.append(number)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    gone.set()
    for thread in threads:
        thread.join(WAIT)
    assert len(had) == 120
    assert turns.waiting == 0
