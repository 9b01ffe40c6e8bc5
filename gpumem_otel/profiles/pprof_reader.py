"""A strict reader of pprof bytes, for checking a file before it is sent and for tests."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_otel.base.profile import Frame, Stack
from gpumem_otel.errors import EncodeError
from gpumem_otel.profiles.protobuf_wire import read_fields, read_packed, signed

if TYPE_CHECKING:
    from collections.abc import Container

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_BYTES = 256 << 20
"""What a gzip may grow to: far beyond any profile a server takes, far below what hurts."""

_Message = dict[int, list["int | bytes"]]


@dataclass(frozen=True, slots=True)
class DecodedSample:
    """One sample with its ids resolved.

    Attributes:
        frames: leaf first, inlined calls spread out; may be empty in files of others.
        values: one per sample type of the profile.
        labels: string labels in the order of the file; numeric ones are left out.
    """

    frames: Stack
    values: tuple[int, ...]
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class DecodedProfile:
    """A pprof as it stands in the file.

    Attributes:
        sample_types: (type, unit) of each value.
        period_type: (type, unit), ("", "") where absent.
    """

    sample_types: tuple[tuple[str, str], ...]
    samples: tuple[DecodedSample, ...]
    time_ns: int = 0
    duration_ns: int = 0
    period_type: tuple[str, str] = ("", "")
    period: int = 0
    default_sample_type: str = ""
    comments: tuple[str, ...] = ()

    def total(self, sample_type: str) -> int:
        """Sum of one value over all samples; KeyError for a type that the profile has not."""
        for index, (name, _) in enumerate(self.sample_types):
            if name == sample_type:
                return sum(sample.values[index] for sample in self.samples)
        raise KeyError(sample_type)


def decode(data: bytes, *, max_bytes: int = _MAX_BYTES) -> DecodedProfile:
    """Read a pprof, gzip or not.

    Args:
        data: the file.
        max_bytes: most that a gzip may expand to.

    Raises:
        EncodeError: anything else: no pprof, cut off, ids or indices that lead nowhere.
    """
    if data.startswith(_GZIP_MAGIC):
        data = _gunzip(data, max_bytes)
    top = _message(data)
    strings = [_text(item) for item in _messages(top, 6)]
    if not strings or strings[0]:
        raise EncodeError("the string table does not begin with an empty string")
    reader = _Reader(strings)
    types = tuple(reader.value_type(item) for item in _messages(top, 1))
    if not types:
        raise EncodeError("a profile without sample types")
    reader.read_mappings(_messages(top, 3))
    reader.read_functions(_messages(top, 5))
    reader.read_locations(_messages(top, 4))
    period_types = _messages(top, 11)
    return DecodedProfile(
        sample_types=types,
        samples=tuple(reader.sample(item, len(types)) for item in _messages(top, 2)),
        time_ns=signed(_number(top, 9)),
        duration_ns=signed(_number(top, 10)),
        period_type=reader.value_type(period_types[-1]) if period_types else ("", ""),
        period=signed(_number(top, 12)),
        default_sample_type=reader.string(_number(top, 14)),
        comments=tuple(reader.string(index) for index in _numbers(top, 13)),
    )


class _Reader:
    """The tables of one profile."""

    def __init__(self, strings: list[str]) -> None:
        self._strings = strings
        self._mappings: set[int] = set()
        self._functions: dict[int, tuple[str, str]] = {}
        self._locations: dict[int, Stack] = {}

    def string(self, index: int) -> str:
        if index >= len(self._strings):
            raise EncodeError(f"string {index} of {len(self._strings)}")
        return self._strings[index]

    def value_type(self, data: bytes) -> tuple[str, str]:
        message = _message(data)
        return self.string(_number(message, 1)), self.string(_number(message, 2))

    def read_mappings(self, items: list[bytes]) -> None:
        for item in items:
            message = _message(item)
            self._mappings.add(_new_id(message, self._mappings, "mapping"))
            self.string(_number(message, 5))
            self.string(_number(message, 6))

    def read_functions(self, items: list[bytes]) -> None:
        for item in items:
            message = _message(item)
            key = _new_id(message, self._functions, "function")
            system_name = self.string(_number(message, 3))
            name = self.string(_number(message, 2)) or system_name
            self._functions[key] = (name, self.string(_number(message, 4)))

    def read_locations(self, items: list[bytes]) -> None:
        for item in items:
            message = _message(item)
            key = _new_id(message, self._locations, "location")
            mapping = _number(message, 2)
            if mapping and mapping not in self._mappings:
                raise EncodeError(f"location {key} refers to mapping {mapping}, which is missing")
            lines = tuple(self._line(line, key) for line in _messages(message, 4))
            # A location that nobody has symbolized yet goes by its address.
            self._locations[key] = lines or (Frame(hex(_number(message, 3))),)

    def sample(self, data: bytes, values_wanted: int) -> DecodedSample:
        message = _message(data)
        frames: list[Frame] = []
        for key in _numbers(message, 1):
            if key not in self._locations:
                raise EncodeError(f"a sample refers to location {key}, which is missing")
            frames += self._locations[key]
        values = tuple(signed(value) for value in _numbers(message, 2))
        if len(values) != values_wanted:
            raise EncodeError(f"a sample with {len(values)} values for {values_wanted} types")
        labels = []
        for item in _messages(message, 3):
            label = _message(item)
            name, text = self.string(_number(label, 1)), self.string(_number(label, 2))
            if text:
                labels.append((name, text))
        return DecodedSample(tuple(frames), values, tuple(labels))

    def _line(self, data: bytes, location: int) -> Frame:
        message = _message(data)
        function = _number(message, 1)
        if function not in self._functions:
            raise EncodeError(f"location {location} refers to function {function}, missing")
        name, filename = self._functions[function]
        return Frame(name, filename, signed(_number(message, 2)))


def _gunzip(data: bytes, max_bytes: int) -> bytes:
    inflate = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        out = inflate.decompress(data, max_bytes)
    except zlib.error as error:
        raise EncodeError(f"broken gzip: {error}") from None
    if inflate.unconsumed_tail:
        raise EncodeError(f"gzip of more than {max_bytes} bytes")
    if not inflate.eof:
        raise EncodeError("gzip that is cut off")
    if inflate.unused_data:
        raise EncodeError(f"{len(inflate.unused_data)} bytes after the gzip")
    return out


def _message(data: bytes) -> _Message:
    fields: _Message = {}
    for number, value in read_fields(data):
        fields.setdefault(number, []).append(value)
    return fields


def _number(message: _Message, number: int) -> int:
    """The last value of an integer field, 0 where absent."""
    value = message.get(number, [0])[-1]
    if isinstance(value, bytes):
        raise EncodeError(f"field {number} is no number")
    return value


def _numbers(message: _Message, number: int) -> list[int]:
    """A repeated integer field, packed or not."""
    out: list[int] = []
    for value in message.get(number, ()):
        out += read_packed(value) if isinstance(value, bytes) else [value]
    return out


def _messages(message: _Message, number: int) -> list[bytes]:
    """A repeated string or message field, as bytes."""
    out = []
    for value in message.get(number, ()):
        if not isinstance(value, bytes):
            raise EncodeError(f"field {number} is no message")
        out.append(value)
    return out


def _new_id(message: _Message, known: Container[int], what: str) -> int:
    key = _number(message, 1)
    if not key or key in known:
        raise EncodeError(f"{what} id {key} is zero or given twice")
    return key


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EncodeError(f"a string that is not UTF-8: {error.reason}") from None
