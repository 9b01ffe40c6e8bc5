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


def _nest() -> list:
    x: list = []
    for _ in range(60):
        x = [x, x]
    return x


def _trace_of(*events: dict, annotations: list | None = None) -> bytes:
    block = {"size": 512, "requested_size": 512, "state": "active_allocated", "address": 512}
    segment = {"device": 0, "address": 512, "total_size": 512, "blocks": [block]}
    raw = {"segments": [segment], "device_traces": [list(events)]}
    return pickle.dumps({**raw, "external_annotations": annotations or []}, 4)


def _event(action: str, address: int, **more: object) -> dict:
    return {"action": action, "addr": address, "size": 512, "time_us": 1, **more}


def _odd_events() -> bytes:
    """Frames, pools and words that are nests, in a trace."""
    frames = [{"name": _nest(), "filename": "f.py", "line": 1}, {"name": "f", "x": _nest()}]
    odd = {"frames": frames, "pool_id": _nest(), "compile_context": _nest()}
    return _trace_of(
        *(_event("alloc", n, **odd, user_metadata=_nest(), stream=_nest()) for n in range(500))
    )


def _distinct_stacks() -> bytes:
    """Stacks that differ in one frame where nobody looks first."""
    frames = [{"name": f"f{n}", "filename": "f.py", "line": n} for n in range(3_000)]
    shared = [frames[0]] * 40
    return _trace_of(
        *(_event("alloc", n, frames=[*shared, frame, *shared]) for n, frame in enumerate(frames))
    )


def _equal_frames() -> bytes:
    """Stacks of frames that are equal to their last letter, and are not the same."""

    def one() -> dict:
        more = {f"key {n}": f"{n}" + "x" * 4_000 for n in range(29)}
        return {"name": "f", "filename": "f.py", "line": 1, **more}

    either, middle = (one(), one()), one()
    stacks = [
        [middle, *(either[number >> bit & 1] for bit in range(9)), *[either[number & 1]] * 500]
        for number in range(512)
    ]
    stacks = [[*stack, middle, *reversed(stack)] for stack in stacks]
    return _trace_of(*(_event("alloc", n, frames=stack) for n, stack in enumerate(stacks)))


def _many_devices() -> bytes:
    """A device has next to nothing, and there are many devices: nobody may walk all for each."""
    segments: list[dict] = [
        {"device": device, "address": device << 21, "total_size": 0, "blocks": []}
        for device in range(500)
        for _ in range(20)
    ]
    traces = [[_event("alloc", device << 21)] * 2 for device in range(500)]
    marks = [
        {"name": "n", "stage": "START", "device": number % 500, "time_us": 0}
        for number in range(20_000)
    ]
    raw = {"segments": segments, "device_traces": traces, "external_annotations": marks}
    return pickle.dumps(raw, 4)


def _devices_of_one_stack() -> bytes:
    """Each device has a block with the same long stack: its frames are named once."""
    frames = [{"name": f"f{n}", "filename": "f.py", "line": n} for n in range(2_000)]
    segments = [
        {
            "device": device,
            "total_size": 512,
            "blocks": [{"size": 512, "state": "active_allocated", "frames": frames}],
        }
        for device in range(100)
    ]
    return pickle.dumps(segments, 4)


def _deep_annotations() -> bytes:
    """Ranges inside one another, none of which ends before all have begun."""
    count = 40_000
    marks = [
        {
            "name": f"n{n % 5}",
            "stage": stage,
            "device": 0,
            "time_us": n + count * (stage == "END"),
        }
        for stage in ("START", "END")
        for n in range(count)
    ]
    events = (_event("alloc", n, time_us=20 * n) for n in range(count // 10))
    return _trace_of(*events, annotations=marks)


def _long_texts() -> bytes:
    """Text that is long, holds what ASCII does not, and is named again and again."""
    text = "\u00e9" * 250_000
    frames = [{"name": text, "filename": text, "line": line} for line in range(1_000)]
    said = {"compile_context": text, "user_metadata": text}
    events = [_event("alloc", n, frames=frames[n : n + 1], **said) for n in range(1_000)]
    events += [_event("annotate", n, **said) for n in range(1_000)]
    marks = [
        {"name": text, "stage": stage, "device": 0, "time_us": n}
        for n in range(1_000)
        for stage in ("START", "END")
    ]
    return _trace_of(*events, annotations=marks)


def _only_marks() -> bytes:
    """Failed allocations, and nothing else."""
    return _trace_of(*({"action": "oom", "size": 1, "device_free": n} for n in range(150_000)))


def deep_values() -> bytes:
    """Where nobody reads, lists so deep that no recursion gets to their end."""
    nest = b"]" * 100_000 + b"a" * 99_999
    return PROTO + b"}(\x8c\x08segments]\x8c\x0ddevice_traces]\x8c\x04more" + nest + b"u."


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
    "events of nests": _odd_events,
    "stacks that are alike": _distinct_stacks,
    "one address again and again": lambda: _trace_of(*[_event("alloc", 7) for _ in range(20_000)]),
    "frees of what never was": lambda: _trace_of(
        *(_event("free_requested", n) for n in range(20_000))
    ),
    "contexts without number": lambda: _trace_of(
        *(_event("alloc", n, compile_context=str(n)) for n in range(10_000))
    ),
    "annotations in one another": _deep_annotations,
    "frames that are equal and not the same": _equal_frames,
    "segments and marks of five hundred devices": _many_devices,
    "one stack on a hundred devices": _devices_of_one_stack,
    "long text again and again": _long_texts,
    "a trace of failed allocations": _only_marks,
    "sizes at the limit": lambda: _trace_of(_event("alloc", 7) | {"size": 2**63 - 1}),
}
"""These read, and nothing that is done with them may take long."""
