"""Failures of ours are counted and logged; what was started is undone within a bound."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from gpumem_otel.base.counters import Counters
from gpumem_otel.errors import ServeError
from gpumem_otel.runtime.teardown import LEAST_STOP_SECONDS, FailureGuard, Teardown


@pytest.mark.parametrize(
    ("error", "traced"),
    [(ServeError("port 80: not allowed; choose another"), False), (KeyError("x"), True)],
)
def test_a_traceback_is_for_what_we_do_not_say_ourselves(caplog, error, traced):
    counters = Counters()
    guard = FailureGuard(counters)

    def fails():
        raise error

    caplog.set_level(logging.WARNING, "gpumem_otel")
    assert not guard.run("listen", fails)
    assert not guard.run("listen", fails)
    (record,) = caplog.records
    assert record.getMessage() == f"listen failed, the job goes on: {error}"
    assert bool(record.exc_info) is traced
    assert counters.get("exporter_errors", stage="listen") == 2
    assert guard.failures == {"listen": str(error)}


@pytest.fixture
def teardown():
    return Teardown(FailureGuard(Counters()))


def test_the_newest_is_undone_first_and_a_failure_stops_no_other(teardown):
    undone = []

    def fail(seconds):
        undone.append("fails")
        raise KeyError("x")

    def interrupted(seconds):
        undone.append("interrupted")
        raise KeyboardInterrupt

    teardown.defer("arm", lambda _: undone.append("first"))
    teardown.defer("steps", fail)
    teardown.defer("listen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        teardown.undo(teardown.end(), 5.0)
    assert undone == ["interrupted", "fails", "first"]
    teardown.undo(teardown.end(), 5.0)
    assert len(undone) == 3, "nothing is undone twice"


def test_all_share_one_deadline_and_each_gets_a_little(teardown, monkeypatch):
    now, given = [1000.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("gpumem_otel.runtime.teardown.time", clock)

    def slow(seconds):
        given.append(seconds)
        now[0] += 2.0

    for _ in range(4):
        teardown.defer("push", slow)
    teardown.undo(teardown.end(), 5.0)
    assert given == [5.0, 3.0, 1.0, LEAST_STOP_SECONDS]


def test_what_starts_after_the_end_is_undone_at_once(teardown):
    undone = []
    teardown.undo(teardown.end(), 60.0)
    teardown.begin("listen", lambda: None, undone.append)
    assert undone == [LEAST_STOP_SECONDS]


@pytest.mark.parametrize("keep", [True, False])
def test_a_forked_child_undoes_only_what_it_keeps(teardown, keep):
    undone = []
    teardown.defer("arm", undone.append)
    teardown.lock.acquire()  # as if a thread that does not exist in the child held it
    teardown.forget_parent(keep=keep)
    teardown.undo(teardown.end(), 1.0)
    assert bool(undone) is keep


def test_a_second_end_does_not_change_the_time_of_the_first(teardown):
    """A finalizer, an exit handler or another thread may end the same process again."""
    seconds = []

    def ends_again(left):
        seconds.append(left)
        teardown.undo(teardown.end(), 60.0)

    teardown.defer("arm", seconds.append)
    teardown.defer("push", ends_again)
    teardown.undo(teardown.end(), 2.0)
    assert [left <= 2.0 for left in seconds] == [True, True]
