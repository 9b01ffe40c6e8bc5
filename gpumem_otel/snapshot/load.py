"""What kind of file it is, by content and never by name, and its values as plain objects.

Known are pickle (protocols 2 to 5), JSON (UTF-8, or UTF-16 and UTF-32 with a byte order mark)
and our own recordings; each plain, in gzip, or in gzip twice, which is what a server makes of a
`.gz` file when it compresses what it sends.
"""

from __future__ import annotations

import functools
import gc
import io
import json
import os
import pickle
import re
import stat
import sys
import zlib
from dataclasses import dataclass
from itertools import chain
from operator import countOf
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, NoReturn

from gpumem_otel.errors import SnapshotError
from gpumem_otel.snapshot.torch_format import ROOT_KEYS, state_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpumem_otel.snapshot.torch_format import RawEvent, RawSegment

# Snapshots of strangers: types and bounds of all that is read, before anything is counted.
#
# Columns are checked at once rather than entries one by one (a trace may have a million); the
# first entry that is wrong is looked for only to name it.

_INT64_MAX = 2**63 - 1
_MAX_DEVICES = 4096
# Addresses and pools become keys, and of larger numbers many can be made that hash alike. Pool
# ids are counters; so many large ones are nothing that torch made.
_MAX_ADDRESS = 2**64
_LARGE_POOL_ID = 2**32
_MAX_LARGE_POOL_IDS = 1000
_KNOWN_STATES = frozenset(
    {"active_allocated", "active_pending_free", "active_awaiting_free", "inactive"}
)

# A stack that is shared costs nothing in a file and its full length each time it is walked. Real
# files hold each stack about once, so that no frame of it takes less than two bytes there.
_FRAMES_PER_BYTE = 4
_FRAMES_FLOOR = 1_000_000

_PIECE = 1024

_Kinds = frozenset[type]

_INT: _Kinds = frozenset({int})
_MAYBE_INT: _Kinds = frozenset({int, type(None)})
_TEXT: _Kinds = frozenset({str})
_MAYBE_TEXT: _Kinds = frozenset({str, type(None)})
_LIST: _Kinds = frozenset({list, tuple})
_MAYBE_LIST: _Kinds = frozenset({list, tuple, type(None)})
_DICT: _Kinds = frozenset({dict})
_MAYBE_DICT: _Kinds = frozenset({dict, type(None)})


class _What(NamedTuple):
    """What the entries are, for messages, and the number of the first of them."""

    name: str
    first: int = 0


class _Wrong(Exception):  # noqa: N818 (internal: leaves this module as a SnapshotError)
    """What is wrong."""


def check(raw: object, source: str, size_bytes: int) -> None:
    """Refuse what can not be read, or not in a time that fits its size.

    Pinned host memory is left out where it is not as torch 2.14 writes it: the file is about the
    device.

    Args:
        raw: the root of a snapshot.
        source: name for messages.
        size_bytes: of the file, uncompressed.

    Raises:
        SnapshotError: says which value is wrong.
    """
    most_frames = _FRAMES_FLOOR + _FRAMES_PER_BYTE * size_bytes
    try:
        _check(raw, most_frames)
    except _Wrong as wrong:
        raise SnapshotError(source, f"not a readable memory snapshot: {wrong}") from None
    if isinstance(raw, dict) and "host_segments" in raw:
        try:
            _check_host_segments(_list_of_dicts(raw, "host_segments"), most_frames)
        except _Wrong:
            raw["host_segments"] = ()


def _check(raw: object, most_frames: int) -> None:
    if type(raw) is list:
        raw = {"segments": raw}
    if type(raw) is not dict:
        raise _Wrong(f"its root is a {type(raw).__name__}")
    if not ROOT_KEYS.intersection(raw):
        raise _Wrong("it has neither 'segments' nor 'device_traces'")
    stacks: list[Sequence[Any]] = []
    _check_segments(_list_of_dicts(raw, "segments"), stacks)
    _check_traces(raw, most_frames - _check_stacks(stacks, most_frames))
    _list_of_dicts(raw, "external_annotations")
    settings = raw.get("allocator_settings")
    if type(settings) not in _MAYBE_DICT:
        raise _Wrong(f"allocator_settings is a {type(settings).__name__}")


