"""Our own recordings: written by a job as it runs, read back anywhere.

The form is told in `recordform`; reading is in `record_read`, what is read in `record_values`.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO

from gpumem_otel.base.profile import BlockState
from gpumem_otel.errors import SnapshotError
from gpumem_otel.recording import format as form
from gpumem_otel.recording.reader import Loader, read_content, whole_lines
from gpumem_otel.snapshot import torch_format
from gpumem_otel.snapshot.roots import builder_for, recorded_root, stackless_root
from gpumem_otel.snapshot.tensor_classes import TensorClass, class_of_root

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gpumem_otel.base.profile import Frame, Identity, Stack, StepStats
    from gpumem_otel.base.protocols import FrameNamer, Pause
    from gpumem_otel.recording.format import Recording
    from gpumem_otel.snapshot.reading import Reading
    from gpumem_otel.snapshot.stacks import StackBuilder
    from gpumem_otel.snapshot.tensor_classes import Classifier
    from gpumem_otel.snapshot.torch_format import RawBlock, RawFrame, RawSegment

# The tables of a recording as it is written: strings, frames and stacks, each written once.

_ITEMS_PER_LINE = 200


def json_text(value: object) -> str:
    """JSON without blanks, ASCII only."""
    return json.dumps(value, separators=(",", ":"))


class NewNames:
    """Strings, frames and stacks of the file, each written when it is first used."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self._new: dict[str, list[Any]] = {"strings": [], "frames": [], "stacks": []}
        self._references = 0

    def lines(self, pause: Pause | None = None) -> Iterator[str]:
        """Lines for what is new, none of them long."""
        for name, items in self._new.items():
            for start in range(0, len(items), _ITEMS_PER_LINE):
                if start and pause is not None:
                    pause()
                yield json_text({name: items[start : start + _ITEMS_PER_LINE]})

    def written(self) -> None:
        """What was new is in the file."""
        for items in self._new.values():
            items.clear()

    def too_large(self) -> bool:
        """Whether a limit of the form is passed."""
        return (
            len(self._strings) > form.MAX_STRINGS
            or len(self._frames) > form.MAX_FRAMES
            or len(self._stacks) > form.MAX_STACKS
            or self._references > form.MAX_FRAME_REFERENCES
        )

    def stack_index(self, stack: Stack) -> int:
        """Index of a stack in the file's table, to which it is added if it is new."""
        key = tuple(self._frame_index(frame) for frame in stack)
        index = self._stacks.get(key)
        if index is None:
            index = self._stacks[key] = len(self._stacks)
            self._new["stacks"].append(key)
            self._references += len(key)
        return index

    def _frame_index(self, frame: Frame) -> int:
        index = self._frames.get(frame)
        if index is None:
            index = self._frames[frame] = len(self._frames)
            self._new["frames"].append(
                (self._string_index(frame.name), self._string_index(frame.filename), frame.line)
            )
        return index

    def _string_index(self, string: str) -> int:
        index = self._strings.get(string)
        if index is None:
            index = self._strings[string] = len(self._strings)
            self._new["strings"].append(string)
        return index


