"""How a Pyroscope 2.x reads a pushed pprof: what it refuses, drops, cuts and splits.

Written from what real servers answered, on its own: no code is shared with the package under test.
"""

from __future__ import annotations

import gzip
import time
import zlib
from dataclasses import dataclass, field

MAX_PROFILE_BYTES = 4 << 20
MAX_SAMPLES = 16_000
MAX_DEPTH = 1000
MAX_LABELS = 30
MAX_NAME_BYTES = 1024
MAX_VALUE_BYTES = 2048
MAX_OLD_NS = 3600 * 10**9
MAX_AHEAD_NS = 600 * 10**9
NOT_SPLIT = {"trace_id", "span_id"}


class RefusedError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def invalid(message: str) -> RefusedError:
    return RefusedError(400, "invalid_argument", message)


@dataclass
class Part:
    """Samples of one profile that share their string labels."""

    labels: dict[str, str]
    samples: list[tuple[tuple[str, ...], list[int]]] = field(default_factory=list)


@dataclass
class Parsed:
    sample_types: list[tuple[str, str]]
    period_type: tuple[str, str]
    time_ns: int
    parts: list[Part]
    size: int
    comments: list[str] = field(default_factory=list)


# protobuf ----------------------------------------------------------------------------------------


class DamagedError(ValueError):
    """No protobuf."""


def number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise DamagedError
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
        shift += 7


def message(data: bytes, least: int = 0) -> dict[int, list]:
    """Field number -> its values: ints, or bytes."""
    if len(data) < least:
        raise DamagedError
    fields: dict[int, list] = {}
    at = 0
    while at < len(data):
        key, at = number(data, at)
        kind = key & 7
        if not key >> 3:
            raise DamagedError
        if kind == 0:
            value, at = number(data, at)
        elif kind in (1, 2, 5):
            size, at = number(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
            if at + size > len(data):
                raise DamagedError
            value = data[at : at + size]
            at += size
        else:
            raise DamagedError
        fields.setdefault(key >> 3, []).append(value)
    return fields


def one(fields: dict[int, list], at: int, default=0):
    value = fields.get(at, [default])[-1]
    if not isinstance(value, type(default)):
        raise DamagedError
    return value


def many(fields: dict[int, list], at: int) -> list[int]:
    """A repeated integer, packed or not."""
    values = []
    for item in fields.get(at, []):
        if isinstance(item, int):
            values.append(item)
            continue
        place = 0
        while place < len(item):
            value, place = number(item, place)
            values.append(value)
    return values


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# a pushed series ---------------------------------------------------------------------------------


def check_labels(pairs: list[tuple[str, str]]) -> dict[str, str]:
    labels = dict(pairs)
    if len(labels) < len(pairs):
        raise invalid("duplicate label name")
    if not labels.get("__name__"):
        raise invalid("invalid metric name")
    if len(labels) > MAX_LABELS:
        raise invalid(f"profile series has {len(labels)} label names; limit {MAX_LABELS}")
    for name, value in labels.items():
        if not name:
            raise invalid("label name is empty")
        if len(name.encode()) > MAX_NAME_BYTES or len(value.encode()) > MAX_VALUE_BYTES:
            raise invalid(f"label name or value too long: {name[:20]}")
    labels.setdefault("service_name", "unknown_service")
    for hidden in ("__delta__", "__session_id__"):
        labels.pop(hidden, None)
    return labels


def parse(raw: bytes) -> Parsed:
    """Read and normalise one profile; raises RefusedError."""
    try:
        data = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
        return _read(message(data, least=1), len(data))
    except (DamagedError, OSError, EOFError, zlib.error):
        raise RefusedError(500, "unknown", "decoding profile: gzip reset: unexpected EOF") from None


class _Tables:
    """Strings, and the function names of each location."""

    def __init__(self, top: dict[int, list]) -> None:
        try:
            self.strings = [item.decode() for item in top.get(6, [])]
        except UnicodeDecodeError:
            raise invalid("invalid utf8 string hex") from None
        if not self.strings or self.strings[0]:
            raise invalid("string 0 should be empty string")
        functions = {}
        for item in top.get(5, []):
            fields = message(item)
            functions[one(fields, 1)] = self.text(one(fields, 2))
        self.locations = {}
        for item in top.get(4, []):
            fields = message(item)
            lines = [message(line) for line in fields.get(4, [])]
            try:
                self.locations[one(fields, 1)] = [functions[one(line, 1)] for line in lines]
            except KeyError:
                raise invalid("location refers to no function") from None
        if 0 in functions or 0 in self.locations:
            raise invalid("function and location ids must not be 0")

    def text(self, index: int) -> str:
        if index >= len(self.strings):
            raise invalid(f"string index {index} out of range")
        return self.strings[index]

    def value_type(self, data: bytes) -> tuple[str, str]:
        fields = message(data)
        return self.text(one(fields, 1)), self.text(one(fields, 2))

    def labels(self, items: list[bytes]) -> dict[str, str]:
        """String labels that split a series; numeric ones are dropped."""
        pairs = [message(item) for item in items]
        named = {self.text(one(p, 1)): self.text(one(p, 2)) for p in pairs if one(p, 2)}
        return {name: value for name, value in named.items() if name not in NOT_SPLIT}

    def stack(self, ids: list[int]) -> tuple[str, ...]:
        """Root first. The file has the leaf first: the frames nearest to it are cut."""
        try:
            names = [name for ref in ids for name in self.locations[ref]]
        except KeyError:
            raise invalid("sample refers to no location") from None
        return tuple(reversed(names[-MAX_DEPTH:]))


def _read(top: dict[int, list], size: int) -> Parsed:
    tables = _Tables(top)
    types = [tables.value_type(item) for item in top.get(1, [])]
    if not types or any("-" in name for name, _ in types):
        raise invalid(f"invalid sample types {types}")
    if size > MAX_PROFILE_BYTES:
        raise invalid(f"profile size {size} exceeds the maximum allowed {MAX_PROFILE_BYTES}")
    samples = [message(item) for item in top.get(2, [])]
    if len(samples) > MAX_SAMPLES:
        raise invalid(f"profile has {len(samples)} samples; limit {MAX_SAMPLES}")
    now = time.time_ns()
    time_ns = signed(one(top, 9)) or now
    if not now - MAX_OLD_NS <= time_ns <= now + MAX_AHEAD_NS:
        raise invalid("profile is outside of the ingestion window (1h back, 10m ahead)")
    period = tables.value_type(top[11][-1]) if 11 in top else ("", "")
    parts: dict[tuple, Part] = {}
    dropped = 0
    for fields in samples:
        values = [signed(value) for value in many(fields, 2)]
        if len(values) != len(types):
            raise invalid("sample has another number of values than there are sample types")
        labels = tables.labels(fields.get(3, []))
        stack = tables.stack(many(fields, 1))
        if min(values) < 0 or not any(values):
            dropped += 1
            continue
        part = parts.setdefault(tuple(sorted(labels.items())), Part(labels))
        part.samples.append((stack, values))
    if dropped and 11 not in top:
        raise RefusedError(500, "unknown", "runtime error: invalid memory address or nil pointer")
    comments = [tables.text(index) for index in many(top, 13)]
    return Parsed(types, period, time_ns, list(parts.values()), size, comments)
