"""Every setting in one table: its keyword, its environment variables, its place in Config.

A keyword argument wins over an environment variable, that over the default. A bad keyword raises
`ConfigError`; a bad environment variable is a warning in `Config.warnings` and the default, since
a variable that a cluster sets for every job must not kill one of them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from gpumem_otel.errors import ConfigError
from gpumem_otel.settings import parsers as p
from gpumem_otel.settings.config import (
    CaptureConfig,
    Config,
    ControlConfig,
    MetricsConfig,
    OomConfig,
    ProfileConfig,
    PyroscopeConfig,
    ServeConfig,
    YieldConfig,
)
from gpumem_otel.settings.parsers import parse_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Unpack


class InstallOptions(TypedDict, total=False):
    """Keyword arguments of `install()`; each has an environment variable beside it."""

    enabled: bool
    service_name: str
    namespace: str
    run_id: str
    tags: Mapping[str, str]
    record_path: str
    host_profiles: bool
    stacks: str
    max_window_events: int
    steps: bool
    interval_seconds: float
    profiles: Sequence[str]
    allocated_window_seconds: float
    job_push_bytes_per_second: float
    max_profile_bytes: int
    max_profile_samples: int
    max_stack_depth: int
    max_stall_ratio: float
    class_as: str
    growth_pushes: int
    phases: bool
    redact_paths: bool
    pyroscope_url: str
    basic_auth_user: str
    basic_auth_password: str
    bearer_token: str
    bearer_token_file: str
    tenant_id: str
    headers: Mapping[str, str]
    ca_file: str
    client_cert_file: str
    client_key_file: str
    proxy: str
    timeout_seconds: float
    metrics_level: str
    otlp: bool
    otlp_interval_seconds: float
    serve: bool
    host: str
    port: int
    token: str
    token_file: str
    tls_cert_file: str
    tls_key_file: str
    tls_client_ca_file: str
    allowed_hosts: Sequence[str]
    run_dir: str
    handover_dir: str
    control: bool
    control_host: str
    control_port: int
    control_token: str
    control_token_file: str
    control_tls_cert_file: str
    control_tls_key_file: str
    control_tls_client_ca_file: str
    control_client_roles: Sequence[str]
    control_allowed_hosts: Sequence[str]
    control_insecure: bool
    control_disk_dirs: Sequence[str]
    yield_host_limit_bytes: int
    yield_keep_bytes: int
    oom: bool
    oom_snapshot_dir: str
    spool_dir: str


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: a keyword of `install()`, its environment variables, its place in Config."""

    name: str
    section: str
    field: str
    environ: tuple[str, ...]
    parse: p.Parser


def _option(name: str, section: str, field: str, environ: str, parse: p.Parser) -> Option:
    return Option(name, section, field, tuple(environ.split()), parse)


