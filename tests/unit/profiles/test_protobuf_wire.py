from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from gpumem_otel.errors import EncodeError
from gpumem_otel.profiles import protobuf_wire


def _message_class():
    file = descriptor_pb2.FileDescriptorProto(name="w.proto", package="w", syntax="proto3")
    message = file.message_type.add(name="All")
    field = descriptor_pb2.FieldDescriptorProto
    kinds = [
        ("u", field.TYPE_UINT64, field.LABEL_OPTIONAL),
        ("i", field.TYPE_INT64, field.LABEL_OPTIONAL),
        ("b", field.TYPE_BYTES, field.LABEL_OPTIONAL),
        ("s", field.TYPE_STRING, field.LABEL_REPEATED),
        ("p", field.TYPE_INT64, field.LABEL_REPEATED),
        ("f64", field.TYPE_FIXED64, field.LABEL_OPTIONAL),
        ("f32", field.TYPE_FIXED32, field.LABEL_OPTIONAL),
    ]
    for number, (name, kind, label) in enumerate(kinds, 1):
        message.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("w.All"))


All = _message_class()
UINT64 = st.integers(0, 2**64 - 1) | st.integers(0, 64).map(lambda n: max(0, 2**n - 1))
INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "00"),
        (1, "01"),
        (127, "7f"),
        (128, "8001"),
        (300, "ac02"),
        (16383, "ff7f"),
        (16384, "808001"),
        (2**63 - 1, "ffffffffffffffff7f"),
        (2**64 - 1, "ffffffffffffffffff01"),
        (-1, "ffffffffffffffffff01"),
        (-(2**63), "80808080808080808001"),
    ],
)
def test_varint_is_the_published_encoding(value, expected):
    assert protobuf_wire.varint(value).hex() == expected


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**30])
def test_a_number_beyond_64_bits_is_refused(value):
    with pytest.raises(EncodeError, match="64 bits"):
        protobuf_wire.varint(value)


@given(UINT64, INT64, st.binary(max_size=300), st.lists(st.text(max_size=20)), st.lists(INT64))
def test_fields_are_what_the_protobuf_library_writes(unsigned, number, data, texts, packed):
    ours = b"".join(
        (
            protobuf_wire.int_field(1, unsigned),
            protobuf_wire.int_field(2, number),
            protobuf_wire.bytes_field(3, data) if data else b"",
            *(protobuf_wire.text_field(4, text) for text in texts),
            protobuf_wire.packed_field(5, packed),
        )
    )
    theirs = All(u=unsigned, i=number, b=data, s=texts, p=packed)
    assert ours == theirs.SerializeToString(deterministic=True)


@given(UINT64, INT64, st.binary(), st.lists(st.text()), st.lists(INT64))
def test_reader_reads_what_the_protobuf_library_writes(unsigned, number, data, texts, packed):
    message = All(u=unsigned, i=number, b=data, s=texts, p=packed, f64=unsigned, f32=unsigned >> 32)
    found: dict[int, list] = {}
    for key, value in protobuf_wire.read_fields(message.SerializeToString()):
        found.setdefault(key, []).append(value)
    assert found.get(1, [0]) == [unsigned]
    assert [protobuf_wire.signed(value) for value in found.get(2, [0])] == [number]
    assert found.get(3, [b""]) == [data]
    assert [value.decode() for value in found.get(4, [])] == texts
    assert [
        protobuf_wire.signed(v) for v in protobuf_wire.read_packed(found.get(5, [b""])[0])
    ] == packed
    assert found.get(6, [0]) == [unsigned]
    assert found.get(7, [0]) == [unsigned >> 32]


@given(st.binary(max_size=60))
def test_any_bytes_read_or_raise_one_error(data):
    try:
        fields = list(protobuf_wire.read_fields(data))
    except EncodeError:
        return
    assert all(number > 0 for number, _ in fields)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("08", "cut off"),
        ("0880", "cut off"),
        ("0a05616263", "field 1 needs 5 bytes"),
        ("0980808080", "field 1 needs 8 bytes"),
        ("00", "field number 0"),
        ("0b", "wire type 3"),
        ("0f", "wire type 7"),
        ("08" + "80" * 10 + "01", "more than 10 bytes"),
    ],
)
def test_broken_messages_say_what_is_wrong(data, reason):
    with pytest.raises(EncodeError, match=reason):
        list(protobuf_wire.read_fields(bytes.fromhex(data)))


def test_bits_beyond_64_are_dropped_as_the_protobuf_library_does():
    data = bytes.fromhex("08" + "ff" * 9 + "7f")
    assert list(protobuf_wire.read_fields(data)) == [(1, 2**64 - 1)]
    assert All.FromString(data).u == 2**64 - 1


def test_lone_surrogates_become_question_marks():
    assert protobuf_wire.utf8("a\ud800b") == b"a?b"
    assert protobuf_wire.text_field(4, "\udfff") == b"\x22\x01?"
