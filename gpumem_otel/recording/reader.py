"""Recordings read back: the file is checked whole, snapshots are made as they are asked for.

A recording may come from a stranger: whatever it holds, reading it ends in a `Recording` or in a
`SnapshotError`, within the limits of `recordform`.
"""

from __future__ import annotations

import json
import zlib
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gpumem_otel.errors import SnapshotError
from gpumem_otel.recording import format as form
from gpumem_otel.recording.format import (
    STATE_WORDS,
    RecordedReading,
    RecordedSegment,
    RecordedWindow,
    Recording,
    RecordingHeader,
    Tables,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from gpumem_otel.base.profile import DeviceStats, Identity

# The lines of a recording file, gzip or plain, whatever became of its end.

_CHUNK = 1 << 20


def read_content(
    data: bytes | str | os.PathLike[str] | BinaryIO, name: str | None
) -> tuple[bytes, str]:
    """Bytes and name of a file.

    Raises:
        SnapshotError: it can not be read, or is too large.
    """
    if isinstance(data, bytes | bytearray | memoryview):
        content, source = bytes(data), name or "<recording>"
    else:
        try:
            if hasattr(data, "read"):
                source = name or str(getattr(data, "name", "<recording>"))
                content = data.read(form.MAX_FILE_BYTES + 1)
            else:
                source = name or str(data)
                with Path(data).open("rb") as file:
                    content = file.read(form.MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            raise SnapshotError(source, getattr(error, "strerror", None) or str(error)) from None
    if len(content) > form.MAX_FILE_BYTES:
        raise SnapshotError(source, f"larger than {form.MAX_FILE_BYTES} bytes")
    return content, source


def whole_lines(content: bytes, source: str, warnings: list[str]) -> Iterator[bytes]:
    """Whole lines of the text; what is missing at its end is told in `warnings`.

    A process that was killed leaves a file without an end: what follows the last newline is left
    out.

    Raises:
        SnapshotError: damaged, or more text than a recording may hold.
    """
    pending: list[bytes] = []
    length = total = 0
    for piece in _pieces(content, source, warnings):
        total += len(piece)
        if total > form.MAX_TEXT_BYTES:
            raise SnapshotError(source, f"holds more than {form.MAX_TEXT_BYTES} bytes of text")
        first, *rest = piece.split(b"\n")
        pending.append(first)
        length += len(first)
        if length > form.MAX_LINE_BYTES:
            raise SnapshotError(source, f"a line is longer than {form.MAX_LINE_BYTES} bytes")
        for part in rest:
            yield b"".join(pending)
            pending, length = [part], len(part)
    if length:
        warnings.append("the recording is cut: its last line is left out")


def _pieces(content: bytes, source: str, warnings: list[str]) -> Iterator[bytes]:
    if content[:2] != b"\x1f\x8b":
        for start in range(0, len(content), _CHUNK):
            yield content[start : start + _CHUNK]
        return
    inflate = zlib.decompressobj(wbits=31)
    given = 0
    while not inflate.eof:
        data = inflate.unconsumed_tail
        if not data:
            data = content[given : given + _CHUNK]
            given += len(data)
        try:
            piece = inflate.decompress(data, _CHUNK)
        except zlib.error:
            raise SnapshotError(source, "damaged gzip") from None
        if piece:
            yield piece
        elif not data:
            warnings.append("the recording was not closed: its writer was stopped")
            return


_CLASS_LETTERS = frozenset(form.CLASSES.values())


class Loader:
    """Takes the lines of a recording one by one.

    Attributes:
        warnings: what a reader of the recording should know.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.warnings: list[str] = []
        self._header: RecordingHeader | None = None
        self._identity: Identity | None = None
        self._tables = Tables()
        self._readings: list[RecordedReading] = []
        self._windows: list[RecordedWindow] = []
        self._blocks = 0
        self._objects = 0
        self._ended = False

    def take(self, line: bytes, count: int) -> None:
        """Check and keep one line."""
        try:
            self._take(form.mapping(json.loads(line.decode("utf-8")), "the line"))
        except form.BadFormError as error:
            raise SnapshotError(self.source, f"line {count}: {error}") from None
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            # the texts of these may hold anything that the file does
            raise SnapshotError(self.source, f"line {count} is damaged") from None

    def recording(self) -> Recording:
        """What was read."""
        if self._header is None or self._identity is None:
            raise SnapshotError(self.source, "no recording: it has no header")
        return Recording(
            source=self.source,
            header=self._header,
            identity=self._identity,
            readings=tuple(self._readings),
            windows=tuple(self._windows),
            warnings=tuple(self.warnings),
        )

    def _take(self, line: dict[str, Any]) -> None:
        if self._header is None:
            self._take_header(line)
        elif "strings" in line:
            room = form.MAX_STRINGS - len(self._tables.strings)
            added = form.sequence(line["strings"], "strings", room)
            self._tables.strings += [form.text(item, "a string") for item in added]
        elif "frames" in line:
            room = form.MAX_FRAMES - len(self._tables.frames)
            self._tables.frames += map(self._frame, form.sequence(line["frames"], "frames", room))
        elif "stacks" in line:
            room = form.MAX_STACKS - len(self._tables.stacks)
            self._tables.stacks += map(self._stack, form.sequence(line["stacks"], "stacks", room))
        elif "reading" in line:
            self._take_reading(form.mapping(line["reading"], "a reading"))
        elif "window" in line:
            self._take_window(form.mapping(line["window"], "a window"))
        elif "end" in line and not self._ended:
            self._ended = True
            moments = [reading.time_ns for reading in self._readings] or [0]
            self.warnings.append(
                f"the recording stopped at its limit after {(moments[-1] - moments[0]) / 1e9:.0f} s"
            )

    def _take_header(self, line: dict[str, Any]) -> None:
        if line.get("format") != form.FORMAT:
            raise SnapshotError(self.source, "no recording: it has no header")
        version = form.whole(line.get("version"), "version", 1)
        if version > form.VERSION:
            raise SnapshotError(
                self.source, f"written by a newer version of this package (form {version})"
            )
        self._header = RecordingHeader(
            version=version,
            created_ns=form.whole(line.get("created_ns", 0), "created_ns"),
            facts=form.facts_of(line.get("facts", {})),
        )
        self._identity = form.identity_of(line.get("identity", {}))

    def _frame(self, item: object) -> dict[str, Any]:
        name, filename, line = form.sequence(item, "parts of a frame", 3)
        last = len(self._tables.strings) - 1
        return {
            "name": self._tables.strings[form.whole(name, "a name", 0, last)],
            "filename": self._tables.strings[form.whole(filename, "a file name", 0, last)],
            "line": form.whole(line, "a line"),
        }

    def _stack(self, item: object) -> list[dict[str, Any]]:
        room = form.MAX_FRAME_REFERENCES - self._tables.references
        frames = form.sequence(item, "frames of stacks", room)
        self._tables.references += len(frames)
        last = len(self._tables.frames) - 1
        return [self._tables.frames[form.whole(index, "a frame", 0, last)] for index in frames]

    def _take_reading(self, item: dict[str, Any]) -> None:
        segments = form.sequence(item.get("segments"), "segments", form.MAX_OBJECTS)
        traced = form.sequence(item.get("traced", []), "devices", form.MAX_DEVICES)
        steps = form.mapping(item.get("steps", {}), "steps")
        self._charge(1 + len(segments) + len(traced))
        self._charge(len(form.mapping(steps.get("floor_bytes", {}), "floor_bytes")))
        self._readings.append(
            RecordedReading(
                **self._shared(item, f"reading {len(self._readings) + 1}"),
                steps=form.steps_of(steps),
                _segments=tuple(self._segment(segment) for segment in segments),
                _traced=tuple(form.whole(d, "device", 0, form.MAX_DEVICES - 1) for d in traced),
                _tables=self._tables,
            )
        )

    def _take_window(self, item: dict[str, Any]) -> None:
        given = form.mapping(item.get("groups", {}), "groups")
        self._charge(1 + len(given))
        groups = {
            form.device_of(device): self._groups(columns) for device, columns in given.items()
        }
        if sum(sum(objects) for _, objects, _ in groups.values()) > form.MAX_WINDOW_EVENTS:
            raise form.BadFormError(f"more than {form.MAX_WINDOW_EVENTS} events in a window")
        self._windows.append(
            RecordedWindow(
                **self._shared(item, f"window {len(self._windows) + 1}"),
                seconds=form.number(item.get("seconds", 0), "seconds"),
                _groups=groups,
                _tables=self._tables,
            )
        )

    def _charge(self, objects: int) -> None:
        # a byte of text can become hundreds in memory: everything of ours counts
        self._objects += objects
        if self._objects > form.MAX_OBJECTS:
            raise form.BadFormError(f"more than {form.MAX_OBJECTS} segments and counters")

    def _shared(self, item: dict[str, Any], which: str) -> dict[str, Any]:
        before = self._all_stats(item.get("before", []))
        after = item.get("after")
        return {
            "source": f"{self.source}, {which}",
            "time_ns": form.whole(item.get("time_ns"), "time_ns"),
            "stall_seconds": form.number(item.get("stall_seconds", 0), "stall_seconds"),
            "before": before,
            "after": before if after is None else self._all_stats(after),
        }

    def _all_stats(self, item: object) -> tuple[DeviceStats, ...]:
        given = form.sequence(item, "device counters", form.MAX_DEVICES)
        self._charge(len(given))
        return tuple(map(form.stats_of, given))

    def _segment(self, item: object) -> RecordedSegment:
        given = form.mapping(item, "a segment")
        columns = form.sequence(given.get("b"), "columns", 4)
        room = form.MAX_BLOCKS - self._blocks
        sizes = array("q", form.sequence(columns[0], "blocks", room))
        count = len(sizes)
        self._blocks += count
        slack = (
            None if columns[1] is None else array("q", form.sequence(columns[1], "sizes", count))
        )
        states = form.text(columns[2], "states").encode()
        stacks = self._stacks(columns[3], count)
        addresses = given.get("A")
        if addresses is not None:
            addresses = tuple(
                None if a is None else form.whole(a, "an address", 0, 2**64 - 1)
                for a in form.sequence(addresses, "addresses", count)
            )
        classes = None if given.get("c") is None else form.text(given["c"], "classes")
        columns_fit = all(
            len(column) == count
            for column in (states, stacks, slack, addresses, classes)
            if column is not None
        )
        if classes is not None and set(classes) - _CLASS_LETTERS:
            classes = None  # a newer version knows more of them: by stack then
        if not columns_fit or not STATE_WORDS.keys() >= set(states):
            raise form.BadFormError("columns of blocks do not fit")
        if count and (min(sizes) < 0 or (slack is not None and _below(sizes, slack))):
            raise form.BadFormError("a block has a negative size")
        pool = form.sequence(given.get("p", [0, 0]), "parts of a pool", 2)
        return RecordedSegment(
            device=form.whole(given.get("d"), "device", 0, form.MAX_DEVICES - 1),
            address=form.whole(given.get("a", 0), "an address", 0, 2**64 - 1),
            size_bytes=form.whole(given.get("n"), "a size"),
            stream=form.whole(given.get("s", 0), "a stream", 0, 2**64 - 1),
            kind=form.text(given.get("t", ""), "a kind"),
            pool_id=(form.whole(pool[0], "a pool"), form.whole(pool[1], "a pool")),
            is_expandable=given.get("x") is True,
            stack=self._stacks([given.get("k", 0)], 1)[0],
            sizes=sizes,
            slack=slack,
            states=states,
            stacks=stacks,
            addresses=addresses,
            classes=classes,
        )

    def _groups(self, item: object) -> tuple[array[int], array[int], array[int]]:
        columns = form.sequence(item, "columns", 3)
        stacks = self._stacks(columns[0], form.MAX_STACKS)
        objects, sizes = (array("q", form.sequence(c, "groups", len(stacks))) for c in columns[1:])
        if not len(stacks) == len(objects) == len(sizes):
            raise form.BadFormError("columns of events do not fit")
        if stacks and (min(objects) < 0 or min(sizes) < 0):
            raise form.BadFormError("a group is negative")
        return stacks, objects, sizes

    def _stacks(self, item: object, most: int) -> array[int]:
        indexes = array("I", form.sequence(item, "stacks of blocks", most))
        if indexes and max(indexes) >= len(self._tables.stacks):
            raise form.BadFormError("a stack that was never written")
        return indexes


def _below(sizes: array[int], slack: array[int]) -> bool:
    return any(size + more < 0 for size, more in zip(sizes, slack, strict=True))
