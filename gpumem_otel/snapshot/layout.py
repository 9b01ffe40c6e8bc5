"""How a device's memory lies: states, pools, and why what is free is not given back.

For people who look at a file: it walks every block once more than `totals` does, and its totals are
those of `totals`, cause by cause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpumem_otel.base.profile import BlockState
from gpumem_otel.snapshot.torch_format import (
    DEFAULT_POOL,
    pool_of,
    requested_of,
    reserved_of,
    state_of,
    text,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpumem_otel.base.profile import Segment
    from gpumem_otel.snapshot.torch_format import RawSegment

# Segments drawn as strips of characters, one cell for an equal share of the bytes.
#
#     #  allocated              =  the next allocated block: neighbours alternate
#     ~  freed, waiting for another stream
#     .  free                   +  a cell with more than one of these states
#
# Colours only repeat what the characters say.

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


_Pool = tuple[int, int]


@dataclass(slots=True)
class StateSum:
    """Blocks of one state.

    Attributes:
        requested_bytes: what was asked for; 0 for inactive blocks, where it means nothing.
    """

    blocks: int = 0
    size_bytes: int = 0
    requested_bytes: int = 0


@dataclass(slots=True)
class PoolSum:
    """What a pool holds: reserved = allocated + pending free + free.

    Attributes:
        largest_free_bytes: its largest free block.
    """

    segments: int = 0
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    pending_free_bytes: int = 0
    largest_free_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """Neither allocated nor waiting for a stream."""
        return self.reserved_bytes - self.allocated_bytes - self.pending_free_bytes


@dataclass(slots=True)
class FreeSums:
    """Free memory by cause; the causes add up to reserved - active.

    Attributes:
        segment_bytes: whole segments of the default pool that were reserved by cudaMalloc and hold
            nothing: what `torch.cuda.empty_cache()` gives back.
        expandable_bytes: whole mapped ranges of expandable segments that hold nothing: given back
            too, by unmapping them; their addresses stay reserved.
        split_bytes: free next to an active block of the same segment. Of a segment of
            cudaMalloc it cannot be given back; of an expandable one whole pages of it can.
        split_expandable_bytes: the part of `split_bytes` that is in expandable segments.
        private_bytes: in private pools (CUDA graphs, `torch.cuda.MemPool`): of use to these alone.
    """

    segment_bytes: int = 0
    expandable_bytes: int = 0
    split_bytes: int = 0
    split_expandable_bytes: int = 0
    private_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FreeBlock:
    """A free block of the default pool.

    Attributes:
        stream: the only stream whose allocations get it.
        kind: `large` or `small`: allocations over 1 MiB get large, the others small ones.
    """

    size_bytes: int
    address: int | None
    stream: int
    kind: str


@dataclass(slots=True)
class ExpandableSum:
    """Expandable segments.

    Attributes:
        segments: as torch lists them, one per mapped stretch.
        ranges: reserved ranges of addresses that these stretches lie in, as far as it is known:
            one per pool, stream and kind.
    """

    segments: int = 0
    ranges: int = 0
    reserved_bytes: int = 0


@dataclass(slots=True)
class Layout:
    """The layout of one device.

    Attributes:
        states: every state, also where no block has it.
        pools: by id; (0, 0) is the default pool.
        largest_free: what a single allocation can get at most without a new segment; None where
            the default pool has nothing free. An expandable segment may grow beyond that.
    """

    device: int
    reserved_bytes: int = 0
    states: dict[BlockState, StateSum] = field(
        default_factory=lambda: {state: StateSum() for state in BlockState}
    )
    pools: dict[_Pool, PoolSum] = field(default_factory=dict)
    free: FreeSums = field(default_factory=FreeSums)
    expandable: ExpandableSum = field(default_factory=ExpandableSum)
    largest_free: FreeBlock | None = None


def lay_out(device: int, segments: Iterable[RawSegment]) -> Layout:
    """The layout of a device.

    Args:
        device: torch's index.
        segments: of this device, as torch wrote them.
    """
    layout = Layout(device)
    ranges: set[tuple[_Pool, int, str]] = set()
    for segment in segments:
        pool = pool_of(segment.get("segment_pool_id")) or DEFAULT_POOL
        expandable = segment.get("is_expandable") is True
        reserved, active = _add(layout, pool, segment)
        _add_free(layout.free, pool, reserved - active, active, expandable=expandable)
        if expandable:
            layout.expandable.segments += 1
            layout.expandable.reserved_bytes += reserved
            stream, kind = whole(segment.get("stream")), text(segment.get("segment_type"))
            ranges.add((pool, stream, kind))
    layout.expandable.ranges = len(ranges)
    return layout


def allocated_in(segment: Segment) -> int:
    """Bytes of a segment's blocks that are allocated."""
    return sum(b.size_bytes for b in segment.blocks if b.state is BlockState.ACTIVE_ALLOCATED)


def free_in(segment: Segment) -> int:
    """Bytes of a segment that are neither allocated nor waiting for a stream."""
    held = sum(b.size_bytes for b in segment.blocks if b.state is not BlockState.INACTIVE)
    return segment.size_bytes - held


def _add(layout: Layout, pool: _Pool, segment: RawSegment) -> tuple[int, int]:
    """Count a segment and its blocks; what it reserves, and what of it is active."""
    totals = layout.pools.setdefault(pool, PoolSum())
    held = allocated = waiting = largest = 0
    largest_at: int | None = None
    for block in segment["blocks"]:
        size, state = block["size"], state_of(block["state"])
        held += size
        of_state = layout.states[state]
        of_state.blocks += 1
        of_state.size_bytes += size
        if state is BlockState.INACTIVE:
            if size > largest:
                largest, largest_at = size, block.get("address")
            continue
        of_state.requested_bytes += requested_of(block)
        if state is BlockState.ACTIVE_ALLOCATED:
            allocated += size
        else:
            waiting += size
    reserved = reserved_of(segment, held)
    totals.segments += 1
    totals.reserved_bytes += reserved
    totals.allocated_bytes += allocated
    totals.pending_free_bytes += waiting
    totals.largest_free_bytes = max(totals.largest_free_bytes, largest)
    layout.reserved_bytes += reserved
    best = layout.largest_free
    if pool == DEFAULT_POOL and largest > (best.size_bytes if best else 0):
        stream, kind = whole(segment.get("stream")), text(segment.get("segment_type"))
        layout.largest_free = FreeBlock(largest, largest_at, stream, kind)
    return reserved, allocated + waiting


def _add_free(free: FreeSums, pool: _Pool, size: int, active: int, *, expandable: bool) -> None:
    if pool != DEFAULT_POOL:
        free.private_bytes += size
    elif active:
        free.split_bytes += size
        if expandable:
            free.split_expandable_bytes += size
    elif expandable:
        free.expandable_bytes += size
    else:
        free.segment_bytes += size
