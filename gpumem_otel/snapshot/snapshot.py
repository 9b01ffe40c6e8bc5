"""CUDA memory snapshots of torch 1.13 to 2.15, from memory or from a file, behind one type.

Differences between versions are handled here and in `torch_format`, which reads the single keys.
Shape and history of the format: `torch/cuda/memory.py` (`_snapshot`),
`c10/cuda/CUDACachingAllocator.h`, and real files of each version.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpumem_otel.base.profile import AllocEvent, Annotation, Block, BlockState, Segment
from gpumem_otel.errors import SnapshotError
from gpumem_otel.snapshot import torch_format
from gpumem_otel.snapshot.grouping import PAUSE_EVERY, EventGroup, Grouper, LiveGroup
from gpumem_otel.snapshot.totals import add_up
from gpumem_otel.snapshot.trace import replay_trace
from gpumem_otel.snapshot.validate import warnings_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from gpumem_otel.base.aggregate import Labels
    from gpumem_otel.base.profile import DeviceTotals
    from gpumem_otel.base.protocols import FrameNamer, Pause
    from gpumem_otel.snapshot.stacks import StackBuilder
    from gpumem_otel.snapshot.tensor_classes import Classifier, TensorClass
    from gpumem_otel.snapshot.torch_format import RawBlock, RawEvent, RawSegment
    from gpumem_otel.snapshot.trace import Replay

_PLAIN = str | int | float


class TorchSnapshot:
    """One state of the allocators of a process, read only.

    It keeps the object it was made from and copies nothing: use `from_torch`, `parse_snapshot`
    or `load_snapshot`.

    Attributes:
        source: name of the file or stream, for messages.
        resolved: frame names are final already and need no naming (recordings of ours).
        builders: by namer and depth, see `heap.builder_for`: devices may share all their frames.
        host_segments: pinned host memory as torch wrote it, () before torch 2.14.
        trusted: frames hold only text and numbers, see `Grouper`.
    """

    def __init__(
        self,
        source: str,
        segments: Sequence[RawSegment],
        traces: Sequence[Sequence[RawEvent]],
        *,
        annotations: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, object] | None = None,
        host_segments: Sequence[dict[str, Any]] = (),
        resolved: bool = False,
        trusted: bool = True,
    ) -> None:
        self.source = source
        self.resolved = resolved
        self.host_segments = host_segments
        self._segments = segments
        self._traces = traces
        self._annotations = annotations
        self._settings = settings or {}
        self._origin_warnings: tuple[str, ...] = ()
        self.trusted = trusted
        self._by_device: dict[int, list[RawSegment]] | None = None
        self._annotations_by_device: dict[int, list[Annotation]] | None = None
        self._reader = torch_format.RawReader()
        self.builders: dict[tuple[FrameNamer, int], StackBuilder] = {}
        self._totals: dict[int, DeviceTotals] = {}
        self._replays: dict[int, Replay] = {}
        self._warnings: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"<Snapshot {self.source!r} devices={self.devices()}>"

    def devices(self) -> tuple[int, ...]:
        """Devices that have segments or events, sorted."""
        devices = {segment["device"] for segment in self._segments}
        devices.update(device for device, trace in enumerate(self._traces) if trace)
        return tuple(sorted(devices))

    @property
    def settings(self) -> Mapping[str, object]:
        """`allocator_settings` as torch wrote it, empty before torch 2.3.

        Only text, numbers and one level of dicts of them: that is what there is.
        """
        return MappingProxyType(
            {
                key: _plain(value) if isinstance(value, dict) else value
                for key, value in self._settings.items()
                if isinstance(value, _PLAIN | dict)
            }
        )

    @property
    def annotations(self) -> tuple[Annotation, ...]:
        """START and END marks, in file order; empty before torch 2.5."""
        text = self._reader.text
        return tuple(
            Annotation(
                name=text(raw.get("name")),
                stage=text(raw.get("stage")),
                device=torch_format.whole(raw.get("device")),
                time_us=torch_format.whole(raw.get("time_us")),
            )
            for raw in self._annotations
        )

    def annotations_of(self, device: int) -> Sequence[Annotation]:
        """The marks of a device, in file order."""
        if self._annotations_by_device is None:
            by_device: dict[int, list[Annotation]] = {}
            for mark in self.annotations:
                by_device.setdefault(mark.device, []).append(mark)
            self._annotations_by_device = by_device
        return self._annotations_by_device.get(device, ())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the numbers should know, one sentence each."""
        if self._warnings is None:
            self._warnings = (*self._origin_warnings, *warnings_for(self._segments, self._traces))
        return self._warnings

    def warn(self, warnings: Sequence[str]) -> None:
        """Put sentences about where the snapshot comes from before its own warnings."""
        self._origin_warnings = (*self._origin_warnings, *warnings)
        self._warnings = None

    def segments(self, device: int | None = None) -> Iterator[Segment]:
        """Segments as objects, for offline work; all devices where none is given."""
        for raw in self._segments if device is None else self._of_device(device):
            yield Segment(
                device=raw["device"],
                address=torch_format.whole(raw.get("address")),
                size_bytes=torch_format.segment_size(raw),
                stream=torch_format.whole(raw.get("stream")),
                kind=self._reader.text(raw.get("segment_type")),
                pool_id=torch_format.pool_of(raw.get("segment_pool_id"))
                or torch_format.DEFAULT_POOL,
                is_expandable=raw.get("is_expandable") is True,
                blocks=tuple(_block(block, self._reader) for block in raw["blocks"]),
                frames=self._reader.stack(raw.get("frames")),
            )

    def raw_segments(self, device: int | None = None) -> Sequence[RawSegment]:
        """Segments as torch wrote them, never to be changed: for copying every block cheaply.

        Args:
            device: only its segments; a walk through all of them for each device would take their
                product.
        """
        return self._segments if device is None else self._of_device(device)

    def raw_events(self, device: int) -> Sequence[RawEvent]:
        """The trace of a device as torch wrote it, never to be changed; () where it has none."""
        return self._trace(device)

    def events(self, device: int) -> Iterator[AllocEvent]:
        """The recorded trace of a device as objects, oldest first."""
        reader = self._reader
        for raw in self._trace(device):
            yield AllocEvent(
                action=reader.text(raw.get("action")),
                address=torch_format.maybe_whole(raw.get("addr")),
                size_bytes=torch_format.whole(raw.get("size")),
                stream=torch_format.whole(raw.get("stream")),
                time_us=torch_format.maybe_whole(raw.get("time_us")),
                frames=reader.stack(raw.get("frames")),
                device_free_bytes=torch_format.maybe_whole(raw.get("device_free")),
                compile_context=reader.maybe_text(raw.get("compile_context")),
                user_metadata=reader.maybe_text(raw.get("user_metadata")),
                pool_id=torch_format.pool_of(raw.get("pool_id")),
            )

    def has_metadata(self, device: int, pause: Pause | None = None) -> bool:
        """Whether any event of a device carries the metadata that a program has set (torch 2.10).

        Args:
            device: torch's index.
            pause: called every 32 events.
        """
        for count, event in enumerate(self._trace(device)):
            if pause is not None and not count % PAUSE_EVERY:
                pause()
            if event.get("user_metadata"):
                return True
        return False

    def totals(self, device: int, pause: Pause | None = None) -> DeviceTotals:
        """Totals over the segments and blocks of a device; all zero where it has none.

        Args:
            device: torch's index.
            pause: called every 32 blocks.
        """
        totals = self._totals.get(device)
        if totals is None:
            totals = self._totals[device] = add_up(
                device,
                self._of_device(device),
                has_events=bool(self._trace(device)),
                resolved=self.resolved,
                pause=pause,
            )
        return totals

    def has_timeline(self, device: int) -> bool:
        """Whether the trace holds more than one moment.

        Record mode `state` keeps a single event.
        """
        return len(self._trace(device)) > 1

    def replay(
        self, device: int, *, pause: Pause | None = None, frees_have_stacks: bool = False
    ) -> Replay:
        """A device's trace played through, for what was alive at any moment of it.

        It is played once; later calls return the same object.

        Args:
            device: torch's index.
            pause: see `replay_trace`.
            frees_have_stacks: see `replay_trace`; only for our own windows.

        Raises:
            SnapshotError: its sizes add up to more than 64 bits hold.
        """
        replay = self._replays.get(device)
        if replay is None:
            try:
                replay = replay_trace(
                    device,
                    self._of_device(device),
                    self._trace(device),
                    pause=pause,
                    frees_have_stacks=frees_have_stacks,
                )
            except OverflowError:
                reason = "the sizes in its trace add up to more than 64 bits hold"
                raise SnapshotError(self.source, reason) from None
            self._replays[device] = replay
        return replay

    def live_groups(
        self, device: int, pause: Pause | None = None, classifier: Classifier | None = None
    ) -> list[LiveGroup]:
        """Every allocated block of a device, grouped by stack.

        The sizes add up to `totals(device).allocated_bytes`. Frames are compared by identity,
        which torch and pickle both preserve; equal stacks that do not share their frames may be
        groups of their own.

        Args:
            device: torch's index.
            pause: called every 32 blocks.
            classifier: groups are also split by tensor class.
        """
        live = (
            block
            for segment in self._of_device(device)
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        )
        if classifier is None:
            return self._grouped(device, live, pause, None)
        by_class: dict[TensorClass | None, list[RawBlock]] = {}
        for count, block in enumerate(live, 1):
            by_class.setdefault(classifier.of_block(block), []).append(block)
            if pause is not None and not count % PAUSE_EVERY:
                pause()
        all_groups: list[LiveGroup] = []
        for tensor_class, blocks in by_class.items():
            groups = self._grouped(device, blocks, pause, tensor_class)
            if tensor_class is None:  # a block without a stack: only its root decides
                groups = [
                    replace(group, tensor_class=classifier.of_stack(group.frames))
                    if group.frames
                    else group
                    for group in groups
                ]
            all_groups += groups
        return all_groups

    def _grouped(
        self,
        device: int,
        blocks: Iterable[RawBlock],
        pause: Pause | None,
        tensor_class: TensorClass | None,
    ) -> list[LiveGroup]:
        grouper = Grouper("address", pause, trusted=self.trusted)
        grouper.add(blocks)
        groups = [
            LiveGroup(frames, objects, size, address, tensor_class=tensor_class)
            for frames, objects, size, address in grouper.groups
        ]
        if grouper.bare:
            trace = self._trace(device)
            seen = {event.get("addr") for event in trace if event.get("action") == "alloc"}
            for block in grouper.bare:
                address = block.get("address")
                has_event = address in seen
                groups.append(LiveGroup((), 1, block["size"], address, has_event, tensor_class))
        return groups

    def event_groups(
        self,
        device: int,
        since_us: int | None = None,
        until_us: int | None = None,
        pause: Pause | None = None,
        labels_of: Callable[[RawEvent], Labels] | None = None,
    ) -> list[EventGroup]:
        """The allocations in a device's trace, grouped by stack, in requested bytes.

        Args:
            device: torch's index.
            since_us: leave out what is older, microseconds since 1970; events without a time
                (before torch 2.2) always count.
            until_us: leave out what is not older than this.
            pause: called every 32 events.
            labels_of: events of different labels are different groups.
        """
        allocs = (event for event in self._trace(device) if event.get("action") == "alloc")
        if since_us is not None or until_us is not None:
            allocs = (event for event in allocs if _within(event, since_us, until_us))
        if labels_of is None:
            return self._event_groups(allocs, pause, ())
        by_labels: dict[Labels, list[RawEvent]] = {}
        for count, event in enumerate(allocs):
            if pause is not None and not count % PAUSE_EVERY:
                pause()
            by_labels.setdefault(labels_of(event), []).append(event)
        return [
            group
            for labels, events in by_labels.items()
            for group in self._event_groups(events, pause, labels)
        ]

    def _event_groups(
        self, events: Iterable[RawEvent], pause: Pause | None, labels: Labels
    ) -> list[EventGroup]:
        grouper = Grouper("addr", pause, trusted=self.trusted)
        grouper.add(events)
        groups = [
            EventGroup(frames, objects, size, address, labels)
            for frames, objects, size, address in grouper.groups
        ]
        if bare := grouper.bare:
            size = sum(event.get("size") or 0 for event in bare)
            groups.append(EventGroup((), len(bare), size, bare[0].get("addr"), labels))
        return groups

    def _of_device(self, device: int) -> Sequence[RawSegment]:
        if self._by_device is None:
            by_device: dict[int, list[RawSegment]] = {}
            for segment in self._segments:
                by_device.setdefault(segment["device"], []).append(segment)
            self._by_device = by_device
        return self._by_device.get(device, ())

    def _trace(self, device: int) -> Sequence[RawEvent]:
        return self._traces[device] if 0 <= device < len(self._traces) else ()


