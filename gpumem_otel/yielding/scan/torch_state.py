"""Asks torch what is in progress, before the job is stopped or the driver is called."""

from __future__ import annotations

import sys
from typing import Any


def not_between_steps() -> str:
    """Why the calling thread cannot stop here, "" if it is between two pieces of work.

    Creates no context and starts nothing on a device.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ""
    try:
        if getattr(torch._C, "_current_graph_task_id", lambda: -1)() != -1:  # noqa: SLF001
            return "backward runs"
        cuda = torch.cuda
        if cuda.is_initialized() and cuda.is_current_stream_capturing():
            return "a stream captures a graph"
    except Exception as error:  # a build without CUDA: nothing captures
        return "" if "CUDA" in str(error) else f"the state of torch is unknown ({error})"
    return ""


def nccl_communicators() -> int:
    """The number of process groups that use NCCL, whether they have communicated or not.

    Limits: communicators that were made without `torch.distributed` are not seen.
    """
    collectives: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if collectives is None:
        return 0
    try:
        groups = list(collectives._world.pg_map.values())  # noqa: SLF001 - there is no public list
    except AttributeError:
        return 0
    return sum("nccl" in str(group[0]).lower() for group in groups)


def imported_from_others() -> str:
    """A clause about other processes' device memory opened here (CUDA IPC), "" for none."""
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
    cache = getattr(reductions, "shared_cache", None)
    if cache is None:
        return ""
    # keys: (handle, offset) for CUDA memory, a descriptor or a name for host memory
    alive = sum(
        type(key) is tuple and bool(key) and type(key[0]) is bytes and not reference.expired()
        for key, reference in list(cache.items())
    )
    return f"{alive} storages of another process are open here" if alive else ""
