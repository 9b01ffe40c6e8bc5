"""Blocks and events by stack, straight from torch's dicts: the hot path of every read-out.

Nothing is made per block. Torch and pickle share frames, so that two stacks are the same if their
frames are the same objects; 30 identities are a few machine instructions to compare, but 30 new
integers to use as a key. So stacks are looked up by their length and two of their frames, then
compared (0.6 us a block, against 2.5 us with a key of all identities).
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

from gpumem_otel.snapshot.torch_format import frames_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpumem_otel.base.protocols import Pause
    from gpumem_otel.base.sums import Labels
    from gpumem_otel.snapshot.tensor_classes import TensorClass
    from gpumem_otel.snapshot.torch_format import RawFrame

# Numbers for recorded stacks, found without making a key of every frame.
#
# Torch and pickle share frames, so that two stacks are the same if their frames are the same
# objects. A key of all identities takes 2 us to make for 30 frames; finding the few stacks that
# have the same length and two of the same frames, and comparing identities with those, takes half
# of that.
#
# Frames are never compared by value: those of a stranger may be nests that take for ever, or long
# text that is alike to its last letter.

_MOST_ALIKE = 16


class StackTable:
    """Interns stacks.

    Attributes:
        all: the distinct stacks, leaf first, never to be changed; 0 is (), none recorded.
    """

    def __init__(self) -> None:
        self.all: list[Sequence[RawFrame]] = [()]
        self._alike: dict[tuple[int, int, int], list[int]] = {}
        self._exact: dict[tuple[int, ...], int] = {}

    def index(self, frames: Sequence[RawFrame]) -> int:
        """The number of a stack; frames are kept alive, since their identities are used."""
        length = len(frames)
        if not length:
            return 0
        known = self.all
        alike = self._alike.get((length, id(frames[0]), id(frames[length >> 1])), ())
        for index in alike:
            if all(map(is_, known[index], frames)):
                return index
        return self._new(frames, len(alike))

    def _new(self, frames: Sequence[RawFrame], alike: int) -> int:
        number = len(self.all)
        if alike >= _MOST_ALIKE:  # comparing with all of them would cost more than a key
            index = self._exact.setdefault(tuple(map(id, frames)), number)
            if index != number:
                return index
        else:
            key = (len(frames), id(frames[0]), id(frames[len(frames) >> 1]))
            self._alike.setdefault(key, []).append(number)
        self.all.append(frames)
        return number


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
        tensor_class: None where nobody asked, or where only the root of a block without a stack
            tells.
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
        labels: those that its events have in common, where anybody asked for labels.
    """

    frames: Sequence[RawFrame]
    objects: int
    size_bytes: int
    address: int | None
    labels: Labels = ()


class Grouper:
    """Sums by stack.

    Attributes:
        groups: [frames, objects, bytes, address of the first] of each stack.
        bare: the entries without a stack.
    """

    def __init__(self, address_key: str, pause: Pause | None, *, trusted: bool) -> None:
        """Begin with nothing.

        Args:
            address_key: `address` of blocks, `addr` of events.
            pause: called every 32 entries.
            trusted: frames hold no more than text and numbers, as torch's do. A stranger's may
                hold nests that take for ever to compare: those go through a `StackTable`.
        """
        self.groups: list[list[Any]] = []
        self.bare: list[Any] = []
        self._address_key = address_key
        self._pause = pause
        self._alike: dict[tuple[int, int, int], list[list[Any]]] = {}
        self._exact: dict[tuple[int, ...], list[Any]] = {}
        self._trusted = trusted
        self._table = StackTable()
        self._count = 0

    def add(self, entries: Iterable[Any]) -> None:
        """Count blocks or events."""
        pause, count, alike, trusted = self._pause, self._count, self._alike, self._trusted
        for entry in entries:
            count += 1
            if pause is not None and not count % PAUSE_EVERY:
                pause()
            frames = entry.get("frames") or frames_of(entry)
            if not frames:
                self.bare.append(entry)
                continue
            if trusted:
                length = len(frames)
                key = (length, id(frames[0]), id(frames[length >> 1]))
                for group in alike.get(key, ()):
                    if group[0] == frames:
                        break
                else:
                    group = self._new(frames, entry, key)
            else:
                group = self._of_stranger(frames, entry)
            group[1] += 1
            group[2] += entry.get("size") or 0
        self._count = count

    def _new(self, frames: Sequence[RawFrame], entry: Any, key: tuple[int, int, int]) -> list[Any]:
        bucket = self._alike.setdefault(key, [])
        if len(bucket) >= _MOST_ALIKE:  # comparing with all of them would cost more than a key
            return self._exactly(frames, entry)
        group = [frames, 0, 0, entry.get(self._address_key)]
        bucket.append(group)
        self.groups.append(group)
        return group

    def _of_stranger(self, frames: Sequence[RawFrame], entry: Any) -> list[Any]:
        number = self._table.index(frames) - 1  # 0 is the empty stack
        if number == len(self.groups):
            self.groups.append([frames, 0, 0, entry.get(self._address_key)])
        group: list[Any] = self.groups[number]
        return group

    def _exactly(self, frames: Sequence[RawFrame], entry: Any) -> list[Any]:
        key = tuple(map(id, frames))
        group = self._exact.get(key)
        if group is None:
            group = self._exact[key] = [frames, 0, 0, entry.get(self._address_key)]
            self.groups.append(group)
        return group
