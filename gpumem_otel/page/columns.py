"""The container of the data inside a page: JSON and columns of numbers.

    base64(gzip(length of the header, 4 bytes little endian; header, JSON; columns))

Each part begins at a multiple of 8 bytes, so that a browser can look at a column where it lies.
The reader is `web/src/data.ts`.
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
from array import array
from operator import sub
from typing import TYPE_CHECKING, Any

from gpumem_otel.base.profile import Frame
from gpumem_otel.snapshot.grouping import Interned
from gpumem_otel.snapshot.stacks import OTHER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpumem_otel.base.profile import Stack

# Stacks for a page, as a tree of frames: what several stacks begin with is there once.

MAX_NODES = 1_000_000
"""A browser builds and draws a graph of so many in less than a second."""

OTHER_NODE = 1
"""Takes every stack for which there is no room."""


class PageStacks:
    """Gives each stack a number: the node of its leaf."""

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        self._strings = Interned()
        self._frames = Interned()
        # shared frames by identity; kept alive, or an identity could occur again
        self._by_id: dict[int, tuple[Frame, int]] = {}
        self._nodes: dict[int, int] = {}
        self._parent = [0]
        self._frame = [0]
        self._max_nodes = max_nodes
        self.node((Frame(OTHER),))

    def string(self, text: str) -> int:
        """Number of a text."""
        return self._strings.index(text)

    def node(self, stack: Stack) -> int:
        """Number of a stack, leaf first; `OTHER_NODE` where there is no room, 0 for ()."""
        nodes, frame_index = self._nodes, self._frame_index
        at = 0
        for left in range(len(stack) - 1, -1, -1):
            key = at << 32 | frame_index(stack[left])
            node = nodes.get(key)
            if node is None:
                # all or nothing: half a stack would be a wrong one
                if len(self._parent) + left + 1 > self._max_nodes:
                    return OTHER_NODE
                node = nodes[key] = len(self._parent)
                self._parent.append(at)
                self._frame.append(key & 0xFFFFFFFF)
            at = node
        return at

    def _frame_index(self, frame: Frame) -> int:
        entry = self._by_id.get(id(frame))
        if entry is not None:
            return entry[1]
        index = self._frames.index(frame)
        self._by_id[id(frame)] = (frame, index)
        return index

    def form(self, columns: Columns) -> dict[str, Any]:
        """Everything, for the header."""
        frames, string = self._frames.all, self._strings.index
        names = columns.add("u32", (string(frame.name) for frame in frames))
        files = columns.add("u32", (string(frame.filename) for frame in frames))
        lines = columns.add("f64", (frame.line for frame in frames))
        return {
            "strings": self._strings.all,
            "frames": {"name": names, "file": files, "line": lines},
            "trie": {
                "parent": columns.add("u32", self._parent, delta=True),
                "frame": columns.add("u32", self._frame, delta=True),
            },
        }


_CODES = {"u8": "B", "u32": "I", "u64": "Q", "f64": "d"}
_ALIGN = 8
_LEVEL = 5
"""Of gzip: a level more takes half as long again, for 2 % less."""
_ALL_32 = 2**32 - 1
_ALL_64 = 2**64 - 1


class Columns:
    """Columns of numbers, known to the header by their index."""

    def __init__(self) -> None:
        self.forms: list[tuple[str, int, int, int]] = []
        self.parts: list[bytes] = []
        self._length = 0

    def add(self, kind: str, values: Iterable[int], *, delta: bool = False) -> int:
        """Take a column; its index.

        Args:
            kind: u8, u32, u64 or f64; whole numbers up to 2**53 are exact in f64.
            values: what fits; of addresses the lower 64 bits are kept.
            delta: store each but the first as the difference to the one before, which makes a
                column that grows or hardly changes small. Not for u8 and u64.
        """
        if kind == "u64":
            column = array("Q", (value & _ALL_64 for value in values))
        else:
            column = array(_CODES[kind], values)
        if delta and kind == "u32":
            differences = map(sub, column[1:], column)
            column = column[:1] + array("I", (value & _ALL_32 for value in differences))
        elif delta:
            column = column[:1] + array("d", map(sub, column[1:], column))
        if sys.byteorder == "big":
            column.byteswap()
        self.forms.append((kind, int(delta), self._length, len(column)))
        data = column.tobytes()
        self.parts.append(data + bytes(-len(data) % _ALIGN))
        self._length += len(self.parts[-1])
        return len(self.forms) - 1


def packed(header: Mapping[str, Any], columns: Columns) -> str:
    """The header with the columns, as text without special characters of HTML."""
    text = json.dumps({**header, "columns": columns.forms}, separators=(",", ":")).encode("ascii")
    start = len(text).to_bytes(4, "little") + text
    data = b"".join((start, bytes(-len(start) % _ALIGN), *columns.parts))
    return base64.b64encode(gzip.compress(data, _LEVEL, mtime=0)).decode("ascii")
