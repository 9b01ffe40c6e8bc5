"""Stacks for a page, as a tree of frames: what several stacks begin with is there once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpumem_otel.core.frames import OTHER
from gpumem_otel.core.model import Frame

if TYPE_CHECKING:
    from gpumem_otel.core.model import Stack
    from gpumem_otel.core.pagedata import Columns

__all__ = ["MAX_NODES", "OTHER_NODE", "PageStacks"]

MAX_NODES = 1_000_000
"""A browser builds and draws a graph of so many in less than a second."""

OTHER_NODE = 1
"""Takes every stack for which there is no room."""


class PageStacks:
    """Gives each stack a number: the node of its leaf.

    Attributes:
        strings: names and files.
    """

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        self.strings: list[str] = []
        self._string: dict[str, int] = {}
        # frames by identity, for whoever shares them; kept alive, or an identity could come again
        self._by_id: dict[int, tuple[Frame, int]] = {}
        self._by_value: dict[Frame, int] = {}
        self._frames: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._nodes: dict[int, int] = {}
        self._parent = [0]
        self._frame = [0]
        self._max_nodes = max_nodes
        self.node((Frame(OTHER),))

    def string(self, text: str) -> int:
        """Number of a text."""
        index = self._string.get(text)
        if index is None:
            index = self._string[text] = len(self.strings)
            self.strings.append(text)
        return index

    def node(self, stack: Stack) -> int:
        """Number of a stack, leaf first; `OTHER_NODE` where there is no room, 0 for ()."""
        nodes, frame_index = self._nodes, self._frame_index
        at = 0
        for left in range(len(stack) - 1, -1, -1):
            key = at << 32 | frame_index(stack[left])
            found = nodes.get(key)
            if found is None:
                # all or nothing: half a stack would be a wrong one
                if len(self._parent) + left + 1 > self._max_nodes:
                    return OTHER_NODE
                found = nodes[key] = len(self._parent)
                self._parent.append(at)
                self._frame.append(key & 0xFFFFFFFF)
            at = found
        return at

    def _frame_index(self, frame: Frame) -> int:
        entry = self._by_id.get(id(frame))
        if entry is not None:
            return entry[1]
        index = self._by_value.get(frame)
        if index is None:
            index = self._by_value[frame] = len(self._by_value)
            names, files, lines = self._frames
            names.append(self.string(frame.name))
            files.append(self.string(frame.filename))
            lines.append(frame.line)
        self._by_id[id(frame)] = (frame, index)
        return index

    def form(self, columns: Columns) -> dict[str, Any]:
        """Everything, for the header."""
        names, files, lines = self._frames
        return {
            "strings": self.strings,
            "frames": {
                "name": columns.add("u32", names),
                "file": columns.add("u32", files),
                "line": columns.add("f64", lines),
            },
            "trie": {
                "parent": columns.add("u32", self._parent, delta=True),
                "frame": columns.add("u32", self._frame, delta=True),
            },
        }
