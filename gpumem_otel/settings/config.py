"""Frozen configs, one per component; the only reader of the environment.

`options.resolve(environ, **options)` fills them in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_KINDS: tuple[str, ...] = ("live",)
"""Profiles that are pushed where nobody says which."""


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
    kinds: tuple[str, ...] = DEFAULT_KINDS
    """`live`, `peak`, `allocated`, `growth`, `pinned`; comma separated in the variable.
    `GPUMEM_OTEL_PROFILES`."""
    allocated_window_seconds: float = 2.0
    """Length of the recorded window behind `allocated` and `peak` profiles where no steps are
    counted; else it holds two whole steps. `GPUMEM_OTEL_ALLOCATED_WINDOW`."""
    job_push_bytes_per_second: float = 1_000_000.0
    """Budget of the whole job, divided by the world size: it stretches the interval.
    `GPUMEM_OTEL_JOB_PUSH_BYTES_PER_SECOND`."""
    max_bytes: int = 1_500_000
    """Of one uncompressed pprof; beyond it the smallest stacks are merged into `[other]`.
    `GPUMEM_OTEL_MAX_PROFILE_BYTES`."""
    max_samples: int = 15_000
    """Stacks in one profile; beyond it the smallest are merged into `[other]`.
    `GPUMEM_OTEL_MAX_PROFILE_SAMPLES`."""
    max_depth: int = 512
    """Frames per stack; the middle is cut. `GPUMEM_OTEL_MAX_STACK_DEPTH`."""
    max_stall_ratio: float = 0.001
    """Share of the job's time that may be spent holding the interpreter lock: the interval is at
    least the stall of a read-out divided by this. `GPUMEM_OTEL_MAX_STALL_RATIO`."""
    class_as: str = "root"
    """Where live profiles tell tensor classes: `root` (the root frame of each stack), `label`
    (the sample label `tensor_class`), or `off`, with which `gpumem_class_bytes` ends too.
    `GPUMEM_OTEL_CLASS_AS`."""
    growth_pushes: int = 10
    """A `growth` profile compares with the live profile of so many pushes before.
    `GPUMEM_OTEL_GROWTH_PUSHES`."""
    phases: bool = False
    """Label `allocated` profiles with the `phase` of the step: `forward`, `backward`,
    `optimizer.step`, `zero_grad`, and ranges of `record_function`. `GPUMEM_OTEL_PHASES`."""
    redact_paths: bool = False
    """Keep only the last part of file names. `GPUMEM_OTEL_REDACT_PATHS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PyroscopeConfig:
    """Where profiles are pushed; nothing is pushed without a URL."""

    url: str = ""
    """Server, like `https://host:4040/prefix`, without credentials in it.
    `PYROSCOPE_SERVER_ADDRESS`."""
    basic_auth_user: str = ""
    """Basic authentication, where there is no bearer token. `PYROSCOPE_BASIC_AUTH_USER`."""
    basic_auth_password: Secret = field(default_factory=lambda: Secret(""))
    """Its password. `PYROSCOPE_BASIC_AUTH_PASSWORD`."""
    bearer_token: Secret = field(default_factory=lambda: Secret(""))
    """Bearer token, in place of basic authentication. `PYROSCOPE_AUTH_TOKEN`."""
    bearer_token_file: str = ""
    """File with the bearer token, read again at each push, so that a rotated one is taken.
    `PYROSCOPE_AUTH_TOKEN_FILE`."""
    tenant_id: str = ""
    """Sent as `X-Scope-OrgID`. `PYROSCOPE_TENANT_ID`."""
    headers: tuple[tuple[str, Secret], ...] = ()
    """Extra request headers; `name=value,name=value` in the variable. `PYROSCOPE_HTTP_HEADERS`."""
    ca_file: str = ""
    """PEM bundle of the server's CA, instead of the system's. `PYROSCOPE_CA_FILE`."""
    client_cert_file: str = ""
    """PEM certificate shown to the server. `PYROSCOPE_CLIENT_CERT_FILE`."""
    client_key_file: str = ""
    """Its key, where the certificate's file does not hold it. `PYROSCOPE_CLIENT_KEY_FILE`."""
    proxy: Secret = field(default_factory=lambda: Secret(""))
    """URL of a proxy, `user:password@` allowed; without it `HTTPS_PROXY`, `HTTP_PROXY` and
    `NO_PROXY` count as usual. `PYROSCOPE_PROXY`."""
    timeout_seconds: float = 10.0
    """Deadline of one push, connection and answer together. `PYROSCOPE_TIMEOUT`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Which metrics are exported, and how."""

    level: str = "standard"
    """How many metrics there are: `minimal`, `standard`, `full`. `GPUMEM_OTEL_METRICS_LEVEL`."""
    otlp: bool = False
    """Register OpenTelemetry instruments. Where nothing is said here, `OTEL_METRICS_EXPORTER`
    decides: on if it names `otlp`. Where that is not set either, it is on if
    `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` is set. Both only
    unless `OTEL_SDK_DISABLED` is `true`. `GPUMEM_OTEL_OTLP`."""
    otlp_environ: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """The `OTEL_*` variables as they were, for the exporter of our own."""
    otlp_interval_seconds: float = 60.0
    """Seconds between exports of our own over OTLP; the variable is in milliseconds.
    `OTEL_METRIC_EXPORT_INTERVAL`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The listener for /metrics and /debug/pprof/gpumem; off unless asked for."""

    enabled: bool = False
    """Listen. Where nothing is said here, it is on if `OTEL_METRICS_EXPORTER` names `prometheus`.
    `GPUMEM_OTEL_SERVE`."""
    host: str = "127.0.0.1"
    """Address to listen on. `GPUMEM_OTEL_HOST`, else `OTEL_EXPORTER_PROMETHEUS_HOST`."""
    port: int = 9464
    """Base port; a process listens on base + local rank. 0: any free port (notebooks).
    `GPUMEM_OTEL_PORT`, else `OTEL_EXPORTER_PROMETHEUS_PORT`."""
    token: Secret = field(default_factory=lambda: Secret(""))
    """Bearer token that readers must show. `GPUMEM_OTEL_TOKEN`."""
    token_file: str = ""
    """File with such a token, read again when it changes. `GPUMEM_OTEL_TOKEN_FILE`."""
    tls_cert_file: str = ""
    """PEM certificate: the listener speaks TLS. `GPUMEM_OTEL_TLS_CERT_FILE`."""
    tls_key_file: str = ""
    """Its key, where the certificate's file does not hold it. `GPUMEM_OTEL_TLS_KEY_FILE`."""
    tls_client_ca_file: str = ""
    """Readers must show a certificate of this CA. `GPUMEM_OTEL_TLS_CLIENT_CA_FILE`."""
    allowed_hosts: tuple[str, ...] = ()
    """Host header names accepted besides loopback names, the bound address and this machine's
    name and addresses (`*`: any); comma separated in the variable.
    `GPUMEM_OTEL_ALLOWED_HOSTS`."""
    run_dir: str = ""
    """Folder where listening processes register for `gpumem-otel sd`; without it
    `$XDG_RUNTIME_DIR/gpumem-otel`, else `/tmp/gpumem-otel-<uid>`. `GPUMEM_OTEL_RUN_DIR`."""
    handover_dir: str = ""
    """Folder where a process leaves its last /metrics when an allocation fails and when it ends;
    `gpumem-otel run --supervise` sets it. `GPUMEM_OTEL_HANDOVER_DIR`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """The listener that takes commands to yield and restore; off unless asked for."""

    enabled: bool = False
    """Take commands to yield and restore, on a Unix socket in the folder of `run_dir` that only
    this user can open. `GPUMEM_OTEL_CONTROL`."""
    host: str = ""
    """Address to take commands on over TCP too; nowhere where it is empty. Needs tokens or client
    certificates, and TLS unless it is a loopback address. `GPUMEM_OTEL_CONTROL_HOST`."""
    port: int = 9564
    """Base port of that; a process listens on base + local rank. 0: any free port.
    `GPUMEM_OTEL_CONTROL_PORT`."""
    token: Secret = field(default_factory=lambda: Secret(""))
    """Bearer token with all roles. Every child process inherits a variable: a file is better, and
    a warning says so. `GPUMEM_OTEL_CONTROL_TOKEN`."""
    token_file: str = ""
    """File with bearer tokens and their roles, a line for each, read again when it changes.
    `GPUMEM_OTEL_CONTROL_TOKEN_FILE`."""
    tls_cert_file: str = ""
    """PEM certificate: commands over TCP come through TLS. `GPUMEM_OTEL_CONTROL_TLS_CERT_FILE`."""
    tls_key_file: str = ""
    """Its key, where the certificate's file does not hold it.
    `GPUMEM_OTEL_CONTROL_TLS_KEY_FILE`."""
    tls_client_ca_file: str = ""
    """Clients must show a certificate of this CA. `GPUMEM_OTEL_CONTROL_TLS_CLIENT_CA_FILE`."""
    client_roles: tuple[str, ...] = ()
    """Roles of whoever shows such a certificate (`read`, `yield`, `restore`), or of one common
    name alone (`name=yield`); comma separated in the variable.
    `GPUMEM_OTEL_CONTROL_CLIENT_ROLES`."""
    allowed_hosts: tuple[str, ...] = ()
    """Host header names accepted there besides loopback names, the bound address and this
    machine's name and addresses (`*`: any); comma separated in the variable.
    `GPUMEM_OTEL_CONTROL_ALLOWED_HOSTS`."""
    insecure: bool = False
    """Take commands without TLS on an address that is no loopback address: whoever sees the
    traffic has the token. `GPUMEM_OTEL_CONTROL_INSECURE`."""
    disk_dirs: tuple[str, ...] = ()
    """Folders that a command may name, or a folder below them, for what host memory can not hold;
    comma separated in the variable. `GPUMEM_OTEL_CONTROL_DISK_DIRS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldConfig:
    """What yields may take of the machine."""

    host_limit_bytes: int | None = None
    """Host memory that the yields of all processes that share the folder of `run_dir` may hold
    together; beyond it they go to disk, where they may, or are refused. Without it what the machine
    and the cgroups have free. `GPUMEM_OTEL_YIELD_HOST_LIMIT_BYTES`."""
    keep_bytes: int | None = None
    """Host memory that each process keeps pinned after a restore, at most: the next yield is faster
    for it. Without it all that the largest yield took. `GPUMEM_OTEL_YIELD_KEEP_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomConfig:
    """What happens when an allocation fails."""

    enabled: bool = True
    """Tell what held the memory when an allocation failed: in the log, as a profile, as a line of
    JSON on stderr. `GPUMEM_OTEL_OOM`."""
    snapshot_dir: str = ""
    """Folder that takes PyTorch's own snapshot of such a moment as a pickle; nothing is written
    without it. `GPUMEM_OTEL_OOM_SNAPSHOT_DIR`."""
    spool_dir: str = ""
    """Folder where such profiles wait for `gpumem-otel push` while they can not be sent; without
    it `spool` in the folder of `run_dir`. `GPUMEM_OTEL_SPOOL_DIR`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything, resolved."""

    enabled: bool = True
    service_name: str = ""
    """Of all profiles, and of metrics over OTLP; without it `service.name` of
    `OTEL_RESOURCE_ATTRIBUTES`, else `unknown_service:python`. `OTEL_SERVICE_NAME`."""
    namespace: str = ""
    """Namespace on all profiles; without it `service.namespace` or `k8s.namespace.name` of
    `OTEL_RESOURCE_ATTRIBUTES`. `GPUMEM_OTEL_NAMESPACE`, else `POD_NAMESPACE`."""
    run_id: str = ""
    """Tells runs of one job apart; without it what the launcher says. `GPUMEM_OTEL_RUN_ID`."""
    tags: tuple[tuple[str, str], ...] = ()
    """Labels of your own on every profile; `name=value,name=value` in the variable.
    `GPUMEM_OTEL_TAGS`."""
    record_path: str = ""
    """File that every read-out is written to. `GPUMEM_OTEL_RECORD`."""
    host_profiles: bool = False
    """Start pyroscope-io too, for CPU and host heap profiles with the same labels.
    `GPUMEM_OTEL_HOST_PROFILES`."""
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    profiles: ProfileConfig = field(default_factory=ProfileConfig)
    pyroscope: PyroscopeConfig = field(default_factory=PyroscopeConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    yields: YieldConfig = field(default_factory=YieldConfig)
    oom: OomConfig = field(default_factory=OomConfig)
    warnings: tuple[str, ...] = ()

    @property
    def spool_dir(self) -> str:
        """Where profiles wait that could not be sent."""
        return self.oom.spool_dir or f"{self.serve.run_dir}/spool"


def process_environ() -> Mapping[str, str]:
    """The environment of this process, for entry points that have none handed in."""
    return os.environ
