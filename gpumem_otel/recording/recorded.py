"""What a recording holds, in a few bytes per block; snapshots are made as they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.profile import BlockState
from gpumem_otel.recording import format as form
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.tensor_classes import RecordedClassifier

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping

    from gpumem_otel.base.profile import DeviceStats, Identity, StepStats
    from gpumem_otel.snapshot.snapshot import TorchSnapshot

STATE_WORDS: Final = {ord(digit): state.value for state, digit in form.STATES.items()}
CLASS_WORDS: Final = {letter: member.value for member, letter in form.CLASSES.items()}
_ALLOCATED: Final = BlockState.ACTIVE_ALLOCATED.value
_INACTIVE: Final = BlockState.INACTIVE.value


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
class RecordedTables:
    """Frames and stacks as torch writes them, shared by all readings; stack 0 is empty."""

    strings: list[str] = field(default_factory=list)
    frames: list[dict[str, Any]] = field(default_factory=list)
    stacks: list[list[dict[str, Any]]] = field(default_factory=lambda: [[]])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSegment:
    """A segment with its blocks in columns, a few bytes for each.

    Attributes:
        torch_fields: what torch writes of the segment itself.
        slack: requested minus allocated size of each block, None where all are equal.
        states: a digit for each block.
        addresses: of the blocks, None where they follow one another.
        classes: a letter for each block, None where they are not known.
    """

    torch_fields: dict[str, Any]
    stack: int
    sizes: array[int]
    slack: array[int] | None
    states: bytes
    stacks: array[int]
    addresses: tuple[int | None, ...] | None
    classes: str | None

    def raw(self, stacks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """The segment as torch writes it."""
        blocks = []
        totals = {"allocated_size": 0, "active_size": 0, "requested_size": 0}
        following: int = self.torch_fields["address"]
        for index, size in enumerate(self.sizes):
            address = following if self.addresses is None else self.addresses[index]
            requested = size if self.slack is None else size + self.slack[index]
            state = STATE_WORDS[self.states[index]]
            block = {"size": size, "requested_size": requested, "state": state}
            if address is not None:
                block["address"] = address
                following = address + size
            block["frames"] = stacks[self.stacks[index]]
            if state != _INACTIVE:
                totals["active_size"] += size
                totals["requested_size"] += requested
            if state == _ALLOCATED:
                totals["allocated_size"] += size
                if self.classes is not None:
                    block["tensor_class"] = CLASS_WORDS[self.classes[index]]
            blocks.append(block)
        return {**self.torch_fields, **totals, "frames": stacks[self.stack], "blocks": blocks}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    source: str
    time_ns: int
    before: tuple[DeviceStats, ...]
    after: tuple[DeviceStats, ...]
    stall_seconds: float
    _tables: RecordedTables = field(repr=False)

    def _reading(
        self, snapshot: TorchSnapshot, classifier: RecordedClassifier | None = None
    ) -> Reading:
        return Reading(
            snapshot=snapshot,
            time_ns=self.time_ns,
            before=self.before,
            after=self.after,
            stall_seconds=self.stall_seconds,
            classifier=classifier,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReading(_Recorded):
    """One recorded state of the allocators.

    Attributes:
        time_ns: when it was read, nanoseconds since 1970.
        steps: the steps counted by then.
    """

    steps: StepStats
    _segments: tuple[RecordedSegment, ...] = field(repr=False)
    _traced: tuple[int, ...] = field(repr=False)

    @property
    def snapshot(self) -> TorchSnapshot:
        """The snapshot, made again at each call; keep it as long as it is needed."""
        # says that events were recorded, without being one that counts
        event = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0}
        segments = [segment.raw(self._tables.stacks) for segment in self._segments]
        return _snapshot(self.source, segments, {device: [event] for device in self._traced})

    def allocated_bytes(self, device: int) -> int:
        """What was allocated on a device, counted without making the snapshot."""
        return sum(
            size
            for segment in self._segments
            if segment.torch_fields["device"] == device
            for size, state in zip(segment.sizes, segment.states, strict=True)
            if STATE_WORDS[state] == _ALLOCATED
        )

    def classifier(self) -> RecordedClassifier:
        """The tensor classes of the snapshot's blocks."""
        known = any(segment.classes is not None for segment in self._segments)
        return RecordedClassifier(by_stack_alone=not known)

    def reading(self) -> Reading:
        """The reading, as the live source gave it."""
        return self._reading(self.snapshot, self.classifier())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWindow(_Recorded):
    """Events that were recorded for a while.

    Attributes:
        time_ns: end of the window, nanoseconds since 1970.
        seconds: its length.
        before: counters at its beginning; `after` those at its end.
    """

    seconds: float
    _groups: Mapping[int, tuple[array[int], array[int], array[int]]] = field(repr=False)

    def reading(self) -> Reading:
        """The reading, with as many events of each stack as were recorded, of equal sizes."""
        traces: dict[int, list[dict[str, Any]]] = {}
        for device, columns in self._groups.items():
            trace = traces.setdefault(device, [])
            for stack, count, size in zip(*columns, strict=True):
                trace += _events(self._tables.stacks[stack], count, size)
        return self._reading(_snapshot(self.source, [], traces))


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


def _snapshot(
    source: str, segments: list[dict[str, Any]], traces: Mapping[int, list[dict[str, Any]]]
) -> TorchSnapshot:
    all_traces = [traces.get(device, []) for device in range(max(traces, default=-1) + 1)]
    raw = {"segments": segments, "device_traces": all_traces}
    return from_torch(raw, source=source, resolved=True)


def _events(frames: list[dict[str, Any]], count: int, size: int) -> list[dict[str, Any]]:
    """So many allocations that add up to the size; equal ones are one shared object."""
    if not count:
        return []
    each, larger = divmod(size, count)
    large, small = (
        {"action": "alloc", "addr": 0, "size": each + extra, "stream": 0, "frames": frames}
        for extra in (1, 0)
    )
    return [large] * larger + [small] * (count - larger)
