"""The layout of a device: every sum by hand, and the same sums as the totals."""

from __future__ import annotations

from hypothesis import given
from support.raw_snapshots import block, raw_snapshots, segment, snapshot

from gpumem_otel.base.profile import BlockState
from gpumem_otel.snapshot.layout import FreeBlock, allocated_in, free_in, lay_out
from gpumem_otel.snapshot.snapshot import from_torch

HELD, WAITING, FREE = "active_allocated", "active_pending_free", "inactive"


def laid_out(*segments, device=0):
    return lay_out(device, segments)


def test_every_state_and_cause():
    """GIVEN each kind of free memory once WHEN it is laid out THEN each has its own bytes."""
    layout = laid_out(
        segment([block(64, state=FREE, requested=1 << 40)]),
        segment([block(10, requested=9), block(20, state=FREE), block(3, state=WAITING)]),
        segment([block(100, state=FREE)], is_expandable=True),
        segment([block(5), block(200, state=FREE)], is_expandable=True, address=1 << 30),
        segment([block(7), block(400, state=FREE)], pool=(0, 1)),
        segment([block(800, state=FREE)], pool=(0, 1)),
    )
    free = layout.free
    assert (free.segment_bytes, free.expandable_bytes) == (64, 100)
    assert (free.split_bytes, free.split_expandable_bytes) == (220, 200)
    assert free.private_bytes == 1200
    assert layout.reserved_bytes == 64 + 33 + 100 + 205 + 407 + 800
    states = layout.states
    assert (states[BlockState.ACTIVE_ALLOCATED].blocks, states[BlockState.INACTIVE].blocks) == (
        3,
        6,
    )
    assert states[BlockState.ACTIVE_ALLOCATED].size_bytes == 22
    assert states[BlockState.ACTIVE_ALLOCATED].requested_bytes == 21
    assert states[BlockState.ACTIVE_PENDING_FREE].size_bytes == 3
    assert states[BlockState.INACTIVE].requested_bytes == 0
    private = layout.pools[0, 1]
    assert (private.segments, private.reserved_bytes, private.free_bytes) == (2, 1207, 1200)
    assert private.largest_free_bytes == 800
    default = layout.pools[0, 0]
    assert default.free_bytes == 64 + 20 + 100 + 200
    assert default.pending_free_bytes == 3


def test_a_private_pool_neither_vanishes_nor_shrinks():
    """GIVEN a pool with 1 byte of 4 in use WHEN it is laid out THEN reserved is 4, active 1."""
    layout = laid_out(segment([block(1), block(3, state=FREE)], pool=(0, 1)))
    pool = layout.pools[0, 1]
    assert (pool.reserved_bytes, pool.allocated_bytes, pool.free_bytes) == (4, 1, 3)
    assert layout.free.private_bytes == 3


def test_largest_free_block_is_of_the_default_pool_and_of_one_block():
    layout = laid_out(
        segment([block(50, state=FREE), block(1), block(50, state=FREE)], stream=3),
        segment([block(70, state=FREE), block(1)], address=4096, stream=7, segment_type="small"),
        segment([block(900, state=FREE)], pool=(0, 1)),
    )
    assert layout.largest_free == FreeBlock(70, 4096, 7, "small")
    assert laid_out(segment([block(1)])).largest_free is None


def test_stretches_of_one_reserved_range_count_once():
    stretch = {"is_expandable": True}
    layout = laid_out(
        segment([block(1)], **stretch),
        segment([block(2)], address=1 << 30, **stretch),
        segment([block(4)], address=1 << 31, stream=9, **stretch),
        segment([block(8)], address=1 << 32, segment_type="small", **stretch),
        segment([block(16)], address=1 << 33),
    )
    assert layout.expandable.segments == 4
    assert layout.expandable.ranges == 3
    assert layout.expandable.reserved_bytes == 15


def test_what_no_block_covers_is_free():
    layout = laid_out(segment([block(7)], device=1, total=10), device=1)
    assert layout.reserved_bytes == 10
    assert layout.free.split_bytes == 3
    assert lay_out(0, ()).pools == {}


@given(raw=raw_snapshots())
def test_sums_are_those_of_the_totals(raw):
    found = from_torch(raw)
    for device in found.devices():
        totals, layout = found.totals(device), lay_out(device, found.raw_segments(device))
        free = layout.free
        assert layout.reserved_bytes == totals.reserved_bytes
        assert free.segment_bytes + free.expandable_bytes == totals.free_segment_bytes
        assert free.split_bytes == totals.split_remainder_bytes
        assert free.private_bytes == totals.private_pool_free_bytes
        causes = totals.free_segment_bytes + free.split_bytes + free.private_bytes
        assert totals.reserved_bytes == totals.active_bytes + causes
        states = layout.states
        assert states[BlockState.ACTIVE_ALLOCATED].size_bytes == totals.allocated_bytes
        assert states[BlockState.ACTIVE_PENDING_FREE].size_bytes == totals.pending_free_bytes
        requested = sum(sums.requested_bytes for sums in states.values())
        assert requested == totals.requested_bytes
        assert sum(sums.blocks for sums in states.values()) == totals.blocks
        pools = {pool: sums.reserved_bytes for pool, sums in layout.pools.items()}
        assert pools == dict(totals.pool_reserved_bytes)
        assert sum(sums.segments for sums in layout.pools.values()) == totals.segments
        in_pools = sum(sums.free_bytes for sums in layout.pools.values())
        assert in_pools == totals.reserved_bytes - totals.active_bytes
        segments = list(found.segments(device))
        assert sum(map(allocated_in, segments)) == totals.allocated_bytes
        assert sum(map(free_in, segments)) == in_pools


def test_an_empty_snapshot_has_no_layout():
    assert lay_out(0, from_torch(snapshot([])).raw_segments()).reserved_bytes == 0
