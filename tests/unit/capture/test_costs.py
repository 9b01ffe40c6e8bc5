"""Which devices a reading tells of."""

from __future__ import annotations

from support import raw_snapshots as raw_form

from gpumem_otel.base.profile import DeviceStats
from gpumem_otel.capture.costs import devices_of
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch

SNAPSHOT = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0}


def reading(segments=(), traces=(), counted=()):
    stats = tuple(
        DeviceStats(
            device=device, allocated_bytes=0, requested_bytes=0, active_bytes=0, reserved_bytes=0
        )
        for device in counted
    )
    raw = raw_form.snapshot(segments, traces)
    return Reading(snapshot=from_torch(raw), time_ns=1, before=stats, after=stats)


def test_a_snapshot_in_its_trace_does_not_make_a_device_used():
    """torch writes one into the trace of every device, used or not, while events are recorded."""
    used = raw_form.segment([raw_form.block(512)])
    assert devices_of(reading([used], [[SNAPSHOT], [SNAPSHOT]])) == [0]
    assert devices_of(reading([], [[SNAPSHOT], [SNAPSHOT]], counted=(1,))) == [1]
    assert devices_of(reading([], [[], [raw_form.alloc(4, 4), SNAPSHOT]])) == [1]
