"""How many series one process exports, counted by the METRICS table itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_otel.core.classify import TensorClass
from gpumem_otel.core.model import (
    DeviceBooks,
    DeviceStats,
    Identity,
    Observation,
    SourceStatus,
    StepStats,
)
from gpumem_otel.core.yields import RESIDUAL_CAUSES, YieldStatus
from gpumem_otel.export.table import rows
from gpumem_otel.export.values import DEFAULT_POOL, PRIVATE_POOLS_SHOWN

if TYPE_CHECKING:
    from gpumem_otel.export.table import Level

__all__ = ["series_of_a_rank"]


def series_of_a_rank(
    level: Level, devices: int, kinds: tuple[str, ...], *, can_yield: bool = False
) -> int:
    """Series that one process exports at most, every other feature on.

    Args:
        level: how many metrics there are.
        devices: that the process uses.
        kinds: of the profiles that it pushes.
        can_yield: whether it takes commands to yield.
    """
    return sum(1 for _ in rows(_everything(devices, kinds, can_yield=can_yield), level))


def _everything(devices: int, kinds: tuple[str, ...], *, can_yield: bool) -> Observation:
    """One process of a larger job that shows every row of the table."""
    on = tuple(range(devices))
    # the default pool, those shown by name, and one for `other`
    pools = {DEFAULT_POOL: 1} | {(0, n + 1): 1 for n in range(PRIVATE_POOLS_SHOWN + 1)}
    return Observation(
        identity=Identity(
            service_name="", world_size=2, device_uuids={device: f"GPU-{device}" for device in on}
        ),
        status=SourceStatus(armed=True, supported=True, devices=on),
        time_ns=0,
        devices=tuple(
            DeviceStats(
                device=device,
                allocated_bytes=1,
                requested_bytes=1,
                active_bytes=1,
                reserved_bytes=1,
                limit_bytes=1,
                device_total_bytes=1,
                device_used_bytes=1,
                process_used_bytes=1,
                host_pinned_bytes=1,
            )
            for device in on
        ),
        books={
            device: DeviceBooks(
                device=device,
                reserved_bytes=1,
                allocated_bytes=1,
                active_bytes=1,
                requested_bytes=1,
                segments=1,
                blocks=1,
                free_segment_bytes=0,
                split_remainder_bytes=0,
                pending_free_bytes=0,
                private_pool_free_bytes=0,
                bytes_without_stack=0,
                history=True,
                pool_reserved_bytes=pools,
            )
            for device in on
        },
        classes={device: dict.fromkeys((one.value for one in TensorClass), 1) for device in on},
        steps=StepStats(steps=1, last_step_time_ns=1, floor_bytes=dict.fromkeys(on, 1)),
        counters={("last_push_timestamp_seconds", (("kind", kind),)): 1.0 for kind in kinds},
        yields=YieldStatus(lease_expiry_ns=1, residual_bytes=dict.fromkeys(RESIDUAL_CAUSES, 1))
        if can_yield
        else None,
    )
