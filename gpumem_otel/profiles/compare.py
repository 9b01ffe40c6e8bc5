"""Two profiles, or two layouts, of different files: what grew, shrank, came and went.

Files of different runs seldom agree on directories, and a changed script moves lines. So stacks
are the same where name, base name of the file and line of every frame agree. What is left of both
files then is matched once more without lines: all stacks with the same names are one, and the
change says that its lines moved.

Limits: a stack that gained or lost a frame, or whose function was renamed, is gone and new. Where
the code is the same and took another branch of the same function, that is shown as moved lines.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from gpumem_otel.profiles.heap import common_sizes
from gpumem_otel.snapshot.layout import allocated_in
from gpumem_otel.snapshot.stacks import basename

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from gpumem_otel.base.profile import HeapProfile, Sample, Segment, Sizes, Stack

    StackKey: TypeAlias = tuple[tuple[str, str, int], ...]

_NOTHING = (0, 0)


class Change(str, Enum):
    """What became of a stack."""

    GROWN = "grown"
    SHRUNK = "shrunk"
    NEW = "new"
    GONE = "gone"
    SAME = "same"


@dataclass(frozen=True, slots=True)
class StackChange:
    """What a stack holds in two profiles.

    Attributes:
        change: by bytes, and by count where the bytes are equal.
        frames: leaf first, as in the second profile where it is there.
        moved: it was matched without its lines.
    """

    change: Change
    frames: Stack
    before_bytes: int
    after_bytes: int
    before_objects: int
    after_objects: int
    moved: bool = False

    @property
    def delta_bytes(self) -> int:
        """Negative where it shrank."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True)
class Category:
    """All stacks with one kind of change."""

    stacks: int
    before_bytes: int
    after_bytes: int
    before_objects: int
    after_objects: int

    @property
    def delta_bytes(self) -> int:
        """Negative where they shrank."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two profiles of one kind.

    Attributes:
        sizes: what the bytes of both are.
        categories: every kind of change, also where nothing has it. They add up to the totals.
        changes: the largest first; stacks that stayed the same are in `categories` alone.
    """

    before_bytes: int
    after_bytes: int
    before_objects: int
    after_objects: int
    categories: Mapping[Change, Category]
    changes: tuple[StackChange, ...]
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class SegmentComparison:
    """Segments by device, address and size, in the order of their file.

    Attributes:
        both: (before, after) of those that are in both files.
    """

    only_before: tuple[Segment, ...]
    only_after: tuple[Segment, ...]
    both: tuple[tuple[Segment, Segment], ...]

    @property
    def refilled(self) -> int:
        """Segments in both files that hold more or less than they did."""
        return sum(allocated_in(before) != allocated_in(after) for before, after in self.both)


class _Pair:
    """Objects and bytes of a stack in both profiles."""

    __slots__ = (
        "after_bytes",
        "after_objects",
        "before_bytes",
        "before_objects",
        "frames",
        "moved",
    )

    def __init__(self, frames: Stack, *, moved: bool = False) -> None:
        self.frames = frames
        self.before_bytes = self.after_bytes = self.before_objects = self.after_objects = 0
        self.moved = moved

    @property
    def before(self) -> tuple[int, int]:
        return (self.before_bytes, self.before_objects)

    @property
    def after(self) -> tuple[int, int]:
        return (self.after_bytes, self.after_objects)

    def add(self, other: _Pair) -> None:
        self.before_bytes += other.before_bytes
        self.after_bytes += other.after_bytes
        self.before_objects += other.before_objects
        self.after_objects += other.after_objects
        if other.after != _NOTHING:
            self.frames = other.frames

    def result(self) -> StackChange:
        return StackChange(
            self._change(),
            self.frames,
            self.before_bytes,
            self.after_bytes,
            self.before_objects,
            self.after_objects,
            self.moved,
        )

    def _change(self) -> Change:
        if self.before == self.after:
            return Change.SAME
        if self.before == _NOTHING:
            return Change.NEW
        if self.after == _NOTHING:
            return Change.GONE
        return Change.GROWN if self.after > self.before else Change.SHRUNK


