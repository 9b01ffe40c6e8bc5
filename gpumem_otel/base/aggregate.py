"""Totals by stack, which all profiles are made of."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from gpumem_otel.base.profile import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeAlias

    from gpumem_otel.base.profile import Stack
    from gpumem_otel.base.protocols import Pause

    Labels: TypeAlias = tuple[tuple[str, str], ...]
    Totals: TypeAlias = dict[tuple[Stack, Labels], list[int]]

K = TypeVar("K")

_BLOCKS_PER_PAUSE = 32


def add(totals: dict[K, list[int]], key: K, objects: int, size_bytes: int) -> None:
    """Add objects and bytes to a key, for instance a stack with its labels."""
    entry = totals.get(key)
    if entry is None:
        totals[key] = [objects, size_bytes]
    else:
        entry[0] += objects
        entry[1] += size_bytes


def sum_up(samples: Iterable[Sample]) -> Totals:
    """The samples, those of one stack and labels together."""
    totals: Totals = {}
    for sample in samples:
        add(totals, (sample.frames, sample.labels), sample.objects, sample.size_bytes)
    return totals


def order_key(stack: Stack) -> list[tuple[str, str, int]]:
    """Order of stacks of equal size and count."""
    return [(frame.name, frame.filename, frame.line) for frame in stack]


def samples_of(totals: Totals, pause: Pause | None = None) -> tuple[Sample, ...]:
    """Largest first; stacks are compared only where sizes and counts are equal."""
    samples: list[Sample] = []
    ranks: list[tuple[int, int, int]] = []
    for index, ((frames, labels), (objects, size)) in enumerate(totals.items()):
        samples.append(Sample(frames, objects, size, labels))
        ranks.append((-size, -objects, index))
        if pause is not None and not index % _BLOCKS_PER_PAUSE:
            pause()
    # plain tuples are sorted several times as fast as by a key function, and cannot be sliced
    ranks.sort()
    ordered: list[Sample] = []
    for _, equals in groupby(ranks, key=itemgetter(0, 1)):
        ties = [samples[rank[2]] for rank in equals]
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
        # events of a time that the counter does not cover: what was recorded is real all the same
        return values, 0, f"{what} as recorded, not scaled: {counter} did not move"
    scaled = [value * total // seen for value in values]
    left = total - sum(scaled)
    # the largest remainders take what integer division left over; ties go to the larger sample
    by_remainder = sorted(range(len(values)), key=lambda i: -(values[i] * total % seen))
    for index in by_remainder[:left]:
        scaled[index] += 1
    return scaled, 0, f"{what} scaled by {total / seen:.6g} to {counter}"
