"""The panels of the job's dashboard that have data at metrics level full only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from boards import queries as q
from boards.parts import BYTES, COUNT, RATIO, Query, lines

if TYPE_CHECKING:
    from boards.parts import Panel

__all__ = ["LINKS", "RANK", "panels"]

RANK = "rank {{rank}}, device {{device}}"
LINKS = (
    ("Flame graphs of this device around this moment", q.moment_link()),
    ("Flame graph of this device over the range, in Explore", q.explore_link()),
)


def panels() -> list[Panel]:
    """Allocation rates, pools, rounding, blocks, host memory, the device as a whole."""
    only = " Exported at level full only (GPUMEM_OTEL_METRICS_LEVEL=full)."
    allocated = q.of_job("gpumem_allocated_bytes")
    return [
        lines(
            "Allocation rate",
            "Bytes allocated per second, freed since or not. High and steady in training is "
            "normal; a jump says what changed between two phases." + only,
            [
                Query(
                    q.worst(f"rate({q.of_job('gpumem_allocation_bytes_total')}[$__rate_interval])"),
                    RANK,
                )
            ],
            "binBps",
            links=LINKS,
        ),
        lines(
            "Allocations per second",
            "Each costs the recorder about a microsecond: beyond a hundred thousand a second, see "
            "the overhead on the exporter's dashboard." + only,
            [
                Query(
                    q.worst(f"rate({q.of_job('gpumem_allocations_total')}[$__rate_interval])"), RANK
                )
            ],
            "ops",
            links=LINKS,
        ),
        lines(
            "Reserved by pool",
            "The default pool, the largest private ones (CUDA graphs, MemPool) and the rest, at "
            "the last read-out. A large private pool is memory that no other code can use." + only,
            [Query(f"sum by (pool) ({q.of_job('gpumem_pool_reserved_bytes')})", "{{pool}}")],
            BYTES,
            width=8,
        ),
        lines(
            "Lost to rounding",
            "Allocated minus what was asked for. Large against allocated: very many small tensors."
            + only,
            [Query(q.worst(f"{allocated} - {q.of_job('gpumem_requested_bytes')}"), RANK)],
            BYTES,
            width=8,
        ),
        lines(
            "Allocated without a recorded stack",
            "What the flame graphs cannot name, over allocated: mostly from before `install()`. "
            "Above 0.1: install earlier, before the model is made." + only,
            [Query(q.worst(f"{q.of_job('gpumem_stackless_bytes')} / {allocated}"), RANK)],
            RATIO,
            width=8,
            top=1,
        ),
        lines(
            "Segments and blocks",
            "Ranges taken from the device, and the pieces they are cut into; summed over the ranks "
            "chosen. Blocks that grow without bytes growing: many small tensors are kept." + only,
            [
                Query(f"sum({q.of_job('gpumem_segments')})", "segments"),
                Query(f"sum({q.of_job('gpumem_blocks')})", "blocks"),
            ],
            COUNT,
            width=8,
        ),
        lines(
            "Pinned host memory",
            "Page-locked host memory of each process, which counts against the pod's memory "
            "limit: data loaders and offloading." + only,
            [Query(q.worst(q.of_job("gpumem_host_pinned_bytes")), RANK)],
            BYTES,
            width=8,
        ),
        lines(
            "Device: used against its memory",
            "What the device says, by everybody who uses it. Above the stack further up: other "
            "processes." + only,
            [
                Query(f"sum(max by (hw_id) ({q.of_job('hw_gpu_memory_usage_bytes')}))", "used"),
                Query(f"sum(max by (hw_id) ({q.of_job('hw_gpu_memory_limit_bytes')}))", "memory"),
            ],
            BYTES,
            width=8,
        ),
        lines(
            "Peak of reserved over limit",
            "Highest the allocator took from the device. 1 with room in the peak of allocated: the "
            "difference was cache." + only,
            [
                Query(
                    q.worst(
                        f"{q.of_job('gpumem_reserved_peak_bytes')} / "
                        f"{q.of_job('gpumem_limit_bytes')}"
                    ),
                    RANK,
                )
            ],
            RATIO,
            top=1,
        ),
        lines(
            "Waiting for another stream",
            "Freed by Python but still in use by another stream (active minus allocated). Large: "
            "`record_stream` keeps tensors longer than the code says." + only,
            [Query(q.worst(f"{q.of_job('gpumem_active_bytes')} - {allocated}"), RANK)],
            BYTES,
        ),
    ]
