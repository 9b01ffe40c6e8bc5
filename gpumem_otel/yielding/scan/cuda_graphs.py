"""Finds captured CUDA graphs and private pools, whose memory must keep its addresses.

A graph replays kernels with the addresses of its capture, in its private pool and outside
(parameters, static inputs). So while it lives, no storage of its device may move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.snapshot.torch_format import DEFAULT_POOL, device_of, pool_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from gpumem_otel.snapshot.torch_format import RawSegment

_A_GRAPH_LIVES: Final = "a captured CUDA graph lives there, which replays with today's addresses"
_A_POOL_LIVES: Final = "memory of a private pool lives there, such as that of a captured CUDA graph"


def pool_ids(pools: Iterable[Any]) -> set[tuple[int, int]]:
    """Ids of `torch.cuda.MemPool` objects."""
    return {pool_of(getattr(pool, "id", None)) or DEFAULT_POOL for pool in pools}


def graph_refusals(
    graphs: Sequence[Any],
    segments: Iterable[RawSegment],
    mem_pools: Collection[tuple[int, int]],
    devices: Collection[int],
) -> dict[int, str]:
    """The reasons why nothing may move, by device.

    Args:
        graphs: live `torch.cuda.CUDAGraph` objects; one whose devices are unknown (perhaps never
            captured) counts for all devices.
        segments: of a snapshot.
        mem_pools: the job's own pools.
        devices: all of this process.
    """
    refused: dict[int, str] = {}
    of_pool: dict[tuple[int, int], set[int]] = {}
    for segment in segments:
        pool = pool_of(segment.get("segment_pool_id")) or DEFAULT_POOL
        if pool == DEFAULT_POOL:
            continue
        of_pool.setdefault(pool, set()).add(device_of(segment))
        lives = any(block["state"] != "inactive" for block in segment["blocks"])
        if lives and pool not in mem_pools:
            refused[device_of(segment)] = _A_POOL_LIVES
    for graph in graphs:
        for device in _devices_of(graph, of_pool) or devices:
            refused[device] = _A_GRAPH_LIVES
    return refused


def _devices_of(graph: Any, of_pool: dict[tuple[int, int], set[int]]) -> set[int]:
    """The devices on which the graph's pool has memory; empty if unknown."""
    try:
        pool = pool_of(graph.pool())
    except Exception:  # not captured yet, or it was reset
        return set()
    return of_pool.get(pool, set()) if pool is not None else set()