def _check_segments(segments: Sequence[dict[str, Any]], stacks: list[Sequence[Any]]) -> None:
    _kinds(segments, "device", _INT, _What("segment"))
    _kinds(segments, "blocks", _LIST, _What("segment"))
    _kinds(segments, "frames", _MAYBE_LIST, _What("segment"))
    _kinds(segments, "segment_pool_id", _MAYBE_LIST, _What("segment"))
    _sizes(segments, "total_size", _MAYBE_INT, _What("segment"))
    if any(not 0 <= segment["device"] < _MAX_DEVICES for segment in segments):
        raise _Wrong(f"a device that is not between 0 and {_MAX_DEVICES - 1}")
    pools = [pool for segment in segments if (pool := segment.get("segment_pool_id")) is not None]
    if any([type(part) for part in pool] != [int, int] for pool in pools):
        raise _Wrong("a segment_pool_id that is not two numbers")
    if sum(max(map(abs, pool)) >= _LARGE_POOL_ID for pool in pools) > _MAX_LARGE_POOL_IDS:
        raise _Wrong("too many memory pools")
    lists = [segment["blocks"] for segment in segments]
    _distinct(lists, "two segments have the same list of blocks")
    blocks = list(chain.from_iterable(lists))
    _all_dicts(blocks, _What("block"))
    _sizes(blocks, "size", _INT, _What("block"))
    _sizes(blocks, "requested_size", _MAYBE_INT, _What("block"))
    _kinds(blocks, "state", _TEXT, _What("block"))
    _addresses(blocks, "address", _What("block"))
    _kinds(blocks, "frames", _MAYBE_LIST, _What("block"))
    _kinds(blocks, "history", _MAYBE_LIST, _What("block"))
    stacks += [frames for entry in chain(segments, blocks) if (frames := entry.get("frames"))]
    present = [history[0] for block in blocks if (history := block.get("history"))]
    _all_dicts(present, _What("history entry"))
    _sizes(present, "real_size", _MAYBE_INT, _What("history entry"))
    _kinds(present, "frames", _MAYBE_LIST, _What("history entry"))
    stacks += [frames for entry in present if (frames := entry.get("frames"))]


def _check_host_segments(segments: Sequence[dict[str, Any]], most_frames: int) -> None:
    """Of pinned host memory, torch 2.14 and newer."""
    what = _What("entry of host_segments")
    for key in ("size", "total_size"):
        _sizes(segments, key, _MAYBE_INT, what)
    _addresses(segments, "address", what)
    stacks = list(filter(None, _kinds(segments, "frames", _MAYBE_LIST, what)))
    _check_stacks(stacks, most_frames)


def _check_traces(raw: dict[str, Any], most_frames: int) -> None:
    traces = raw.get("device_traces")
    if traces is None:
        return
    if type(traces) not in _LIST:
        raise _Wrong(f"device_traces is a {type(traces).__name__}")
    if len(traces) > _MAX_DEVICES:
        raise _Wrong(f"traces of {len(traces)} devices")
    for trace in traces:
        if type(trace) not in _LIST:
            raise _Wrong(f"a trace is a {type(trace).__name__}")
    _distinct(traces, "two devices have the same trace")
    frames = size_bytes = 0
    for events, what in _pieces(traces):
        _all_dicts(events, what)
        _kinds(events, "action", _MAYBE_TEXT, what)
        size_bytes = _sizes(events, "size", _MAYBE_INT, what, size_bytes)
        _addresses(events, "addr", what)
        _kinds(events, "time_us", _MAYBE_INT, what)
        _kinds(events, "device_free", _MAYBE_INT, what)
        stacks = list(filter(None, _kinds(events, "frames", _MAYBE_LIST, what)))
        frames += _check_stacks(stacks, most_frames - frames)


def _pieces(traces: Sequence[Sequence[Any]]) -> Iterator[tuple[Sequence[Any], _What]]:
    """All events, in pieces that the processor's cache holds while their columns are checked."""
    for trace in traces:
        for start in range(0, len(trace), _PIECE):
            yield trace[start : start + _PIECE], _What("event", start)


