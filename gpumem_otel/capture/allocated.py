"""One reading of the allocator for an explicit call, installed or not.

Nothing is switched on: where `install()` records stacks they are in it, else the blocks have none
(or those that the job records itself).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gpumem_otel.capture.recorder import Recorder
from gpumem_otel.capture.sources import TorchSource
from gpumem_otel.capture.stats import StatsReader
from gpumem_otel.capture.workspaces import workspace_sizes
from gpumem_otel.core.classify import Classifier, workspaces_in
from gpumem_otel.core.ports import Reading
from gpumem_otel.core.snapshot import from_torch
from gpumem_otel.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpumem_otel.core.ports import Source

__all__ = ["allocated_now", "read_allocator"]


def read_allocator(
    source: Source | None, environ: Mapping[str, str]
) -> tuple[Reading | None, bool, str]:
    """What the allocators of this process hold now.

    Makes no context and starts nothing; on the caller's thread.

    Args:
        source: of the agent that is installed, None without one; one that plays a recording says
            nothing of this process.
        environ: the process's environment, for the size of cuBLAS's workspace.

    Returns:
        The reading, None where there is nothing to read; whether stacks are recorded; and why
        there is no reading, "" where CUDA is simply not in use.
    """
    torch = sys.modules.get("torch")
    if isinstance(source, TorchSource) and source.status().supported:
        try:
            reading = source.read_at_once(float("inf"))
            return None if reading is None else source.completed(reading), True, ""
        except CaptureError as error:
            return None, True, str(error)
    if torch is None or not _in_use(torch):
        return None, False, ""
    try:
        backend = str(torch.cuda.get_allocator_backend())
        if backend != "native":
            return None, False, f"the allocator backend {backend} tells no blocks"
        return _read(torch, environ), False, ""
    except (CaptureError, RuntimeError) as error:
        return None, False, str(error)


def allocated_now() -> int:
    """Bytes allocated on all devices together; 0 where CUDA is not in use."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or not _in_use(torch):
            return 0
        stats = StatsReader(torch)
        return sum(stats.allocated(stats.devices()).values())
    except RuntimeError:
        return 0


def _in_use(torch: Any) -> bool:
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _read(torch: Any, environ: Mapping[str, str]) -> Reading:
    recorder = Recorder()
    recorder.prepare(torch)  # keeps the first naming of frames from importing the compiler
    try:
        stats = StatsReader(torch)
        devices = stats.devices()
        before = stats.counters(devices)
        raw = recorder.snapshot(traces=False)
        after = stats.counters(devices)
    finally:
        recorder.stop()
    segments = raw["segments"] if isinstance(raw, dict) else raw
    workspaces = workspaces_in(segments, workspace_sizes(environ), ())
    return Reading(
        snapshot=from_torch(raw),
        time_ns=0,
        before=before,
        after=after,
        classifier=Classifier({}, workspaces),
    )
