"""Writes recordings while a job runs."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from gpumem_otel.base.profile import BlockState
from gpumem_otel.recording import format as form
from gpumem_otel.recording.format import json_text
from gpumem_otel.snapshot import torch_format
from gpumem_otel.snapshot.grouping import StackTable
from gpumem_otel.snapshot.roots import builder_for, recorded_root, stackless_root
from gpumem_otel.snapshot.tensor_classes import TensorClass, class_of_root

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from gpumem_otel.base.profile import Identity, Stack, StepStats
    from gpumem_otel.base.protocols import FrameNamer, Pause
    from gpumem_otel.snapshot.reading import Reading
    from gpumem_otel.snapshot.stacks import StackBuilder
    from gpumem_otel.snapshot.tensor_classes import Classifier
    from gpumem_otel.snapshot.torch_format import RawBlock, RawFrame, RawSegment

_ITEMS_PER_LINE: Final = 200
_BLOCKS_PER_PAUSE: Final = 32
_NUMBERS_PER_PAUSE: Final = 1000
_END: Final = json_text({"end": {"why": "full"}})


class RecordingWriter:
    """Writes a recording as it happens.

    Every reading is flushed through to the file, so that a process that is killed leaves a
    recording of all that went before. At a limit of the format it stops and records that it did:
    what it writes can be read. Not for use by several threads at a time.

    Attributes:
        full: a limit was reached; nothing more is written.
    """

    def __init__(
        self,
        file: BinaryIO,
        *,
        identity: Identity,
        created_ns: int,
        facts: Mapping[str, str],
        namer: FrameNamer,
        max_depth: int = 512,
        max_bytes: int = form.MAX_TEXT_BYTES,
    ) -> None:
        """Write the header.

        Args:
            file: takes the bytes; it stays open at `close`.
            identity: whose memory it is.
            created_ns: nanoseconds since 1970.
            facts: short texts about the surroundings, for instance `torch`, `device_names`.
            namer: names Python frames; final names are what a recording holds.
            max_depth: frames per stack; the middle is cut.
            max_bytes: of text before compression, which makes it a tenth or less.

        Raises:
            OSError: the file cannot be written.
        """
        self.full = False
        self._file = file
        self._namer = namer
        self._max_depth = max_depth
        self._room_bytes = min(max_bytes, form.MAX_TEXT_BYTES) - len(_END) - 1
        self._zip: Any = zlib.compressobj(level=6, wbits=31)
        self._tables = _Tables()
        self._blocks = self._objects = 0
        header = {
            "format": form.FORMAT,
            "version": form.VERSION,
            "created_ns": created_ns,
            "identity": form.encode(form.IDENTITY, identity),
            "facts": {key: str(value) for key, value in facts.items()},
        }
        self._write([json_text(header)])

    def add(self, reading: Reading, steps: StepStats, pause: Pause | None = None) -> bool:
        """Write one state of the allocators.

        Args:
            reading: what was read.
            steps: the steps counted by then.
            pause: called every few dozen blocks.

        Returns:
            whether it was written; False once a limit is reached.

        Raises:
            OSError: the file cannot be written.
        """
        if self.full or self._zip is None:
            return False
        snapshot = reading.snapshot
        stacks = self._stacks_of(reading, pause)
        traced = [d for d in snapshot.devices() if next(snapshot.events(d), None) is not None]
        raw_segments = snapshot.raw_segments()
        steps_json = json_text(form.encode(form.STEP_STATS, steps))
        parts = [
            f'{_opening("reading", reading)},"steps":{steps_json},"traced":{json_text(traced)},',
            '"segments":[',
        ]
        blocks = 0
        for position, segment in enumerate(raw_segments):
            blocks += len(segment["blocks"])
            if self._blocks + blocks > form.MAX_BLOCKS:
                return self._fill()
            parts.append("," if position else "")
            parts += _segment(segment, stacks, reading.classifier, pause)
        parts.append("]}}")
        objects = 1 + len(raw_segments) + len(traced) + len(steps.floor_bytes)
        return self._add(parts, objects + len(reading.before) + len(reading.after), blocks, pause)

    def add_window(self, reading: Reading, seconds: float, pause: Pause | None = None) -> bool:
        """Write the allocations recorded in a window, by stack.

        Args:
            reading: its snapshot holds the events, its counters are those at both ends.
            seconds: length of the window.
            pause: called every few dozen events.

        Returns:
            whether it was written; not where it holds too many events, nor once `full`.

        Raises:
            OSError: the file cannot be written.
        """
        if self.full or self._zip is None:
            return False
        stacks = self._stacks_of(reading, pause)
        columns: dict[int, tuple[tuple[int, ...], ...]] = {}
        for device in reading.snapshot.devices():
            totals: dict[int, list[int]] = {}
            for group in reading.snapshot.event_groups(device, pause=pause):
                index = stacks.of_event(device, group.frames, group.address)
                total = totals.setdefault(index, [0, 0])
                total[0] += group.objects
                total[1] += group.size_bytes
            if totals:
                columns[device] = (tuple(totals), *zip(*totals.values(), strict=True))
        if sum(sum(objects) for _, objects, _ in columns.values()) > form.MAX_WINDOW_EVENTS:
            return False
        parts = [
            _opening("window", reading),
            f',"seconds":{json_text(float(seconds))},"groups":{json_text(columns)}}}}}',
        ]
        objects = 1 + len(columns) + len(reading.before) + len(reading.after)
        return self._add(parts, objects, 0, pause)

    def close(self) -> None:
        """Write the end; the file itself stays open. A second call does nothing.

        Raises:
            OSError: the file cannot be written.
        """
        if self._zip is not None:
            end, self._zip = self._zip.flush(zlib.Z_FINISH), None
            self._file.write(end)
            self._file.flush()

    def _stacks_of(self, reading: Reading, pause: Pause | None) -> _SnapshotStacks:
        builder = builder_for(reading.snapshot, self._namer, self._max_depth)
        return _SnapshotStacks(self._tables, builder, reading, pause)

    def _add(self, parts: Sequence[str], objects: int, blocks: int, pause: Pause | None) -> bool:
        """Write the new entries of the tables and a line, if all of it fits."""
        tables = list(self._tables.new_lines(pause))
        sizes = [sum(map(len, parts)) + 1, *(len(line) + 1 for line in tables)]
        if (
            sum(sizes) > self._room_bytes
            or max(sizes) > form.MAX_LINE_BYTES
            or self._tables.too_large()
            or self._objects + objects > form.MAX_OBJECTS
        ):
            return self._fill()
        self._blocks += blocks
        self._objects += objects
        for line in tables:
            self._compress([line], pause)
        self._tables.written()
        self._write(parts, pause)
        return True

    def _fill(self) -> bool:
        """Record that more was to come; room for that is kept."""
        self.full = True
        self._write([_END])
        return False

    def _write(self, parts: Iterable[str], pause: Pause | None = None) -> None:
        self._compress(parts, pause)
        self._out(self._zip.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def _compress(self, parts: Iterable[str], pause: Pause | None) -> None:
        for part in (*parts, "\n"):
            self._room_bytes -= len(part)
            self._out(self._zip.compress(part.encode("ascii")), pause)

    def _out(self, data: bytes, pause: Pause | None = None) -> None:
        try:
            self._file.write(data)
            if pause is not None:
                pause()  # which may raise too, to end it all
        except BaseException:
            # nothing behind a hole in the stream could be read, not even its end
            self.full = True
            self._zip = None
            raise


class _Table:
    """Numbers things in the order of their first use."""

    def __init__(self, *known: Hashable) -> None:
        self._numbers = {item: number for number, item in enumerate(known)}
        self.new: list[Any] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, item: Hashable) -> int:
        number = self._numbers.get(item)
        if number is None:
            number = self._numbers[item] = len(self._numbers)
            self.new.append(item)
        return number


class _Tables:
    """Strings, frames and stacks of the file, each written when it is first used."""

    def __init__(self) -> None:
        self._strings, self._frames, self._stacks = _Table(), _Table(), _Table(())
        self._by_name = {"strings": self._strings, "frames": self._frames, "stacks": self._stacks}
        self._references = 0

    def stack(self, stack: Stack) -> int:
        """The number of a stack."""
        count = len(self._stacks)
        string = self._strings.number
        number = self._stacks.number(
            tuple(
                self._frames.number((string(frame.name), string(frame.filename), frame.line))
                for frame in stack
            )
        )
        self._references += len(stack) if len(self._stacks) > count else 0
        return number

    def new_lines(self, pause: Pause | None) -> Iterator[str]:
        """Lines for what is new, none of them long."""
        for name, table in self._by_name.items():
            for start in range(0, len(table.new), _ITEMS_PER_LINE):
                if start and pause is not None:
                    pause()
                yield json_text({name: table.new[start : start + _ITEMS_PER_LINE]})

    def written(self) -> None:
        """What was new is in the file."""
        for table in self._by_name.values():
            table.new.clear()

    def too_large(self) -> bool:
        """Whether a limit of the format is passed."""
        return (
            len(self._strings) > form.MAX_STRINGS
            or len(self._frames) > form.MAX_FRAMES
            or len(self._stacks) > form.MAX_STACKS
            or self._references > form.MAX_FRAME_REFERENCES
        )


class _SnapshotStacks:
    """Numbers of the stacks, and classes, of the blocks and events of one snapshot."""

    def __init__(
        self, tables: _Tables, builder: StackBuilder, reading: Reading, pause: Pause | None
    ) -> None:
        self._tables = tables
        self._builder = builder
        self._snapshot = reading.snapshot
        self._stackless = reading.stackless
        self._pause = pause
        self._distinct = StackTable()
        self._numbers = [0]  # in the file, of the distinct stacks of this snapshot
        self._classes: dict[int, TensorClass] = {}
        self._has_event: dict[int, dict[int | None, bool]] = {}

    def of_block(self, device: int, block: RawBlock, state: BlockState) -> int:
        """The block's own stack, or for allocated memory without one its named root."""
        if state is BlockState.INACTIVE:
            return 0
        frames = torch_format.frames_of(block)
        if frames or state is not BlockState.ACTIVE_ALLOCATED:
            return self.of_frames(frames)
        return self._tables.stack(self._builder.root(self._root(device, block.get("address"))))

    def of_event(self, device: int, frames: Sequence[RawFrame], address: int | None) -> int:
        """The stack of a recorded allocation, or its named root."""
        if frames:
            return self.of_frames(frames)
        root = recorded_root(self._stackless, device, address)
        return self._tables.stack(self._builder.root(root))

    def of_frames(self, frames: Sequence[RawFrame]) -> int:
        """A stack as recorded; 0 for none."""
        index = self._distinct.index(frames)
        if index == len(self._numbers):
            self._numbers.append(self._tables.stack(self._builder.build(frames)))
            if self._pause is not None:
                self._pause()
        return self._numbers[index]

    def class_of(self, device: int, block: RawBlock, classifier: Classifier) -> TensorClass:
        """The class of a block; one that is not allocated has none."""
        if block["state"] != BlockState.ACTIVE_ALLOCATED.value:
            return TensorClass.UNATTRIBUTED
        tensor_class = classifier.of_block(block)
        if tensor_class is not None:
            return tensor_class
        frames = torch_format.frames_of(block)
        if not frames:
            return class_of_root(self._root(device, block.get("address")))
        index = self._distinct.index(frames)
        if index not in self._classes:
            self._classes[index] = classifier.of_stack(frames)
        return self._classes[index]

    def _root(self, device: int, address: int | None) -> str:
        if self._stackless is not None:
            return self._stackless(device, address)
        if device not in self._has_event:
            groups = self._snapshot.live_groups(device, self._pause)
            self._has_event[device] = {g.address: g.has_event for g in groups if not g.frames}
        return stackless_root(self._has_event[device].get(address, False))


