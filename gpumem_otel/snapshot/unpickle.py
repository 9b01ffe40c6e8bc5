"""Pickles of plain values, read without running anything and in memory that fits their size.

A pickle needs no global to do harm: nine bytes that write memo entry 268,435,455 take gigabytes,
and a deep nest of tuples as a dict key overflows the C stack. So the opcodes are scanned first.
What `pickle.Unpickler` then sees are lists, dicts, strings, numbers and tuples, with these bounds:

* only the opcodes that `pickle` writes for such values in protocols 2 to 5;
* lengths of at most what remains, memo indices of at most the size of the file, integers of at
  most nine bytes (of larger ones, many have the same hash);
* tuples at most 64 deep with at most 10,000 elements, at most 1,000 of them used as dict keys
  (tuples with equal hashes are easily made);
* containers in proportion to the size of the file.

The scan is one regular expression over runs of harmless opcodes; it takes about as long as the
load itself. Only a file with tuples other than two small numbers is also followed opcode by opcode,
ten times slower and for at most a million opcodes.

Format: the comments of `pickletools.py` in the standard library.
"""

from __future__ import annotations

import functools
import gc
import io
import pickle
import re
import sys
from itertools import islice
from typing import Any, NoReturn

from gpumem_otel.errors import SnapshotError

_MAX_INT_BYTES = 9
_MAX_DEPTH = 64
_MAX_WEIGHT = 10_000
_MAX_TUPLE_KEYS = 1_000
_MAX_FOLLOWED_OPCODES = 1_000_000

# Memory of a list and a dict; real files need at most 12 bytes per byte of file. The two opcodes
# are counted wherever their bytes occur, which is one in a hundred too many.
_LIST_BYTES = 90
_DICT_BYTES = 250
_MAX_EXPANSION = 40
_EXPANSION_FLOOR = 16 << 20

_PROTO, _FRAME, _STOP = 0x80, 0x95, ord(".")
_LONG1, _LONG4, _LONG_BINPUT = 0x8A, 0x8B, ord("r")
_TUPLES = frozenset(b"t\x85\x86\x87")

_ARGUMENT_BYTES = {
    **dict.fromkeys(b"(}])Naesut.\x85\x86\x87\x88\x89\x94", 0),
    **dict.fromkeys(b"Kqh", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"Jrj", 4),
    **dict.fromkeys(b"G", 8),
}
# bytes of the length in front of an argument: short, normal and long text, short and long integer
_LENGTH_BYTES = {0x8C: 1, ord("X"): 4, 0x8D: 8, _LONG1: 1, _LONG4: 4}

# Possessive repetition keeps no state per opcode and is twice as fast. Before Python 3.11.5 it
# could match wrongly (gh-106052), so there a run is matched in pieces.
_REPEAT = b"*+" if sys.version_info >= (3, 11, 5) else b"{1,1000}"


class _RefusedError(Exception):
    """Why a pickle is not loaded."""


