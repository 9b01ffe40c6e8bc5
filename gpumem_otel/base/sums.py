"""Sums by stack, the common ground of all profiles."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from gpumem_otel.base.profile import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeAlias

    from gpumem_otel.base.profile import Stack
    from gpumem_otel.base.protocols import Pause

    Labels: TypeAlias = tuple[tuple[str, str], ...]
    Sums: TypeAlias = dict[tuple[Stack, Labels], list[int]]

_BLOCKS_PER_PAUSE = 32


def add(sums: Sums, key: tuple[Stack, Labels], objects: int, size_bytes: int) -> None:
    """Count so much under a stack and its labels."""
    entry = sums.get(key)
    if entry is None:
        sums[key] = [objects, size_bytes]
    else:
        entry[0] += objects
        entry[1] += size_bytes


def sum_up(samples: Iterable[Sample]) -> Sums:
    """The samples, those of one stack and labels together."""
    sums: Sums = {}
    for sample in samples:
        add(sums, (sample.frames, sample.labels), sample.objects, sample.size_bytes)
    return sums


def order_key(stack: Stack) -> list[tuple[str, str, int]]:
    """What stacks are sorted by where nothing else tells them apart."""
    return [(frame.name, frame.filename, frame.line) for frame in stack]


def samples_of(sums: Sums, pause: Pause | None = None) -> tuple[Sample, ...]:
    """Largest first; stacks are compared only where sizes and counts are equal."""
    found: list[Sample] = []
    ranks: list[tuple[int, int, int]] = []
    for index, ((frames, labels), (objects, size)) in enumerate(sums.items()):
        found.append(Sample(frames, objects, size, labels))
        ranks.append((-size, -objects, index))
        if pause is not None and not index % _BLOCKS_PER_PAUSE:
            pause()
    # plain tuples are sorted several times as fast as by a key function, and can not be sliced
    ranks.sort()
    ordered: list[Sample] = []
    for _, equals in groupby(ranks, key=itemgetter(0, 1)):
        ties = [found[rank[2]] for rank in equals]
        if len(ties) > 1:
            ties.sort(key=lambda sample: (order_key(sample.frames), sample.labels))
        ordered += ties
        if pause is not None and not len(ordered) % _BLOCKS_PER_PAUSE:
            pause()
    return tuple(ordered)


def scale(
    values: Sequence[int], total: int | None, what: str, counter: str
) -> tuple[Sequence[int], int, str]:
    """The values in proportion, so that they add up to the total.

    Returns:
        the new values, what of the total is left because all values are zero, and a sentence.
    """
    seen = sum(values)
    if total is None:
        return values, 0, f"{what} as recorded, not scaled"
    if not seen:
        return values, total, f"{what}: none recorded, {counter} rose by {total}"
    if not total:
        # events of a moment that the counter does not cover: what was seen is real all the same
        return values, 0, f"{what} as recorded, not scaled: {counter} did not move"
    scaled = [value * total // seen for value in values]
    left = total - sum(scaled)
    # the largest remainders take what integer division left over; ties go to the larger sample
    by_remainder = sorted(range(len(values)), key=lambda i: -(values[i] * total % seen))
    for index in by_remainder[:left]:
        scaled[index] += 1
    return scaled, 0, f"{what} scaled by {total / seen:.6g} to {counter}"