def _check_stacks(stacks: Sequence[Sequence[Any]], most_frames: int) -> int:
    """How many frames the stacks have."""
    frames = sum(map(len, stacks))
    if frames > most_frames:
        raise _Wrong("its stacks are longer than its size allows")
    if countOf(map(type, chain.from_iterable(stacks)), dict) != frames:
        raise _Wrong("a frame that is no dict")
    return frames


def _list_of_dicts(raw: dict[str, Any], key: str) -> Sequence[dict[str, Any]]:
    found: Sequence[dict[str, Any]] | None = raw.get(key)
    if found is None:
        return ()
    if type(found) not in _LIST:
        raise _Wrong(f"{key} is a {type(found).__name__}")
    _all_dicts(found, _What(f"entry of {key}"))
    return found


def _all_dicts(entries: Sequence[object], what: _What) -> None:
    if countOf(map(type, entries), dict) != len(entries):
        for number, entry in enumerate(entries, what.first):
            if type(entry) is not dict:
                raise _Wrong(f"{what.name} {number} is a {type(entry).__name__}")


def _kinds(entries: Sequence[dict[str, Any]], key: str, kinds: _Kinds, what: _What) -> list[Any]:
    """The values of a key, None where it is missing."""
    values = [entry.get(key) for entry in entries]
    if not set(map(type, values)) <= kinds:
        for number, entry in enumerate(entries, what.first):
            if type(entry.get(key)) not in kinds:
                wrong = f"a {type(entry[key]).__name__}" if key in entry else "missing"
                raise _Wrong(f"{key} of {what.name} {number} is {wrong}")
    return values


def _sizes(
    entries: Sequence[dict[str, Any]], key: str, kinds: _Kinds, what: _What, before: int = 0
) -> int:
    """The sum, of these and what came before."""
    sizes = list(filter(None, _kinds(entries, key, kinds, what)))
    if sizes and min(sizes) < 0:
        raise _Wrong(f"{key} of one {what.name} is negative")
    total: int = before + sum(sizes)
    if total > _INT64_MAX:
        raise _Wrong(f"the sum of {key} over all of its kind does not fit 64 bits")
    return total


def _addresses(entries: Sequence[dict[str, Any]], key: str, what: _What) -> None:
    found = list(filter(None, _kinds(entries, key, _MAYBE_INT, what)))
    if found and not -_MAX_ADDRESS <= min(found) <= max(found) <= _MAX_ADDRESS:
        raise _Wrong(f"{key} of one {what.name} does not fit 64 bits")


def _distinct(lists: Sequence[Sequence[Any]], message: str) -> None:
    filled = [id(entries) for entries in lists if entries]
    if len(set(filled)) != len(filled):
        raise _Wrong(message)


def warnings_for(
    segments: Sequence[RawSegment], traces: Sequence[Sequence[RawEvent]]
) -> tuple[str, ...]:
    """What a reader of the numbers should know, one sentence each."""
    found: list[str] = []
    events = sum(map(len, traces))
    blocks = [block for segment in segments for block in segment["blocks"]]
    stacks = any(block.get("frames") or block.get("history") for block in blocks)
    if segments and not events and not stacks:
        found.append(
            "no history recorded: no block carries a stack and no event was kept; call "
            "torch.cuda.memory._record_memory_history() before the memory is allocated"
        )
    unlike = 0
    for segment in segments:
        size = segment.get("total_size")
        unlike += size is not None and size != sum(block["size"] for block in segment["blocks"])
    if unlike:
        found.append(
            f"{unlike} of {len(segments)} segments differ in size from the sum of their blocks; "
            "the larger of the two is counted as reserved"
        )
    strange = sorted({block["state"] for block in blocks} - _KNOWN_STATES)
    found += [f"block state {word[:40]!r} is read as {state_of(word).value}" for word in strange]
    for device, trace in enumerate(traces):
        unseen = _unseen_frees(trace)
        if unseen:
            found.append(
                f"device {device}: {unseen} frees of memory whose allocation is not in the trace: "
                "recording began after it, or its ring was full"
            )
    return tuple(found)