class StackIndexes:
    """Stack indexes for the blocks and events of one snapshot."""

    def __init__(
        self, tables: NewNames, builder: StackBuilder, reading: Reading, pause: Pause | None
    ) -> None:
        self._tables = tables
        self._builder = builder
        self._snapshot = reading.snapshot
        self._rule = reading.stackless
        self._pause = pause
        self._lists: dict[int, int] = {}
        self._classes: dict[int, TensorClass] = {}
        self._known: dict[tuple[int, ...], int] = {}
        self._seen: dict[int, dict[int | None, bool]] = {}

    def of_block(self, device: int, block: RawBlock, state: BlockState) -> int:
        """The block's own stack, or for live memory without one its named root."""
        if state is BlockState.INACTIVE:
            return 0
        frames = torch_format.frames_of(block)
        if frames or state is not BlockState.ACTIVE_ALLOCATED:
            return self.of_frames(frames)
        root = self._root(device, block.get("address"))
        return self._tables.stack_index(self._builder.root(root))

    def class_of_block(self, device: int, block: RawBlock, classifier: Classifier) -> TensorClass:
        """The class of a block; what is not allocated has none."""
        if block["state"] != BlockState.ACTIVE_ALLOCATED.value:
            return TensorClass.UNATTRIBUTED
        found = classifier.of_block(block)
        if found is not None:
            return found
        frames = torch_format.frames_of(block)
        if frames:
            known = self._classes.get(id(frames))
            if known is None:
                known = self._classes[id(frames)] = classifier.of_stack(frames)
            return known
        return class_of_root(self._root(device, block.get("address")))

    def of_event(self, device: int, frames: Sequence[RawFrame], address: int | None) -> int:
        """The stack of a recorded allocation, or its named root."""
        if frames:
            return self.of_frames(frames)
        root = recorded_root(self._rule, device, address)
        return self._tables.stack_index(self._builder.root(root))

    def of_frames(self, frames: Sequence[RawFrame]) -> int:
        """A stack as recorded; 0 for none."""
        # the snapshot keeps lists and frames alive, so that an id stands for one of them
        index = self._lists.get(id(frames))
        if index is None:
            index = self._lists[id(frames)] = self._of_new_list(frames)
        return index

    def _root(self, device: int, address: int | None) -> str:
        if self._rule is not None:
            return self._rule(device, address)
        return stackless_root(self._has_event(device, address))

    def _of_new_list(self, frames: Sequence[RawFrame]) -> int:
        key = tuple(map(id, frames))
        index = self._known.get(key)
        if index is None:
            index = self._known[key] = self._tables.stack_index(self._builder.build(frames))
            if self._pause is not None:
                self._pause()
        return index

    def _has_event(self, device: int, address: int | None) -> bool:
        seen = self._seen.get(device)
        if seen is None:
            groups = self._snapshot.live_groups(device, self._pause)
            seen = {group.address: group.has_event for group in groups if not group.frames}
            self._seen[device] = seen
        return seen.get(address, False)


_BLOCKS_PER_PAUSE = 32
_NUMBERS_PER_PAUSE = 1000
_END = json_text({"end": {"why": "full"}})


