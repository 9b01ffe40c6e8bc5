"""Builds an engine of yields from the parts that read and move memory."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.capture.process_facts import device_uuids, distributed_rank
from gpumem_otel.settings import identity
from gpumem_otel.settings.config import YieldConfig
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.yielding.copy.devices import CpuDevices, CudaDevices
from gpumem_otel.yielding.copy.host_memory import HostPool
from gpumem_otel.yielding.copy.limits import read_room
from gpumem_otel.yielding.copy.offload import Offload
from gpumem_otel.yielding.copy.reservations import DeviceReservations, HostReservations
from gpumem_otel.yielding.driver.checkpoint import DriverCheckpoint
from gpumem_otel.yielding.engine.dependencies import YieldDependencies
from gpumem_otel.yielding.engine.engine import YieldEngine
from gpumem_otel.yielding.engine.safepoint import Quiescence
from gpumem_otel.yielding.scan.candidates import CandidateFinder
from gpumem_otel.yielding.scan.other_threads import who_else
from gpumem_otel.yielding.scan.torch_state import imported_from_others, nccl_communicators

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import DeviceStats
    from gpumem_otel.capture.source import TorchSource
    from gpumem_otel.yielding.callbacks import Callbacks
    from gpumem_otel.yielding.engine.safepoint import SafePoints
    from gpumem_otel.yielding.protocols import Finding

_SEVERAL = (
    "several optimizers step, and the steps of the first are taken for the job's: call "
    "gpumem_otel.step() once per iteration"
)


def compose(
    source: TorchSource,
    *,
    safe_points: SafePoints,
    callbacks: Callbacks,
    participants: Callable[[], Collection[threading.Thread]],
    environ: Mapping[str, str],
    counters: Counters,
    run_dir: str,
    limits: YieldConfig | None = None,
    why_not_now: Callable[[], str] = str,
    several: Callable[[], bool] = bool,
    note: str = "",
    device_type: str = "cuda",
    finder: Finding | None = None,
) -> YieldEngine:
    """Build an engine; torch is imported, and the source records.

    Args:
        source: reads the allocator.
        safe_points: of the job.
        callbacks: of the job.
        participants: threads that do not use the GPU while the job's thread is stopped.
        environ: of the process.
        counters: of the engine.
        run_dir: folder in which the processes of this user reserve memory.
        limits: of host memory; None for the defaults.
        why_not_now: what a yield would disturb at the moment, "" for nothing.
        several: whether several optimizers step, of which one gives the job's steps.
        note: for each report.
        device_type: `cpu` for tests without a GPU.
        finder: of storages; None for those of torch's CUDA allocator.
    """
    torch: Any = sys.modules["torch"]
    devices: Any = CudaDevices(torch) if device_type == "cuda" else CpuDevices(torch)
    folder = f"{run_dir}/yield"
    limits = limits or YieldConfig()
    clock = SystemClock()

    def usage() -> Sequence[DeviceStats]:
        try:
            return source.stats()
        except Exception:  # a report without it is better than none
            return ()

    def segments() -> Sequence[Any]:
        if device_type != "cuda":
            return ()
        return from_torch(source.recorder.snapshot(traces=False), source="torch").raw_segments()

    def world_size() -> int:
        known = distributed_rank()
        return max(identity.identify(environ).world_size, known[1] if known else 1)

    def uuids() -> Mapping[int, str]:
        return device_uuids(source.status().devices)

    def reserved() -> Mapping[str, int]:
        return {uuid: torch.cuda.memory_reserved(at) for at, uuid in uuids().items()}

    parts = YieldDependencies(
        finder=finder or CandidateFinder(source, environ, device_type=device_type),
        offload=Offload(
            devices,
            HostPool(devices),
            HostReservations(folder, read_room, limit_bytes=limits.host_limit_bytes),
            DeviceReservations(folder),
            keep_bytes=limits.keep_bytes,
            moves=source.restored,
        ),
        safe_points=safe_points,
        quiescence=Quiescence(
            participants=participants,
            who_else=partial(who_else, segments),
            counters=lambda: {one.device: (one.allocations, one.frees) for one in usage()},
            clock=clock,
        ),
        callbacks=callbacks,
        clock=clock,
        checkpoint=DriverCheckpoint(
            environ=environ,
            communicators=nccl_communicators,
            foreign=imported_from_others,
            uuids=lambda: uuids().values(),
            reserved=reserved,
        ),
        gate=source.gate,
        world_size=world_size,
        why_not_now=why_not_now,
        usage=usage,
        hints=lambda: [line for line in (_SEVERAL if several() else "", note) if line],
    )
    return YieldEngine(parts, counters=counters, environ=environ)
