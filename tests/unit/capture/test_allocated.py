"""A reading for an explicit call: with an agent's source, without one, and where there is none."""

from __future__ import annotations

import sys

import pytest
from support import fake_torch

from gpumem_otel.base.counters import Counters
from gpumem_otel.capture.source import TorchSource
from gpumem_otel.tensors.walk import allocated_now, read_allocator


@pytest.fixture
def torch(monkeypatch):
    made = fake_torch.make("2.11")
    made.cuda.is_initialized = lambda: True
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


def test_without_install_blocks_are_read_and_nothing_is_switched_on(torch):
    torch.allocators[0].alloc(1000)
    hooks = vars(torch._C).copy()
    reading, recorded, why = read_allocator(None, {})
    assert (recorded, why) == (False, "")
    assert reading.snapshot.totals(0).allocated_bytes == 1024
    assert not reading.raced(0)
    assert torch.allocators[0].calls == []  # recording was not touched
    assert vars(torch._C) == hooks
    assert allocated_now() == 1024


def test_with_an_agents_source_stacks_are_there(torch):
    source = TorchSource(counters=Counters(), classes=False)
    source.start()
    try:
        torch.allocators[0].alloc(1000)
        reading, recorded, why = read_allocator(source, {})
    finally:
        source.stop()
    assert (recorded, why) == (True, "")
    (found,) = reading.snapshot.live_groups(0)
    assert list(found.frames) == [fake_torch.FRAME]


def test_the_source_of_a_recording_says_nothing_of_this_process(torch):
    class Played:
        def status(self):
            raise AssertionError("asked")

    torch.allocators[0].alloc(512)
    reading, recorded, _ = read_allocator(Played(), {})
    assert reading.snapshot.totals(0).allocated_bytes == 512
    assert not recorded


def test_nothing_is_touched_before_cuda_is_initialised(torch):
    torch.cuda.is_initialized = lambda: False
    torch._C._cuda_getDeviceCount = lambda: 1 / 0
    assert read_allocator(None, {}) == (None, False, "")
    assert allocated_now() == 0


def test_other_allocators_and_errors_are_reasons(torch):
    torch.backend = "cudaMallocAsync"
    reading, _, why = read_allocator(None, {})
    assert reading is None
    assert "cudaMallocAsync" in why
    torch.backend = "native"

    def fails(*args):
        raise RuntimeError("driver gone")

    torch._C._cuda_memorySnapshot = fails
    reading, _, why = read_allocator(None, {})
    assert reading is None
    assert "driver gone" in why
