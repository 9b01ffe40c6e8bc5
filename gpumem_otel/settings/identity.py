"""Who this process is in its job, from the variables that launchers set.

Launchers in order of certainty: torchrun and everything that sets `RANK` (Kubeflow,
Lightning, Accelerate), then Slurm's `srun`, then MPI (Open MPI, MPICH and Intel MPI), then an
indexed Kubernetes Job.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_otel.base.profile import Identity

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_SERVICE_NAME = "unknown_service:python"
"""What OpenTelemetry calls a Python process that was given no name."""


@dataclass(frozen=True, slots=True)
class _Launcher:
    """Variables of one launcher; the first set variable of each row counts."""

    rank: tuple[str, ...]
    local_rank: tuple[str, ...]
    world_size: tuple[str, ...]
    run_id: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()


_LAUNCHERS = (
    _Launcher(
        rank=("RANK",),
        local_rank=("LOCAL_RANK",),
        world_size=("WORLD_SIZE",),
        run_id=("TORCHELASTIC_RUN_ID", "PET_RDZV_ID", "SLURM_JOB_ID"),
        restart=("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"),
    ),
    _Launcher(
        rank=("SLURM_PROCID",),
        local_rank=("SLURM_LOCALID",),
        # of the step, where srun started only a part of the job's tasks
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        run_id=("SLURM_JOB_ID",),
        restart=("SLURM_RESTART_COUNT",),
    ),
    _Launcher(
        rank=("OMPI_COMM_WORLD_RANK",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        run_id=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher(
        rank=("PMI_RANK",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        world_size=("PMI_SIZE",),
    ),
    _Launcher(
        rank=("JOB_COMPLETION_INDEX",),
        local_rank=(),
        world_size=(),
        run_id=("JOB_NAME",),
    ),
)

_NO_RUN_ID = {"", "none"}
"""torchrun without a rendezvous id calls its run `none`, which identifies no run."""


def _text(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := environ.get(name, "").strip())), "")


def _run_id(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    values = (environ.get(name, "").strip() for name in names)
    return next((value for value in values if value not in _NO_RUN_ID), "")


def _number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    try:
        number = int(_text(environ, names))
    except ValueError:
        return default
    return number if number >= 0 else default


def identify(
    environ: Mapping[str, str],
    *,
    service_name: str = "",
    namespace: str = "",
    run_id: str = "",
    tags: tuple[tuple[str, str], ...] = (),
) -> Identity:
    """Identity from the launcher's variables; without them rank 0 of 1."""
    launcher = next((each for each in _LAUNCHERS if _text(environ, each.rank)), _LAUNCHERS[0])
    run_id = run_id or _run_id(environ, launcher.run_id)
    rank = _number(environ, launcher.rank, 0)
    return Identity(
        service_name=service_name or DEFAULT_SERVICE_NAME,
        namespace=namespace,
        run_id="" if run_id in _NO_RUN_ID else run_id,
        # torchrun counts from 0 again in a job that Slurm has queued once more
        restart=sum(_number(environ, (name,), 0) for name in launcher.restart),
        rank=rank,
        local_rank=_number(environ, launcher.local_rank, 0),
        world_size=max(_number(environ, launcher.world_size, 1), rank + 1),
        node=_text(environ, ("NODE_NAME", "K8S_NODE_NAME", "SLURMD_NODENAME"))
        or socket.gethostname(),
        pid=os.getpid(),
        tags=tags,
    )


def in_notebook(modules: Mapping[str, object]) -> bool:
    """Whether this process is the kernel of a notebook (Jupyter, Colab, VS Code).

    A kernel's shell has an attribute `kernel`, that of a terminal has none. Whether `ipykernel` was
    imported does not decide it: progress bars and widgets import it in any process.

    Args:
        modules: of the process, `sys.modules`.
    """
    get_shell = getattr(modules.get("IPython"), "get_ipython", None)
    if get_shell is None:  # still being imported, or not at all
        return False
    try:
        return getattr(get_shell(), "kernel", None) is not None
    except Exception:  # the shell is foreign code, and this only a question
        return False
