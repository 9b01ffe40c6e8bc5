"""The floor under what is allocated at step boundaries; hooks are tested beside torch itself."""

from __future__ import annotations

import logging

import pytest
from support.fake_clock import FakeClock

from gpumem_otel.capture.steps import StepCounter


@pytest.fixture
def boundaries():
    """What is allocated at the boundaries to come, by device."""
    return []


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def counter(boundaries, clock):
    return StepCounter(lambda: boundaries.pop(0), monotonic=clock.monotonic)


def floors(counter, boundaries, clock, sizes):
    found = []
    for size in sizes:
        boundaries.append({0: size})
        clock.advance(1)
        counter.step()
        found.append(counter.stats().floor_bytes[0])
    return found


def test_a_large_batch_does_not_raise_the_floor(counter, boundaries, clock):
    batches = (8, 8, 8000, 8, 16000)
    assert floors(counter, boundaries, clock, batches) == [8, 8, 8, 8, 8]


def test_the_floor_falls_at_once_and_rises_sixteen_boundaries_late(counter, boundaries, clock):
    assert floors(counter, boundaries, clock, [100, 40]) == [100, 40]
    assert floors(counter, boundaries, clock, [70] * 16) == [40] * 15 + [70]


def test_a_leak_raises_it_under_any_batch(counter, boundaries, clock):
    leak = [1000 * step + (step % 4) * 100 for step in range(40)]
    assert floors(counter, boundaries, clock, leak)[16:] == [
        min(leak[i - 15 : i + 1]) for i in range(16, 40)
    ]


def test_every_device_has_its_own(counter, boundaries, clock):
    boundaries += [{0: 5, 1: 9}, {0: 7, 1: 3}, {0: 6, 1: 4, 2: 1}, {}]
    for _ in range(4):
        clock.advance(1)
        counter.step()
    assert dict(counter.stats().floor_bytes) == {0: 5, 1: 3, 2: 1}


def test_a_floor_that_can_not_be_read_never_raises_into_a_step(counter, boundaries, clock, caplog):
    caplog.set_level(logging.WARNING, "gpumem_otel")
    boundaries.append({0: 5})
    for _ in range(4):
        clock.advance(1)
        counter.step()  # from the second on there is no answer: IndexError
    assert counter.stats().steps == 4
    assert dict(counter.stats().floor_bytes) == {}  # nothing rather than something old
    assert [r.message for r in caplog.records] == ["memory at step boundaries is no longer read"]
