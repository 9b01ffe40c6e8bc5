"""The guarded unpickler: plain values as pickle reads them, and nothing else."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import pickle
import pickletools
import struct
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpumem_otel.errors import SnapshotError
from gpumem_otel.snapshot import unpickle

ALLOWED = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT"),
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
    *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
}

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**71), 2**71 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(SCALARS, inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
    ),
    max_leaves=40,
)


def loads(data: bytes):
    return unpickle.loads(data, "made")


def refusal(data: bytes) -> str:
    with pytest.raises(SnapshotError) as caught:
        loads(data)
    assert caught.value.source == "made"
    return caught.value.reason


@given(value=VALUES, protocol=st.integers(2, 5))
@example(value=list(range(3000)), protocol=2)
@example(value={str(i): (i, i + 1) for i in range(3000)}, protocol=3)
@example(value=["x" * 255, "y" * 256, "z" * 70_000, "\u20ac" * 100], protocol=4)
@settings(deadline=None)
def test_plain_values_come_back_as_they_were(value, protocol):
    assert loads(pickle.dumps(value, protocol)) == value


@given(value=VALUES)
@settings(deadline=None)
def test_the_exact_way_agrees_with_the_fast_one(value):
    """Whatever the fast way lets pass, the one that follows the stack lets pass too."""
    data = pickle.dumps([value, value, (("now", ("exact",)), 1)], 4)
    assert loads(data)[0] == value
    unpickle._check_tuples(pickle.dumps(value, 4))


@given(value=VALUES, protocol=st.integers(2, 5))
@settings(deadline=None)
def test_both_ways_to_repeat_match_the_same(value, protocol):
    """Before Python 3.11.5 runs are matched in pieces; here in pieces of three."""
    data = pickle.dumps([(0, 1), value, value, {"pool_id": (0, 300)}], protocol)
    possessive = unpickle._harmless_run(0)
    pieces = unpickle._harmless_run(0, b"{1,3}")
    position = 2
    while position < len(data):
        whole = possessive.match(data, position)
        end = whole.end() if whole else position
        while piece := pieces.match(data, position):
            position = piece.end()
        assert position == end
        position = unpickle._next_opcode(data, position) if position < len(data) else end


def test_what_is_shared_stays_shared():
    frame = {"name": "f"}
    stack = [frame, frame]
    for protocol in (2, 3, 4, 5):
        first, second = loads(pickle.dumps([stack, stack], protocol))
        assert first is second
        assert first[0] is first[1]


@pytest.mark.parametrize("number", [2**31, 2**63, 2**64 - 1, -(2**63), 2**71 - 1])
def test_numbers_of_up_to_nine_bytes_read(number):
    assert loads(pickle.dumps([number], 4)) == [number]


def test_a_number_may_not_be_longer():
    assert refusal(pickle.dumps([2**71], 4)) == "refused as a pickle: a number of more than 72 bits"


def test_tuples_may_nest_to_64():
    value: tuple = ()
    for _ in range(63):
        value = (value,)
    assert loads(pickle.dumps({value: 1}, 4)) == {value: 1}
    assert "nested 65 deep" in refusal(pickle.dumps((value,), 4))


def test_tuples_may_hold_so_many_elements():
    assert len(loads(pickle.dumps(tuple(range(9_999)), 4))) == 9_999
    assert "10001 elements" in refusal(pickle.dumps(tuple(range(10_000)), 4))


def test_so_many_tuples_may_be_keys():
    assert len(loads(pickle.dumps({(i, "x"): i for i in range(1000)}, 4))) == 1000
    assert "1000 tuples as keys" in refusal(pickle.dumps({(i, "x"): i for i in range(1001)}, 4))


def test_small_pairs_need_no_exact_look():
    """Pool ids: a pair of small numbers on each of a million events."""
    value = [{"pool_id": (0, i % 7), "other": (i % 60_000, 1)} for i in range(100_000)]
    assert loads(pickle.dumps(value, 4)) == value  # 1.2 million opcodes


def test_a_file_with_nested_tuples_may_not_be_long():
    value = [("a", ("b", i)) for i in range(150_000)]
    assert "too long for a pickle with nested tuples" in refusal(pickle.dumps(value, 4))


def test_every_other_opcode_is_refused_by_its_name():
    tried = 0
    for opcode in pickletools.opcodes:
        if opcode.name in ALLOWED:
            continue
        data = b"\x80\x05N" + opcode.code.encode("latin-1") + b"\0" * 16 + b"."
        assert f"opcode {opcode.name}," in refusal(data)
        tried += 1
    assert tried == len(pickletools.opcodes) - len(ALLOWED)


def test_bytes_that_are_no_opcode_are_refused():
    known = {ord(opcode.code) for opcode in pickletools.opcodes}
    for byte in set(range(256)) - known:
        assert f"unknown opcode 0x{byte:02x}" in refusal(b"\x80\x04N" + bytes([byte]) + b".")


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(a=1),
        collections.Counter("a"),
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
        {1, 2},
        frozenset({1}),
        b"bytes",
        bytearray(b"x"),
        1j,
        print,
        SnapshotError,
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_whatever_needs_more_than_plain_opcodes_is_refused(value, protocol):
    assert refusal(pickle.dumps([value], protocol)).startswith(
        "refused as a pickle: it uses opcode"
    )


def test_the_unpickler_itself_refuses_too():
    """Were the scan to miss it, the unpickler itself still looks nothing up."""
    guarded = unpickle._Unpickler.__new__(unpickle._Unpickler)
    with pytest.raises(unpickle._RefusedError, match=r"os\.system"):
        guarded.find_class("os", "system")
    with pytest.raises(unpickle._RefusedError, match="outside"):
        guarded.persistent_load("x")


@pytest.mark.parametrize("version", [0, 1, 6, 255])
def test_other_protocols_are_refused(version):
    assert refusal(b"\x80" + bytes([version]) + b"N.") == (
        f"refused as a pickle: protocol {version}, 2 to 5 are read"
    )


HUNGRY = {
    "memo index of nine bytes": b"\x80\x02]r\xff\xff\xff\x0f.",
    "memo index in protocol 4": b"\x80\x04Nr\xff\xff\xff\xff.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 32) + b".",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".",
    "text of 4 GiB": b"\x80\x04X\xff\xff\xff\xff.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    "number": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "tuples by reference": b"\x80\x04)\x94" + b"h\x00h\x00\x86\x94" * 9 + b"h\x00.",
}


@pytest.mark.parametrize("name", HUNGRY)
def test_a_few_bytes_take_little_memory(name):
    """The plain unpickler takes a gigabyte for some of these."""
    with contextlib.suppress(SnapshotError):
        loads(b"\x80\x04)\x85.")  # what is imported and compiled once
    tracemalloc.start()
    try:
        with contextlib.suppress(SnapshotError):
            loads(HUNGRY[name])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_nine_byte_file_is_refused():
    data = HUNGRY["memo index of nine bytes"]
    assert len(data) == 9
    assert "memo index" in refusal(data)


def test_memo_indices_are_bounded_by_the_size():
    """Protocols 2 and 3 write them, in order; a file of n bytes has less than n entries."""
    for size in (10, 300, 70_000, 500_000):
        body = b"\x80\x02](" + b"N" * size + b"e"
        last = len(body) + 6
        assert loads(body + b"r" + struct.pack("<I", last) + b".")[-1:] == [None]
        # rounded up to 65,536 where nothing is gained by being exact
        for index in (last + 65_536, last + 2**24, 2**32 - 1):
            reason = refusal(body + b"r" + struct.pack("<I", index) + b".")
            assert f"memo index {index} in {last} bytes" in reason


def test_memo_indices_of_large_files_are_bounded_as_well():
    run = unpickle._harmless_run(0x0102)
    for index in (0, 0xFFFF, 0x00FF_0000, 0x0101_0000, 0x0102_FFFF):
        assert run.match(b"r" + struct.pack("<I", index)).end() == 5
    for index in (0x0103_0000, 0x0200_0000, 0x0201_0000, 0xFFFF_FFFF):
        match = run.match(b"r" + struct.pack("<I", index))
        assert match is None or match.end() == 0


def test_many_containers_for_few_bytes_are_refused():
    assert "far more memory" in refusal(b"\x80\x04](" + b"}" * 300_000 + b"e.")
    assert len(loads(b"\x80\x04](" + b"}" * 30_000 + b"e.")) == 30_000


@given(data=st.binary(max_size=200), proto=st.integers(2, 5))
@settings(deadline=None, max_examples=500)
def test_random_bytes_end_in_a_value_or_the_one_error(data, proto):
    with contextlib.suppress(SnapshotError):
        loads(b"\x80" + bytes([proto]) + data)


OPCODES = st.sampled_from(sorted(opcode.code for opcode in pickletools.opcodes))
CHUNKS = st.lists(
    st.tuples(OPCODES.map(lambda c: c.encode("latin-1")), st.binary(max_size=4)).map(b"".join)
    | st.sampled_from([b"K\x01K\x02\x86\x94", b"]\x94(", b"}\x94(", b"\x8c\x01a\x94", b"h\x00"]),
    max_size=30,
)


@given(chunks=CHUNKS)
@settings(deadline=None, max_examples=500)
def test_random_opcodes_end_in_a_value_or_the_one_error(chunks):
    data = b"\x80\x04" + b"".join(chunks) + b"."
    try:
        loads(data)
    except SnapshotError:
        return
    # what was read is what the opcodes say, by the standard library's own reading of them
    names = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert names <= ALLOWED


def test_importing_it_reads_no_opcode_table():
    """pickletools is large, and wanted only to name what is refused."""
    code = "import sys, gpumem_otel.snapshot.unpickle; sys.exit('pickletools' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