OPTIONS: tuple[Option, ...] = (
    _option("service_name", "", "service_name", "OTEL_SERVICE_NAME", p.text),
    _option("namespace", "", "namespace", "GPUMEM_OTEL_NAMESPACE POD_NAMESPACE", p.text),
    _option("run_id", "", "run_id", "GPUMEM_OTEL_RUN_ID", p.text),
    _option("tags", "", "tags", "GPUMEM_OTEL_TAGS", p.pairs),
    _option("record_path", "", "record_path", "GPUMEM_OTEL_RECORD", p.path),
    _option("host_profiles", "", "host_profiles", "GPUMEM_OTEL_HOST_PROFILES", p.flag),
    _option("stacks", "capture", "stacks", "GPUMEM_OTEL_STACKS", p.one_of("python", "all")),
    _option(
        "max_window_events",
        "capture",
        "max_window_events",
        "GPUMEM_OTEL_WINDOW_EVENTS",
        p.integer(100, 10_000_000),
    ),
    _option("steps", "capture", "steps", "GPUMEM_OTEL_STEPS", p.flag),
    _option(
        "interval_seconds",
        "profiles",
        "interval_seconds",
        "GPUMEM_OTEL_INTERVAL",
        p.number(0.1, 86_400),
    ),
    _option(
        "profiles",
        "profiles",
        "kinds",
        "GPUMEM_OTEL_PROFILES",
        p.words("live", "peak", "allocated", "growth", "pinned"),
    ),
    _option(
        "allocated_window_seconds",
        "profiles",
        "allocated_window_seconds",
        "GPUMEM_OTEL_ALLOCATED_WINDOW",
        p.number(0.01, 300),
    ),
    _option(
        "job_push_bytes_per_second",
        "profiles",
        "job_push_bytes_per_second",
        "GPUMEM_OTEL_JOB_PUSH_BYTES_PER_SECOND",
        p.number(1, 1e12),
    ),
    _option(
        "max_profile_bytes",
        "profiles",
        "max_bytes",
        "GPUMEM_OTEL_MAX_PROFILE_BYTES",
        p.integer(10_000, 100_000_000),
    ),
    _option(
        "max_profile_samples",
        "profiles",
        "max_samples",
        "GPUMEM_OTEL_MAX_PROFILE_SAMPLES",
        p.integer(10, 1_000_000),
    ),
    _option(
        "max_stack_depth",
        "profiles",
        "max_depth",
        "GPUMEM_OTEL_MAX_STACK_DEPTH",
        p.integer(4, 1000),
    ),
    _option(
        "max_stall_ratio",
        "profiles",
        "max_stall_ratio",
        "GPUMEM_OTEL_MAX_STALL_RATIO",
        p.number(1e-6, 1),
    ),
    _option(
        "class_as", "profiles", "class_as", "GPUMEM_OTEL_CLASS_AS", p.one_of("root", "label", "off")
    ),
    _option(
        "growth_pushes", "profiles", "growth_pushes", "GPUMEM_OTEL_GROWTH_PUSHES", p.integer(1, 60)
    ),
    _option("phases", "profiles", "phases", "GPUMEM_OTEL_PHASES", p.flag),
    _option("redact_paths", "profiles", "redact_paths", "GPUMEM_OTEL_REDACT_PATHS", p.flag),
    _option("pyroscope_url", "pyroscope", "url", "PYROSCOPE_SERVER_ADDRESS", p.url),
    _option("basic_auth_user", "pyroscope", "basic_auth_user", "PYROSCOPE_BASIC_AUTH_USER", p.text),
    _option(
        "basic_auth_password",
        "pyroscope",
        "basic_auth_password",
        "PYROSCOPE_BASIC_AUTH_PASSWORD",
        p.secret,
    ),
    _option("bearer_token", "pyroscope", "bearer_token", "PYROSCOPE_AUTH_TOKEN", p.secret),
    _option(
        "bearer_token_file", "pyroscope", "bearer_token_file", "PYROSCOPE_AUTH_TOKEN_FILE", p.path
    ),
    _option("tenant_id", "pyroscope", "tenant_id", "PYROSCOPE_TENANT_ID", p.text),
    _option("headers", "pyroscope", "headers", "PYROSCOPE_HTTP_HEADERS", p.secret_pairs),
    _option("ca_file", "pyroscope", "ca_file", "PYROSCOPE_CA_FILE", p.path),
    _option(
        "client_cert_file", "pyroscope", "client_cert_file", "PYROSCOPE_CLIENT_CERT_FILE", p.path
    ),
    _option("client_key_file", "pyroscope", "client_key_file", "PYROSCOPE_CLIENT_KEY_FILE", p.path),
    _option("proxy", "pyroscope", "proxy", "PYROSCOPE_PROXY", p.secret),
    _option(
        "timeout_seconds", "pyroscope", "timeout_seconds", "PYROSCOPE_TIMEOUT", p.number(1, 60)
    ),
    _option(
        "metrics_level",
        "metrics",
        "level",
        "GPUMEM_OTEL_METRICS_LEVEL",
        p.one_of("minimal", "standard", "full"),
    ),
    _option("otlp", "metrics", "otlp", "GPUMEM_OTEL_OTLP", p.flag),
    _option(
        "otlp_interval_seconds",
        "metrics",
        "otlp_interval_seconds",
        "OTEL_METRIC_EXPORT_INTERVAL",
        p.number(0.1, 86_400, scale=0.001),
    ),
    _option("serve", "serve", "enabled", "GPUMEM_OTEL_SERVE", p.flag),
    _option("host", "serve", "host", "GPUMEM_OTEL_HOST OTEL_EXPORTER_PROMETHEUS_HOST", p.text),
    _option(
        "port",
        "serve",
        "port",
        "GPUMEM_OTEL_PORT OTEL_EXPORTER_PROMETHEUS_PORT",
        p.integer(0, 65_535),
    ),
    _option("token", "serve", "token", "GPUMEM_OTEL_TOKEN", p.secret),
    _option("token_file", "serve", "token_file", "GPUMEM_OTEL_TOKEN_FILE", p.path),
    _option("tls_cert_file", "serve", "tls_cert_file", "GPUMEM_OTEL_TLS_CERT_FILE", p.path),
    _option("tls_key_file", "serve", "tls_key_file", "GPUMEM_OTEL_TLS_KEY_FILE", p.path),
    _option(
        "tls_client_ca_file",
        "serve",
        "tls_client_ca_file",
        "GPUMEM_OTEL_TLS_CLIENT_CA_FILE",
        p.path,
    ),
    _option("allowed_hosts", "serve", "allowed_hosts", "GPUMEM_OTEL_ALLOWED_HOSTS", p.words()),
    _option("run_dir", "serve", "run_dir", "GPUMEM_OTEL_RUN_DIR", p.path),
    _option("handover_dir", "serve", "handover_dir", "GPUMEM_OTEL_HANDOVER_DIR", p.path),
    _option("control", "control", "enabled", "GPUMEM_OTEL_CONTROL", p.flag),
    _option("control_host", "control", "host", "GPUMEM_OTEL_CONTROL_HOST", p.text),
    _option("control_port", "control", "port", "GPUMEM_OTEL_CONTROL_PORT", p.integer(0, 65_535)),
    _option("control_token", "control", "token", "GPUMEM_OTEL_CONTROL_TOKEN", p.secret),
    _option(
        "control_token_file", "control", "token_file", "GPUMEM_OTEL_CONTROL_TOKEN_FILE", p.path
    ),
    _option(
        "control_tls_cert_file",
        "control",
        "tls_cert_file",
        "GPUMEM_OTEL_CONTROL_TLS_CERT_FILE",
        p.path,
    ),
    _option(
        "control_tls_key_file",
        "control",
        "tls_key_file",
        "GPUMEM_OTEL_CONTROL_TLS_KEY_FILE",
        p.path,
    ),
    _option(
        "control_tls_client_ca_file",
        "control",
        "tls_client_ca_file",
        "GPUMEM_OTEL_CONTROL_TLS_CLIENT_CA_FILE",
        p.path,
    ),
    _option(
        "control_client_roles",
        "control",
        "client_roles",
        "GPUMEM_OTEL_CONTROL_CLIENT_ROLES",
        p.words(),
    ),
    _option(
        "control_allowed_hosts",
        "control",
        "allowed_hosts",
        "GPUMEM_OTEL_CONTROL_ALLOWED_HOSTS",
        p.words(),
    ),
    _option("control_insecure", "control", "insecure", "GPUMEM_OTEL_CONTROL_INSECURE", p.flag),
    _option(
        "control_disk_dirs", "control", "disk_dirs", "GPUMEM_OTEL_CONTROL_DISK_DIRS", p.words()
    ),
    _option(
        "yield_host_limit_bytes",
        "yields",
        "host_limit_bytes",
        "GPUMEM_OTEL_YIELD_HOST_LIMIT_BYTES",
        p.integer(0, 1 << 60),
    ),
    _option(
        "yield_keep_bytes",
        "yields",
        "keep_bytes",
        "GPUMEM_OTEL_YIELD_KEEP_BYTES",
        p.integer(0, 1 << 60),
    ),
    _option("oom", "oom", "enabled", "GPUMEM_OTEL_OOM", p.flag),
    _option("oom_snapshot_dir", "oom", "snapshot_dir", "GPUMEM_OTEL_OOM_SNAPSHOT_DIR", p.path),
    _option("spool_dir", "oom", "spool_dir", "GPUMEM_OTEL_SPOOL_DIR", p.path),
)
"""All settings but `enabled`, which is `GPUMEM_OTEL_DISABLED` turned round."""

