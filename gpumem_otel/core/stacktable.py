"""Numbers for recorded stacks, found without making a key of every frame.

Torch and pickle share frames, so that two stacks are the same if their frames are the same
objects. A key of all identities takes 2 us to make for 30 frames; finding the few stacks that have
the same length and two of the same frames, and comparing identities with those, takes half of that.

Frames are never compared by value: those of a stranger may be nests that take for ever, or long
text that is alike to its last letter.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.core.rawform import RawFrame

__all__ = ["StackTable"]

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
