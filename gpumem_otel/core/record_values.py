"""What a recording holds, as values; snapshots are made out of it as they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpumem_otel.core import recordform as form
from gpumem_otel.core.classify import RecordedClassifier
from gpumem_otel.core.model import BlockState, StepStats
from gpumem_otel.core.ports import Reading
from gpumem_otel.core.snapshot import from_torch

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping

    from gpumem_otel.core.model import DeviceStats, Identity
    from gpumem_otel.core.snapshot import Snapshot

__all__ = [
    "STATE_WORDS",
    "RecordedReading",
    "RecordedSegment",
    "RecordedWindow",
    "Recording",
    "RecordingHeader",
    "Tables",
]

STATE_WORDS = {ord(digit): state.value for state, digit in form.STATES.items()}
"""Byte of a column of states -> the allocator's word."""

_CLASS_WORDS = {letter: found.value for found, letter in form.CLASSES.items()}
_ALLOCATED = BlockState.ACTIVE_ALLOCATED.value
_INACTIVE = BlockState.INACTIVE.value


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingHeader:
    """First line of a recording.

    Attributes:
        facts: what the writer knew about its surroundings, for instance `torch`.
    """

    version: int
    created_ns: int
    facts: Mapping[str, str]


@dataclass(slots=True)
class Tables:
    """Frames and stacks as torch would write them, shared by all readings; stack 0 is empty."""

    strings: list[str] = field(default_factory=list)
    frames: list[dict[str, Any]] = field(default_factory=list)
    stacks: list[list[dict[str, Any]]] = field(default_factory=lambda: [[]])
    references: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSegment:
    """A segment with its blocks in columns, a few bytes for each.

    Attributes:
        stack: index of its own stack.
        slack: requested minus allocated size of each block, None where all are equal.
        states: a digit for each block, see `recordform.STATES`.
        addresses: of the blocks, None where they follow one another.
        classes: a letter for each block, see `recordform.CLASSES`; None where none was written.
    """

    device: int
    address: int
    size_bytes: int
    stream: int
    kind: str
    pool_id: tuple[int, int]
    is_expandable: bool
    stack: int
    sizes: array[int]
    slack: array[int] | None
    states: bytes
    stacks: array[int]
    addresses: tuple[int | None, ...] | None
    classes: str | None = None

    def raw(self, tables: Tables) -> dict[str, Any]:
        """The segment as torch writes it."""
        stacks = tables.stacks
        blocks = []
        allocated = active = requested = 0
        address: int | None = self.address
        for index, size in enumerate(self.sizes):
            if self.addresses is not None:
                address = self.addresses[index]
            asked = size + self.slack[index] if self.slack is not None else size
            state = STATE_WORDS[self.states[index]]
            if state != _INACTIVE:
                active += size
                requested += asked
            if state == _ALLOCATED:
                allocated += size
            block = {"size": size, "requested_size": asked, "state": state}
            if address is not None:
                block["address"] = address
                address += size
            block["frames"] = stacks[self.stacks[index]]
            if self.classes is not None and state == _ALLOCATED:
                block["tensor_class"] = _CLASS_WORDS[self.classes[index]]
            blocks.append(block)
        return {
            "device": self.device,
            "address": self.address,
            "total_size": self.size_bytes,
            "allocated_size": allocated,
            "active_size": active,
            "requested_size": requested,
            "stream": self.stream,
            "segment_type": self.kind,
            "segment_pool_id": self.pool_id,
            "is_expandable": self.is_expandable,
            "frames": stacks[self.stack],
            "blocks": blocks,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReading:
    """One recorded state of the allocators.

    Attributes:
        time_ns: when it was read, nanoseconds since 1970.
        steps: the steps counted by then.
    """

    source: str
    time_ns: int
    before: tuple[DeviceStats, ...]
    after: tuple[DeviceStats, ...]
    stall_seconds: float
    steps: StepStats
    _segments: tuple[RecordedSegment, ...] = field(repr=False)
    _traced: tuple[int, ...] = field(repr=False)
    _tables: Tables = field(repr=False)

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot, made anew at each call; keep it as long as it is needed."""
        traces: list[list[dict[str, Any]]] = [[] for _ in range(max(self._traced, default=-1) + 1)]
        for device in self._traced:
            # says that events were recorded, without being one that counts
            traces[device].append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0})
        raw = {
            "segments": [segment.raw(self._tables) for segment in self._segments],
            "device_traces": traces,
        }
        return from_torch(raw, source=self.source, resolved=True)

    def allocated_bytes(self, device: int) -> int:
        """What was allocated on a device, counted without making the snapshot."""
        return sum(
            size
            for segment in self._segments
            if segment.device == device
            for size, state in zip(segment.sizes, segment.states, strict=True)
            if STATE_WORDS[state] == _ALLOCATED
        )

    def classifier(self) -> RecordedClassifier:
        """Tells the tensor classes of the snapshot's blocks."""
        known = any(segment.classes is not None for segment in self._segments)
        return RecordedClassifier(by_stack_alone=not known)

    def reading(self) -> Reading:
        """The reading, as the live source gave it."""
        return Reading(
            snapshot=self.snapshot,
            time_ns=self.time_ns,
            before=self.before,
            after=self.after,
            stall_seconds=self.stall_seconds,
            classifier=self.classifier(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWindow:
    """Events that were recorded for a while.

    Attributes:
        time_ns: end of the window, nanoseconds since 1970.
        seconds: its length.
        before: counters at its beginning; `after` those at its end.
    """

    source: str
    time_ns: int
    seconds: float
    before: tuple[DeviceStats, ...]
    after: tuple[DeviceStats, ...]
    stall_seconds: float
    _groups: Mapping[int, tuple[array[int], array[int], array[int]]] = field(repr=False)
    _tables: Tables = field(repr=False)

    def reading(self) -> Reading:
        """The reading, with as many events of each stack as were recorded, of equal sizes."""
        traces: list[list[dict[str, Any]]] = [[] for _ in range(max(self._groups, default=-1) + 1)]
        for device, (stacks, objects, sizes) in self._groups.items():
            for stack, count, size in zip(stacks, objects, sizes, strict=True):
                traces[device] += _events(self._tables.stacks[stack], count, size)
        raw = {"segments": [], "device_traces": traces}
        return Reading(
            snapshot=from_torch(raw, source=self.source, resolved=True),
            time_ns=self.time_ns,
            before=self.before,
            after=self.after,
            stall_seconds=self.stall_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recording, whole.

    Attributes:
        warnings: what a reader should know, one sentence each, for instance a cut end.
    """

    source: str
    header: RecordingHeader
    identity: Identity
    readings: tuple[RecordedReading, ...]
    windows: tuple[RecordedWindow, ...] = ()
    warnings: tuple[str, ...] = ()


def _events(frames: list[dict[str, Any]], count: int, size: int) -> list[dict[str, Any]]:
    """So many allocations that add up to the size; equal ones are one shared object."""
    if not count:
        return []
    each, more = divmod(size, count)
    large, small = (
        {"action": "alloc", "addr": 0, "size": each + extra, "stream": 0, "frames": frames}
        for extra in (1, 0)
    )
    return [large] * more + [small] * (count - more)