_PREFIX = "GPUMEM_OTEL_"

_SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")
"""Set by Kubernetes for each Service of the namespace; one may be called gpumem-otel-something."""

_RESOURCE_FIELDS = {
    "service_name": ("service.name",),
    "namespace": ("service.namespace", "k8s.namespace.name"),
}
"""Settings that OTEL_RESOURCE_ATTRIBUTES may hold."""


def _exporters(environ: Mapping[str, str]) -> set[str]:
    return {word.strip() for word in environ.get("OTEL_METRICS_EXPORTER", "").split(",")} - {""}


def _standard_defaults(environ: Mapping[str, str]) -> dict[str, object]:
    """What the standard variables imply where ours say nothing."""
    exporters = _exporters(environ)
    endpoint = environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") or environ.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    implied: dict[str, object] = {
        "otlp": "otlp" in exporters or (bool(endpoint) and not exporters),
        "serve": "prometheus" in exporters,
    }
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        implied["otlp"] = False
    attributes = parse_pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    for name, keys in _RESOURCE_FIELDS.items():
        value = next((attributes[key] for key in keys if attributes.get(key)), "")
        if value:
            implied[name] = value
    runtime_dir = environ.get("XDG_RUNTIME_DIR", "")
    implied["run_dir"] = (
        f"{runtime_dir}/gpumem-otel" if runtime_dir else f"/tmp/gpumem-otel-{os.getuid()}"  # noqa: S108 - the listener refuses a folder of another user
    )
    return implied