def _unseen_frees(trace: Sequence[RawEvent]) -> int:
    """How many allocations are freed that the trace did not see being made."""
    if len(trace) < 2:  # noqa: PLR2004 (what record mode `state` leaves is no trace)
        return 0
    actions = {event.get("action") for event in trace}
    # each free is requested first, then completed; some writers keep the second alone
    free = "free_requested" if "free_requested" in actions else "free_completed"
    if "alloc" not in actions:
        return sum(event.get("action") == free for event in trace)
    live: set[object] = set()
    unseen = 0
    for event in trace:
        action = event.get("action")
        if action == "alloc":
            live.add(event.get("addr"))
        elif action == free:
            address = event.get("addr")
            if address in live:
                live.discard(address)
            else:
                unseen += 1
    return unseen


# A pickle reader for plain values that runs nothing and can not be made to hurt.
#
# A pickle needs no global to do harm: ten bytes that write memo entry 268,435,455 take 4 GB, and a
# tuple in a tuple in a tuple ... used as a dict key overflows the C stack. So the opcodes are
# scanned before anything is loaded; what `pickle.Unpickler` then sees are lists, dicts, strings,
# numbers and tuples, within these bounds:
#
# * only the opcodes that `pickle` writes for such values in protocols 2 to 5;
# * lengths at most what remains, memo indices at most the number of bytes (an opcode is at least
#   one byte), integers of at most nine bytes;
# * tuples nested at most 64 deep and at most 10,000 elements in all, at most 1,000 of them used
#   as dict keys (equal hashes of many tuples are easily made); lists and dicts may nest, nobody
#   walks them by recursion;
# * containers in proportion to the bytes of the file.
#
# The scan is one regular expression that eats whole runs of harmless opcodes, and takes less than
# the load itself (87 MB, a million events: 1.0 s of scan before 2.6 s of load; CPython 3.11). A
# file with tuples of other things than two small numbers takes the exact way, an interpreter that
# knows what is on the stack: ten times slower, and for at most a million opcodes.
#
# Format: the comments of `pickletools.py` in the standard library.

_MAX_INT_BYTES = 9
_MAX_DEPTH = 64
_MAX_WEIGHT = 10_000
_MAX_TUPLE_KEYS = 1_000
_MAX_EXACT_OPCODES = 1_000_000

# What a list and a dict take, against what real files need per byte (at most 12), with room for
# small files. Counting the two bytes anywhere counts too many, by one in a hundred or so.
_LIST_BYTES = 90
_DICT_BYTES = 250
_MAX_EXPANSION = 40
_EXPANSION_FLOOR = 16 << 20

_PROTO, _FRAME, _STOP = 0x80, 0x95, ord(".")
_SHORT_BINUNICODE, _BINUNICODE, _BINUNICODE8 = 0x8C, ord("X"), 0x8D
_LONG1, _LONG4 = 0x8A, 0x8B
_BINPUT, _LONG_BINPUT, _MEMOIZE = ord("q"), ord("r"), 0x94
_BINGET, _LONG_BINGET = ord("h"), ord("j")
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_TUPLE, _EMPTY_TUPLE, _MARK = ord("t"), ord(")"), ord("(")
_APPEND, _APPENDS, _SETITEM, _SETITEMS = ord("a"), ord("e"), ord("s"), ord("u")

# opcode -> bytes of its argument, for those whose argument has a fixed size
_FIXED = {
    **dict.fromkeys(b"(}])Naesut.\x85\x86\x87\x88\x89\x94", 0),
    **dict.fromkeys(b"Kqh", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"Jrj", 4),
    **dict.fromkeys(b"G", 8),
}
# opcode -> bytes of the length that precedes its argument
_COUNTED = {_SHORT_BINUNICODE: 1, _BINUNICODE: 4, _BINUNICODE8: 8, _LONG1: 1, _LONG4: 4}
_PUSHES = frozenset(b"}]NKMJG\x88\x89") | frozenset(_COUNTED)

# Possessive repetition keeps no state per opcode and is twice as fast; before 3.11.5 it could
# match wrongly (gh-106052), so there the run is cut into pieces.
_REPEAT = b"*+" if sys.version_info >= (3, 11, 5) else b"{1,1000}"


