"""What Slurm gives a batch script and the tasks of its `srun`, and stand-ins for two of its tools.

The variables are those of Slurm 22.05.8 with two nodes, one task on each, as the options of
deploy/examples/slurm.sbatch ask for; only names of the machine and of the cluster are others.

    python slurm_steps.py srun COMMAND...
    python slurm_steps.py scontrol show hostnames NODELIST

`srun` starts one process for each node, all of them on this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NODES = ("n1", "n2")

_JOB = {
    "SLURM_CLUSTER_NAME": "try",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_GPUS_PER_NODE": "8",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_GID": "0",
    "SLURM_JOB_NAME": "llm-train",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_PARTITION": "main",
    "SLURM_JOB_UID": "0",
    "SLURM_JOB_USER": "root",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NODE_ALIASES": "(null)",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PRIO_PROCESS": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
}
_STEP = {
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x3",
    "SLURM_CPU_BIND_LIST": "0x3",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_CPU_BIND_VERBOSE": "quiet",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0": "2(x2)",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_SRUN_COMM_HOST": "127.0.0.1",
    "SLURM_SRUN_COMM_PORT": "45569",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_LAUNCHER_PORT": "45569",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_UMASK": "0022",
}


def _place(task: int) -> dict[str, str]:
    """One task a node: number and node are the same."""
    return {
        "SLURMD_NODENAME": NODES[task],
        "SLURM_GTIDS": str(task),
        "SLURM_NODEID": str(task),
        "SLURM_PROCID": str(task),
        "SLURM_TOPOLOGY_ADDR": NODES[task],
    }


def batch(job_id: int, requeued: int = 0) -> dict[str, str]:
    """The variables of the batch script, which runs on the first node.

    Args:
        job_id: stays the same when the job is requeued.
        requeued: how many times it was; the first time there is no variable of it.
    """
    number = str(job_id)
    again = {"SLURM_RESTART_COUNT": str(requeued)} if requeued else {}
    return {**_JOB, **_place(0), "SLURM_JOB_ID": number, "SLURM_JOBID": number, **again}


def task(environ: Mapping[str, str], number: int) -> dict[str, str]:
    """The variables of one task of a step, out of those of the batch script."""
    return {**environ, **_STEP, **_place(number)}


def put_tools(folder: Path) -> None:
    """Both tools as programs in this folder, to be the first one of PATH."""
    for name in ("srun", "scontrol"):
        tool = folder / name
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        tool.chmod(0o755)


def _srun(command: list[str]) -> int:
    tasks = [
        subprocess.Popen(command, env=task(os.environ, number)) for number in range(len(NODES))
    ]
    return max(one.wait() for one in tasks)


def main(tool: str, arguments: list[str]) -> int:
    if tool == "srun":
        return _srun(arguments)
    assert arguments == ["show", "hostnames", _JOB["SLURM_JOB_NODELIST"]], arguments
    sys.stdout.write("127.0.0.1\n" * len(NODES))  # where the real one says n1 and n2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