def resolve(environ: Mapping[str, str], **options: Unpack[InstallOptions]) -> Config:
    """Build the config: keyword arguments, then environment variables, then defaults.

    Raises:
        ConfigError: an unknown keyword, or a keyword whose value can not be used.
    """
    given = dict(options)
    known = {option.name for option in OPTIONS} | {"enabled"}
    for name in given:
        if name not in known:
            near = _nearest(name, known)
            hint = f"did you mean {near!r}? " if near else ""
            raise ConfigError(
                f"unknown option {name!r}: {hint}known are {', '.join(sorted(known))}"
            )
    warnings = _unknown_variables(environ)
    implied = _standard_defaults(environ)
    sections: dict[str, dict[str, object]] = {
        "": {},
        "capture": {},
        "profiles": {},
        "pyroscope": {},
        "metrics": {},
        "serve": {},
        "control": {},
        "yields": {},
        "oom": {},
    }
    for option in OPTIONS:
        found = _find(option, given, environ, warnings)
        if found is None and option.name in implied:
            found = (implied[option.name],)
        if found is not None:
            sections[option.section][option.field] = found[0]
    sections["metrics"]["otlp_environ"] = tuple(
        sorted((name, value) for name, value in environ.items() if name.startswith("OTEL_"))
    )
    try:
        disabled = p.flag(environ.get("GPUMEM_OTEL_DISABLED", ""))
    except p.UnusableError as error:
        warnings.append(f"GPUMEM_OTEL_DISABLED {error}; ignored")
        disabled = False
    enabled = given.get("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigError("option 'enabled' must be true or false")
    return Config(
        enabled=enabled and not disabled,
        capture=CaptureConfig(**sections["capture"]),  # type: ignore[arg-type] # parsers check
        profiles=ProfileConfig(**sections["profiles"]),  # type: ignore[arg-type]
        pyroscope=PyroscopeConfig(**sections["pyroscope"]),  # type: ignore[arg-type]
        metrics=MetricsConfig(**sections["metrics"]),  # type: ignore[arg-type]
        serve=ServeConfig(**sections["serve"]),  # type: ignore[arg-type]
        control=ControlConfig(**sections["control"]),  # type: ignore[arg-type]
        yields=YieldConfig(**sections["yields"]),  # type: ignore[arg-type]
        oom=OomConfig(**sections["oom"]),  # type: ignore[arg-type]
        warnings=tuple(warnings),
        **sections[""],  # type: ignore[arg-type]
    )


def _nearest(name: str, names: set[str]) -> str:
    # late: every process of a job reads its settings, few have a word wrong
    from difflib import get_close_matches  # noqa: PLC0415

    return next(iter(get_close_matches(name, sorted(names), 1)), "")


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable with our prefix that stands for nothing."""
    known = {v for option in OPTIONS for v in option.environ if v.startswith(_PREFIX)}
    known.add("GPUMEM_OTEL_DISABLED")
    warnings = []
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known and not _SERVICE_LINK.search(name):
            near = _nearest(name[len(_PREFIX) :], {one[len(_PREFIX) :] for one in known})
            hint = f"; did you mean {_PREFIX}{near}?" if near else ""
            warnings.append(f"{name} is no setting{hint}")
    return warnings


def _find(
    option: Option,
    given: Mapping[str, object],
    environ: Mapping[str, str],
    warnings: list[str],
) -> tuple[object] | None:
    """The option's value in a 1-tuple, None where nobody set it."""
    if given.get(option.name) is not None:
        try:
            return (option.parse(given[option.name]),)
        except p.UnusableError as error:
            raise ConfigError(f"option {option.name!r} {error}") from None
    for variable in option.environ:
        text = environ.get(variable, "")
        if not text.strip():
            continue
        try:
            return (option.parse(text),)
        except p.UnusableError as error:
            # never the value itself: it may be a secret
            warnings.append(f"{variable} {error}; ignored")
    return None
