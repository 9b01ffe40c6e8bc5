"""HeapProfile -> pprof bytes.

Format: https://github.com/google/pprof/blob/main/proto/profile.proto. What servers make of it
shaped the choices here:

* `period_type` is space/bytes and `period` 1, always: it is part of the type's name in Pyroscope.
* One more sample type, `snapshots/count`, is the divisor for servers that add up all profiles of
  a range. It is carried by a sample of its own with the frame `(snapshot)` and no bytes, so that
  the flame graph of the bytes shows nothing but memory, and so that a moment at which nothing was
  allocated still counts: a profile without any non-zero sample is stored as nothing at all.
* `Function.system_name` stays empty. Where it equals the name, `go tool pprof` takes the name for
  a mangled C++ symbol and cuts `<...>` and `(...)` out of it.
* One mapping that says `has_functions`: without any, `go tool pprof` makes one up, looks for
  symbols and warns that it found none.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from gpumem_otel.base.aggregate import add
from gpumem_otel.base.profile import Frame, ProfileKind, Sample
from gpumem_otel.errors import EncodeError
from gpumem_otel.profiles import pprof_reader
from gpumem_otel.profiles.protobuf_wire import (
    INT64_MAX,
    bytes_field,
    int_field,
    packed_field,
    utf8,
    varint,
)
from gpumem_otel.snapshot.stacks import UNNAMED
from gpumem_otel.snapshot.tensor_classes import other_stack

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from gpumem_otel.base.profile import HeapProfile, Stack
    from gpumem_otel.base.protocols import Pause

SAMPLE_TYPES = {
    ProfileKind.LIVE: (("inuse_objects", "count"), ("inuse_space", "bytes")),
    ProfileKind.ALLOCATED: (("alloc_objects", "count"), ("alloc_space", "bytes")),
    ProfileKind.PEAK: (("peak_objects", "count"), ("peak_space", "bytes")),
    ProfileKind.PINNED: (("pinned_objects", "count"), ("pinned_space", "bytes")),
    ProfileKind.GROWTH: (("growth_objects", "count"), ("growth_space", "bytes")),
}
"""(type, unit) of the first two values of a sample; the third is always snapshots/count."""

SNAPSHOT_FRAME = Frame("(snapshot)")
_NO_STACK = Frame("[no stack]")

_MAPPING_ID = 1
_MAPPING_NAME = "gpu_memory"
"""Shown by `go tool pprof` as the file; no path, so that no binary is looked for."""

_SAMPLES_PER_PAUSE = 16
_GZIP_LEVEL = 1

_Labels = tuple[tuple[str, str], ...]


decode = pprof_reader.decode
"""The reader, to check what was written."""


def encode(
    profiles: Sequence[HeapProfile],
    *,
    comments: Sequence[str] = (),
    device_labels: Mapping[str, str] | None = None,
    max_bytes: int | None = None,
    kind: ProfileKind = ProfileKind.LIVE,
    pause: Pause | None = None,
) -> bytes:
    """Uncompressed pprof of profiles of one kind; the same bytes for the same input.

    Args:
        profiles: what to write, in this order.
        comments: sentences added to those of the profiles.
        device_labels: not None gives every sample the string labels `device` and these (a server
            that pulls knows the labels of the target only), and each device a snapshot count of
            its own; otherwise the profiles together count as one snapshot.
        max_bytes: where the encoding would be larger, only the largest samples that fit are kept;
            the others become one sample `[other]` per profile, tensor class and label set. Totals
            stay the same.
        kind: what to call the types where there is no profile at all.
        pause: called after every 16 samples, and after each with frames not met before.

    Labels without a name or value are left out, as such a label says the same as none.

    Raises:
        EncodeError: profiles of different kinds, a number that is negative or beyond 64 bits, or
            a `max_bytes` that even `[other]` alone exceeds.
    """
    if len({profile.kind for profile in profiles}) > 1:
        raise EncodeError("profiles of different kinds do not fit one pprof")
    document = _Document(profiles, comments, device_labels, kind, pause)
    everything = [profile.samples for profile in profiles]
    writer = document.write(everything)
    data = writer.finish()
    if max_bytes is None or len(data) <= max_bytes:
        return data
    return _fit(document, everything, writer, max_bytes)


def gzip_bytes(data: bytes) -> bytes:
    """Gzip without time and name, so that equal input gives equal bytes.

    Level 1: two to four times as quick as level 6 for 4 to 10 % more bytes (measured on profiles
    of 3 kB to 1.5 MB). zlib works without the interpreter lock.
    """
    deflate = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return deflate.compress(data) + deflate.flush()


class _Document:
    """What all attempts at one pprof have in common."""

    def __init__(
        self,
        profiles: Sequence[HeapProfile],
        comments: Sequence[str],
        device_labels: Mapping[str, str] | None,
        kind: ProfileKind,
        pause: Pause | None,
    ) -> None:
        self.pause = pause
        self.types = (*SAMPLE_TYPES[profiles[0].kind if profiles else kind], ("snapshots", "count"))
        self.time_ns = max((p.time_ns for p in profiles), default=0)
        self.duration_ns = max((p.duration_ns for p in profiles), default=0)
        texts = [text for profile in profiles for text in profile.comments]
        self.comments = tuple(dict.fromkeys((*texts, *comments)))
        self.labels: list[_Labels] = [
            ()
            if device_labels is None
            else tuple({**device_labels, "device": str(profile.device)}.items())
            for profile in profiles
        ]
        # Samples of devices that nothing tells apart are one reading, counted once.
        self.snapshots = self.labels[:1] if device_labels is None else self.labels

    def write(self, samples: Sequence[Sequence[Sample]]) -> _Writer:
        """Write everything with these samples, one sequence per profile."""
        writer = _Writer(self)
        for labels, group in zip(self.labels, samples, strict=True):
            for start in range(0, len(group), _SAMPLES_PER_PAUSE):
                writer.add(group[start : start + _SAMPLES_PER_PAUSE], labels)
                if self.pause is not None:
                    self.pause()
        for labels in self.snapshots:
            writer.add((Sample((SNAPSHOT_FRAME,), 0, 0),), labels, snapshots=1)
        return writer


class _Writer:
    """Builds the tables and keeps every message as finished bytes.

    The messages that come by the thousand are formatted by hand, their tags written out as
    field number times eight plus wire type; `bytes_field` and `int_field` cost four times as much.
    Chunks and ids are cached by the identity of the frame (the profiles keep their frames alive),
    since that turns the inner loop over frames into C code.
    """

    def __init__(self, document: _Document) -> None:
        self._document = document
        self._strings: dict[str, int] = {}
        self._functions: dict[tuple[int, int], int] = {}
        self._locations: dict[tuple[int, int], int] = {}
        self._label_chunks: dict[tuple[_Labels, _Labels], bytes] = {}
        self._packed_ids: dict[int, bytes] = {}
        self.location_ids: dict[int, int] = {}
        self.location_functions: list[int] = [0]
        self.function_strings: list[tuple[int, int]] = [(0, 0)]
        self.sample_chunks: list[bytes] = []
        # Ids start at 1; place 0 of these two is a filler that keeps id and index the same.
        self.location_chunks: list[bytes] = [b""]
        self.function_chunks: list[bytes] = [b""]
        self.string_chunks: list[bytes] = []
        self._string("")
        self._types = [self._value_type(1, *pair) for pair in document.types]
        self._period_type = self._value_type(11, "space", "bytes")
        self._mapping = bytes_field(
            3,
            int_field(1, _MAPPING_ID) + int_field(5, self._string(_MAPPING_NAME)) + int_field(7, 1),
        )

    def add(self, samples: Sequence[Sample], labels: _Labels, snapshots: int = 0) -> None:
        """Append samples, all with these labels in addition to their own."""
        packed_id = self._packed_ids.__getitem__
        join = b"".join
        third = varint(snapshots)
        for sample in samples:
            try:
                stack = join(map(packed_id, map(id, sample.frames)))
            except KeyError:
                stack = self._new_stack(sample.frames)
            if not stack:
                stack = self._new_stack((_NO_STACK,))
            objects, size_bytes = sample.objects, sample.size_bytes
            if not (0 <= objects <= INT64_MAX and 0 <= size_bytes <= INT64_MAX):
                raise EncodeError(f"a sample of {objects} objects and {size_bytes} bytes")
            values = varint(objects) + varint(size_bytes) + third
            chunk = b"\x0a%b%b\x12%c%b" % (varint(len(stack)), stack, len(values), values)
            if labels or sample.labels:
                chunk += self._labels(sample.labels, labels)
            self.sample_chunks.append(b"\x12%b%b" % (varint(len(chunk)), chunk))

    def finish(self) -> bytes:
        """The whole profile; nothing may be added afterwards."""
        document = self._document
        comments = packed_field(13, [self._string(text) for text in document.comments])
        default_type = int_field(14, self._string(document.types[1][0]))
        for name, number in (("time", document.time_ns), ("duration", document.duration_ns)):
            if not 0 <= number <= INT64_MAX:
                raise EncodeError(f"a {name} of {number} nanoseconds")
        return b"".join(
            (
                *self._types,
                *self.sample_chunks,
                self._mapping,
                *self.location_chunks,
                *self.function_chunks,
                *self.string_chunks,
                int_field(9, document.time_ns),
                int_field(10, document.duration_ns),
                self._period_type,
                int_field(12, 1),
                comments,
                default_type,
            )
        )

    def _new_stack(self, frames: Stack) -> bytes:
        packed_ids = self._packed_ids
        for frame in [frame for frame in frames if id(frame) not in packed_ids]:
            location = self.location_ids[id(frame)] = self._location(frame)
            packed_ids[id(frame)] = varint(location)
        if self._document.pause is not None:
            self._document.pause()
        return b"".join(map(packed_ids.__getitem__, map(id, frames)))

    def _location(self, frame: Frame) -> int:
        strings = (self._string(frame.name or UNNAMED), self._string(frame.filename))
        function = self._functions.get(strings)
        if function is None:
            function = self._function(strings)
        # Unwinders write 2^64-1 for an unknown line, which no reader of int64 can show.
        line = frame.line if 0 <= frame.line <= INT64_MAX else 0
        location = self._locations.get((function, line))
        if location is None:
            location = self._locations[function, line] = len(self.location_chunks)
            # Three numbers of at most ten bytes each: every length below fits one byte.
            code = b"\x08" + varint(function)
            if line:
                code += b"\x10" + varint(line)
            code = b'\x08%b\x10\x01"%c%b' % (varint(location), len(code), code)
            self.location_chunks.append(b'"%c%b' % (len(code), code))
            self.location_functions.append(function)
        return location

    def _function(self, strings: tuple[int, int]) -> int:
        function = self._functions[strings] = len(self.function_chunks)
        name, filename = strings
        body = b"\x08%b\x10%b" % (varint(function), varint(name))
        if filename:
            body += b" " + varint(filename)
        self.function_chunks.append(b"*%c%b" % (len(body), body))
        self.function_strings.append(strings)
        return function

    def _string(self, text: str) -> int:
        index = self._strings.get(text)
        if index is not None:
            return index
        try:
            data = text.encode()
        except UnicodeEncodeError:
            # Lone surrogates: what is left of the text may be in the table already.
            index = self._strings[text] = self._string(utf8(text).decode())
            return index
        index = self._strings[text] = len(self.string_chunks)
        self.string_chunks.append(b"2%b%b" % (varint(len(data)), data))
        return index

    def _labels(self, own: _Labels, added: _Labels) -> bytes:
        chunk = self._label_chunks.get((own, added))
        if chunk is None:
            chunk = b"".join(
                bytes_field(3, int_field(1, self._string(key)) + int_field(2, self._string(value)))
                for key, value in sorted({**dict(own), **dict(added)}.items())
                if key and value
            )
            self._label_chunks[own, added] = chunk
        return chunk

    def _value_type(self, number: int, name: str, unit: str) -> bytes:
        body = int_field(1, self._string(name)) + int_field(2, self._string(unit))
        return bytes_field(number, body)


def _fit(
    document: _Document, everything: Sequence[Sequence[Sample]], writer: _Writer, max_bytes: int
) -> bytes:
    """Keep the largest samples that fit and merge the others."""
    keep_labels = True
    smallest = document.write([_merge_rest(group, (), keep_labels) for group in everything])
    least = len(smallest.finish())
    if least * 2 > max_bytes:
        # As many label sets as samples, or nearly: rather lose the labels of the small ones.
        keep_labels = False
        smallest = document.write([_merge_rest(group, (), keep_labels) for group in everything])
        least = len(smallest.finish())
    if least > max_bytes:
        raise EncodeError(f"the smallest encoding takes {least} bytes, {max_bytes} are allowed")
    room = max_bytes - least
    while True:
        kept = _choose(everything, writer, room, document.pause)
        groups = []
        start = 0
        for group in everything:
            mine = {index - start for index in kept if start <= index < start + len(group)}
            groups.append(_merge_rest(group, mine, keep_labels))
            start += len(group)
        data = document.write(groups).finish()
        if len(data) <= max_bytes:
            return data
        # The cost of a sample is that of the full encoding; ids may have grown by a byte since.
        room = min(room - (len(data) - max_bytes), room * 9 // 10)


def _choose(
    everything: Sequence[Sequence[Sample]], writer: _Writer, room: int, pause: Pause | None
) -> list[int]:
    """Positions of the largest samples whose bytes, with the table rows they need, fit the room."""
    samples = [sample for group in everything for sample in group]
    order = sorted(range(len(samples)), key=lambda at: (-samples[at].size_bytes, at))
    ids = writer.location_ids.__getitem__
    locations: set[int] = set()
    functions: set[int] = set()
    strings: set[int] = set()
    kept = []
    for turn, index in enumerate(order):
        frames = samples[index].frames
        new_locations = set(map(ids, map(id, frames))) - locations
        new_functions = {writer.location_functions[at] for at in new_locations} - functions
        new_strings = {at for f in new_functions for at in writer.function_strings[f]} - strings
        cost = (
            len(writer.sample_chunks[index])
            + sum(len(writer.location_chunks[at]) for at in new_locations)
            + sum(len(writer.function_chunks[at]) for at in new_functions)
            + sum(len(writer.string_chunks[at]) for at in new_strings)
        )
        # One that does not fit ends nothing: a smaller one with known frames costs a few bytes.
        if cost <= room:
            room -= cost
            kept.append(index)
            locations |= new_locations
            functions |= new_functions
            strings |= new_strings
        if pause is not None and turn % _SAMPLES_PER_PAUSE == 0:
            pause()
    return kept


def _merge_rest(
    samples: Sequence[Sample], kept: Collection[int], keep_labels: bool
) -> list[Sample]:
    """The kept samples in their order, then what `[other]` holds; an `[other]` is extended."""
    out = []
    rest: dict[tuple[Stack, _Labels], list[int]] = {}
    for index, sample in enumerate(samples):
        other = other_stack(sample.frames)
        if index in kept and sample.frames != other:
            out.append(sample)
            continue
        key = other, sample.labels if keep_labels else ()
        add(rest, key, sample.objects, sample.size_bytes)
    out += [
        Sample(stack, objects, size, labels) for (stack, labels), (objects, size) in rest.items()
    ]
    return out
