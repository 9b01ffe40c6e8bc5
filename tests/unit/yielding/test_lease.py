"""When a lease brings the memory back, and how often it tries."""

from __future__ import annotations

import threading

from support.fake_clock import FakeClock

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.yielding.engine.lease import Lease

NAME = "gpumem-otel-lease"


class Waits(FakeClock):
    """Writes down how long it is waited for."""

    def __init__(self):
        super().__init__()
        self.waited = []

    def wait(self, event, seconds):
        self.waited.append(seconds)
        return super().wait(event, seconds)


def leases():
    return [one for one in threading.enumerate() if one.name == NAME]


def waits_of(begin, tries):
    """How long it waits each time, where so many attempts are needed."""
    clock, left, done = Waits(), list(range(tries)), threading.Event()

    def restore(stopped):
        left.pop()
        if not left:
            done.set()
        return not left

    begin(Lease(restore, clock))
    assert done.wait(20)
    for one in leases():
        one.join(20)
    return clock.waited


def test_it_tries_again_after_twice_as_long_and_each_minute_at_last():
    assert waits_of(lambda lease: lease.start(300.0), 10) == [
        300.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0,
    ]  # fmt: skip


def test_what_failed_for_somebody_else_is_tried_again_soon():
    assert waits_of(lambda lease: lease.try_again(), 2) == [1.0, 1.0]


def test_a_new_one_ends_the_one_before_it():
    restored = threading.Event()
    lease = Lease(lambda stopped: restored.set() or True, SystemClock())
    lease.start(1000.0)
    (first,) = leases()
    lease.start(1000.0)
    first.join(20)
    (second,) = leases()
    assert second is not first
    lease.stop()
    second.join(20)
    assert leases() == []
    assert not restored.is_set()


def test_where_no_thread_can_be_started_it_is_said(monkeypatch, caplog):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    Lease(lambda stopped: True, SystemClock()).try_again()
    assert caplog.messages == ["a restore is not tried again: can't start new thread"]
