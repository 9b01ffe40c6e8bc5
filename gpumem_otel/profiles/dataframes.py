"""Columns of blocks, segments, events and stacks, for tables.

Sizes are bytes. `function` is the innermost frame that is shown, `stack` all of them, root first
and joined by ";" as in folded stacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpumem_otel.profiles.folded import escape_name
from gpumem_otel.snapshot import torch_format
from gpumem_otel.snapshot.grouping import StackTable
from gpumem_otel.snapshot.labels import pool_name
from gpumem_otel.snapshot.roots import builder_for
from gpumem_otel.snapshot.stacks import file_function_namer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpumem_otel.base.profile import Sample, Stack
    from gpumem_otel.profiles.heap import DiffEntry
    from gpumem_otel.snapshot.snapshot import TorchSnapshot
    from gpumem_otel.snapshot.torch_format import RawFrame, RawSegment

    Columns = dict[str, list[Any]]

_ALLOCATED = "active_allocated"


def segments(snapshot: TorchSnapshot, device: int | None = None) -> Columns:
    """One entry per segment."""
    columns: Columns = {
        key: []
        for key in (
            "device",
            "address",
            "size_bytes",
            "allocated_bytes",
            "blocks",
            "pool",
            "stream",
            "kind",
            "is_expandable",
        )
    }
    for raw in _segments(snapshot, device):
        allocated = sum(b["size"] for b in raw["blocks"] if b["state"] == _ALLOCATED)
        row = (
            raw["device"],
            torch_format.whole(raw.get("address")),
            torch_format.segment_size(raw),
            allocated,
            len(raw["blocks"]),
            _pool(raw),
            torch_format.whole(raw.get("stream")),
            torch_format.text(raw.get("segment_type")),
            raw.get("is_expandable") is True,
        )
        _append(columns, row)
    return columns


def blocks(snapshot: TorchSnapshot, device: int | None = None) -> Columns:
    """One entry per block; `requested_bytes` is 0 where the block is inactive."""
    columns: Columns = {
        key: []
        for key in (
            "device",
            "segment",
            "pool",
            "stream",
            "address",
            "size_bytes",
            "requested_bytes",
            "state",
            "function",
            "stack",
        )
    }
    names = _Names(snapshot)
    for raw in _segments(snapshot, device):
        shared = (
            raw["device"],
            torch_format.whole(raw.get("address")),
            _pool(raw),
            torch_format.whole(raw.get("stream")),
        )
        for block in raw["blocks"]:
            state = torch_format.state_of(block["state"])
            active = state.value != "inactive"
            row = (
                *shared,
                block.get("address"),
                block["size"],
                torch_format.requested_of(block) if active else 0,
                state.value,
                *names.of(torch_format.frames_of(block) if active else ()),
            )
            _append(columns, row)
    return columns


def events(snapshot: TorchSnapshot, device: int | None = None) -> Columns:
    """One entry per event; `allocated_bytes` (requested) and `reserved_bytes` are after it."""
    columns: Columns = {
        key: []
        for key in (
            "device",
            "event",
            "time_us",
            "action",
            "address",
            "size_bytes",
            "stream",
            "allocated_bytes",
            "reserved_bytes",
            "function",
            "stack",
        )
    }
    names = _Names(snapshot)
    for number in snapshot.devices() if device is None else (device,):
        trace = snapshot.raw_events(number)
        if not trace:
            continue
        replay = snapshot.replay(number)
        for moment, raw in enumerate(trace, 1):
            row = (
                number,
                moment,
                torch_format.maybe_whole(raw.get("time_us")),
                torch_format.text(raw.get("action")),
                torch_format.maybe_whole(raw.get("addr")),
                torch_format.whole(raw.get("size")),
                torch_format.whole(raw.get("stream")),
                replay.allocated_bytes[moment],
                replay.reserved_bytes[moment],
                *names.of(raw.get("frames") or ()),
            )
            _append(columns, row)
    return columns


def stacks(samples: Iterable[Sample] | Iterable[DiffEntry]) -> Columns:
    """One entry per stack; a column for each label that there is."""
    entries: list[Sample | DiffEntry] = list(samples)
    labels = sorted({key for entry in entries for key, _ in entry.labels})
    columns: Columns = {
        "size_bytes": [entry.size_bytes for entry in entries],
        "objects": [entry.objects for entry in entries],
        "function": [entry.frames[0].name for entry in entries],
        "file": [entry.frames[0].filename for entry in entries],
        "line": [entry.frames[0].line for entry in entries],
        "stack": [_joined(entry.frames) for entry in entries],
    }
    for label in labels:
        columns[label] = [dict(entry.labels).get(label) for entry in entries]
    return columns


class _Names:
    """Function and joined stack of recorded frames; each distinct stack is named once."""

    def __init__(self, snapshot: TorchSnapshot) -> None:
        self._builder = builder_for(snapshot, file_function_namer)
        self._table = StackTable()
        self._known: list[tuple[str, str]] = [("", "")]

    def of(self, frames: Sequence[RawFrame]) -> tuple[str, str]:
        number = self._table.index(frames)
        if number == len(self._known):
            stack = self._builder.build(frames)
            self._known.append((stack[0].name, _joined(stack)))
        return self._known[number]


def _joined(stack: Stack) -> str:
    return ";".join(escape_name(frame.name) for frame in reversed(stack))


def _segments(snapshot: TorchSnapshot, device: int | None) -> Iterable[RawSegment]:
    return snapshot.raw_segments(device)


def _pool(raw: RawSegment) -> str:
    return pool_name(torch_format.pool_of(raw.get("segment_pool_id")) or torch_format.DEFAULT_POOL)


def _append(columns: Columns, row: Sequence[Any]) -> None:
    for column, value in zip(columns.values(), row, strict=True):
        column.append(value)
