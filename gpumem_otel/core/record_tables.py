"""The tables of a recording as it is written: strings, frames and stacks, each written once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpumem_otel.core import rawform
from gpumem_otel.core import recordform as form
from gpumem_otel.core.classify import TensorClass, class_of_root
from gpumem_otel.core.heap import recorded_root, stackless_root
from gpumem_otel.core.model import BlockState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpumem_otel.core.classify import Classifier
    from gpumem_otel.core.frames import StackBuilder
    from gpumem_otel.core.model import Frame, Stack
    from gpumem_otel.core.ports import Pause, Reading
    from gpumem_otel.core.rawform import RawBlock, RawFrame

__all__ = ["NewNames", "StackIndexes", "json_text"]

_ITEMS_PER_LINE = 200


def json_text(value: object) -> str:
    """JSON without blanks, ASCII only."""
    return json.dumps(value, separators=(",", ":"))


class NewNames:
    """Strings, frames and stacks of the file, each written when it is first used."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self._new: dict[str, list[Any]] = {"strings": [], "frames": [], "stacks": []}
        self._references = 0

    def lines(self, pause: Pause | None = None) -> Iterator[str]:
        """Lines for what is new, none of them long."""
        for name, items in self._new.items():
            for start in range(0, len(items), _ITEMS_PER_LINE):
                if start and pause is not None:
                    pause()
                yield json_text({name: items[start : start + _ITEMS_PER_LINE]})

    def written(self) -> None:
        """What was new is in the file."""
        for items in self._new.values():
            items.clear()

    def too_large(self) -> bool:
        """Whether a limit of the form is passed."""
        return (
            len(self._strings) > form.MAX_STRINGS
            or len(self._frames) > form.MAX_FRAMES
            or len(self._stacks) > form.MAX_STACKS
            or self._references > form.MAX_FRAME_REFERENCES
        )

    def stack_index(self, stack: Stack) -> int:
        """Index of a stack in the file's table, to which it is added if it is new."""
        key = tuple(self._frame_index(frame) for frame in stack)
        index = self._stacks.get(key)
        if index is None:
            index = self._stacks[key] = len(self._stacks)
            self._new["stacks"].append(key)
            self._references += len(key)
        return index

    def _frame_index(self, frame: Frame) -> int:
        index = self._frames.get(frame)
        if index is None:
            index = self._frames[frame] = len(self._frames)
            self._new["frames"].append(
                (self._string_index(frame.name), self._string_index(frame.filename), frame.line)
            )
        return index

    def _string_index(self, string: str) -> int:
        index = self._strings.get(string)
        if index is None:
            index = self._strings[string] = len(self._strings)
            self._new["strings"].append(string)
        return index


class StackIndexes:
    """Stack indexes for the blocks and events of one snapshot."""

    def __init__(
        self, tables: NewNames, builder: StackBuilder, reading: Reading, pause: Pause | None
    ) -> None:
        self._tables = tables
        self._builder = builder
        self._snapshot = reading.snapshot
        self._rule = reading.stackless
        self._pause = pause
        self._lists: dict[int, int] = {}
        self._classes: dict[int, TensorClass] = {}
        self._known: dict[tuple[int, ...], int] = {}
        self._seen: dict[int, dict[int | None, bool]] = {}

    def of_block(self, device: int, block: RawBlock, state: BlockState) -> int:
        """The block's own stack, or for live memory without one its named root."""
        if state is BlockState.INACTIVE:
            return 0
        frames = rawform.frames_of(block)
        if frames or state is not BlockState.ACTIVE_ALLOCATED:
            return self.of_frames(frames)
        root = self._root(device, block.get("address"))
        return self._tables.stack_index(self._builder.root(root))

    def class_of_block(self, device: int, block: RawBlock, classifier: Classifier) -> TensorClass:
        """The class of a block; what is not allocated has none."""
        if block["state"] != BlockState.ACTIVE_ALLOCATED.value:
            return TensorClass.UNATTRIBUTED
        found = classifier.of_block(block)
        if found is not None:
            return found
        frames = rawform.frames_of(block)
        if frames:
            known = self._classes.get(id(frames))
            if known is None:
                known = self._classes[id(frames)] = classifier.of_stack(frames)
            return known
        return class_of_root(self._root(device, block.get("address")))

    def of_event(self, device: int, frames: Sequence[RawFrame], address: int | None) -> int:
        """The stack of a recorded allocation, or its named root."""
        if frames:
            return self.of_frames(frames)
        root = recorded_root(self._rule, device, address)
        return self._tables.stack_index(self._builder.root(root))

    def of_frames(self, frames: Sequence[RawFrame]) -> int:
        """A stack as recorded; 0 for none."""
        # the snapshot keeps lists and frames alive, so that an id stands for one of them
        index = self._lists.get(id(frames))
        if index is None:
            index = self._lists[id(frames)] = self._of_new_list(frames)
        return index

    def _root(self, device: int, address: int | None) -> str:
        if self._rule is not None:
            return self._rule(device, address)
        return stackless_root(self._has_event(device, address))

    def _of_new_list(self, frames: Sequence[RawFrame]) -> int:
        key = tuple(map(id, frames))
        index = self._known.get(key)
        if index is None:
            index = self._known[key] = self._tables.stack_index(self._builder.build(frames))
            if self._pause is not None:
                self._pause()
        return index

    def _has_event(self, device: int, address: int | None) -> bool:
        seen = self._seen.get(device)
        if seen is None:
            groups = self._snapshot.live_groups(device, self._pause)
            seen = {group.address: group.has_event for group in groups if not group.frames}
            self._seen[device] = seen
        return seen.get(address, False)
