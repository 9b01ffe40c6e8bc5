"""Totals of a device: what its segments and blocks add up to."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from gpumem_otel.base.profile import BlockState, DeviceTotals
from gpumem_otel.snapshot.stacks import STACKLESS_ROOTS
from gpumem_otel.snapshot.torch_format import (
    DEFAULT_POOL,
    frames_of,
    pool_of,
    requested_of,
    reserved_of,
    state_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpumem_otel.base.protocols import Pause
    from gpumem_otel.snapshot.torch_format import RawBlock, RawFrame, RawSegment

_PAUSE_EVERY = 32


class _Totals:
    """Totals over blocks.

    Attributes:
        stacks: an allocated block carries a stack.
    """

    def __init__(self, *, resolved: bool, pause: Pause | None) -> None:
        self.blocks = self.held = self.live = self.waiting = self.requested = self.stackless = 0
        self.stacks = False
        self._resolved = resolved
        self._pause = pause

    def add(self, blocks: Sequence[RawBlock]) -> None:
        pause, count = self._pause, self.blocks
        for block in blocks:
            count += 1
            if pause is not None and not count % _PAUSE_EVERY:
                pause()
            size = block["size"]
            self.held += size
            state = block["state"]
            if state == "inactive":
                continue
            if state == "active_allocated":
                self.live += size
                frames = block.get("frames") or frames_of(block)
                if frames and not (self._resolved and _stands_for_none(frames)):
                    self.stacks = True
                else:
                    self.stackless += size
            elif state_of(state) is BlockState.ACTIVE_PENDING_FREE:
                self.waiting += size
            else:
                continue
            self.requested += requested_of(block)
        self.blocks = count


def add_up(
    device: int,
    segments: Iterable[RawSegment],
    *,
    has_events: bool,
    resolved: bool = False,
    pause: Pause | None = None,
) -> DeviceTotals:
    """Sum up the segments of one device.

    A segment whose blocks do not fill it (no real file has one) has the rest free.

    Args:
        device: torch's index, for the result.
        segments: those of the device, and no others.
        has_events: its trace holds something.
        resolved: blocks without a stack carry the name of their root instead (recordings).
        pause: called every 32 blocks.
    """
    totals = _Totals(resolved=resolved, pause=pause)
    count = reserved = free_segment = remainder = private_free = 0
    pools: dict[tuple[int, int], int] = {}
    for segment in segments:
        count += 1
        held, active = totals.held, totals.live + totals.waiting
        totals.add(segment["blocks"])
        size = reserved_of(segment, totals.held - held)
        in_use = totals.live + totals.waiting - active
        pool = pool_of(segment.get("segment_pool_id")) or DEFAULT_POOL
        pools[pool] = pools.get(pool, 0) + size
        reserved += size
        if pool != DEFAULT_POOL:
            private_free += size - in_use
        elif in_use:
            remainder += size - in_use
        else:
            free_segment += size
    return DeviceTotals(
        device=device,
        reserved_bytes=reserved,
        allocated_bytes=totals.live,
        active_bytes=totals.live + totals.waiting,
        requested_bytes=totals.requested,
        segments=count,
        blocks=totals.blocks,
        free_segment_bytes=free_segment,
        split_remainder_bytes=remainder,
        pending_free_bytes=totals.waiting,
        private_pool_free_bytes=private_free,
        bytes_without_stack=totals.stackless,
        history=totals.stacks or has_events,
        pool_reserved_bytes=MappingProxyType(pools),
    )


def _stands_for_none(frames: Sequence[RawFrame]) -> bool:
    # a recording names the root of blocks without a stack; they count as stackless all the same
    return len(frames) == 1 and frames[0].get("name") in STACKLESS_ROOTS
