"""All settings, as frozen configs of the components; the only reader of the environment.

`options.resolve(environ, **options)` fills them in. A keyword argument wins over an environment
variable, and that over the default.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from gpumem_otel.settings import parsers as p
from gpumem_otel.settings.parsers import Secret

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = TypeVar("Value")

DEFAULT_KINDS: tuple[str, ...] = ("live",)
"""Profiles that are pushed by default."""


def setting(
    default: Value, environ: str, parse: p.Parser, *, meaning: str, keyword: str = ""
) -> Value:
    """A field that users set; `options.OPTIONS` lists them all.

    Args:
        default: of the field.
        environ: its environment variables, the first that is set counts; separated by spaces.
        parse: makes the field's value of a keyword's or a variable's.
        meaning: shown by `help(gpumem_otel.install)` and docs/configuration.md.
        keyword: of `install()`, where it is not the field's name.
    """
    metadata = {"environ": environ, "parse": parse, "meaning": meaning, "keyword": keyword}
    return field(default=default, metadata=metadata)


# fmt: off

@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """How the allocator is recorded and read."""

    stacks: str = setting("python", "GPUMEM_OTEL_STACKS", p.one_of("python", "all"), meaning="""
        `python` (default) or `all`: C++ frames too, which cost seconds at the first read-out.""")
    max_window_events: int = setting(
        100_000, "GPUMEM_OTEL_WINDOW_EVENTS", p.integer(100, 10_000_000), meaning="""
        Events an `allocated` window may hold before it ends early.""")
    steps: bool = setting(True, "GPUMEM_OTEL_STEPS", p.flag, meaning="""
        Count optimizer steps through torch's global optimizer hooks.""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Which profiles are made, how often, how large."""

    interval_seconds: float = setting(
        60.0, "GPUMEM_OTEL_INTERVAL", p.number(0.1, 86_400), meaning="""
        Cadence of live profiles, at wall-clock multiples of it.""")
    kinds: tuple[str, ...] = setting(
        DEFAULT_KINDS, "GPUMEM_OTEL_PROFILES",
        p.words("live", "peak", "allocated", "growth", "pinned"), keyword="profiles", meaning="""
        `live`, `peak`, `allocated`, `growth`, `pinned`; comma separated in the variable.""")
    allocated_window_seconds: float = setting(
        2.0, "GPUMEM_OTEL_ALLOCATED_WINDOW", p.number(0.01, 300), meaning="""
        Length of the recorded window behind `allocated` and `peak` profiles where no steps are
        counted; else it holds two whole steps.""")
    job_push_bytes_per_second: float = setting(
        1_000_000.0, "GPUMEM_OTEL_JOB_PUSH_BYTES_PER_SECOND", p.number(1, 1e12), meaning="""
        Budget of the whole job, divided by the world size: it stretches the interval.""")
    max_bytes: int = setting(
        1_500_000, "GPUMEM_OTEL_MAX_PROFILE_BYTES", p.integer(10_000, 100_000_000),
        keyword="max_profile_bytes", meaning="""
        Of one uncompressed pprof; beyond it the smallest stacks are merged into `[other]`.""")
    max_samples: int = setting(
        15_000, "GPUMEM_OTEL_MAX_PROFILE_SAMPLES", p.integer(10, 1_000_000),
        keyword="max_profile_samples", meaning="""
        Stacks in one profile; beyond it the smallest are merged into `[other]`.""")
    max_depth: int = setting(
        512, "GPUMEM_OTEL_MAX_STACK_DEPTH", p.integer(4, 1000),
        keyword="max_stack_depth", meaning="""
        Frames per stack; the middle is cut.""")
    max_stall_ratio: float = setting(
        0.001, "GPUMEM_OTEL_MAX_STALL_RATIO", p.number(1e-6, 1), meaning="""
        Share of the job's time that may be spent holding the interpreter lock: the interval is
        at least the stall of a read-out divided by this.""")
    class_as: str = setting(
        "root", "GPUMEM_OTEL_CLASS_AS", p.one_of("root", "label", "off"), meaning="""
        Where live profiles show tensor classes: `root` (the root frame of each stack), `label`
        (the sample label `tensor_class`), or `off`, with which `gpumem_class_bytes` ends too.""")
    growth_pushes: int = setting(10, "GPUMEM_OTEL_GROWTH_PUSHES", p.integer(1, 60), meaning="""
        A `growth` profile compares with the live profile of so many pushes before.""")
    phases: bool = setting(False, "GPUMEM_OTEL_PHASES", p.flag, meaning="""
        Label `allocated` profiles with the `phase` of the step: `forward`, `backward`,
        `optimizer.step`, `zero_grad`, and ranges of `record_function`.""")
    redact_paths: bool = setting(False, "GPUMEM_OTEL_REDACT_PATHS", p.flag, meaning="""
        Keep only the last part of file names.""")


