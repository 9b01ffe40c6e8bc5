"""Captured CUDA graphs, and pools that belong to somebody: memory whose addresses are baked in.

A graph replays kernels with the addresses that it was captured with, in its private pool and
outside: parameters, static inputs. So while one lives, no storage of its device may move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.snapshot.torch_format import DEFAULT_POOL, device_of, pool_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from gpumem_otel.snapshot.torch_format import RawSegment

_A_GRAPH_LIVES: Final = "a captured CUDA graph lives there, and replays addresses as they are now"
_A_POOL_LIVES: Final = "memory of a private pool lives there, as captured CUDA graphs have"


def pool_ids(pools: Iterable[Any]) -> set[tuple[int, int]]:
    """Ids of `torch.cuda.MemPool` objects."""
    return {pool_of(getattr(pool, "id", None)) or DEFAULT_POOL for pool in pools}


def graph_refusals(
    graphs: Sequence[Any],
    segments: Iterable[RawSegment],
    mem_pools: Collection[tuple[int, int]],
    devices: Collection[int],
) -> dict[int, str]:
    """Why nothing of a device may move, by device.

    Args:
        graphs: live `torch.cuda.CUDAGraph` objects; one that was never captured counts too, where
            it can not be told.
        segments: of a snapshot.
        mem_pools: pools that are the job's own.
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
    """Where its pool has memory; a graph on several devices, or without memory, is not told."""
    try:
        pool = pool_of(graph.pool())
    except Exception:  # not captured yet, or it was reset
        return set()
    return of_pool.get(pool, set()) if pool is not None else set()
