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
"""What a gzip may grow to: far more than any server accepts, and still harmless."""


@dataclass(frozen=True, slots=True)
class DecodedSample:
    """One sample with its ids resolved.

    Attributes:
        frames: leaf first, inlined calls expanded; may be empty in files of other tools.
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
        """Sum of one value over all samples; KeyError for a type that the profile does not have."""
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
        EncodeError: no pprof, cut off, or with ids or indices of nothing.
    """
    if data.startswith(_GZIP_MAGIC):
        data = _gunzip(data, max_bytes)
    top = _Message(data)
    strings = top.texts(6)
    if not strings or strings[0]:
        raise EncodeError("the string table does not begin with an empty string")
    reader = _Reader(top, strings)
    types = tuple(map(reader.value_type, top.messages(1)))
    if not types:
        raise EncodeError("a profile without sample types")
    period_types = top.messages(11)
    return DecodedProfile(
        sample_types=types,
        samples=tuple(reader.sample(item, len(types)) for item in top.messages(2)),
        time_ns=signed(top.number(9)),
        duration_ns=signed(top.number(10)),
        period_type=reader.value_type(period_types[-1]) if period_types else ("", ""),
        period=signed(top.number(12)),
        default_sample_type=reader.string(top, 14),
        comments=tuple(map(reader.string_at, top.numbers(13))),
    )


class _Message:
    """The fields of one message, by number."""

    def __init__(self, data: bytes) -> None:
        self._fields: dict[int, list[int | bytes]] = {}
        for number, value in read_fields(data):
            self._fields.setdefault(number, []).append(value)

    def number(self, field: int) -> int:
        """The last value of an integer field, 0 where absent."""
        value = self._fields.get(field, [0])[-1]
        if isinstance(value, bytes):
            raise EncodeError(f"field {field} is no number")
        return value

    def numbers(self, field: int) -> list[int]:
        """A repeated integer field, packed or not."""
        numbers: list[int] = []
        for value in self._fields.get(field, ()):
            numbers += read_packed(value) if isinstance(value, bytes) else [value]
        return numbers

    def bytes_of(self, field: int) -> list[bytes]:
        values = self._fields.get(field, ())
        found = [value for value in values if isinstance(value, bytes)]
        if len(found) != len(values):
            raise EncodeError(f"field {field} is no message")
        return found

    def messages(self, field: int) -> list[_Message]:
        return list(map(_Message, self.bytes_of(field)))

    def texts(self, field: int) -> list[str]:
        try:
            return [value.decode("utf-8") for value in self.bytes_of(field)]
        except UnicodeDecodeError as error:
            raise EncodeError(f"a string that is not UTF-8: {error.reason}") from None


class _Reader:
    """The tables of one profile."""

    def __init__(self, top: _Message, strings: list[str]) -> None:
        self._strings = strings
        self._functions: dict[int, tuple[str, str]] = {}
        self._locations: dict[int, Stack] = {}
        mappings: set[int] = set()
        for item in top.messages(3):
            mappings.add(_new_id(item, mappings, "mapping"))
            for field in (5, 6):
                self.string(item, field)
        for item in top.messages(5):
            key = _new_id(item, self._functions, "function")
            system_name = self.string(item, 3)
            self._functions[key] = (self.string(item, 2) or system_name, self.string(item, 4))
        for item in top.messages(4):
            key = _new_id(item, self._locations, "location")
            mapping = item.number(2)
            if mapping and mapping not in mappings:
                raise EncodeError(f"location {key} refers to mapping {mapping}, which is missing")
            lines = tuple(self._line(line, key) for line in item.messages(4))
            # without symbols, a location is named by its address
            self._locations[key] = lines or (Frame(hex(item.number(3))),)

    def string_at(self, index: int) -> str:
        if index >= len(self._strings):
            raise EncodeError(f"string {index} of {len(self._strings)}")
        return self._strings[index]

    def string(self, message: _Message, field: int) -> str:
        return self.string_at(message.number(field))

    def value_type(self, message: _Message) -> tuple[str, str]:
        return self.string(message, 1), self.string(message, 2)

    def sample(self, message: _Message, values_wanted: int) -> DecodedSample:
        frames: list[Frame] = []
        for key in message.numbers(1):
            if key not in self._locations:
                raise EncodeError(f"a sample refers to location {key}, which is missing")
            frames += self._locations[key]
        values = tuple(map(signed, message.numbers(2)))
        if len(values) != values_wanted:
            raise EncodeError(f"a sample with {len(values)} values for {values_wanted} types")
        labels = map(self.value_type, message.messages(3))
        return DecodedSample(tuple(frames), values, tuple(label for label in labels if label[1]))

    def _line(self, message: _Message, location: int) -> Frame:
        function = message.number(1)
        if function not in self._functions:
            raise EncodeError(f"location {location} refers to function {function}, missing")
        return Frame(*self._functions[function], signed(message.number(2)))


def _new_id(message: _Message, known: Container[int], kind: str) -> int:
    key = message.number(1)
    if not key or key in known:
        raise EncodeError(f"{kind} id {key} is zero or given twice")
    return key


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