@dataclass(frozen=True, slots=True, kw_only=True)
class PyroscopeConfig:
    """Where profiles are pushed; nothing is pushed without a URL."""

    url: str = setting("", "PYROSCOPE_SERVER_ADDRESS", p.url, keyword="pyroscope_url", meaning="""
        Server, like `https://host:4040/prefix`, without credentials in it.""")
    basic_auth_user: str = setting("", "PYROSCOPE_BASIC_AUTH_USER", p.text, meaning="""
        Basic authentication, where there is no bearer token.""")
    basic_auth_password: Secret = setting(
        Secret(""), "PYROSCOPE_BASIC_AUTH_PASSWORD", p.secret, meaning="""
        Its password.""")
    bearer_token: Secret = setting(Secret(""), "PYROSCOPE_AUTH_TOKEN", p.secret, meaning="""
        Bearer token, in place of basic authentication.""")
    bearer_token_file: str = setting("", "PYROSCOPE_AUTH_TOKEN_FILE", p.path, meaning="""
        File with the bearer token, read again at each push, so that a rotated one is taken.""")
    tenant_id: str = setting("", "PYROSCOPE_TENANT_ID", p.text, meaning="""
        Sent as `X-Scope-OrgID`.""")
    headers: tuple[tuple[str, Secret], ...] = setting(
        (), "PYROSCOPE_HTTP_HEADERS", p.secret_pairs, meaning="""
        Extra request headers; `name=value,name=value` in the variable.""")
    ca_file: str = setting("", "PYROSCOPE_CA_FILE", p.path, meaning="""
        PEM bundle of the server's CA, instead of the system's.""")
    client_cert_file: str = setting("", "PYROSCOPE_CLIENT_CERT_FILE", p.path, meaning="""
        PEM certificate shown to the server.""")
    client_key_file: str = setting("", "PYROSCOPE_CLIENT_KEY_FILE", p.path, meaning="""
        Its key, where the certificate's file does not hold it.""")
    proxy: Secret = setting(Secret(""), "PYROSCOPE_PROXY", p.secret, meaning="""
        URL of a proxy, `user:password@` allowed; without it `HTTPS_PROXY`, `HTTP_PROXY` and
        `NO_PROXY` count as usual.""")
    timeout_seconds: float = setting(10.0, "PYROSCOPE_TIMEOUT", p.number(1, 60), meaning="""
        Deadline of one push, connection and answer together.""")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Which metrics are exported, and how."""

    level: str = setting(
        "standard", "GPUMEM_OTEL_METRICS_LEVEL", p.one_of("minimal", "standard", "full"),
        keyword="metrics_level", meaning="""
        How many metrics there are: `minimal`, `standard`, `full`.""")
    otlp: bool = setting(False, "GPUMEM_OTEL_OTLP", p.flag, meaning="""
        Register OpenTelemetry instruments. Unless this is set, `OTEL_METRICS_EXPORTER`
        decides: on if it names `otlp`. If that is not set either, it is on if
        `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` is set. Neither
        counts if `OTEL_SDK_DISABLED` is `true`.""")
    otlp_environ: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """The `OTEL_*` variables, for our own exporter."""
    otlp_interval_seconds: float = setting(
        60.0, "OTEL_METRIC_EXPORT_INTERVAL", p.number(0.1, 86_400, scale=0.001), meaning="""
        Seconds between our own exports over OTLP; the variable is in milliseconds.""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The listener for /metrics and /debug/pprof/gpumem; off unless asked for."""

    enabled: bool = setting(False, "GPUMEM_OTEL_SERVE", p.flag, keyword="serve", meaning="""
        Listen. Unless this is set, it is on if `OTEL_METRICS_EXPORTER` names
        `prometheus`.""")
    host: str = setting(
        "127.0.0.1", "GPUMEM_OTEL_HOST OTEL_EXPORTER_PROMETHEUS_HOST", p.text, meaning="""
        Address to listen on.""")
    port: int = setting(
        9464, "GPUMEM_OTEL_PORT OTEL_EXPORTER_PROMETHEUS_PORT", p.integer(0, 65_535), meaning="""
        Base port; a process listens on base + local rank. 0: any free port (notebooks).""")
    token: Secret = setting(Secret(""), "GPUMEM_OTEL_TOKEN", p.secret, meaning="""
        Bearer token that readers must show.""")
    token_file: str = setting("", "GPUMEM_OTEL_TOKEN_FILE", p.path, meaning="""
        File with such a token, read again when it changes.""")
    tls_cert_file: str = setting("", "GPUMEM_OTEL_TLS_CERT_FILE", p.path, meaning="""
        PEM certificate: the listener uses TLS.""")
    tls_key_file: str = setting("", "GPUMEM_OTEL_TLS_KEY_FILE", p.path, meaning="""
        Its key, where the certificate's file does not hold it.""")
    tls_client_ca_file: str = setting("", "GPUMEM_OTEL_TLS_CLIENT_CA_FILE", p.path, meaning="""
        Readers must show a certificate of this CA.""")
    allowed_hosts: tuple[str, ...] = setting((), "GPUMEM_OTEL_ALLOWED_HOSTS", p.words(), meaning="""
        Host header names accepted besides loopback names, the bound address and this machine's
        name and addresses (`*`: any); comma separated in the variable.""")
    run_dir: str = setting("", "GPUMEM_OTEL_RUN_DIR", p.path, meaning="""
        Folder where listening processes register for `gpumem-otel sd`; without it
        `$XDG_RUNTIME_DIR/gpumem-otel`, else `/tmp/gpumem-otel-<uid>`.""")
    handover_dir: str = setting("", "GPUMEM_OTEL_HANDOVER_DIR", p.path, meaning="""
        Folder where a process leaves its last /metrics when an allocation fails and when it
        ends; `gpumem-otel run --supervise` sets it.""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """The listener that takes commands to yield and restore; off unless asked for."""

    enabled: bool = setting(False, "GPUMEM_OTEL_CONTROL", p.flag, keyword="control", meaning="""
        Take commands to yield and restore, on a Unix socket in the folder of `run_dir` that
        only this user can open.""")
    host: str = setting("", "GPUMEM_OTEL_CONTROL_HOST", p.text, keyword="control_host", meaning="""
        Address to take commands on over TCP too; none if it is empty. Needs tokens or
        client certificates, and TLS unless it is a loopback address.""")
    port: int = setting(
        9564, "GPUMEM_OTEL_CONTROL_PORT", p.integer(0, 65_535), keyword="control_port", meaning="""
        Base port of this address; a process listens on base + local rank. 0: any free port.""")
    token: Secret = setting(
        Secret(""), "GPUMEM_OTEL_CONTROL_TOKEN", p.secret, keyword="control_token", meaning="""
        Bearer token with all roles. Every child process inherits a variable: a file is better,
        and a warning says so.""")
    token_file: str = setting(
        "", "GPUMEM_OTEL_CONTROL_TOKEN_FILE", p.path, keyword="control_token_file", meaning="""
        File with bearer tokens and their roles, a line for each, read again when it changes.""")
    tls_cert_file: str = setting(
        "", "GPUMEM_OTEL_CONTROL_TLS_CERT_FILE", p.path,
        keyword="control_tls_cert_file", meaning="""
        PEM certificate: commands over TCP come through TLS.""")
    tls_key_file: str = setting(
        "", "GPUMEM_OTEL_CONTROL_TLS_KEY_FILE", p.path, keyword="control_tls_key_file", meaning="""
        Its key, where the certificate's file does not hold it.""")
    tls_client_ca_file: str = setting(
        "", "GPUMEM_OTEL_CONTROL_TLS_CLIENT_CA_FILE", p.path,
        keyword="control_tls_client_ca_file", meaning="""
        Clients must show a certificate of this CA.""")
    client_roles: tuple[str, ...] = setting(
        (), "GPUMEM_OTEL_CONTROL_CLIENT_ROLES", p.words(),
        keyword="control_client_roles", meaning="""
        Roles of a client that shows such a certificate (`read`, `yield`, `restore`), or of one
        common name alone (`name=yield`); comma separated in the variable.""")
    allowed_hosts: tuple[str, ...] = setting(
        (), "GPUMEM_OTEL_CONTROL_ALLOWED_HOSTS", p.words(),
        keyword="control_allowed_hosts", meaning="""
        Host header names accepted there besides loopback names, the bound address and this
        machine's name and addresses (`*`: any); comma separated in the variable.""")
    insecure: bool = setting(
        False, "GPUMEM_OTEL_CONTROL_INSECURE", p.flag, keyword="control_insecure", meaning="""
        Take commands without TLS on an address that is no loopback address: anyone who sees the
        traffic learns the token.""")
    disk_dirs: tuple[str, ...] = setting(
        (), "GPUMEM_OTEL_CONTROL_DISK_DIRS", p.words(), keyword="control_disk_dirs", meaning="""
        Folders that a command may name, or a folder below them, for what does not fit in
        host memory; comma separated in the variable.""")


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldConfig:
    """What yields may take of the machine."""

    host_limit_bytes: int | None = setting(
        None, "GPUMEM_OTEL_YIELD_HOST_LIMIT_BYTES", p.integer(0, 1 << 60),
        keyword="yield_host_limit_bytes", meaning="""
        Host memory that the yields of all processes with the same `run_dir` may hold together;
        beyond it they go to disk, where that is allowed, or are refused. By default what the
        machine and the cgroups have free.""")
    keep_bytes: int | None = setting(
        None, "GPUMEM_OTEL_YIELD_KEEP_BYTES", p.integer(0, 1 << 60),
        keyword="yield_keep_bytes", meaning="""
        The most host memory that each process keeps pinned after a restore, which makes the
        next yield faster. By default all that the largest yield took.""")


@dataclass(frozen=True, slots=True, kw_only=True)
class OomConfig:
    """What happens when an allocation fails."""

    enabled: bool = setting(True, "GPUMEM_OTEL_OOM", p.flag, keyword="oom", meaning="""
        Report what held the memory when an allocation failed: in the log, as a profile, as a
        line of JSON on stderr.""")
    snapshot_dir: str = setting(
        "", "GPUMEM_OTEL_OOM_SNAPSHOT_DIR", p.path, keyword="oom_snapshot_dir", meaning="""
        Folder that takes PyTorch's own snapshot of such a moment as a pickle; nothing is
        written without it.""")
    spool_dir: str = setting("", "GPUMEM_OTEL_SPOOL_DIR", p.path, meaning="""
        Folder where such profiles wait for `gpumem-otel push` while they cannot be sent;
        by default `spool` in the folder of `run_dir`.""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything, resolved."""

    enabled: bool = True
    service_name: str = setting("", "OTEL_SERVICE_NAME", p.text, meaning="""
        Of all profiles, and of metrics over OTLP; without it `service.name` of
        `OTEL_RESOURCE_ATTRIBUTES`, else `unknown_service:python`.""")
    namespace: str = setting("", "GPUMEM_OTEL_NAMESPACE POD_NAMESPACE", p.text, meaning="""
        Namespace on all profiles; without it `service.namespace` or `k8s.namespace.name` of
        `OTEL_RESOURCE_ATTRIBUTES`.""")
    run_id: str = setting("", "GPUMEM_OTEL_RUN_ID", p.text, meaning="""
        Distinguishes the runs of one job; without it the id that the launcher sets.""")
    tags: tuple[tuple[str, str], ...] = setting((), "GPUMEM_OTEL_TAGS", p.pairs, meaning="""
        Labels of your own on every profile; `name=value,name=value` in the variable.""")
    record_path: str = setting("", "GPUMEM_OTEL_RECORD", p.path, meaning="""
        File that every read-out is written to.""")
    host_profiles: bool = setting(False, "GPUMEM_OTEL_HOST_PROFILES", p.flag, meaning="""
        Start pyroscope-io too, for CPU and host heap profiles with the same labels.""")
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    profiles: ProfileConfig = field(default_factory=ProfileConfig)
    pyroscope: PyroscopeConfig = field(default_factory=PyroscopeConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    yields: YieldConfig = field(default_factory=YieldConfig)
    oom: OomConfig = field(default_factory=OomConfig)
    warnings: tuple[str, ...] = ()

    # fmt: on

    @property
    def spool_dir(self) -> str:
        """Where profiles that could not be sent wait."""
        return self.oom.spool_dir or f"{self.serve.run_dir}/spool"


def process_environ() -> Mapping[str, str]:
    """The environment of this process, for entry points that are given none."""
    return os.environ
