"""A pickle reader for plain values that runs nothing and can not be made to hurt.

A pickle needs no global to do harm: ten bytes that write memo entry 268,435,455 take 4 GB, and a
tuple in a tuple in a tuple ... used as a dict key overflows the C stack. So the opcodes are
scanned before anything is loaded; what `pickle.Unpickler` then sees are lists, dicts, strings,
numbers and tuples, within these bounds:

* only the opcodes that `pickle` writes for such values in protocols 2 to 5;
* lengths at most what remains, memo indices at most the number of bytes (an opcode is at least
  one byte), integers of at most nine bytes;
* tuples nested at most 64 deep and at most 10,000 elements in all, at most 1,000 of them used
  as dict keys (equal hashes of many tuples are easily made); lists and dicts may nest, nobody
  walks them by recursion;
* containers in proportion to the bytes of the file.

The scan is one regular expression that eats whole runs of harmless opcodes, and takes less than
the load itself (87 MB, a million events: 1.0 s of scan before 2.6 s of load; CPython 3.11). A
file with tuples of other things than two small numbers takes the exact way, an interpreter that
knows what is on the stack: ten times slower, and for at most a million opcodes.

Format: the comments of `pickletools.py` in the standard library.
"""

from __future__ import annotations

import functools
import gc
import io
import pickle
import re
import sys
from typing import Any, NoReturn

from gpumem_otel.errors import SnapshotError

__all__ = ["loads"]

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
