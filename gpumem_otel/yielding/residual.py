"""What is left on the devices after a yield, by cause; the causes add up to what is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_otel.core.yields import RESIDUAL_CAUSES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpumem_otel.core.model import DeviceStats
    from gpumem_otel.yielding.plan import Plan

__all__ = ["foreign_bytes", "residual_of"]


def residual_of(plan: Plan, stats: Sequence[DeviceStats]) -> dict[str, int]:
    """Bytes by cause of the devices that were asked for, after their tensors were freed.

    `context` is what the process uses beside the allocator, by the driver's count; where that is
    not known it is part of `unknown`, as is what the allocator holds for no known reason, and what
    the driver needs for itself.

    Args:
        plan: what was done.
        stats: of now; () where they can not be read: then what was found is all that is said.
    """
    chosen = plan.request.devices
    left = dict.fromkeys(RESIDUAL_CAUSES, 0)
    for stay in plan.found.stays if plan.found is not None else ():
        if chosen is None or stay.device in chosen:
            left[stay.cause if stay.cause in left else "unknown"] += stay.size_bytes
    for one in plan.kept:
        if chosen is None or one.device in chosen:
            left["kept"] += one.block_bytes
    used = 0
    for device in stats:
        if device.device_used_bytes is None or (chosen is not None and device.device not in chosen):
            continue
        used += device.device_used_bytes
        ours = device.process_used_bytes
        if ours is not None:
            others = device.others_used_bytes
            rest = max(device.device_used_bytes - ours, 0)
            left["other_process"] += rest if others is None else min(others, rest)
            left["context"] += max(ours - device.reserved_bytes, 0)
    left["unknown"] += max(used - sum(left.values()), 0)
    return {cause: size for cause, size in left.items() if size}


def foreign_bytes(residual: Mapping[str, int]) -> dict[str, int]:
    """What is left once the driver took all of this process: what is others'."""
    size = residual.get("other_process", 0)
    return {"other_process": size} if size else {}
