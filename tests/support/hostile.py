"""Files that are made to do harm: each is refused, at once, in little memory, running nothing.

`FILES` maps a name to a function that makes the bytes; making some takes longer than refusing.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import zlib

PROTO = b"\x80\x04"
MARK = "/tmp/gpumem-otel-was-here"
"""A folder that some of the files would make, if anything of them were run."""


class _Runs:
    def __reduce__(self):
        return (os.mkdir, (MARK,))


def _long_binput(index: int) -> bytes:
    return PROTO + b"]r" + struct.pack("<I", index) + b"0N."


def _tuple_nest(depth: int) -> bytes:
    """{((((...)))): None}: hashing the key recurses in C."""
    return PROTO + b"})" + b"\x85" * depth + b"Ns."


def _tuple_dag(levels: int) -> bytes:
    """t = (t, t), again and again: 2**levels elements to hash."""
    body = b")\x94"
    for level in range(levels):
        body += b"h" + bytes([level]) + b"h" + bytes([level]) + b"\x86\x94"
    return PROTO + b"}" + body + b"Ns."


def _colliding_tuples(count: int) -> bytes:
    """Keys (a, b) whose hashes are all 1: setting n of them takes n * n / 2 comparisons."""
    p1, p2, p5, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, 2**64 - 1
    back1, back2 = pow(p1, -1, 2**64), pow(p2, -1, 2**64)

    def turn(x: int, n: int) -> int:
        return (x << n | x >> (64 - n)) & mask

    want = (1 - (2 ^ (p5 ^ 3527539))) & mask
    before = turn(want * back1 & mask, 33)
    keys, a = [], 0
    while len(keys) < count:
        a += 1
        acc = turn((p5 + a * p2) & mask, 31) * p1 & mask
        lane = (before - acc) * back2 & mask
        b = lane - 2**64 if lane >= 2**63 else lane
        if abs(b) < 2**61 - 1 and b != -1:
            keys.append((a, b))
    assert len({hash(key) for key in keys}) == 1
    numbers = [[pickle.encode_long(number) for number in key] for key in keys]
    items = [b"".join(b"\x8a%c%b" % (len(n), n) for n in pair) + b"\x86N" for pair in numbers]
    return PROTO + b"}(" + b"".join(items) + b"u."


def _shared_blocks() -> bytes:
    """Segments that are all one, with blocks that are all one, with a stack of one frame."""
    many = 20_000
    frame = {"name": "f", "filename": "f.py", "line": 1}
    block = {"size": 1, "state": "active_allocated", "frames": [frame] * many}
    segment = {"device": 0, "total_size": many, "blocks": [block] * many}
    return pickle.dumps({"segments": [segment] * many, "device_traces": []}, 4)


def _shared_stack() -> bytes:
    """Different blocks with one very long stack."""
    frames = [{"name": "f", "filename": "f.py", "line": 1}] * 100_000
    blocks = [{"size": 1, "state": "active_allocated", "frames": frames} for _ in range(20_000)]
    return pickle.dumps([{"device": 0, "total_size": 20_000, "blocks": blocks}], 4)


def _shared_traces() -> bytes:
    trace = [{"action": "alloc", "addr": 1, "size": 1, "stream": 0, "frames": []}] * 50_000
    return pickle.dumps({"segments": [], "device_traces": [trace] * 4_000}, 4)


def _odd_frames() -> bytes:
    """Equal frames that take 2**60 steps to find equal."""

    def nest() -> list:
        x: list = []
        for _ in range(60):
            x = [x, x]
        return x

    blocks = [
        {"size": 1, "state": "active_allocated", "frames": [{"name": "f", "extra": nest()}]}
        for _ in range(2)
    ]
    return pickle.dumps([{"device": 0, "total_size": 2, "blocks": blocks}], 4)


def _huge_addresses() -> bytes:
    events = [
        {"action": "alloc", "addr": (2**61 - 1) * 2**200 * i, "size": 1} for i in range(20_000)
    ]
    return json.dumps({"segments": [], "device_traces": [events]}).encode()


def _gzip_of(first: bytes, byte: bytes, mebibytes: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    out = [packer.compress(first)]
    out += [packer.compress(byte * (1 << 20)) for _ in range(mebibytes)]
    return b"".join([*out, packer.flush()])


FILES = {
    "global": lambda: pickle.dumps(_Runs(), 4),
    "global of protocol 2": lambda: pickle.dumps(_Runs(), 2),
    "global, text form": lambda: b"\x80\x02cos\nmkdir\n(U\x19" + MARK.encode() + b"tR.",
    "persistent id": lambda: PROTO + b"NQ.",
    "extension": lambda: PROTO + b"\x82\x01.",
    "instance": lambda: PROTO + b"(ios\nmkdir\n.",
    "build": lambda: PROTO + b"}}b.",
    "reduce without a global": lambda: PROTO + b"N)R.",
    "out of band buffer": lambda: b"\x80\x05\x97.",
    "bytearray of 8 GiB": lambda: b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b"a.",
    "bytes of 8 GiB": lambda: PROTO + b"\x8e" + struct.pack("<Q", 1 << 33) + b"a.",
    "text of 8 GiB": lambda: PROTO + b"\x8d" + struct.pack("<Q", 1 << 33) + b"a.",
    "text of 2**64 - 1": lambda: PROTO + b"\x8d" + b"\xff" * 8 + b"a.",
    "text of 4 GiB": lambda: PROTO + b"X" + b"\xff" * 4 + b"a.",
    "frame of 2**62": lambda: PROTO + b"\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "number of 100 MB": lambda: PROTO + b"\x8b" + struct.pack("<i", 10**8) + b"\x01" * 1000,
    "number of -1 bytes": lambda: PROTO + b"\x8b" + struct.pack("<i", -1) + b"N.",
    "number of 1 kB": lambda: PROTO + b"\x8b" + struct.pack("<i", 1000) + b"\x01" * 1000 + b".",
    "number of 10 bytes": lambda: PROTO + b"\x8a\x0a" + b"\x01" * 10 + b".",
    "memo index 268435455": lambda: _long_binput(0x0FFFFFFF),
    "memo index 2**32 - 1": lambda: _long_binput(0xFFFFFFFF),
    "memo index beyond a large file": lambda: (
        PROTO + b"]" + b"Na" * 200_000 + b"r\x00\x00\x00\x02."
    ),
    "memo index in text": lambda: PROTO + b"]p268435455\n.",
    "memo entry never written": lambda: PROTO + b"h\x07.",
    "tuples 65 deep": lambda: _tuple_nest(65),
    "tuples 400,000 deep": lambda: _tuple_nest(400_000),
    "tuples of tuples, exponential": lambda: _tuple_dag(60),
    "tuples that hash alike": lambda: _colliding_tuples(40_000),
    "stack of a million marks": lambda: PROTO + b"(" * 1_000_000,
    "lists a million deep": lambda: PROTO + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "lists a million deep, protocol 0": lambda: PROTO + b"(" * 1_000_000 + b"l" * 1_000_000 + b".",
    "two million empty dicts": lambda: PROTO + b"(" + b"}" * 2_000_000 + b"t.",
    "a list of itself": lambda: PROTO + b"]\x94h\x00a.",
    "a segment that is its own block": lambda: (
        PROTO + b"]}\x94(\x8c\x06deviceK\x00\x8c\x06blocks]h\x00aua."
    ),
    "duplicated": lambda: PROTO + b"]" + b"2a" * 100 + b".",
    "all segments one": _shared_blocks,
    "all stacks one": _shared_stack,
    "all traces one": _shared_traces,
    "huge addresses that hash alike": _huge_addresses,
    "zeros in gzip": lambda: _gzip_of(b"", b"\0", 64),
    "spaces in gzip": lambda: _gzip_of(b"[", b" ", 64),
    "None in gzip": lambda: _gzip_of(PROTO + b"(", b"N", 64),
    "lists in gzip": lambda: _gzip_of(PROTO + b"(", b"]", 64),
    "gzip in gzip in gzip": lambda: gzip.compress(gzip.compress(gzip.compress(b"[]"))),
    "bomb in gzip in gzip": lambda: gzip.compress(_gzip_of(b"[", b" ", 64)),
    "JSON 100,000 deep": lambda: b"[" * 100_000 + b"]" * 100_000,
    "JSON objects 100,000 deep": lambda: b'{"a":' * 100_000,
    "JSON number of a million digits": lambda: b'{"segments":' + b"9" * 1_000_000 + b"}",
}

HARMLESS = {
    "frames that are slow to compare": _odd_frames,
}
"""These read, and nothing that is done with them may take long."""