def compare_profiles(
    before: HeapProfile, after: HeapProfile, *, exact_lines: bool = False
) -> Comparison:
    """What changed from one profile to another.

    Args:
        before: of any kind.
        after: of the same kind.
        exact_lines: do not match once more without lines.

    Raises:
        ValueError: profiles of different kinds or sizes.
    """
    if before.kind is not after.kind:
        raise ValueError("profiles of different kinds cannot be compared")
    sizes = common_sizes((before, after))
    exact: dict[StackKey, _Pair] = {}
    for sample in _filled(before):
        pair = _pair_of(exact, sample.frames)
        pair.before_bytes += sample.size_bytes
        pair.before_objects += sample.objects
    for sample in _filled(after):
        pair = _pair_of(exact, sample.frames)
        pair.after_bytes += sample.size_bytes
        pair.after_objects += sample.objects
        pair.frames = sample.frames
    pairs = list(exact.values()) if exact_lines else _without_lines(exact)
    stacks = [pair.result() for pair in pairs]
    changes = [stack for stack in stacks if stack.change is not Change.SAME]
    changes.sort(key=_order)
    return Comparison(
        before.total_bytes,
        after.total_bytes,
        before.total_objects,
        after.total_objects,
        {kind: _category(stacks, kind) for kind in Change},
        tuple(changes),
        sizes,
    )


def compare_segments(before: Iterable[Segment], after: Iterable[Segment]) -> SegmentComparison:
    """Which segments are in one file only: the same means the same device, address and size."""
    first = list(before)
    second = list(after)
    places: dict[tuple[int, int, int], deque[Segment]] = {}
    for segment in first:
        places.setdefault(_place(segment), deque()).append(segment)
    both = []
    only_after = []
    for segment in second:
        known = places.get(_place(segment))
        if known:
            both.append((known.popleft(), segment))
        else:
            only_after.append(segment)
    left = {id(segment) for segments in places.values() for segment in segments}
    return SegmentComparison(
        tuple(segment for segment in first if id(segment) in left), tuple(only_after), tuple(both)
    )


def _filled(profile: HeapProfile) -> Iterator[Sample]:
    # a sample that holds nothing is as good as none
    return (sample for sample in profile.samples if sample.size_bytes or sample.objects)


def _pair_of(stacks: dict[StackKey, _Pair], frames: Stack) -> _Pair:
    key = tuple((frame.name, basename(frame.filename), frame.line) for frame in frames)
    pair = stacks.get(key)
    if pair is None:
        pair = stacks[key] = _Pair(frames)
    return pair


def _without_lines(exact: Mapping[StackKey, _Pair]) -> list[_Pair]:
    """Stacks with the same names that are in one file each, put together."""
    pairs: list[_Pair] = []
    unmatched: dict[tuple[tuple[str, str], ...], list[_Pair]] = {}
    for key, pair in exact.items():
        if _NOTHING not in {pair.before, pair.after}:
            pairs.append(pair)
        else:
            unmatched.setdefault(tuple((name, file) for name, file, _ in key), []).append(pair)
    for group in unmatched.values():
        if len({pair.after != _NOTHING for pair in group}) == 1:
            pairs += group
            continue
        joined = _Pair(group[0].frames, moved=True)
        for pair in group:
            joined.add(pair)
        pairs.append(joined)
    return pairs


def _category(stacks: Sequence[StackChange], kind: Change) -> Category:
    of_kind = [stack for stack in stacks if stack.change is kind]
    return Category(
        len(of_kind),
        sum(stack.before_bytes for stack in of_kind),
        sum(stack.after_bytes for stack in of_kind),
        sum(stack.before_objects for stack in of_kind),
        sum(stack.after_objects for stack in of_kind),
    )


def _order(stack: StackChange) -> tuple[object, ...]:
    names = [(frame.name, frame.filename, frame.line) for frame in stack.frames]
    return (
        -abs(stack.delta_bytes),
        -stack.delta_bytes,
        stack.before_objects - stack.after_objects,
        names,
    )


def _place(segment: Segment) -> tuple[int, int, int]:
    return (segment.device, segment.address, segment.size_bytes)
