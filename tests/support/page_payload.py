"""Reads a page's data without the page's own code."""

from __future__ import annotations

import base64
import gzip
import json
import re
import struct
from itertools import accumulate

WIDTH = {"u8": 1, "u32": 4, "u64": 8, "f64": 8}
LETTER = {"u8": "B", "u32": "I", "u64": "Q", "f64": "d"}


class Payload:
    """The header, and its columns as lists.

    Attributes:
        header: as written.
    """

    def __init__(self, text: str) -> None:
        data = gzip.decompress(base64.b64decode(text, validate=True))
        (length,) = struct.unpack_from("<I", data)
        self.header = json.loads(data[4 : 4 + length])
        start = (4 + length + 7) // 8 * 8
        self.columns = [self._column(data, start, form) for form in self.header["columns"]]
        names, files, lines = (self[self.header["frames"][key]] for key in ("name", "file", "line"))
        strings = self.header["strings"]
        self.frames = [
            (strings[name], strings[file], int(line))
            for name, file, line in zip(names, files, lines, strict=True)
        ]
        self.parent = self[self.header["trie"]["parent"]]
        self.frame = self[self.header["trie"]["frame"]]

    def __getitem__(self, index: int) -> list:
        return self.columns[index]

    @staticmethod
    def _column(data: bytes, start: int, form: list) -> list:
        kind, delta, offset, length = form
        assert offset % 8 == 0
        values = struct.unpack_from(f"<{length}{LETTER[kind]}", data, start + offset)
        if not delta:
            return list(values)
        if kind == "u32":
            return list(accumulate(values, lambda a, b: (a + b) & 0xFFFFFFFF))
        return list(accumulate(values))

    def stack(self, node: int) -> tuple[tuple[str, str, int], ...]:
        """Leaf first."""
        found = []
        while node:
            assert self.parent[node] < node
            found.append(self.frames[self.frame[node]])
            node = self.parent[node]
        return tuple(found)

    def profile(self, kind: str, device: int = 0, source: int = 0) -> dict:
        """Stack -> (objects, bytes)."""
        (form,) = [
            p
            for p in self.header["profiles"]
            if (p["kind"], p["device"], p["source"]) == (kind, device, source)
        ]
        columns = (self[form[name]] for name in ("node", "objects", "bytes"))
        return {
            self.stack(node): (objects, size) for node, objects, size in zip(*columns, strict=True)
        }


def payload_of(html: str) -> Payload:
    found = re.search(
        r'<script type="application/octet-stream" id="payload">([^<]*)</script>', html
    )
    assert found, "no payload"
    return Payload(found[1])
