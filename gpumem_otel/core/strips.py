"""Segments drawn as strips of characters, one cell for an equal share of the bytes.

    #  allocated              =  the next allocated block: neighbours alternate
    ~  freed, waiting for another stream
    .  free                   +  a cell with more than one of these states

Colours only repeat what the characters say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_otel.core.model import BlockState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["ALLOCATED", "FREE", "LEGEND", "MIXED", "NEXT_ALLOCATED", "WAITING", "strip"]

ALLOCATED = "#"
NEXT_ALLOCATED = "="
WAITING = "~"
FREE = "."
MIXED = "+"

LEGEND: tuple[tuple[str, str], ...] = (
    (ALLOCATED + NEXT_ALLOCATED, "allocated, block by block"),
    (WAITING, "waiting for a stream"),
    (FREE, "free"),
    (MIXED, "several in one cell"),
)
"""Characters and what they mean, for the line over the strips."""

_PLAIN = (ALLOCATED, NEXT_ALLOCATED)


def strip(blocks: Iterable[tuple[int, BlockState]], size_bytes: int, width: int) -> str:
    """A segment in exactly `width` characters (at least 1); blanks where its size is 0.

    Where a cell holds blocks of one state only, the one that covers the most of it decides.

    Args:
        blocks: size and state, in order of address; what they leave of the segment is free.
        size_bytes: of the segment, at least the sum of its blocks.
        width: cells.
    """
    width = max(1, width)
    if size_bytes <= 0:
        return " " * width
    runs = _runs(blocks, size_bytes)
    cells = []
    index = 0
    for cell in range(width):
        # in units of 1 / width byte, so that the edges of cells are whole numbers
        low, high = cell * size_bytes, (cell + 1) * size_bytes
        while runs[index][1] * width <= low:
            index += 1
        cells.append(_cell(runs, index, low, high, width))
    return "".join(cells)


def _runs(blocks: Iterable[tuple[int, BlockState]], size_bytes: int) -> list[tuple[int, int, str]]:
    """(start, end, character) without gaps, up to the size of the segment."""
    runs: list[tuple[int, int, str]] = []
    start = allocated = 0
    for size, state in blocks:
        if size <= 0:
            continue
        if state is BlockState.ACTIVE_ALLOCATED:
            character = _PLAIN[allocated % 2]
            allocated += 1
        else:
            character = FREE if state is BlockState.INACTIVE else WAITING
        runs.append((start, start + size, character))
        start += size
    if start < size_bytes:
        runs.append((start, size_bytes, FREE))
    return runs


def _cell(runs: Sequence[tuple[int, int, str]], index: int, low: int, high: int, width: int) -> str:
    shares: dict[str, int] = {}
    while index < len(runs) and runs[index][0] * width < high:
        start, end, character = runs[index]
        share = min(end * width, high) - max(start * width, low)
        shares[character] = shares.get(character, 0) + share
        index += 1
    if (FREE in shares) + (WAITING in shares) + (not shares.keys().isdisjoint(_PLAIN)) > 1:
        return MIXED
    return max(shares, key=lambda character: shares[character])
