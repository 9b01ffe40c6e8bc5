"""The few pieces of the protobuf encoding that pprof and push requests need.

Written here so that a training process inherits no protobuf version conflict. Format:
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_otel.errors import EncodeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

INT64_MAX = (1 << 63) - 1
_INT64_MIN = -(1 << 63)
_UINT64_MASK = (1 << 64) - 1

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_ONE_BYTE = tuple(bytes((value,)) for value in range(128))


def varint(value: int) -> bytes:
    """Base-128 bytes of an unsigned 64-bit number, or of a signed one as its two's complement.

    Raises:
        EncodeError: it fits neither.
    """
    if 0 <= value < 128:  # noqa: PLR2004 - seven bits to a byte
        return _ONE_BYTE[value]
    if 0 <= value < 16384:  # noqa: PLR2004
        return bytes((value & 0x7F | 0x80, value >> 7))
    if not _INT64_MIN <= value <= _UINT64_MASK:
        raise EncodeError(f"{value} does not fit 64 bits")
    value &= _UINT64_MASK
    out = bytearray()
    while value > 0x7F:  # noqa: PLR2004
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def signed(value: int) -> int:
    """What an int64 field means whose varint was read as an unsigned number."""
    return value - (1 << 64) if value > INT64_MAX else value


def utf8(text: str) -> bytes:
    """UTF-8 bytes; what has none (a lone surrogate) becomes a question mark."""
    return text.encode("utf-8", "replace")


def int_field(number: int, value: int) -> bytes:
    """An integer or boolean field; nothing where it is 0, the default of proto3."""
    return varint(number << 3 | _VARINT) + varint(value) if value else b""


def bytes_field(number: int, data: bytes) -> bytes:
    """A bytes or message field, written also where it is empty (an element of a repeated one)."""
    return b"".join((varint(number << 3 | _BYTES), varint(len(data)), data))


def text_field(number: int, text: str) -> bytes:
    """A string field, written also where it is empty."""
    return bytes_field(number, utf8(text))


def packed_field(number: int, values: Iterable[int]) -> bytes:
    """A packed repeated integer field; nothing where there are no values."""
    data = b"".join(map(varint, values))
    return bytes_field(number, data) if data else b""


def read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in order: (number, unsigned integer or bytes).

    Fixed-width fields are given as integers too; groups are refused.

    Raises:
        EncodeError: the bytes are no protobuf message.
    """
    end = len(data)
    at = 0
    while at < end:
        key, at = _read_varint(data, at)
        number, wire_type = key >> 3, key & 7
        if not 0 < number < 1 << 29:
            raise EncodeError(f"field number {number} at byte {at}")
        value: int | bytes
        if wire_type == _VARINT:
            value, at = _read_varint(data, at)
        else:
            if wire_type == _BYTES:
                size, at = _read_varint(data, at)
            elif wire_type in (_FIXED64, _FIXED32):
                size = 8 if wire_type == _FIXED64 else 4
            else:
                raise EncodeError(f"wire type {wire_type} at byte {at}")
            if size > end - at:
                raise EncodeError(f"cut off at byte {end}: field {number} needs {size} bytes")
            value = data[at : at + size]
            at += size
            if wire_type != _BYTES:
                value = int.from_bytes(value, "little")
        yield number, value


def read_packed(data: bytes) -> list[int]:
    """The unsigned integers of a packed repeated field.

    Raises:
        EncodeError: the last one is cut off, or one has more than 64 bits.
    """
    values = []
    at = 0
    while at < len(data):
        value, at = _read_varint(data, at)
        values.append(value)
    return values


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    try:
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004
                break
            shift += 7
            if shift > 63:  # noqa: PLR2004
                raise EncodeError(f"a number of more than 10 bytes at byte {at}")
    except IndexError:
        raise EncodeError(f"cut off at byte {at}: a number goes on") from None
    # The tenth byte may carry bits beyond 64; readers drop them, as the specification says.
    return value & _UINT64_MASK, at
