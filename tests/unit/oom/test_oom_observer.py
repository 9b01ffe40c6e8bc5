"""What the observer of failed allocations does on the job's thread, and what it leaves alone."""

from __future__ import annotations

import sys
import threading

import pytest
from support import fake_torch

from gpumem_otel.base.counters import Counters
from gpumem_otel.capture.source import TorchSource
from gpumem_otel.errors import CaptureError
from gpumem_otel.oom import observer
from gpumem_otel.oom.observer import OomWatch, is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.fixture
def torch(monkeypatch):
    module = fake_torch.make("2.11", devices=2)
    monkeypatch.setitem(sys.modules, "torch", module)
    for allocator in module.allocators:
        allocator.alloc(1000)
    return module


class Bench:
    """A watch over the stand-in for torch, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.counters = Counters()
        self.failures = []
        self.counted = 0
        self.source = TorchSource(counters=self.counters)
        self.source.start()
        self.watch = OomWatch(
            self.source,
            counters=self.counters,
            on_failure=self.failures.append,
            on_counted=self.count,
            monotonic=lambda: self.now,
        )
        self.watch.start()

    def count(self):
        self.counted += 1

    @property
    def errors(self):
        return self.counters.get("exporter_errors", stage="oom")


@pytest.fixture
def bench(torch):
    made = Bench()
    yield made
    made.watch.stop()
    made.source.stop()


def fail(torch, size=1 << 30, device=0, **numbers):
    """The job's allocation fails, and it sees just that."""
    with pytest.raises(torch.OutOfMemoryError, match=f"Tried to allocate {size} bytes"):
        torch.fail(size, device, **numbers)


def test_a_failure_comes_with_its_numbers_and_the_snapshot_of_that_moment(bench, torch):
    torch.allocators[1].alloc(5000)
    fail(torch, 1 << 30, 1, free=123, limit=456)
    torch.allocators[1].alloc(7000)
    (failure,) = bench.failures
    oom = failure.oom
    assert (oom.device, oom.asked_bytes, oom.limit_bytes, oom.free_bytes) == (
        1, 1 << 30, 456, 123,
    )  # fmt: skip
    assert oom.thread == "MainThread"
    assert failure.reading.snapshot.totals(1).allocated_bytes == 1024 + 5120
    assert failure.reading.stackless(1, None) == "[no Python frame]"
    assert not failure.late
    assert bench.errors == 0


def test_the_observer_is_attached_once_and_does_nothing_once_stopped(bench, torch):
    assert torch.observers == [observer._observe]
    bench.watch.stop()
    fail(torch)
    assert bench.failures == []
    again = Bench()
    assert torch.observers == [observer._observe]
    fail(torch)
    again.watch.stop()
    again.source.stop()
    assert len(again.failures) == 1
    assert bench.failures == []


def test_one_failure_a_minute_and_device_is_looked_at(bench, torch):
    snapshots = len(torch.snapshots)
    for _ in range(5):
        fail(torch)
        bench.now += 10
    fail(torch, device=1)
    assert [failure.oom.device for failure in bench.failures] == [0, 1]
    assert len(torch.snapshots) == snapshots + 2
    bench.now += 10
    fail(torch)
    assert bench.failures[2].oom.unseen == 4
    assert len({failure.oom.oom_id for failure in bench.failures}) == 3


def test_of_failures_that_are_only_counted_somebody_hears_once_a_second(bench, torch):
    for _ in range(1000):
        bench.now += 0.01
        fail(torch)
    assert len(bench.failures) == 1
    assert bench.counted == 9


def test_nothing_of_ours_takes_the_place_of_the_jobs_error(bench, torch):
    def broken(_):
        raise CaptureError("driver shut down")

    bench.source.read_at_once = broken
    fail(torch)
    assert bench.failures[0].reading is None
    assert bench.errors == 1
    bench.watch._on_failure = broken
    bench.now += 100
    fail(torch)
    assert bench.errors == 3


def test_a_snapshot_that_would_take_too_long_is_not_taken(bench, torch):
    for _ in range(2000):
        torch.allocators[0].alloc(100)
    bench.source.read()
    bench.source._snapshots.block_seconds = 0.0002  # 0.4 s for all of them
    snapshots = len(torch.snapshots)
    fail(torch)
    assert bench.failures[0].reading is None
    assert len(torch.snapshots) == snapshots
    # ... but the failure that ends the process is looked at
    bench.watch.on_uncaught(torch.OutOfMemoryError())
    late = bench.failures[1]
    assert late.late
    assert late.reading.snapshot.totals(0).allocated_bytes == 1024 + 2000 * 512
    assert late.oom.asked_bytes == 1 << 30


def test_the_fatal_failure_is_looked_at_although_one_was_just_before(bench, torch):
    fail(torch, 100)
    fail(torch, 200)
    fail(torch, 300)
    assert [failure.oom.asked_bytes for failure in bench.failures] == [100]
    bench.watch.on_uncaught(ValueError("something else"))
    assert len(bench.failures) == 1
    bench.watch.on_uncaught(OutOfMemoryError())
    assert [failure.oom.asked_bytes for failure in bench.failures] == [100, 300]
    assert bench.failures[1].oom.unseen == 1
    bench.watch.on_uncaught(OutOfMemoryError())
    assert len(bench.failures) == 2


def test_two_threads_that_fail_at_once_take_one_snapshot(bench, torch):
    inside, go_on = threading.Event(), threading.Event()

    def slow():
        inside.set()
        assert go_on.wait(10)

    torch.on_snapshot.append(slow)
    first = threading.Thread(target=fail, args=(torch,))
    first.start()
    assert inside.wait(10)
    fail(torch, device=1)
    go_on.set()
    first.join()
    assert [failure.oom.device for failure in bench.failures] == [0]
    assert bench.counted == 1


def test_a_forked_child_says_nothing(bench, torch, monkeypatch):
    monkeypatch.setattr(observer.os, "getpid", lambda: -1)
    fail(torch)
    bench.watch.on_uncaught(OutOfMemoryError())
    assert bench.failures == []


def test_a_torch_without_observers_is_left_alone(torch):
    del torch._C._cuda_attach_out_of_memory_observer
    bench = Bench()
    bench.watch.stop()
    bench.source.stop()
    assert torch.observers == []


def test_an_error_that_was_raised_because_of_one_counts():
    assert is_out_of_memory(OutOfMemoryError())
    assert is_out_of_memory(type("Own", (OutOfMemoryError,), {})())
    assert not is_out_of_memory(MemoryError())
    assert not is_out_of_memory(None)
    caused = ValueError("batch")
    caused.__cause__ = OutOfMemoryError()
    assert is_out_of_memory(caused)
    during = KeyError()
    during.__context__ = caused
    assert is_out_of_memory(during)


def test_a_circle_of_causes_ends():
    first, second = ValueError(), KeyError()
    first.__context__, second.__context__ = second, first
    assert not is_out_of_memory(first)