def _opening(kind: str, reading: Reading) -> str:
    """The beginning of a reading's or window's line, up to its counters."""
    before, after = (
        [form.encode(form.DEVICE_STATS, stats, whole=False) for stats in moment]
        for moment in (reading.before, reading.after)
    )
    values = {
        "time_ns": reading.time_ns,
        "stall_seconds": round(reading.stall_seconds, 9),
        "before": before,
        "after": None if after == before else after,
    }
    return f'{{"{kind}":{json_text(values)[:-1]}'


def _segment(
    segment: RawSegment,
    names: _SnapshotStacks,
    classifier: Classifier | None,
    pause: Pause | None,
) -> Iterator[str]:
    """A segment as JSON, in pieces."""
    device = torch_format.device_of(segment)
    sizes: list[int] = []
    slack: list[int] = []
    states: list[str] = []
    stacks: list[int] = []
    addresses: list[int | None] = []
    classes: list[str] = []
    start = following = torch_format.whole(segment.get("address"))
    contiguous = True
    for count, block in enumerate(segment["blocks"], 1):
        if pause is not None and not count % _BLOCKS_PER_PAUSE:
            pause()
        size = block["size"]
        state = torch_format.state_of(block["state"])
        address = block.get("address")
        contiguous = contiguous and address == following
        following += size
        sizes.append(size)
        slack.append(max(torch_format.requested_of(block), 0) - size)
        states.append(form.STATES[state])
        stacks.append(names.of_block(device, block, state))
        addresses.append(address)
        if classifier is not None and not classifier.by_stack_alone:
            classes.append(form.CLASSES[names.class_of(device, block, classifier)])
    own = {
        "d": device,
        "a": start,
        "n": torch_format.reserved_of(segment, sum(sizes)),
        "s": torch_format.whole(segment.get("stream")),
        "t": torch_format.text(segment.get("segment_type")),
        "p": torch_format.pool_of(segment.get("segment_pool_id")) or (0, 0),
        "x": segment.get("is_expandable") is True,
        "k": names.of_frames(segment.get("frames") or ()),
    }
    yield f'{json_text(own)[:-1]},"b":['
    yield from _numbers(sizes, pause)
    yield ","
    yield from _numbers(slack, pause) if any(slack) else ("null",)
    yield f',"{"".join(states)}",'
    yield from _numbers(stacks, pause)
    yield "]"
    if not contiguous:
        yield ',"A":'
        yield from _numbers(["null" if a is None else a for a in addresses], pause)
    if classes:
        yield f',"c":"{"".join(classes)}"'
    yield "}"


def _numbers(values: Sequence[object], pause: Pause | None) -> Iterator[str]:
    """A list of numbers as JSON, in pieces."""
    for start in range(0, len(values), _NUMBERS_PER_PAUSE):
        yield "," if start else "["
        if start and pause is not None:
            pause()
        yield ",".join(map(str, values[start : start + _NUMBERS_PER_PAUSE]))
    yield "]" if values else "[]"
