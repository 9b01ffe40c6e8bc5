"""Reads recordings; the whole file is checked.

A recording may come from an untrusted source: whatever it holds, reading it ends in a `Recording`
or in a `SnapshotError`, within the limits of the format.
"""

from __future__ import annotations

import io
import json
import zlib
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from gpumem_otel.base.profile import DeviceStats, Identity, StepStats
from gpumem_otel.errors import SnapshotError
from gpumem_otel.recording import format as form
from gpumem_otel.recording.recorded import (
    CLASS_WORDS,
    STATE_WORDS,
    RecordedReading,
    RecordedSegment,
    RecordedTables,
    RecordedWindow,
    Recording,
    RecordingHeader,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

_CHUNK_BYTES: Final = 1 << 20


def load_recording(
    data: bytes | str | os.PathLike[str] | BinaryIO, *, name: str | None = None
) -> Recording:
    """Read a recording.

    Args:
        data: the bytes of the file, its path, or a file open for reading bytes.
        name: what messages call it.

    Raises:
        SnapshotError: it cannot be read or is no recording; no other error leaves this function.
    """
    content, source = _content(data, name)
    loader = _Loader(source)
    try:
        for number, line in enumerate(_whole_lines(content, source, loader.warnings), 1):
            loader.take(line, number)
    except MemoryError:
        raise SnapshotError(source, "too large for this machine's memory") from None
    return loader.recording()


# From a file to whole lines.


def _content(
    data: bytes | str | os.PathLike[str] | BinaryIO, name: str | None
) -> tuple[bytes, str]:
    """Bytes and name of a file."""
    most = form.MAX_FILE_BYTES + 1
    if isinstance(data, bytes | bytearray | memoryview):
        content, source = bytes(data), name or "<recording>"
    else:
        is_open = hasattr(data, "read")
        source = name or str(getattr(data, "name", "<recording>") if is_open else data)
        try:
            if is_open:
                content = data.read(most)  # type: ignore[union-attr]
            else:
                with Path(data).open("rb") as file:  # type: ignore[arg-type]
                    content = file.read(most)
        except (OSError, ValueError) as error:
            raise SnapshotError(source, getattr(error, "strerror", None) or str(error)) from None
    if len(content) >= most:
        raise SnapshotError(source, f"larger than {form.MAX_FILE_BYTES} bytes")
    return content, source


class _Inflated(io.RawIOBase):
    """The text of a gzip stream whose end may be missing."""

    def __init__(self, content: bytes, source: str, warnings: list[str]) -> None:
        self._compressed = io.BytesIO(content)
        self._inflate = zlib.decompressobj(wbits=31)
        self._source = source
        self._warnings = warnings

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        inflate = self._inflate
        while not inflate.eof:
            data = inflate.unconsumed_tail or self._compressed.read(_CHUNK_BYTES)
            try:
                piece = inflate.decompress(data, len(buffer))
            except zlib.error:
                raise SnapshotError(self._source, "damaged gzip") from None
            if piece:
                buffer[: len(piece)] = piece
                return len(piece)
            if not data:
                self._warnings.append("the recording was not closed: its writer was stopped")
                break
        return 0


def _whole_lines(content: bytes, source: str, warnings: list[str]) -> Iterator[bytes]:
    """The lines of the text, but for one without an end, as a killed process leaves it."""
    is_gzip = content[:2] == b"\x1f\x8b"
    raw = _Inflated(content, source, warnings) if is_gzip else io.BytesIO(content)
    file = io.BufferedReader(raw, _CHUNK_BYTES)
    total = 0
    while line := file.readline(form.MAX_LINE_BYTES + 1):
        total += len(line)
        if total > form.MAX_TEXT_BYTES:
            raise SnapshotError(source, f"holds more than {form.MAX_TEXT_BYTES} bytes of text")
        if line.endswith(b"\n"):
            yield line
        elif len(line) > form.MAX_LINE_BYTES:
            raise SnapshotError(source, f"a line is longer than {form.MAX_LINE_BYTES} bytes")
        else:
            warnings.append("the recording is cut: its last line is left out")
            return


# From lines to values.


class _Loader:
    """Takes the lines of a recording one by one."""

    def __init__(self, source: str) -> None:
        self.warnings: list[str] = []
        self._source = source
        self._header: RecordingHeader | None = None
        self._identity: Identity | None = None
        self._tables = RecordedTables()
        self._readings: list[RecordedReading] = []
        self._windows: list[RecordedWindow] = []
        self._references = self._blocks = self._objects = 0
        self._ended = False

    def take(self, line: bytes, number: int) -> None:
        """Check and keep one line."""
        try:
            self._take(form.mapping(json.loads(line.decode("utf-8")), "the line"))
        except form.FormatError as error:
            raise SnapshotError(self._source, f"line {number}: {error}") from None
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            # the texts of these may quote anything that the file holds
            raise SnapshotError(self._source, f"line {number} is damaged") from None

    def recording(self) -> Recording:
        if self._header is None or self._identity is None:
            raise SnapshotError(self._source, "no recording: it has no header")
        return Recording(
            source=self._source,
            header=self._header,
            identity=self._identity,
            readings=tuple(self._readings),
            windows=tuple(self._windows),
            warnings=tuple(self.warnings),
        )

    def _take(self, line: dict[str, Any]) -> None:
        tables = self._tables
        if self._header is None:
            self._take_header(line)
        elif "strings" in line:
            room = form.MAX_STRINGS - len(tables.strings)
            added = form.sequence(line["strings"], "strings", room)
            tables.strings += [form.text(string, "a string") for string in added]
        elif "frames" in line:
            room = form.MAX_FRAMES - len(tables.frames)
            tables.frames += map(self._frame, form.sequence(line["frames"], "frames", room))
        elif "stacks" in line:
            room = form.MAX_STACKS - len(tables.stacks)
            tables.stacks += map(self._stack, form.sequence(line["stacks"], "stacks", room))
        elif "reading" in line:
            self._take_reading(form.mapping(line["reading"], "a reading"))
        elif "window" in line:
            self._take_window(form.mapping(line["window"], "a window"))
        elif "end" in line and not self._ended:
            self._ended = True
            times_ns = [reading.time_ns for reading in self._readings] or [0]
            seconds = (times_ns[-1] - times_ns[0]) / 1e9
            self.warnings.append(f"the recording stopped at its limit after {seconds:.0f} s")

    def _take_header(self, line: dict[str, Any]) -> None:
        if line.get("format") != form.FORMAT:
            raise SnapshotError(self._source, "no recording: it has no header")
        header = RecordingHeader(**form.decode(form.HEADER, line, "the header"))
        if header.version > form.VERSION:
            raise SnapshotError(
                self._source,
                f"written by a newer version of this package (format {header.version})",
            )
        self._identity = Identity(
            **form.decode(form.IDENTITY, line.get("identity", {}), "identity")
        )
        self._header = header

    def _frame(self, item: object) -> dict[str, Any]:
        name, filename, line = form.sequence(item, "parts of a frame", 3)
        strings = self._tables.strings
        return {
            "name": strings[form.whole(name, "a name", 0, len(strings) - 1)],
            "filename": strings[form.whole(filename, "a file name", 0, len(strings) - 1)],
            "line": form.whole(line, "a line"),
        }

    def _stack(self, item: object) -> list[dict[str, Any]]:
        room = form.MAX_FRAME_REFERENCES - self._references
        indexes = form.sequence(item, "frames of stacks", room)
        self._references += len(indexes)
        frames = self._tables.frames
        return [frames[form.whole(index, "a frame", 0, len(frames) - 1)] for index in indexes]

    def _take_reading(self, item: dict[str, Any]) -> None:
        segments = form.sequence(item.get("segments"), "segments", form.MAX_OBJECTS)
        traced = form.sequence(item.get("traced", []), "devices", form.MAX_DEVICES)
        self._charge(1 + len(segments) + len(traced))
        steps = StepStats(**form.decode(form.STEP_STATS, item.get("steps", {}), "steps"))
        self._charge(len(steps.floor_bytes))
        self._readings.append(
            RecordedReading(
                **self._shared(item, f"reading {len(self._readings) + 1}"),
                steps=steps,
                _segments=tuple(map(self._segment, segments)),
                _traced=tuple(map(form.device, traced)),
            )
        )

    def _take_window(self, item: dict[str, Any]) -> None:
        columns_of = form.mapping(item.get("groups", {}), "groups")
        self._charge(1 + len(columns_of))
        groups = {form.device_key(key): self._groups(item) for key, item in columns_of.items()}
        if sum(sum(objects) for _, objects, _ in groups.values()) > form.MAX_WINDOW_EVENTS:
            raise form.FormatError(f"more than {form.MAX_WINDOW_EVENTS} events in a window")
        self._windows.append(
            RecordedWindow(
                **self._shared(item, f"window {len(self._windows) + 1}"),
                seconds=form.number(item.get("seconds", 0), "seconds"),
                _groups=groups,
            )
        )

    def _charge(self, objects: int) -> None:
        # a byte of text can become hundreds in memory: every object of ours counts
        self._objects += objects
        if self._objects > form.MAX_OBJECTS:
            raise form.FormatError(f"more than {form.MAX_OBJECTS} segments and counters")

    def _shared(self, item: dict[str, Any], which: str) -> dict[str, Any]:
        before = self._all_stats(item.get("before", []))
        after = item.get("after")
        return {
            "source": f"{self._source}, {which}",
            "time_ns": form.whole(item.get("time_ns"), "time_ns"),
            "stall_seconds": form.number(item.get("stall_seconds", 0), "stall_seconds"),
            "before": before,
            "after": before if after is None else self._all_stats(after),
            "_tables": self._tables,
        }

    def _all_stats(self, item: object) -> tuple[DeviceStats, ...]:
        devices = form.sequence(item, "device counters", form.MAX_DEVICES)
        self._charge(len(devices))
        all_stats = []
        for counters in devices:
            named = form.mapping(counters, "device counters").items()
            known = {name: value for name, value in named if value is not None}
            all_stats.append(DeviceStats(**form.decode(form.DEVICE_STATS, known, "counters")))
        return tuple(all_stats)

    def _segment(self, item: object) -> RecordedSegment:
        torch_fields = form.decode(form.SEGMENT, item, "a segment")
        columns = form.mapping(item, "a segment")
        sizes, slack, states, stacks = form.sequence(columns.get("b"), "columns", 4)
        sizes = array("q", form.sequence(sizes, "blocks", form.MAX_BLOCKS - self._blocks))
        count = len(sizes)
        self._blocks += count
        slack = None if slack is None else array("q", form.sequence(slack, "sizes", count))
        addresses = columns.get("A")
        if addresses is not None:
            addresses = tuple(
                None if address is None else form.whole(address, "an address", 0, form.UINT64_MAX)
                for address in form.sequence(addresses, "addresses", count)
            )
        classes = None if columns.get("c") is None else form.text(columns["c"], "classes")
        segment = RecordedSegment(
            torch_fields=torch_fields,
            stack=self._stacks([columns.get("k", 0)], 1)[0],
            sizes=sizes,
            slack=slack,
            states=form.text(states, "states").encode(),
            stacks=self._stacks(stacks, count),
            addresses=addresses,
            # a newer version knows more classes: the stacks tell them then
            classes=classes if set(classes or ()) <= CLASS_WORDS.keys() else None,
        )
        all_columns = (segment.states, segment.stacks, slack, addresses, classes)
        if not set(segment.states) <= STATE_WORDS.keys() or any(
            len(column) != count for column in all_columns if column is not None
        ):
            raise form.FormatError("columns of blocks do not fit")
        requested = sizes if slack is None else map(sum, zip(sizes, slack, strict=True))
        if count and (min(sizes) < 0 or min(requested) < 0):
            raise form.FormatError("a block has a negative size")
        return segment

    def _groups(self, item: object) -> tuple[array[int], array[int], array[int]]:
        columns = form.sequence(item, "columns", 3)
        stacks = self._stacks(columns[0], form.MAX_STACKS)
        objects, sizes = (array("q", form.sequence(c, "groups", len(stacks))) for c in columns[1:])
        if not len(stacks) == len(objects) == len(sizes):
            raise form.FormatError("columns of events do not fit")
        if stacks and (min(objects) < 0 or min(sizes) < 0):
            raise form.FormatError("a group is negative")
        return stacks, objects, sizes

    def _stacks(self, item: object, most: int) -> array[int]:
        indexes = array("I", form.sequence(item, "stacks of blocks", most))
        if indexes and max(indexes) >= len(self._tables.stacks):
            raise form.FormatError("a stack that was never written")
        return indexes