class RecordingWriter:
    """Writes a recording as it happens.

    Every reading is flushed through to the file, so that a process that is killed leaves a
    recording of all that went before. It stops at the limits of the form and says so in the
    file: what it writes can be read. Not for use by several threads at a time.

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
            OSError: the file can not be written.
        """
        self.full = False
        self._file = file
        self._namer = namer
        self._max_depth = max_depth
        self._room = min(max_bytes, form.MAX_TEXT_BYTES) - len(_END) - 1
        self._zip: Any = zlib.compressobj(level=6, wbits=31)
        self._tables = NewNames()
        self._blocks = self._objects = 0
        header = {
            "format": form.FORMAT,
            "version": form.VERSION,
            "created_ns": created_ns,
            "identity": form.identity_form(identity),
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
            OSError: the file can not be written.
        """
        if self.full or self._zip is None:
            return False
        snapshot = reading.snapshot
        names = self._names(reading, pause)
        traced = [d for d in snapshot.devices() if next(snapshot.events(d), None) is not None]
        parts = [f"{self._opening('reading', reading)},"]
        parts.append(f'"steps":{json_text(form.steps_form(steps))},"traced":{json_text(traced)},')
        parts.append('"segments":[')
        raw_segments = snapshot.raw_segments()
        blocks = 0
        for position, segment in enumerate(raw_segments):
            blocks += len(segment["blocks"])
            if self._blocks + blocks > form.MAX_BLOCKS:
                return self._fill()
            parts.append("," if position else "")
            parts += self._segment(segment, names, reading.classifier, pause)
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
            OSError: the file can not be written.
        """
        if self.full or self._zip is None:
            return False
        names = self._names(reading, pause)
        groups: dict[str, list[list[int]]] = {}
        events = 0
        for device in reading.snapshot.devices():
            found: dict[int, list[int]] = {}
            for group in reading.snapshot.event_groups(device, pause=pause):
                index = names.of_event(device, group.frames, group.address)
                entry = found.setdefault(index, [0, 0])
                entry[0] += group.objects
                entry[1] += group.size_bytes
            if found:
                objects, sizes = zip(*found.values(), strict=True)
                groups[str(device)] = [list(found), list(objects), list(sizes)]
                events += sum(objects)
        if events > form.MAX_WINDOW_EVENTS:
            return False
        parts = [
            self._opening("window", reading),
            f',"seconds":{json_text(float(seconds))},"groups":{json_text(groups)}}}}}',
        ]
        objects_written = 1 + len(groups) + len(reading.before) + len(reading.after)
        return self._add(parts, objects_written, 0, pause)

    def close(self) -> None:
        """Write the end; the file itself stays open. A second call does nothing.

        Raises:
            OSError: the file can not be written.
        """
        if self._zip is not None:
            end, self._zip = self._zip.flush(zlib.Z_FINISH), None
            self._file.write(end)
            self._file.flush()

    def _names(self, reading: Reading, pause: Pause | None) -> StackIndexes:
        builder = builder_for(reading.snapshot, self._namer, self._max_depth)
        return StackIndexes(self._tables, builder, reading, pause)

    def _opening(self, what: str, reading: Reading) -> str:
        before = [form.stats_form(stats) for stats in reading.before]
        after = [form.stats_form(stats) for stats in reading.after]
        fields = {
            "time_ns": reading.time_ns,
            "stall_seconds": round(reading.stall_seconds, 9),
            "before": before,
            "after": None if after == before else after,
        }
        return f'{{"{what}":{json_text(fields)[:-1]}'

    def _segment(
        self,
        segment: RawSegment,
        names: StackIndexes,
        classifier: Classifier | None,
        pause: Pause | None,
    ) -> Iterable[str]:
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
                classes.append(form.CLASSES[names.class_of_block(device, block, classifier)])
        meta: dict[str, Any] = {
            "d": device,
            "a": start,
            "n": torch_format.reserved_of(segment, sum(sizes)),
            "s": torch_format.whole(segment.get("stream")),
            "t": torch_format.text(segment.get("segment_type")),
            "p": torch_format.pool_of(segment.get("segment_pool_id")) or (0, 0),
            "x": segment.get("is_expandable") is True,
            "k": names.of_frames(segment.get("frames") or ()),
        }
        yield f'{json_text(meta)[:-1]},"b":['
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

    def _add(self, parts: Sequence[str], objects: int, blocks: int, pause: Pause | None) -> bool:
        """Write the new entries of the tables and a line, if all of it fits."""
        tables = list(self._tables.lines(pause))
        line = sum(map(len, parts)) + 1
        needed = line + sum(len(table) + 1 for table in tables)
        if (
            needed > self._room
            or max(line, *map(len, tables), 0) > form.MAX_LINE_BYTES
            or self._tables.too_large()
            or self._objects + objects > form.MAX_OBJECTS
        ):
            return self._fill()
        self._blocks += blocks
        self._objects += objects
        for table in tables:
            self._compress([table], pause)
        self._tables.written()
        self._write(parts, pause)
        return True

    def _fill(self) -> bool:
        """Say in the file that more was to come; there is always room for that."""
        self.full = True
        self._write([_END])
        return False

    def _write(self, parts: Iterable[str], pause: Pause | None = None) -> None:
        self._compress(parts, pause)
        self._out(self._zip.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def _compress(self, parts: Iterable[str], pause: Pause | None) -> None:
        for part in (*parts, "\n"):
            self._room -= len(part)
            self._out(self._zip.compress(part.encode("ascii")), pause)

    def _out(self, data: bytes, pause: Pause | None = None) -> None:
        try:
            self._file.write(data)
            if pause is not None:
                pause()  # which may raise too, to end it all
        except BaseException:
            # what follows a hole in the stream could not be read, its end no more than the rest
            self.full = True
            self._zip = None
            raise


def load_recording(
    data: bytes | str | os.PathLike[str] | BinaryIO, *, name: str | None = None
) -> Recording:
    """Read a recording.

    Args:
        data: the bytes of the file, its path, or a file open for reading bytes.
        name: what messages call it.

    Raises:
        SnapshotError: it can not be read or is no recording; no other error leaves this function.
    """
    content, source = read_content(data, name)
    loader = Loader(source)
    lines = whole_lines(content, source, loader.warnings)
    try:
        for count, line in enumerate(lines, 1):
            loader.take(line, count)
    except MemoryError:
        raise SnapshotError(source, "too large for this machine's memory") from None
    return loader.recording()


def _numbers(values: Sequence[object], pause: Pause | None) -> Iterable[str]:
    """A list of numbers as JSON, in pieces."""
    yield "["
    for start in range(0, len(values), _NUMBERS_PER_PAUSE):
        if start:
            yield ","
            if pause is not None:
                pause()
        yield ",".join(map(str, values[start : start + _NUMBERS_PER_PAUSE]))
    yield "]"
