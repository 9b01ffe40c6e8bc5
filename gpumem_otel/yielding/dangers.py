"""What may end a job while it stands still, as far as its environment tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["dangers_of"]

_OFF = {"", "0", "false", "off", "no"}


def dangers_of(
    environ: Mapping[str, str],
    *,
    now_ns: int,
    world_size: int = 1,
    lease_seconds: float | None = None,
) -> tuple[str, ...]:
    """One line each; nothing is said that the environment does not show.

    Args:
        environ: of the process.
        now_ns: nanoseconds since 1970.
        world_size: ranks of the job.
        lease_seconds: after which it goes on by itself; None for never.

    `SLURM_JOB_END_TIME` is in seconds since 1970 (Slurm newer than 22.05); the variables of NCCL
    and of elastic are those of torch's own documentation.
    """
    found = []
    if world_size > 1:
        found.append(
            "NCCL: a collective that other ranks began fails after its time-out; the heartbeat "
            f"monitor ends a process after {_seconds(environ, 'TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC')}"
        )
    if environ.get("TORCHELASTIC_RUN_ID"):
        timed = environ.get("TORCHELASTIC_ENABLE_FILE_TIMER", "").lower() not in _OFF
        found.append(
            "torchrun: its file timer ends a worker whose timer runs out"
            if timed
            else "torchrun: a worker that ends restarts them all"
        )
    if environ.get("KUBERNETES_SERVICE_HOST"):
        found.append(
            "Kubernetes: a liveness probe that needs a step of the job fails, and "
            "activeDeadlineSeconds goes on; neither is visible from inside the pod"
        )
    found += _slurm(environ, now_ns, lease_seconds)
    return tuple(found)


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
