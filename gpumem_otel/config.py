"""Frozen configs, one per component; the only reader of the environment.

`options.resolve(environ, **options)` fills them in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CaptureConfig",
    "Config",
    "MetricsConfig",
    "ProfileConfig",
    "PyroscopeConfig",
    "Secret",
    "ServeConfig",
    "process_environ",
]


class Secret:
    """A string that neither repr nor str shows."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The string itself, for the wire alone."""
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(("Secret", self._value))

    def __repr__(self) -> str:
        return "Secret('***')" if self._value else "Secret('')"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """How the allocator is recorded and read."""

    stacks: str = "python"
    """`python` (default) or `all`: C++ frames too, which cost seconds at the first read-out.
    `GPUMEM_OTEL_STACKS`."""
    max_window_events: int = 100_000
    """Events an `allocated` window may hold before it ends early. `GPUMEM_OTEL_WINDOW_EVENTS`."""
    steps: bool = True
    """Count optimizer steps through torch's global optimizer hooks. `GPUMEM_OTEL_STEPS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Which profiles are made, how often, how large."""

    interval_seconds: float = 60.0
    """Cadence of live profiles, at wall-clock multiples of it. `GPUMEM_OTEL_INTERVAL`."""
    kinds: tuple[str, ...] = ("live",)
    """`live`, `allocated`. `GPUMEM_OTEL_PROFILES`, comma separated."""
    allocated_window_seconds: float = 2.0
    """Length of the recorded window behind one `allocated` profile.
    `GPUMEM_OTEL_ALLOCATED_WINDOW`."""
    job_push_bytes_per_second: float = 1_000_000.0
    """Budget of the whole job, divided by the world size: it stretches the interval.
    `GPUMEM_OTEL_JOB_PUSH_BYTES_PER_SECOND`."""
    max_bytes: int = 1_500_000
    """Uncompressed pprof. `GPUMEM_OTEL_MAX_PROFILE_BYTES`."""
    max_samples: int = 15_000
    """`GPUMEM_OTEL_MAX_PROFILE_SAMPLES`."""
    max_depth: int = 512
    """Frames per stack; the middle is cut. `GPUMEM_OTEL_MAX_STACK_DEPTH`."""
    max_stall_ratio: float = 0.001
    """Share of the job's time that may be spent holding the interpreter lock: the interval is at
    least the stall of a read-out divided by this. `GPUMEM_OTEL_MAX_STALL_RATIO`."""
    redact_paths: bool = False
    """Keep only the last part of file names. `GPUMEM_OTEL_REDACT_PATHS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PyroscopeConfig:
    """Where profiles are pushed; nothing is pushed without a URL."""

    url: str = ""
    """`PYROSCOPE_SERVER_ADDRESS`."""
    basic_auth_user: str = ""
    """`PYROSCOPE_BASIC_AUTH_USER`."""
    basic_auth_password: Secret = field(default_factory=lambda: Secret(""))
    """`PYROSCOPE_BASIC_AUTH_PASSWORD`."""
    bearer_token: Secret = field(default_factory=lambda: Secret(""))
    """`PYROSCOPE_AUTH_TOKEN`."""
    bearer_token_file: str = ""
    """Read again at each push, so that a rotated token is taken. `PYROSCOPE_AUTH_TOKEN_FILE`."""
    tenant_id: str = ""
    """`X-Scope-OrgID`. `PYROSCOPE_TENANT_ID`."""
    headers: tuple[tuple[str, Secret], ...] = ()
    """Extra request headers. `PYROSCOPE_HTTP_HEADERS`, `name=value,name=value`."""
    ca_file: str = ""
    """PEM bundle of the server's CA, instead of the system's. `PYROSCOPE_CA_FILE`."""
    client_cert_file: str = ""
    """`PYROSCOPE_CLIENT_CERT_FILE`."""
    client_key_file: str = ""
    """`PYROSCOPE_CLIENT_KEY_FILE`."""
    proxy: str = ""
    """`PYROSCOPE_PROXY`; else `HTTPS_PROXY`, `HTTP_PROXY`, `NO_PROXY` as usual."""
    timeout_seconds: float = 10.0
    """Deadline of one push, connection and answer together. `PYROSCOPE_TIMEOUT`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Which metrics are exported, and how."""

    level: str = "standard"
    """`minimal`, `standard`, `full`. `GPUMEM_OTEL_METRICS_LEVEL`."""
    otlp: bool = False
    """Register OpenTelemetry instruments. On when `OTEL_METRICS_EXPORTER` names `otlp`, or an
    `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` is set and
    `OTEL_METRICS_EXPORTER` is not `none`."""
    otlp_environ: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """The `OTEL_*` variables as they were, for the exporter of our own."""
    otlp_interval_seconds: float = 60.0
    """`OTEL_METRIC_EXPORT_INTERVAL` (milliseconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The listener for /metrics and /debug/pprof/gpumem; off unless asked for."""

    enabled: bool = False
    """`GPUMEM_OTEL_SERVE`, or on when `OTEL_METRICS_EXPORTER` names `prometheus`."""
    host: str = "127.0.0.1"
    """`GPUMEM_OTEL_HOST`, else `OTEL_EXPORTER_PROMETHEUS_HOST`."""
    port: int = 9464
    """Base port; a process listens on base + local rank. 0: any free port (notebooks).
    `GPUMEM_OTEL_PORT`, else `OTEL_EXPORTER_PROMETHEUS_PORT`."""
    token: Secret = field(default_factory=lambda: Secret(""))
    """Bearer token that readers must show. `GPUMEM_OTEL_TOKEN`."""
    token_file: str = ""
    """`GPUMEM_OTEL_TOKEN_FILE`."""
    tls_cert_file: str = ""
    """`GPUMEM_OTEL_TLS_CERT_FILE`."""
    tls_key_file: str = ""
    """`GPUMEM_OTEL_TLS_KEY_FILE`."""
    tls_client_ca_file: str = ""
    """Readers must show a certificate of this CA. `GPUMEM_OTEL_TLS_CLIENT_CA_FILE`."""
    allowed_hosts: tuple[str, ...] = ()
    """Host header names accepted besides loopback names, the bound address and this machine's
    name and addresses (`*`: any). `GPUMEM_OTEL_ALLOWED_HOSTS`, comma separated."""
    run_dir: str = ""
    """Where listening processes register for `gpumem-otel sd`. `GPUMEM_OTEL_RUN_DIR`, else
    `$XDG_RUNTIME_DIR/gpumem-otel`, else `/tmp/gpumem-otel-<uid>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything, resolved."""

    enabled: bool = True
    service_name: str = ""
    namespace: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    record_path: str = ""
    host_profiles: bool = False
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    profiles: ProfileConfig = field(default_factory=ProfileConfig)
    pyroscope: PyroscopeConfig = field(default_factory=PyroscopeConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    warnings: tuple[str, ...] = ()


def process_environ() -> Mapping[str, str]:
    """The environment of this process, for entry points that have none handed in."""
    return os.environ
