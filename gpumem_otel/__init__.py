"""GPU memory of PyTorch jobs as flame graphs in Pyroscope and series in Prometheus.

One line in the job:

    import gpumem_otel; gpumem_otel.install()

Of a snapshot file, on any machine:

    gpumem_otel.load_snapshot("snapshot.pickle").profile("peak")

All types that these calls take and return can be imported from here, for annotations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_otel._version import __version__
from gpumem_otel.api.lifecycle import install, participant, step, uninstall, watch
from gpumem_otel.api.line_profiler import (
    LineProfiler,
    line_profiler,
    profile,
    profile_every,
    set_target_gpu,
)
from gpumem_otel.api.notebook import load_ipython_extension, unload_ipython_extension
from gpumem_otel.api.regions import Region, region
from gpumem_otel.api.snapshots import Difference, Profile, Snapshot, load_snapshot
from gpumem_otel.api.tensors import Report, holders, release_traceback, report
from gpumem_otel.api.yields import (
    Courtesy,
    restore,
    yield_callbacks,
    yield_memory,
    yield_on_stop_signal,
    yielded,
)
from gpumem_otel.errors import (
    BusyError,
    CaptureError,
    ConfigError,
    EncodeError,
    GpumemError,
    MissingPackageError,
    NoHistoryError,
    PageError,
    PushError,
    ServeError,
    SnapshotError,
    SpoolError,
    YieldFailedError,
    YieldRefusedError,
)

if TYPE_CHECKING:
    from gpumem_otel.api.public_types import *
else:

    def __getattr__(name: str) -> object:
        """A type of `api.public_types`, imported when it is first asked for."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from gpumem_otel.api import public_types  # noqa: PLC0415 - imports what few jobs need

        return globals().setdefault(name, getattr(public_types, name))


def __dir__() -> list[str]:
    return list(__all__)


__all__ = [
    "AllocEvent",
    "Annotation",
    "Block",
    "BlockState",
    "BusyError",
    "CaptureError",
    "ConfigError",
    "CounterReader",
    "Courtesy",
    "DeviceReport",
    "DeviceTotals",
    "DiffEntry",
    "Difference",
    "EncodeError",
    "Frame",
    "FunctionLines",
    "GpumemError",
    "HeapProfile",
    "Holder",
    "Holders",
    "InstallOptions",
    "LineProfiler",
    "LineReport",
    "LineRow",
    "LineUse",
    "MissingPackageError",
    "NoHistoryError",
    "PageError",
    "Phase",
    "PhaseTime",
    "Profile",
    "ProfileKind",
    "PushError",
    "Region",
    "Report",
    "ReportData",
    "Sample",
    "Segment",
    "ServeError",
    "Sizes",
    "Snapshot",
    "SnapshotError",
    "SnapshotKind",
    "SnapshotTable",
    "SpoolError",
    "Stack",
    "Subject",
    "TensorClass",
    "TensorInfo",
    "TensorPart",
    "TopBy",
    "TopRow",
    "TorchSnapshot",
    "YieldFailedError",
    "YieldLevel",
    "YieldOptions",
    "YieldRefusedError",
    "YieldReport",
    "YieldState",
    "__version__",
    "holders",
    "install",
    "line_profiler",
    "load_ipython_extension",
    "load_snapshot",
    "participant",
    "profile",
    "profile_every",
    "region",
    "release_traceback",
    "report",
    "restore",
    "set_target_gpu",
    "step",
    "uninstall",
    "unload_ipython_extension",
    "watch",
    "yield_callbacks",
    "yield_memory",
    "yield_on_stop_signal",
    "yielded",
]
