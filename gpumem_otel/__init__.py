"""GPU memory of PyTorch jobs as flame graphs in Pyroscope and series in Prometheus.

One line in the job:

    import gpumem_otel; gpumem_otel.install()

Of a snapshot file, on any machine:

    gpumem_otel.load_snapshot("snapshot.pickle").profile("peak")
"""

from __future__ import annotations

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
from gpumem_otel.api.regions import region
from gpumem_otel.api.snapshots import load_snapshot
from gpumem_otel.api.tensors import holders, release_traceback, report
from gpumem_otel.api.yields import (
    Courtesy,
    restore,
    yield_callbacks,
    yield_memory,
    yield_on_stop_signal,
    yielded,
)
from gpumem_otel.errors import (
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
    YieldFailedError,
    YieldRefusedError,
)

__all__ = [
    "CaptureError",
    "ConfigError",
    "Courtesy",
    "EncodeError",
    "GpumemError",
    "LineProfiler",
    "MissingPackageError",
    "NoHistoryError",
    "PageError",
    "PushError",
    "ServeError",
    "SnapshotError",
    "YieldFailedError",
    "YieldRefusedError",
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
