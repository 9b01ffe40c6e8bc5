"""When windows begin."""

from __future__ import annotations

from gpumem_otel.push.schedule import WindowPlan

S = 1_000_000_000


def test_a_window_lies_between_half_and_three_quarters():
    plan = WindowPlan(0.001)
    places = []
    for minute in range(500):
        plan.plan("run", minute * 60 * S, (minute + 1) * 60 * S)
        places.append((plan.begin_ns / S - 60 * minute) / 60)
    assert 0.5 <= min(places) < 0.51
    assert 0.74 < max(places) < 0.75
    middle = sorted(places)[len(places) // 2]
    assert 0.6 < middle < 0.65


def test_runs_have_moments_of_their_own_and_ranks_have_not():
    one, other, again = WindowPlan(0.001), WindowPlan(0.001), WindowPlan(0.001)
    for plan, run_id in ((one, "a"), (other, "b"), (again, "a")):
        plan.plan(run_id, 60 * S, 120 * S)
    assert one.begin_ns == again.begin_ns != other.begin_ns


def test_a_window_has_time_until_shortly_before_the_next_read_out():
    plan = WindowPlan(0.001)
    assert not plan.due(0)
    plan.plan("run", 0, 100 * S)
    assert not plan.due(plan.begin_ns - 1)
    assert plan.due(plan.begin_ns)
    assert plan.limit_seconds(80 * S) == 15
    assert plan.limit_seconds(96 * S) == 0


def test_one_that_comes_too_late_is_left_out():
    plan = WindowPlan(0.001)
    plan.plan("run", 0, 100 * S)
    assert not plan.due(96 * S)
    assert plan.begin_ns is None


def test_a_stall_is_followed_by_a_rest_a_thousand_times_as_long():
    plan = WindowPlan(0.001)
    plan.plan("run", 0, 60 * S)
    plan.done(40 * S, 0.1)
    assert plan.begin_ns is None
    plan.plan("run", 60 * S, 120 * S)  # before 140 s
    assert plan.begin_ns is None
    plan.plan("run", 120 * S, 180 * S)
    assert plan.begin_ns >= 150 * S
