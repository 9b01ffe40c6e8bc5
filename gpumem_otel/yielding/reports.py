"""What a yield or a restore says of itself when it has ended."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from gpumem_otel.core.yields import YieldLevel, YieldReport, YieldState
from gpumem_otel.yielding.dangers import dangers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpumem_otel.yielding.parts import YieldParts
    from gpumem_otel.yielding.phases import Phases

__all__ = ["dry_report", "restore_report", "yield_report"]


def dry_report(phases: Phases, parts: YieldParts, environ: Mapping[str, str]) -> YieldReport:
    """What a yield that was only prepared would move, and how long its copy takes."""
    plan = phases.plan
    if plan is None:
        return YieldReport()
    return _of_plan(
        phases, parts, environ,
        moved_bytes=plan.moved_bytes, expected_seconds=phases.expected_seconds(plan),
    )  # fmt: skip


def yield_report(
    operation_id: str, phases: Phases, parts: YieldParts, environ: Mapping[str, str]
) -> YieldReport:
    """What is away now."""
    return _of_plan(
        phases, parts, environ,
        operation=operation_id, state=YieldState.YIELDED, moved_bytes=parts.offload.held_bytes,
    )  # fmt: skip


def _of_plan(
    phases: Phases,
    parts: YieldParts,
    environ: Mapping[str, str],
    *,
    moved_bytes: Mapping[str, int],
    operation: str = "",
    state: YieldState = YieldState.RUNNING,
    expected_seconds: float | None = None,
) -> YieldReport:
    plan = phases.plan
    if plan is None:
        return YieldReport(operation=operation, state=state)
    return YieldReport(
        operation=operation,
        state=state,
        level=plan.level,
        phases=tuple(phases.times),
        moved_bytes=MappingProxyType(dict(moved_bytes)),
        discarded_bytes=MappingProxyType(dict(plan.discarded_bytes)),
        residual_bytes=MappingProxyType(dict(phases.residual)),
        host_bytes=phases.host_bytes,
        disk_bytes=phases.disk_bytes,
        expected_seconds=expected_seconds,
        dangers=dangers_of(
            environ,
            now_ns=parts.clock.time_ns(),
            world_size=parts.world_size(),
            lease_seconds=plan.request.lease_seconds,
        ),
        notes=tuple(phases.notes),
    )


def restore_report(
    operation_id: str,
    phases: Phases,
    state: YieldState,
    *,
    moved_bytes: Mapping[str, int],
    discarded_bytes: Mapping[str, int],
) -> YieldReport:
    """What came back."""
    return YieldReport(
        operation=operation_id,
        state=state,
        level=phases.plan.level if phases.plan is not None else YieldLevel.AUTO,
        phases=tuple(phases.times),
        moved_bytes=moved_bytes,
        discarded_bytes=discarded_bytes,
        host_bytes=phases.host_bytes,
        disk_bytes=phases.disk_bytes,
        checksums=phases.checksums,
        notes=tuple(phases.notes),
    )
