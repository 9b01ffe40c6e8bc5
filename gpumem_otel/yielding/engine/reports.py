"""The report of a yield or a restore, and what may end a job that is stopped."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from gpumem_otel.yielding.values import YieldLevel, YieldReport, YieldState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpumem_otel.yielding.engine.dependencies import YieldDependencies
    from gpumem_otel.yielding.engine.phases import Phases

_OFF = {"", "0", "false", "off", "no"}


def risks_of(
    environ: Mapping[str, str],
    *,
    now_ns: int,
    world_size: int = 1,
    lease_seconds: float | None = None,
) -> tuple[str, ...]:
    """What may end a job while it is stopped, as far as its environment shows; one line each.

    Args:
        environ: of the process.
        now_ns: nanoseconds since 1970.
        world_size: ranks of the job.
        lease_seconds: after which it goes on without a command; None for never.

    `SLURM_JOB_END_TIME` is in seconds since 1970 (Slurm newer than 22.05); the variables of NCCL
    and of elastic are those of torch's own documentation.
    """
    risks = []
    if world_size > 1:
        risks.append(
            "NCCL: a collective that other ranks began fails after its time-out; the heartbeat "
            f"monitor ends a process after {_seconds(environ, 'TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC')}"
        )
    if environ.get("TORCHELASTIC_RUN_ID"):
        timed = environ.get("TORCHELASTIC_ENABLE_FILE_TIMER", "").lower() not in _OFF
        risks.append(
            "torchrun: its file timer ends a worker whose timer runs out"
            if timed
            else "torchrun: a worker that ends restarts them all"
        )
    if environ.get("KUBERNETES_SERVICE_HOST"):
        risks.append(
            "Kubernetes: a liveness probe that needs a step of the job fails, and "
            "activeDeadlineSeconds goes on; neither is visible from inside the pod"
        )
    risks += _slurm(environ, now_ns, lease_seconds)
    return tuple(risks)


def _seconds(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    return f"{value} s ({name})" if value else f"{name} seconds"


def _slurm(environ: Mapping[str, str], now_ns: int, lease_seconds: float | None) -> list[str]:
    if not environ.get("SLURM_JOB_ID"):
        return []
    try:
        end = int(environ.get("SLURM_JOB_END_TIME", ""))
    except ValueError:
        return ["Slurm: the job's time limit goes on"]
    left = end - now_ns // 1_000_000_000
    if lease_seconds is None:
        return [f"Slurm: the job's time limit ends it in {left} s"]
    if lease_seconds < left:
        return []
    return [f"Slurm: the job's time limit ends it in {left} s, the lease in {lease_seconds:g} s"]


def dry_report(phases: Phases, parts: YieldDependencies, environ: Mapping[str, str]) -> YieldReport:
    """What a dry run would move, and how long the copy would take."""
    plan = phases.plan
    if plan is None:
        return YieldReport()
    return _of_plan(
        phases, parts, environ,
        moved_bytes=plan.moved_bytes, expected_seconds=phases.expected_seconds(plan),
    )  # fmt: skip


def yield_report(
    operation_id: str, phases: Phases, parts: YieldDependencies, environ: Mapping[str, str]
) -> YieldReport:
    """What is away now."""
    return _of_plan(
        phases, parts, environ,
        operation=operation_id, state=YieldState.YIELDED, moved_bytes=parts.offload.held_bytes,
    )  # fmt: skip


def _of_plan(
    phases: Phases,
    parts: YieldDependencies,
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
        dangers=risks_of(
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
