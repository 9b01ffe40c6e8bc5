"""GPU memory of PyTorch jobs as flame graphs in Pyroscope and series in Prometheus.

One line in the job:

    import gpumem_otel; gpumem_otel.install()
"""

from __future__ import annotations

from gpumem_otel._version import __version__
from gpumem_otel.errors import (
    CaptureError,
    ConfigError,
    EncodeError,
    GpumemError,
    PushError,
    ServeError,
    SnapshotError,
)
from gpumem_otel.lifecycle import install, participant, step, uninstall, watch

__all__ = [
    "CaptureError",
    "ConfigError",
    "EncodeError",
    "GpumemError",
    "PushError",
    "ServeError",
    "SnapshotError",
    "__version__",
    "install",
    "participant",
    "step",
    "uninstall",
    "watch",
]
