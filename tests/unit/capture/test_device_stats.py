"""Raw counters -> DeviceStats."""

from __future__ import annotations

import pytest
from support import fake_torch

from gpumem_otel.capture.device_stats import StatsReader, device_stats, pinned_bytes


def test_every_counter_is_taken_from_its_place():
    def stat(current, peak, allocated, freed):
        return {
            "all": {"current": current, "peak": peak, "allocated": allocated, "freed": freed},
            "large_pool": {"current": -1, "peak": -1, "allocated": -1, "freed": -1},
        }

    raw = {
        "allocated_bytes": stat(1, 2, 3, 4),
        "requested_bytes": stat(5, 6, 7, 8),
        "active_bytes": stat(9, 10, 11, 12),
        "reserved_bytes": stat(13, 14, 15, 16),
        "inactive_split_bytes": stat(17, 18, 19, 20),
        "allocation": stat(21, 22, 23, 24),
        "segment": stat(25, 26, 27, 28),
        "num_ooms": 29,
        "num_alloc_retries": 30,
        "reserved_bytes_by_private_pools": {(0, 1): stat(1, 1, 1, 1)},
    }
    found = device_stats(raw, 3, limit_bytes=31, device_used_bytes=32)
    assert found.device == 3
    assert (found.allocated_bytes, found.allocated_peak_bytes, found.allocation_bytes) == (1, 2, 3)
    assert (found.requested_bytes, found.requested_allocation_bytes) == (5, 7)
    assert found.active_bytes == 9
    assert (found.reserved_bytes, found.reserved_peak_bytes) == (13, 14)
    assert found.inactive_split_bytes == 17
    assert (found.allocations, found.frees, found.segments) == (23, 24, 25)
    assert (found.ooms, found.alloc_retries) == (29, 30)
    assert (found.limit_bytes, found.device_used_bytes) == (31, 32)
    assert (found.device_total_bytes, found.host_pinned_bytes) == (None, None)


@pytest.mark.parametrize("raw", [{}, None, {"allocated_bytes": 3, "num_ooms": "x"}, []])
def test_what_is_missing_is_zero(raw):
    assert device_stats(raw, 0) == device_stats({}, 0)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"allocated_bytes": {"current": 5}, "active_bytes": {"current": 1}}, 5),
        ({"allocated_bytes": {"current": 1}, "reserved_bytes": {"current": 7}}, 7),
        ({"reserved_bytes": {"all": {"current": 9}}}, 9),
        ({}, None),
        (None, None),
    ],
)
def test_pinned_memory_by_version(raw, expected):
    assert pinned_bytes(raw) == expected


def test_only_devices_with_a_context_where_memory_was_used():
    torch = fake_torch.make("2.15", devices=4)
    torch.contexts = {1, 3}
    asked = []
    real = torch._C._cuda_memoryStats
    torch._C._cuda_memoryStats = lambda device: asked.append(device) or real(device)
    torch.allocators[0].alloc(10)  # impossible without a context; never read
    reader = StatsReader(torch)
    assert reader.devices() == ()
    address = torch.allocators[3].alloc(10)
    assert reader.devices() == (3,)
    torch.allocators[3].free(address)
    assert reader.devices() == (3,)
    assert set(asked) == {1, 3}
    torch.contexts = set()
    assert reader.devices() == ()


def test_full_values():
    torch = fake_torch.make("2.15")
    torch._C._cuda_getMemoryFraction = lambda device: 0.25
    torch._C._cuda_hostMemoryStats = lambda: {"allocated_bytes": {"current": 4096}}
    torch.allocators[0].alloc(1000)
    reader = StatsReader(torch)
    (found,) = reader.full(reader.devices())
    assert found.allocated_bytes == 1024
    assert found.requested_bytes == 1000
    assert found.device_total_bytes == 80 << 30
    assert found.device_used_bytes == 20 << 30
    assert found.limit_bytes == 20 << 30
    assert found.host_pinned_bytes == 4096
    assert reader.allocated((0,)) == {0: 1024}


def test_a_torch_that_does_not_tell_the_fraction_or_pinned_memory():
    torch = fake_torch.make("2.3")

    def refuse(*args):
        raise RuntimeError("not for this backend")

    torch._C._cuda_getMemoryFraction = refuse
    torch._C._cuda_hostMemoryStats = refuse
    (found,) = StatsReader(torch, counted=False).full((0,))
    assert found.limit_bytes == 80 << 30
    assert found.host_pinned_bytes is None
    assert found.allocated_bytes == 0
