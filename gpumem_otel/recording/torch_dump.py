"""Converts a recording of ours, or any snapshot, to what torch dumps and `_memory_viz.py` reads.

A recording gives the segments and blocks of one reading, frame names as recorded, and the
allocations of its windows as events. A window holds what was allocated, but neither the order nor
the lifetimes: the allocations are spread evenly over the window and freed at once, at an address
that no segment has. So a timeline shows how much was allocated when, and what is alive at its end
is what the segments hold.

Format: `torch/cuda/memory.py` (`_snapshot`), as torch 2.11 writes it.
"""

from __future__ import annotations

import pickle
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from gpumem_otel.errors import SnapshotError
from gpumem_otel.snapshot.stacks import STACKLESS_ROOTS
from gpumem_otel.snapshot.torch_format import pool_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpumem_otel.recording.recorded import RecordedReading, RecordedWindow, Recording
    from gpumem_otel.snapshot.torch_format import RawEvent, RawFrame

MAX_EVENTS = 3_000_000
"""The oldest windows are left out where there would be more."""

_PROTOCOL = 4
_PAGE = 1 << 21
_PARTS = ("alloc", "free_requested", "free_completed")


def dumped(raw: dict[str, Any], source: str) -> bytes:
    """The pickle, in the protocol that torch writes.

    Args:
        raw: what to write, unknown keys included: torch's own tools may read them.
        source: the name of its source, for messages.

    Raises:
        SnapshotError: a value is nested too deep to be written.
    """
    try:
        return pickle.dumps(raw, protocol=_PROTOCOL)
    except RecursionError:
        raise SnapshotError(
            source, "holds values that are nested too deep to be written; no memory snapshot does"
        ) from None


def plain_snapshot(raw: object) -> dict[str, Any]:
    """The content of a snapshot file in the form that torch's own tools read.

    The bare list of segments becomes a dict, and pool ids that JSON made lists are tuples again.

    Args:
        raw: a checked root; it is not changed.
    """
    root: dict[str, Any] = {"segments": raw} if isinstance(raw, list) else dict(raw)  # type: ignore[call-overload]
    segments = root.get("segments") or ()
    root["segments"] = [_with_pool(segment, "segment_pool_id") for segment in segments]
    root["device_traces"] = [
        [_with_pool(event, "pool_id") for event in trace]
        for trace in root.get("device_traces") or ()
    ]
    return root


def _with_pool(entry: dict[str, Any], key: str) -> dict[str, Any]:
    pool = entry.get(key)
    pair = pool_of(pool) if isinstance(pool, list) else None
    return entry if pair is None else {**entry, key: pair}


def recorded_snapshot(recording: Recording, number: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A reading of a recording, and the windows that had ended by then, as one snapshot.

    Args:
        recording: the recording.
        number: of the reading, from 0; the windows after the last reading belong to that one.

    Returns:
        The argument of `dumped`, and sentences about what was left out.
    """
    reading = recording.readings[number]
    segments = [_as_torch(segment) for segment in reading.snapshot.raw_segments()]
    windows = list(recording.windows)
    if number < len(recording.readings) - 1:
        windows = [window for window in windows if window.time_ns <= reading.time_ns]
    kept = _newest(windows)
    devices = {segment["device"] for segment in segments}
    devices.update(device for _, snapshot in kept for device in snapshot)
    traces: list[list[dict[str, Any]]] = [[] for _ in range(max(devices, default=-1) + 1)]
    free = _above(segments)
    for window, events in kept:
        for device, allocs in events.items():
            traces[device] += _spread(window, allocs, free)
    left_out = (
        f"{len(windows) - len(kept)} of {len(windows)} windows are left out, the oldest: all "
        f"would be more than {MAX_EVENTS} events"
    )
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": _marks(kept, reading),
    }, (left_out,) if len(kept) < len(windows) else ()


def _newest(windows: Sequence[RecordedWindow]) -> list[tuple[RecordedWindow, dict[int, Any]]]:
    """As many of the newest windows as there is room for, oldest first, with their events."""
    kept: list[tuple[RecordedWindow, dict[int, Any]]] = []
    room = MAX_EVENTS
    for window in reversed(windows):
        snapshot = window.reading().snapshot
        events = {device: snapshot.raw_events(device) for device in snapshot.devices()}
        room -= len(_PARTS) * sum(map(len, events.values()))
        if room < 0:
            break
        kept.append((window, events))
    return kept[::-1]


def _spread(
    window: RecordedWindow, allocs: Sequence[RawEvent], address: int
) -> Iterable[dict[str, Any]]:
    end_us = window.time_ns // 1000
    start_us = end_us - round(window.seconds * 1e6)
    for position, event in enumerate(allocs):
        time_us = start_us + (end_us - start_us) * position // len(allocs)
        for action in _PARTS:
            yield {
                "action": action,
                "addr": address,
                "size": event.get("size") or 0,
                "stream": 0,
                "time_us": time_us,
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": _recorded(event.get("frames")),
            }


def _marks(
    kept: Sequence[tuple[RecordedWindow, dict[int, Any]]], reading: RecordedReading
) -> list[dict[str, Any]]:
    """Annotations of when each window began and ended, and when the blocks were read."""
    moments = []
    for number, (window, events) in enumerate(kept, 1):
        end_us = window.time_ns // 1000
        start_us = end_us - round(window.seconds * 1e6)
        moments += [(start_us, end_us, f"window {number}", device) for device in events]
    at_us = reading.time_ns // 1000
    devices = {segment["device"] for segment in reading.snapshot.raw_segments()}
    moments += [(at_us, at_us, "reading", device) for device in sorted(devices)]
    marks = [
        {"name": name, "stage": stage, "device": device, "time_us": time_us}
        for start_us, end_us, name, device in moments
        for stage, time_us in (("START", start_us), ("END", end_us))
    ]
    return sorted(marks, key=itemgetter("time_us"))


def _above(segments: Iterable[Any]) -> int:
    """An address that no segment has."""
    ends = (segment["address"] + segment["total_size"] for segment in segments)
    return (max(ends, default=0) // _PAGE + 1) * _PAGE


def _as_torch(segment: Any) -> dict[str, Any]:
    """The segment with an address for each block, and no stack where none was recorded.

    Torch before 2.1 gave blocks no addresses; its newer tools need them.
    """
    address = segment["address"]
    blocks = []
    for block in segment["blocks"]:
        blocks.append({"address": address, **block, "frames": _recorded(block["frames"])})
        address += block["size"]
    return {**segment, "blocks": blocks}


def _recorded(frames: Sequence[RawFrame] | None) -> Sequence[RawFrame]:
    """The stack; () for a named root that stands for a missing stack."""
    if frames and not (len(frames) == 1 and frames[0]["name"] in STACKLESS_ROOTS):
        return frames
    return []