def _plain(values: Mapping[Any, object]) -> dict[Any, object]:
    return {key: value for key, value in values.items() if isinstance(value, _PLAIN)}


def _block(raw: RawBlock, reader: torch_format.RawReader) -> Block:
    state = torch_format.state_of(raw["state"])
    # an inactive block of torch 2.0 still carries the history of what once was there
    inactive = state is BlockState.INACTIVE
    return Block(
        address=raw.get("address"),
        size_bytes=raw["size"],
        requested_bytes=torch_format.requested_of(raw),
        state=state,
        frames=reader.stack(raw.get("frames") if inactive else torch_format.frames_of(raw)),
    )


def _within(event: RawEvent, since_us: int | None, until_us: int | None) -> bool:
    time_us = event.get("time_us")
    if time_us is None:
        return True
    return (since_us is None or time_us >= since_us) and (until_us is None or time_us < until_us)


def from_torch(raw: object, *, source: str = "torch", resolved: bool = False) -> TorchSnapshot:
    """Wrap what `torch._C._cuda_memorySnapshot` gives, without copying.

    Only the outer shape is looked at, torch's own objects are trusted. Files go through
    `parse_snapshot`, which checks them.

    Args:
        raw: the dict, or the bare list of segments (torch 1.13, `MemPool.snapshot()`).
        source: name for messages.
        resolved: frame names are final already.

    Raises:
        SnapshotError: it is neither.
    """
    return _wrap(raw, source, resolved=resolved, trusted=True)


def from_file(raw: object, source: str) -> TorchSnapshot:
    """Wrap what was read from a file and checked (`validate`).

    Raises:
        SnapshotError: it is no snapshot.
    """
    return _wrap(raw, source, resolved=False, trusted=False)


def _wrap(raw: object, source: str, *, resolved: bool, trusted: bool) -> TorchSnapshot:
    if isinstance(raw, list):
        raw = {"segments": raw}
    if not isinstance(raw, dict) or not torch_format.ROOT_KEYS.intersection(raw):
        raise SnapshotError(source, "not a memory snapshot: neither a list nor a dict of segments")
    return TorchSnapshot(
        source,
        raw.get("segments") or (),
        raw.get("device_traces") or (),
        annotations=raw.get("external_annotations") or (),
        host_segments=raw.get("host_segments") or (),
        settings=raw.get("allocator_settings"),
        resolved=resolved,
        trusted=trusted,
    )
