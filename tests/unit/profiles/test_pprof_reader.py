from __future__ import annotations

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.heap_profiles import SMALL

from gpumem_otel.base.profile import Frame
from gpumem_otel.errors import EncodeError
from gpumem_otel.profiles import pprof, protobuf_wire
from gpumem_otel.profiles.pprof_reader import DecodedSample


def test_every_cut_and_every_changed_byte_decodes_or_raises_one_error():
    data = pprof.encode([SMALL])
    packed = pprof.gzip_bytes(data)
    for end in range(len(data)):
        _decode_or_error(data[:end])
        for value in (0, data[end] ^ 1, data[end] ^ 0x80, 255):
            _decode_or_error(data[:end] + bytes([value]) + data[end + 1 :])
    for end in range(len(packed)):
        with pytest.raises(EncodeError):
            pprof.decode(packed[:end])


@given(st.binary(max_size=80) | st.binary(max_size=80).map(gzip.compress))
def test_any_bytes_decode_or_raise_one_error(data):
    _decode_or_error(data)


def _decode_or_error(data):
    try:
        decoded = pprof.decode(data)
    except EncodeError:
        return
    assert decoded.sample_types


BASE = protobuf_wire.text_field(6, "") + protobuf_wire.bytes_field(1, b"")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "string table"),
        (protobuf_wire.text_field(6, "x"), "string table"),
        (protobuf_wire.text_field(6, ""), "without sample types"),
        (BASE + protobuf_wire.bytes_field(6, b"\xff"), "not UTF-8"),
        (BASE + protobuf_wire.bytes_field(1, b"\x08\x05"), "string 5 of 1"),
        (BASE + protobuf_wire.bytes_field(5, b""), "function id 0"),
        (BASE + protobuf_wire.bytes_field(5, b"\x08\x01") * 2, "function id 1"),
        (BASE + protobuf_wire.bytes_field(4, b"\x08\x01\x10\x07"), "mapping 7"),
        (BASE + protobuf_wire.bytes_field(4, b"\x08\x01\x22\x02\x08\x02"), "function 2"),
        (BASE + protobuf_wire.bytes_field(2, b"\x0a\x01\x01\x12\x01\x00"), "location 1"),
        (BASE + protobuf_wire.bytes_field(2, b""), "0 values for 1 types"),
        (BASE + protobuf_wire.int_field(2, 1), "field 2 is no message"),
        (BASE + protobuf_wire.bytes_field(9, b"1"), "field 9 is no number"),
        (b"\x1f\x8bnot gzip", "broken gzip"),
        (gzip.compress(BASE, mtime=0) + b"more", "4 bytes after the gzip"),
    ],
)
def test_a_broken_pprof_says_what_is_wrong(data, reason):
    with pytest.raises(EncodeError, match=reason):
        pprof.decode(data)


def test_a_gzip_bomb_is_refused():
    with pytest.raises(EncodeError, match="more than 1000 bytes"):
        pprof.decode(gzip.compress(bytes(1_000_000), mtime=0), max_bytes=1000)


def test_files_of_other_tools_read_too():
    function = protobuf_wire.bytes_field(5, b"\x08\x07\x18\x01")
    inlined = protobuf_wire.bytes_field(
        4, b"\x08\x03\x22\x04\x08\x07\x10\x05\x22\x04\x08\x07\x10\x09"
    )
    address = protobuf_wire.bytes_field(4, b"\x08\x04\x18\xff\x01")
    unpacked = protobuf_wire.bytes_field(
        2, b"\x08\x03\x08\x04\x10\x2a" + b"\x1a\x04\x08\x01\x18\x05"
    )
    data = BASE + protobuf_wire.text_field(6, "main") + function + inlined + address + unpacked
    assert pprof.decode(data).samples == (
        DecodedSample((Frame("main", "", 5), Frame("main", "", 9), Frame("0xff")), (42,)),
    )
