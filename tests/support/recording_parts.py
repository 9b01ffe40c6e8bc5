"""Readings, and recordings of them or written by hand."""

from __future__ import annotations

import gzip
import io
import json

from support.raw_snapshots import alloc, block, frame, segment, snapshot

from gpumem_otel.base.profile import DeviceStats, Identity, StepStats
from gpumem_otel.recording.writer import RecordingWriter
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.stacks import identity_namer

IDENTITY = Identity(
    service_name="job",
    namespace="team",
    run_id="r1",
    restart=2,
    rank=3,
    local_rank=1,
    world_size=8,
    node="n1",
    pid=77,
    tags=(("a", "b"), ("c", "\u00e9")),
    device_uuids={0: "GPU-1", 1: "MIG-2"},
)
STATS = DeviceStats(
    device=1,
    allocated_bytes=5,
    requested_bytes=4,
    active_bytes=6,
    reserved_bytes=7,
    allocations=8,
    frees=3,
    limit_bytes=0,
    device_total_bytes=None,
    host_pinned_bytes=9,
)
STEPS = StepStats(steps=4, last_step_time_ns=99, floor_bytes={0: 5, 1: 0})


def reading_of(raw, **more):
    more = {"time_ns": 5, "before": (), "after": (), **more}
    return Reading(snapshot=from_torch(raw), **more)


def writer_for(file, **more):
    more = {"namer": identity_namer, "facts": {}, "created_ns": 1, **more}
    return RecordingWriter(file, identity=IDENTITY, **more)


def written(*readings, windows=(), steps=STEPS, **more):
    file = io.BytesIO()
    writer = writer_for(file, **more)
    for reading in readings:
        assert writer.add(reading, steps) is True
    for reading, seconds in windows:
        assert writer.add_window(reading, seconds) is True
    writer.close()
    return file.getvalue()


def lines_of(data):
    return [json.loads(line) for line in gzip.decompress(data).splitlines()]


def stackful(size=512):
    leaf, main = frame("leaf", "/x/a.py", 2), frame("main", "/x/a.py", 9)
    blocks = [
        block(size, [leaf, main], requested=size - 12),
        block(1024, [leaf, main], state="inactive", requested=9999),
        block(256, [main], state="active_pending_free"),
        block(128),
    ]
    return snapshot([segment(blocks, device=1, pool=(4, 2), stream=2**63, total=1 << 20)])


def windowed(**more):
    leaf, main = frame("leaf"), frame("main")
    trace = [alloc(1, 100, [leaf, main]), alloc(2, 51, [leaf, main]), alloc(3, 7), alloc(4, 0)]
    return reading_of(snapshot([], [[], trace]), **more)


HEADER = {"format": "gpumem-recording", "version": 1, "created_ns": 1}
TABLES = [{"strings": ["f", ""]}, {"frames": [[0, 1, 3]]}, {"stacks": [[0]]}]
SEGMENT = {"d": 0, "a": 0, "n": 8, "b": [[8], None, "1", [1]]}


def recording_of(*lines, header=HEADER):
    return "\n".join(
        line if isinstance(line, str) else json.dumps(line)
        for line in (header, *TABLES, *lines, "")
    ).encode()
