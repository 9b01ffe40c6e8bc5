"""The container in which data travel inside a page: JSON beside columns of numbers.

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

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Columns", "packed"]

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
    """The header with the columns, as text of which nothing means anything in HTML."""
    text = json.dumps({**header, "columns": columns.forms}, separators=(",", ":")).encode("ascii")
    start = len(text).to_bytes(4, "little") + text
    data = b"".join((start, bytes(-len(start) % _ALIGN), *columns.parts))
    return base64.b64encode(gzip.compress(data, _LEVEL, mtime=0)).decode("ascii")
