"""The segments of a device for a page: every block with its place, state and stack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpumem_otel.base.profile import BlockState
from gpumem_otel.snapshot.grouping import StackTable
from gpumem_otel.snapshot.roots import builder_for, stackless_root
from gpumem_otel.snapshot.torch_format import (
    DEFAULT_POOL,
    frames_of,
    pool_of,
    requested_of,
    reserved_of,
    state_of,
    text,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gpumem_otel.base.profile import DeviceTotals
    from gpumem_otel.base.protocols import FrameNamer
    from gpumem_otel.page.columns import Columns, PageStacks
    from gpumem_otel.snapshot.snapshot import TorchSnapshot
    from gpumem_otel.snapshot.torch_format import RawBlock, RawFrame, RawSegment

_STATES = {
    BlockState.ACTIVE_ALLOCATED: 0,
    BlockState.ACTIVE_PENDING_FREE: 1,
    BlockState.INACTIVE: 2,
}


def segments_form(
    snapshot: TorchSnapshot, device: int, stacks: PageStacks, columns: Columns, namer: FrameNamer
) -> dict[str, Any] | None:
    """Segments and blocks in columns; None where the device has none.

    The stacks of allocated blocks are those of the live profile, so that a page can add up by
    segment what it shows by stack.

    Args:
        snapshot: of which nothing is changed.
        device: torch's index.
        stacks: takes the stacks.
        columns: takes the columns.
        namer: names Python frames.
    """
    segments = snapshot.raw_segments(device)
    if not segments:
        return None
    builder = builder_for(snapshot, namer)
    traced = {
        event.get("addr") for event in snapshot.raw_events(device) if event.get("action") == "alloc"
    }

    # thousands of blocks share a stack: it is built once
    table, nodes = StackTable(), [0]

    def node_of(frames: Sequence[RawFrame]) -> int:
        number = table.index(frames)
        if number == len(nodes):
            nodes.append(stacks.node(builder.build(frames)))
        return nodes[number]

    def node_of_block(block: RawBlock, state: BlockState) -> int:
        # torch 2.0 keeps what once was in an inactive block
        frames = () if state is BlockState.INACTIVE else frames_of(block)
        if not frames and state is BlockState.ACTIVE_ALLOCATED:
            return stacks.node(builder.root(stackless_root(block.get("address") in traced)))
        return node_of(frames)

    pools: dict[tuple[int, int], int] = {}
    rows: list[tuple[int, ...]] = []
    blocks: list[tuple[int, ...]] = []
    first = [0]
    for segment in segments:
        pool = pool_of(segment.get("segment_pool_id")) or DEFAULT_POOL
        blocks += _blocks(segment, node_of_block)
        first.append(len(blocks))
        rows.append(
            (
                whole(segment.get("address")),
                reserved_of(segment, sum(block["size"] for block in segment["blocks"])),
                whole(segment.get("stream")),
                stacks.string(text(segment.get("segment_type"))),
                pools.setdefault(pool, len(pools)),
                int(segment.get("is_expandable") is True),
                node_of(segment.get("frames") or ()),
            )
        )
    kinds = {"address": "u64", "bytes": "f64", "stream": "f64", "kind": "u32", "pool": "u32"}
    of_block = {"address": "u64", "bytes": "f64", "requested": "f64", "state": "u8", "node": "u32"}
    return {
        "device": device,
        "totals": _totals(snapshot.totals(device)),
        "pools": ["default pool" if p == DEFAULT_POOL else f"pool {p}" for p in pools],
        "first": columns.add("u32", first, delta=True),
        **_columns(columns, {**kinds, "expandable": "u8", "node": "u32"}, rows),
        "block": _columns(columns, of_block, blocks),
    }


def _blocks(
    segment: RawSegment, node_of: Callable[[RawBlock, BlockState], int]
) -> Iterator[tuple[int, ...]]:
    at = whole(segment.get("address"))
    for block in segment["blocks"]:
        state = state_of(block["state"])
        address = block.get("address")
        at = at if address is None else address
        # of an inactive block it is stale
        asked = 0 if state is BlockState.INACTIVE else requested_of(block)
        yield at, block["size"], asked, _STATES[state], node_of(block, state)
        at += block["size"]


def _columns(
    columns: Columns, kinds: dict[str, str], rows: list[tuple[int, ...]]
) -> dict[str, int]:
    return {
        name: columns.add(kind, (row[place] for row in rows))
        for place, (name, kind) in enumerate(kinds.items())
    }


def _totals(totals: DeviceTotals) -> dict[str, int]:
    """By cause; they add up to what is reserved."""
    return {
        "reserved": totals.reserved_bytes,
        "allocated": totals.allocated_bytes,
        "pending_free": totals.pending_free_bytes,
        "free_segments": totals.free_segment_bytes,
        "split_remainders": totals.split_remainder_bytes,
        "private_pools_free": totals.private_pool_free_bytes,
    }
