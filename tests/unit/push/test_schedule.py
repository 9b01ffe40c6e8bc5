"""When to read and send."""

from __future__ import annotations

import pytest

from gpumem_otel.push.schedule import Backoff, next_multiple_ns, phase, stretch

S = 1_000_000_000


@pytest.mark.parametrize(
    ("now", "interval", "then"),
    [(0, 60, 60), (59.9, 60, 60), (60, 60, 120), (61, 15, 75), (10.26, 0.25, 10.5)],
)
def test_multiples_of_the_wall_clock(now, interval, then):
    assert next_multiple_ns(int(now * S), interval) == int(then * S)


def test_phase_is_the_ranks_own_and_spread():
    places = [phase("run", rank) for rank in range(256)]
    assert len(set(places)) == 256
    assert all(0 <= place < 1 for place in places)
    assert all(50 <= sum(n / 4 <= p < (n + 1) / 4 for p in places) <= 78 for n in range(4))
    assert phase("run", 3) == phase("run", 3) != phase("other", 3)
    assert 0 <= phase("\ud800", 0) < 1


@pytest.mark.parametrize(
    ("configured", "needed", "interval"),
    [
        (60, (0, 0), 60),
        (60, (60.0,), 60),
        (60, (60.0000000001,), 60),
        (60, (61, 10), 120),
        (60, (10, 179), 180),
        (15, (0.1 / 0.001,), 105),
        (60, (1e9,), 3600),
        (60, (float("inf"), float("nan"), 70), 120),
        (7000, (1e9,), 7000),
        (0.5, (0.6,), 1.0),
        (60, (), 60),
    ],
)
def test_the_smallest_sufficient_multiple(configured, needed, interval):
    assert stretch(configured, *needed) == interval


def test_backoff_doubles_up_to_a_limit_and_obeys_the_server():
    backoff = Backoff(0.0)
    assert [backoff.delay(n) for n in (0, 1, 2, 3, 6, 1000)] == [1, 1, 2, 4, 30, 30]
    assert backoff.delay(1, 12.5) == 12.5
    assert backoff.delay(6, 2.0) == 30
    assert Backoff(0.5).delay(2) == 1.5