class _Refused(Exception):  # noqa: N818 (internal: leaves this module as a SnapshotError)
    """Why a pickle is not loaded."""


class _Unpickler(pickle.Unpickler):
    """The scan has refused all that would lead here; this is the second lock on the door."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise _Refused(f"it names the global {module}.{name}")

    def persistent_load(self, pid: Any, /) -> NoReturn:  # noqa: ARG002
        raise _Refused("it refers to an object outside of it")


def loads(data: bytes, source: str) -> Any:
    """Load a pickle of plain values.

    Args:
        data: the whole pickle; what follows its end is ignored, as pickle does.
        source: name for messages.

    Raises:
        SnapshotError: it is damaged, or holds what a snapshot has no use for.
    """
    collecting = gc.isenabled()
    try:
        _scan(data)
        # Looking for garbage among millions of new objects, again and again as they grow in
        # number, takes longer than making them.
        gc.disable()
        # BufferedReader, since protocols 2 and 3 have no frames and would be read byte by byte
        return _Unpickler(io.BufferedReader(io.BytesIO(data))).load()
    except _Refused as refused:
        raise SnapshotError(source, f"refused as a pickle: {refused}") from None
    except MemoryError:
        raise SnapshotError(source, "it does not fit into memory") from None
    except Exception as error:
        reason = str(error)[:200] or type(error).__name__
        raise SnapshotError(source, f"damaged pickle: {reason}") from None
    finally:
        if collecting:
            gc.enable()


@functools.lru_cache(maxsize=4)
def _harmless(upper_half: int, repeat: bytes = _REPEAT) -> re.Pattern[bytes]:
    """Runs of opcodes that need no look: short, fixed, and with nothing to hide.

    Args:
        upper_half: upper 16 bits of the largest memo index.
        repeat: how the run is repeated.
    """
    small = rb"(?:K.|M..)"
    ints = b"|".join(_sized(size) for size in (6, 7, 8, 5, 9, 0, 1, 2, 3, 4))
    strings = b"|".join(_sized(size) for size in range(256))
    third, fourth = upper_half & 0xFF, upper_half >> 8 & 0xFF
    upper = _up_to(third) + b"\\x%02x" % fourth
    if fourth:
        upper += rb"|." + _up_to(fourth - 1)
    # a frame may end anywhere, its length needs a look where it is larger than this
    frame = rb"(?:\x95...\x00{5})?"
    tokens = [
        rb"j.{4}",
        rb"h.",
        rb"\x94",
        rb"\x8a(?:" + ints + rb")",
        rb"[(}\]ueaNs\x88\x89)]",
        # with the tuple that follows it, if it is one of two small numbers (a pool id)
        small + rb"(?:" + frame + small + frame + rb"\x86)?",
        rb"J.{4}",
        rb"\x8c(?:" + strings + rb")",
        rb"q.",
        rb"r..(?:" + upper + rb")",
        rb"G.{8}",
    ]
    return re.compile(rb"(?s:" + b"|".join(tokens) + rb")" + repeat)


def _sized(size: int) -> bytes:
    return b"\\x%02x.{%d}" % (size, size)


def _up_to(byte: int) -> bytes:
    return b"[\\x00-\\x%02x]" % byte


def _scan(data: bytes) -> None:
    """Refuse what is not a pickle of plain values within the bounds of this module."""
    end = len(data)
    if end < 2 or data[0] != _PROTO:  # noqa: PLR2004
        raise _Refused("it does not begin like one")
    if not 2 <= data[1] <= 5:  # noqa: PLR2004
        raise _Refused(f"protocol {data[1]}, 2 to 5 are read")
    held = data.count(b"]") * _LIST_BYTES + data.count(b"}") * _DICT_BYTES
    if held > end * _MAX_EXPANSION + _EXPANSION_FLOOR:
        raise _Refused("it would take far more memory than its size")
    run = _harmless(end >> 16).match
    position = 2
    while True:
        # again and again where the run is cut into pieces: a pair must not be cut in two
        matched = run(data, position)
        while matched and matched.end() > position:
            position = matched.end()
            matched = run(data, position)
        if position >= end:
            raise _Refused("it is cut short")
        opcode = data[position]
        if opcode == _STOP:
            return
        if opcode in _TUPLES or opcode == _TUPLE:
            _scan_exactly(data)
            return
        position = _after(data, position, opcode)


def _after(data: bytes, position: int, opcode: int) -> int:
    """Where the next opcode is; refuses this one if it or its argument is out of bounds."""
    start = position + 1
    size = _FIXED.get(opcode)
    if size is None:
        width = _COUNTED.get(opcode)
        if width is not None:
            size = width + int.from_bytes(data[start : start + width], "little")
            if opcode in (_LONG1, _LONG4) and size - width > _MAX_INT_BYTES:
                raise _Refused("a number of more than 72 bits")
        elif opcode == _FRAME:
            size = 8
            if int.from_bytes(data[start : start + 8], "little") > len(data) - start - 8:
                raise _Refused("it is cut short")
        else:
            raise _Refused(f"it uses {_name(opcode)}, and a snapshot has no use for that")
    elif opcode == _LONG_BINPUT:
        index = int.from_bytes(data[start : start + 4], "little")
        if index > len(data):
            raise _Refused(f"memo index {index} in {len(data)} bytes")
    if start + size > len(data):
        raise _Refused("it is cut short")
    return start + size


def _name(opcode: int) -> str:
    import pickletools  # noqa: PLC0415 (large, and only for this message)

    for known in pickletools.opcodes:
        if known.code == chr(opcode):
            return f"opcode {known.name}"
    return f"the unknown opcode 0x{opcode:02x}"


_Shape = tuple[int, int]
"""(depth, number of elements) of a tuple with all tuples in it; (0, 1) for anything else."""

_PLAIN: _Shape = (0, 1)


def _scan_exactly(data: bytes) -> None:  # noqa: C901, PLR0912 (a branch for each opcode)
    """As `_scan`, following the stack, so that tuples of tuples are measured."""
    stack: list[_Shape] = []
    marks: list[int] = []
    memo: dict[int, _Shape] = {}
    keys = 0
    position = 2
    for _ in range(_MAX_EXACT_OPCODES):
        if position >= len(data):
            raise _Refused("it is cut short")
        opcode = data[position]
        start = position + 1
        position = _after(data, position, opcode)
        if opcode in _PUSHES:
            stack.append(_PLAIN)
        elif opcode == _STOP:
            return
        elif opcode == _EMPTY_TUPLE:
            stack.append((1, 1))
        elif opcode == _MARK:
            marks.append(len(stack))
        elif opcode in (_BINGET, _LONG_BINGET):
            found = memo.get(int.from_bytes(data[start:position], "little"))
            if found is None:
                raise _Refused("it reads a memo entry that it never wrote")
            stack.append(found)
        elif opcode in (_MEMOIZE, _BINPUT, _LONG_BINPUT):
            written = data[start:position]
            index = int.from_bytes(written, "little") if written else len(memo)
            memo[index] = _take(stack, marks, 1)[0]
            stack.append(memo[index])
        elif opcode in _TUPLES:
            stack.append(_nest(_take(stack, marks, _TUPLES[opcode])))
        elif opcode == _TUPLE:
            stack.append(_nest(_take_to_mark(stack, marks)))
        elif opcode == _APPEND:
            _take(stack, marks, 1)
        elif opcode == _APPENDS:
            _take_to_mark(stack, marks)
        elif opcode in (_SETITEM, _SETITEMS):
            single = opcode == _SETITEM
            items = _take(stack, marks, 2) if single else _take_to_mark(stack, marks)
            keys += sum(depth > 0 for depth, _ in items[::2])
            if keys > _MAX_TUPLE_KEYS:
                raise _Refused(f"more than {_MAX_TUPLE_KEYS} tuples as keys")
    raise _Refused("it is too long for a pickle with nested tuples")


def _take(stack: list[_Shape], marks: list[int], count: int) -> list[_Shape]:
    if len(stack) - count < (marks[-1] if marks else 0):
        raise _Refused("it takes more from its stack than there is")
    taken = stack[-count:]
    del stack[-count:]
    return taken


def _take_to_mark(stack: list[_Shape], marks: list[int]) -> list[_Shape]:
    if not marks:
        raise _Refused("it takes more from its stack than there is")
    fence = marks.pop()
    taken = stack[fence:]
    del stack[fence:]
    return taken


def _nest(items: list[_Shape]) -> _Shape:
    depth = 1 + max((depth for depth, _ in items), default=0)
    weight = sum(weight for _, weight in items) + 1
    if depth > _MAX_DEPTH or weight > _MAX_WEIGHT:
        raise _Refused(f"tuples nested {depth} deep, with {weight} elements")
    return depth, weight


RECORDING_FORMAT: Final = "gpumem-recording"
"""Value of the key "format" in the first line of a recording of ours."""

_MAX_BYTES = 8 << 30
_HEAD_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_PPROF = b"\x0a"
"""A message begins with its first field, of bytes: the sample types."""
_GZIP_LAYERS = 2

# Real files shrink to between a fifth and a sixtieth, zeros to a thousandth.
_MAX_RATIO = 100
_RATIO_FLOOR_BYTES = 32 << 20

_INT64 = 2**63

_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
_STRANGERS = {
    b"PK\x03\x04": "a zip archive (as torch.save writes)",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"SQLite format 3": "an SQLite database",
    b"<": "HTML or XML",
}


@dataclass(frozen=True, slots=True)
class RecordingBytes:
    """A recording of ours was found; reading it is another module's work.

    Attributes:
        data: its bytes, plain or in gzip (which may lack its end).
    """

    data: bytes


def read_all(
    path: str | os.PathLike[str] | BinaryIO, name: str | None, *, pprof: bool = False
) -> tuple[bytes, str]:
    """The bytes of a file, and what to call it.

    The first bytes must look like something we know before the rest is read, so that /dev/zero
    or the wrong file of 100 GB costs nothing.

    Args:
        path: file name, or a file open for reading bytes.
        name: what to call it.
        pprof: a plain pprof profile is let through too.

    Raises:
        SnapshotError: it can not be read, or is no snapshot.
    """
    if isinstance(path, str | os.PathLike):
        source = name or os.fspath(path)
        try:
            with open(path, "rb") as file:  # noqa: PTH123 (a name, or anything that has one)
                return _read(file, source, pprof=pprof), source
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise SnapshotError(source, reason[:1].lower() + reason[1:]) from None
    source = name or str(getattr(path, "name", "<stream>"))
    try:
        return _read(path, source, pprof=pprof), source
    except (OSError, ValueError) as error:
        raise SnapshotError(source, str(error) or type(error).__name__) from None


def _read(file: BinaryIO, source: str, *, pprof: bool) -> bytes:
    try:
        head = file.read(_HEAD_BYTES)
        if not isinstance(head, bytes):
            raise SnapshotError(source, "opened as text, it has to be opened for reading bytes")
        if not (pprof and head.startswith(_PPROF)):
            _refuse_stranger(head, source)
        if _is_whole(file, head):
            file.seek(0)
            return file.read()  # without a copy
        # in pieces: read(n) would take memory for n bytes at once
        pieces = [head]
        size = len(head)
        while piece := file.read(_CHUNK_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > _MAX_BYTES:
                raise SnapshotError(source, f"larger than {_MAX_BYTES} bytes")
        return b"".join(pieces)
    except MemoryError:
        raise SnapshotError(source, "it does not fit into memory") from None


def _is_whole(file: BinaryIO, head: bytes) -> bool:
    """Whether it is a file on disk, read from its beginning, of a size that may be read at once."""
    try:
        about = os.fstat(file.fileno())
        return (
            stat.S_ISREG(about.st_mode)
            and file.tell() == len(head)
            and len(head) < about.st_size <= _MAX_BYTES
        )
    except (OSError, AttributeError):
        return False


def decode(data: bytes, source: str) -> tuple[object, int]:
    """The values in a file, or a `RecordingBytes`; and its size in bytes, uncompressed.

    Raises:
        SnapshotError: it is none of the kinds above, damaged, or made to do harm.
    """
    allowance = len(data)
    for layer in range(_GZIP_LAYERS + 1):
        _refuse_stranger(data, source)
        if data[:2] != _GZIP:
            break
        if layer == _GZIP_LAYERS:
            raise SnapshotError(source, f"gzip in gzip, more than {_GZIP_LAYERS} times")
        if _is_recording(_gunzip_head(data)):
            return RecordingBytes(data), len(data)
        data = _gunzip(data, source, allowance)
    if data[:1] == b"\x80":
        return loads(data, source), len(data)
    if _is_recording(data[:_HEAD_BYTES]):
        return RecordingBytes(data), len(data)
    return _json(data, source), len(data)


def _refuse_stranger(data: bytes, source: str) -> None:
    if not data:
        raise SnapshotError(source, "empty file")
    if data[:2] == _GZIP or data[:1] == b"\x80":
        return
    if data.startswith(_BYTE_ORDER_MARKS) or data[:_HEAD_BYTES].lstrip()[:1] in (b"{", b"["):
        return
    for magic, what in _STRANGERS.items():
        if data.startswith(magic):
            raise SnapshotError(source, f"{what}, not a memory snapshot")
    raise SnapshotError(source, "neither a pickle nor JSON nor gzip of one")


def _gunzip_head(data: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(data[:_HEAD_BYTES], _HEAD_BYTES)
    except zlib.error:
        return b""


def _gunzip(data: bytes, source: str, allowance: int) -> bytes:
    """Decompress all members; stops a bomb when it is out of proportion.

    Args:
        data: gzip.
        source: name for messages.
        allowance: bytes of the file itself, of which `data` may be an inner layer.
    """
    out: list[bytes] = []
    size = used = 0
    try:
        while used < len(data):
            if out and not data[used] and not data[used:].strip(b"\0"):
                break  # padding, as tapes and tar leave it
            member = zlib.decompressobj(wbits=31)
            while not member.eof:
                chunk = member.unconsumed_tail
                if not chunk:
                    chunk = data[used : used + _HEAD_BYTES]
                    used += len(chunk)
                piece = member.decompress(chunk, _CHUNK_BYTES)
                if not chunk and not piece:
                    raise SnapshotError(source, "gzip cut short")
                out.append(piece)
                size += len(piece)
                read = min(used - len(member.unconsumed_tail), allowance)
                if size > _RATIO_FLOOR_BYTES + _MAX_RATIO * read or size > _MAX_BYTES:
                    raise SnapshotError(source, f"gzip that grows to more than {size} bytes")
            used -= len(member.unused_data)
        return b"".join(out)
    except zlib.error as error:
        raise SnapshotError(source, f"damaged gzip: {error}") from None
    except MemoryError:
        raise SnapshotError(source, "it does not fit into memory") from None


def _is_recording(head: bytes) -> bool:
    line = head.split(b"\n", 1)[0]
    if RECORDING_FORMAT.encode() not in line:
        return False
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and first.get("format") == RECORDING_FORMAT


def _json(data: bytes, source: str) -> object:
    # A pickle shares the frames that it repeats, JSON can not: share them again, since grouping
    # by stack compares frames by identity, and a long trace repeats few frames very often.
    frames: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}

    def share(value: dict[str, Any]) -> dict[str, Any]:
        if "filename" not in value or "line" not in value:
            return value
        for part in value.values():
            # no nests; and no huge numbers, of which many can be made that hash alike
            if type(part) is not str and not (type(part) is int and -_INT64 <= part < 2 * _INT64):
                return value
        return frames.setdefault(tuple(value.items()), value)

    try:
        return json.loads(data, object_hook=share)
    except RecursionError:
        raise SnapshotError(source, "JSON nested too deep") from None
    except MemoryError:
        raise SnapshotError(source, "it does not fit into memory") from None
    except json.JSONDecodeError as error:
        raise SnapshotError(source, f"damaged JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise SnapshotError(source, f"damaged JSON: {error.reason} at byte {error.start}") from None
    except ValueError:  # what is left: Python refuses numbers of more than 4300 digits
        raise SnapshotError(source, "JSON with a number of too many digits") from None