class _Unpickler(pickle.Unpickler):
    """A second guard: the scan has already refused every opcode that leads here."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise _RefusedError(f"it names the global {module}.{name}")

    def persistent_load(self, pid: Any, /) -> NoReturn:  # noqa: ARG002
        raise _RefusedError("it refers to an object outside of it")


def loads(data: bytes, source: str) -> Any:
    """Load a pickle of plain values.

    Args:
        data: the whole pickle; what follows its end is ignored, as pickle does.
        source: name for messages.

    Raises:
        SnapshotError: it is damaged, or holds something that a snapshot does not need.
    """
    collecting = gc.isenabled()
    try:
        _scan(data)
        # repeated collections among millions of new objects take longer than making them
        gc.disable()
        # BufferedReader: protocols 2 and 3 have no frames and would be read byte by byte
        return _Unpickler(io.BufferedReader(io.BytesIO(data))).load()
    except _RefusedError as refused:
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
def _harmless_run(upper_half: int, repeat: bytes = _REPEAT) -> re.Pattern[bytes]:
    """Matches runs of opcodes that need no further check.

    Args:
        upper_half: upper 16 bits of the largest memo index.
        repeat: how the run is repeated.
    """
    integers = b"|".join(b"\\x%02x" % size + b"." * size for size in (6, 7, 8, 5, 9, 0, 1, 2, 3, 4))
    texts = b"|".join(b"\\x%02x.{%d}" % (size, size) for size in range(256))
    third, fourth = upper_half & 0xFF, upper_half >> 8
    upper = b"[\\x00-\\x%02x]\\x%02x" % (third, fourth)
    if fourth:
        upper += b"|.[\\x00-\\x%02x]" % (fourth - 1)
    small = rb"(?:K.|M..)"
    frame = rb"(?:\x95...\x00{5})?"  # a frame may end anywhere; a longer one is checked elsewhere
    tokens = [
        rb"j....",
        rb"h.",
        rb"\]\x94\(",
        rb"eu}\x94\(",
        rb"\x94",
        rb"\x8a(?:" + integers + rb")",
        rb"[(}\]ueaNs\x88\x89)]",
        # a small number, or a tuple of two of them (a pool id)
        small + rb"(?:" + frame + small + frame + rb"\x86)?",
        rb"J....",
        rb"\x8c(?:" + texts + rb")",
        rb"q.",
        rb"r..(?:" + upper + rb")",
        rb"G........",
    ]
    return re.compile(rb"(?s:" + b"|".join(tokens) + rb")" + repeat)


def _scan(data: bytes) -> None:
    """Refuse what is not a pickle of plain values within the bounds of this module."""
    if len(data) < 2 or data[0] != _PROTO:  # noqa: PLR2004
        raise _RefusedError("it does not begin like one")
    if not 2 <= data[1] <= 5:  # noqa: PLR2004
        raise _RefusedError(f"protocol {data[1]}, 2 to 5 are read")
    containers_bytes = data.count(b"]") * _LIST_BYTES + data.count(b"}") * _DICT_BYTES
    if containers_bytes > len(data) * _MAX_EXPANSION + _EXPANSION_FLOOR:
        raise _RefusedError("it would take far more memory than its size")
    run = _harmless_run(len(data) >> 16).match
    position, has_tuples = 2, False
    while True:
        # repeated, since a run in pieces must not be taken for the end of the harmless part
        while (matched := run(data, position)) and matched.end() > position:
            position = matched.end()
        if position >= len(data):
            raise _RefusedError("it is cut short")
        if data[position] == _STOP:
            break
        has_tuples |= data[position] in _TUPLES
        position = _next_opcode(data, position)
    if has_tuples:
        _check_tuples(data)


def _next_opcode(data: bytes, position: int) -> int:
    """Position of the next opcode; refuses this one if it or its argument is out of bounds."""
    opcode, start = data[position], position + 1
    if opcode == _FRAME:
        if int.from_bytes(data[start : start + 8], "little") > len(data) - start - 8:
            raise _RefusedError("it is cut short")
        size = 8
    elif opcode in _LENGTH_BYTES:
        width = _LENGTH_BYTES[opcode]
        length = int.from_bytes(data[start : start + width], "little")
        if opcode in (_LONG1, _LONG4) and length > _MAX_INT_BYTES:
            raise _RefusedError("a number of more than 72 bits")
        size = width + length
    elif opcode in _ARGUMENT_BYTES:
        size = _ARGUMENT_BYTES[opcode]
        if opcode == _LONG_BINPUT:
            index = int.from_bytes(data[start : start + 4], "little")
            if index > len(data):
                raise _RefusedError(f"memo index {index} in {len(data)} bytes")
    else:
        raise _RefusedError(f"it uses {_name(opcode)}, which a snapshot does not need")
    if start + size > len(data):
        raise _RefusedError("it is cut short")
    return start + size


def _name(code: int) -> str:
    import pickletools  # noqa: PLC0415 (large, and only for this message)

    names = [opcode.name for opcode in pickletools.opcodes if opcode.code == chr(code)]
    return f"opcode {names[0]}" if names else f"the unknown opcode 0x{code:02x}"


# (depth, number of elements) of a tuple with all tuples in it, _PLAIN for anything else; None is
# a mark on the stack
_Shape = tuple[int, int]
_PLAIN: _Shape = (0, 1)
_BOTTOM: _Shape = (-1, 0)
_POPPED = {"a": 1, "s": 2, "q": 1, "r": 1, "\x94": 1, "\x85": 1, "\x86": 2, "\x87": 3}


def _check_tuples(data: bytes) -> None:  # noqa: C901 (a branch for each kind of opcode)
    """Follow the stack of a scanned pickle, so that tuples of tuples are measured."""
    import pickletools  # noqa: PLC0415 (large, and only for files with unusual tuples)

    stack: list[_Shape | None] = []
    memo: dict[Any, _Shape] = {}
    tuple_keys = 0
    for opcode, argument, _ in islice(pickletools.genops(data), _MAX_FOLLOWED_OPCODES):
        code = opcode.code
        if code == ".":
            return
        items = _pop(stack, code)
        if code in "su":
            tuple_keys += sum(depth > 0 for depth, _ in items[::2])
            if tuple_keys > _MAX_TUPLE_KEYS:
                raise _RefusedError(f"more than {_MAX_TUPLE_KEYS} tuples as keys")
        elif code in "hj":
            if argument not in memo:
                raise _RefusedError("it reads a memo entry that it never wrote")
            stack.append(memo[argument])
        elif code in "qr\x94":
            memo[len(memo) if code == "\x94" else argument] = items[0]
            stack += items
        elif code in ")t\x85\x86\x87":
            stack.append(_tuple_of(items))
        elif code == "(":
            stack.append(None)
        elif code not in "ae\x80\x95":
            stack.append(_PLAIN)
    raise _RefusedError("it is too long for a pickle with nested tuples")


def _pop(stack: list[_Shape | None], code: str) -> list[_Shape]:
    """What an opcode takes from the stack: a fixed number, or all above the last mark."""
    to_mark = code in "eut"
    items: list[_Shape] = []
    while to_mark or len(items) < _POPPED.get(code, 0):
        item = stack.pop() if stack else _BOTTOM
        if item is None and to_mark:
            break
        if item is None or item is _BOTTOM:
            raise _RefusedError("it takes more from its stack than there is")
        items.append(item)
    return items[::-1]


def _tuple_of(items: list[_Shape]) -> _Shape:
    depth = 1 + max((depth for depth, _ in items), default=0)
    weight = 1 + sum(weight for _, weight in items)
    if depth > _MAX_DEPTH or weight > _MAX_WEIGHT:
        raise _RefusedError(f"tuples nested {depth} deep, with {weight} elements")
    return depth, weight
