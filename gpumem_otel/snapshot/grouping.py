"""Blocks and events by stack, straight from torch's dicts: the hot path of every read-out.

Nothing is made per block. Torch and pickle share frames, so two stacks are equal if their frames
are the same objects. A key of all identities takes 2 us for 30 frames; looking stacks up by their
length and two of their frames, then comparing with the few candidates, takes a fraction of that.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_otel.snapshot.torch_format import frames_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpumem_otel.base.aggregate import Labels
    from gpumem_otel.base.protocols import Pause
    from gpumem_otel.snapshot.tensor_classes import TensorClass
    from gpumem_otel.snapshot.torch_format import RawFrame

_MAX_CANDIDATES = 16


class Interned:
    """Numbers for hashable values, in order of their first use.

    Attributes:
        all: the distinct values.
    """

    def __init__(self, *first: Any) -> None:
        self.all: list[Any] = list(first)
        self._known = {value: index for index, value in enumerate(first)}

    def index(self, value: Any) -> int:
        """The number of a value."""
        index = self._known.get(value)
        if index is None:
            index = self._known[value] = len(self.all)
            self.all.append(value)
        return index


class StackTable:
    """Numbers for recorded stacks, without a key of all their frames.

    Attributes:
        all: the distinct stacks, leaf first, never to be changed; 0 is (), none recorded.
    """

    def __init__(self, *, trusted: bool = False) -> None:
        """Begin with the empty stack.

        Args:
            trusted: frames hold no more than text and numbers, as torch's do. Untrusted frames may
                be slow to compare by value, so they are only compared by identity.
        """
        self.all: list[Sequence[RawFrame]] = [()]
        self._equal = operator.eq if trusted else _same_frames
        self._candidates: dict[tuple[int, int, int], list[int]] = {}
        self._exact: dict[tuple[int, ...], int] = {}

    def index(self, frames: Sequence[RawFrame]) -> int:
        """The number of a stack; frames are kept alive, since their identities are used."""
        length = len(frames)
        if not length:
            return 0
        known, equal = self.all, self._equal
        key = (length, id(frames[0]), id(frames[length >> 1]))
        candidates = self._candidates.get(key, ())
        for index in candidates:
            if equal(known[index], frames):
                return index
        number = len(known)
        if len(candidates) >= _MAX_CANDIDATES:  # comparing all would cost more than a full key
            index = self._exact.setdefault(tuple(map(id, frames)), number)
            if index != number:
                return index
        else:
            self._candidates.setdefault(key, []).append(number)
        known.append(frames)
        return number


def _same_frames(first: Sequence[RawFrame], second: Sequence[RawFrame]) -> bool:
    return all(map(operator.is_, first, second))


PAUSE_EVERY = 32


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """Live blocks that carry the same stack.

    Attributes:
        frames: the recorded frames as torch wrote them, leaf first; () where there are none.
            Never to be changed: they are shared with the snapshot.
        size_bytes: what the allocator holds for the blocks, rounding included.
        address: of one of the blocks, None where blocks carry none. A block without a stack is
            always a group of its own, so that a rule can name it by its address.
        has_event: only for a block without a stack: the trace holds its allocation, so it was
            made while history was recorded.
        tensor_class: None without a classifier, and where only the root of a block without a stack
            decides.
    """

    frames: Sequence[RawFrame]
    objects: int
    size_bytes: int
    address: int | None
    has_event: bool = False
    tensor_class: TensorClass | None = None


@dataclass(frozen=True, slots=True)
class EventGroup:
    """Allocation events that carry the same stack.

    Attributes:
        frames: as in `LiveGroup`; all events without a stack are one group with ().
        size_bytes: requested bytes: that is what torch writes into a trace.
        address: of the first of the events.
        labels: those that its events have in common, where labels were asked for.
    """

    frames: Sequence[RawFrame]
    objects: int
    size_bytes: int
    address: int | None
    labels: Labels = ()


class Grouper:
    """Totals by stack.

    Attributes:
        groups: [frames, objects, bytes, address of the first] of each stack.
        bare: the entries without a stack.
    """

    def __init__(self, address_key: str, pause: Pause | None, *, trusted: bool) -> None:
        """Begin with nothing.

        Args:
            address_key: `address` of blocks, `addr` of events.
            pause: called every 32 entries.
            trusted: see `StackTable`.
        """
        self.groups: list[list[Any]] = []
        self.bare: list[Any] = []
        self._address_key = address_key
        self._pause = pause
        self._table = StackTable(trusted=trusted)
        self._count = 0

    def add(self, entries: Iterable[Any]) -> None:
        """Count blocks or events."""
        pause, count, groups, index_of = self._pause, self._count, self.groups, self._table.index
        for entry in entries:
            count += 1
            if pause is not None and not count % PAUSE_EVERY:
                pause()
            frames = entry.get("frames") or frames_of(entry)
            if not frames:
                self.bare.append(entry)
                continue
            place = index_of(frames) - 1  # 0 is the empty stack
            if place == len(groups):
                groups.append([frames, 0, 0, entry.get(self._address_key)])
            group = groups[place]
            group[1] += 1
            group[2] += entry.get("size") or 0
        self._count = count
