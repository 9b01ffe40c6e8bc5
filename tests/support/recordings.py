"""Recordings made of the snapshot files of the tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_otel.base.profile import DeviceStats, Identity, StepStats
from gpumem_otel.profiles.of_file import load_snapshot
from gpumem_otel.recording.writer import RecordingWriter
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.stacks import file_function_namer

if TYPE_CHECKING:
    from gpumem_otel.snapshot.snapshot import TorchSnapshot

DATA = Path(__file__).parents[1] / "data"
START_NS = 1_800_000_000_000_000_000
SECOND_NS = 1_000_000_000


def stats_of(snapshot: TorchSnapshot, device: int, turn: int) -> DeviceStats:
    """Counters that agree with a snapshot."""
    totals = snapshot.totals(device)
    return DeviceStats(
        device=device,
        allocated_bytes=totals.allocated_bytes,
        requested_bytes=totals.requested_bytes,
        active_bytes=totals.active_bytes,
        reserved_bytes=totals.reserved_bytes,
        allocated_peak_bytes=totals.allocated_bytes,
        reserved_peak_bytes=totals.reserved_bytes,
        allocations=1000 * (turn + 1),
        frees=900 * (turn + 1),
        allocation_bytes=10**9 * (turn + 1),
        requested_allocation_bytes=10**9 * (turn + 1),
        segments=totals.segments,
    )


def make_recording(*names: str, data: Path = DATA, windows: int = 0) -> bytes:
    """A recording with one reading a second, one per snapshot file, and windows of half a second.

    Window n holds the events of the last file, and its counters grow by n + 1 times theirs.
    """
    file = io.BytesIO()
    writer = RecordingWriter(
        file,
        identity=Identity(service_name="recorded"),
        created_ns=START_NS,
        facts={"torch": "2.11.0"},
        namer=file_function_namer,
    )
    for turn, name in enumerate(names):
        snapshot = load_snapshot(data / name)
        devices = [d for d in snapshot.devices() if snapshot.totals(d).segments]
        stats = tuple(stats_of(snapshot, device, turn) for device in devices)
        reading = Reading(
            snapshot=snapshot, time_ns=START_NS + turn * SECOND_NS, before=stats, after=stats
        )
        writer.add(reading, StepStats(steps=10 * (turn + 1), last_step_time_ns=reading.time_ns))
    for turn in range(windows):
        window = Reading(
            snapshot=snapshot,
            time_ns=START_NS + turn * SECOND_NS + SECOND_NS // 2,
            before=tuple(stats_of(snapshot, device, 0) for device in devices),
            after=tuple(stats_of(snapshot, device, turn + 1) for device in devices),
        )
        writer.add_window(window, 0.5)
    writer.close()
    return file.getvalue()
