"""GPU memory of PyTorch jobs as flame graphs in Pyroscope and series in Prometheus.

One line in the job:

    import gpumem_otel; gpumem_otel.install()

Of a snapshot file, on any machine:

    gpumem_otel.load_snapshot("snapshot.pickle").profile("peak")
"""

from __future__ import annotations

from gpumem_otel._version import __version__
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
)
from gpumem_otel.lifecycle import install, participant, step, uninstall, watch
from gpumem_otel.offline import load_snapshot

__all__ = [
    "CaptureError",
    "ConfigError",
    "EncodeError",
    "GpumemError",
    "MissingPackageError",
    "NoHistoryError",
    "PageError",
    "PushError",
    "ServeError",
    "SnapshotError",
    "__version__",
    "install",
    "load_snapshot",
    "participant",
    "step",
    "uninstall",
    "watch",
]
