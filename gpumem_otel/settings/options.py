"""Resolves the settings: keywords of `install()`, environment variables, defaults.

A bad keyword raises `ConfigError`. A bad environment variable is a warning in `Config.warnings`,
and the default holds: a variable that a cluster sets for every job must not end one of them.
"""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict

from gpumem_otel.errors import ConfigError
from gpumem_otel.settings.config import Config
from gpumem_otel.settings.parsers import (
    Parser,
    Secret,
    UnusableError,
    flag,
    pairs,
    parse_pairs,
    secret_pairs,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Unpack


class InstallOptions(TypedDict, total=False):
    """Keyword arguments of `install()`; each has an environment variable too."""

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
    yield_host_limit_bytes: int | None
    yield_keep_bytes: int | None
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
    parse: Parser
    default: object
    meaning: str


_SECTIONS: dict[str, Any] = {
    field.name: field.default_factory
    for field in fields(Config)
    if field.default_factory is not MISSING
}
"""Field of Config -> the config that it holds."""


def _options() -> Iterator[Option]:
    for section, config in {"": Config, **_SECTIONS}.items():
        for field in fields(config):
            if field.metadata:
                yield Option(
                    name=field.metadata["keyword"] or field.name,
                    section=section,
                    field=field.name,
                    environ=tuple(field.metadata["environ"].split()),
                    parse=field.metadata["parse"],
                    default=field.default,
                    meaning=inspect.cleandoc(field.metadata["meaning"]),
                )


OPTIONS: tuple[Option, ...] = tuple(_options())
"""All settings but `enabled`, which is `GPUMEM_OTEL_DISABLED` negated."""


def keyword_signature(result: object) -> inspect.Signature:
    """The signature of a function that takes every setting as a keyword.

    Args:
        result: the annotation of what it returns.
    """
    annotations = {
        name: getattr(annotation, "__forward_arg__", annotation)
        for name, annotation in InstallOptions.__annotations__.items()
    }
    defaults = {"enabled": True, **{option.name: _default(option) for option in OPTIONS}}
    keywords = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotations[name]
        )
        for name, default in defaults.items()
    ]
    return inspect.Signature(keywords, return_annotation=result)


def _default(option: Option) -> object:
    """The default as a keyword's value."""
    if isinstance(option.default, Secret):
        return option.default.reveal()
    return {} if option.parse in {pairs, secret_pairs} else option.default


def keyword_help() -> str:
    """The meaning and the environment variables of each setting, as `Args:` of a docstring."""
    entries = ["enabled: False switches everything off, as `GPUMEM_OTEL_DISABLED=1` does."]
    for option in OPTIONS:
        variables = ", else ".join(f"`{name}`" for name in option.environ)
        entries.append(f"{option.name}: {option.meaning}\nVariable: {variables}.")
    return "".join(
        f"        {entry}\n".replace("\n", "\n" + 12 * " ").rstrip(" ") for entry in entries
    )


_PREFIX = "GPUMEM_OTEL_"

_SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")
"""Set by Kubernetes for each Service of the namespace; one may be named gpumem-otel-something."""

_RESOURCE_FIELDS = {
    "service_name": ("service.name",),
    "namespace": ("service.namespace", "k8s.namespace.name"),
}
"""Settings that OTEL_RESOURCE_ATTRIBUTES may hold."""


def _exporters(environ: Mapping[str, str]) -> set[str]:
    return {word.strip() for word in environ.get("OTEL_METRICS_EXPORTER", "").split(",")} - {""}


def _standard_defaults(environ: Mapping[str, str]) -> dict[str, object]:
    """Values that the standard variables imply where ours are not set."""
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
        ConfigError: an unknown keyword, or a keyword whose value cannot be used.
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
    values: dict[str, dict[str, Any]] = {section: {} for section in ("", *_SECTIONS)}
    for option in OPTIONS:
        value = _value(option, given, environ, warnings)
        if value is None and option.name in implied:
            value = (implied[option.name],)
        if value is not None:
            values[option.section][option.field] = value[0]
    values["metrics"]["otlp_environ"] = tuple(
        sorted((name, value) for name, value in environ.items() if name.startswith("OTEL_"))
    )
    try:
        disabled = flag(environ.get("GPUMEM_OTEL_DISABLED", ""))
    except UnusableError as error:
        warnings.append(f"GPUMEM_OTEL_DISABLED {error}; ignored")
        disabled = False
    enabled = given.get("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigError("option 'enabled' must be true or false")
    return Config(
        enabled=enabled and not disabled,
        warnings=tuple(warnings),
        **values[""],
        **{section: config(**values[section]) for section, config in _SECTIONS.items()},
    )


def _nearest(name: str, names: set[str]) -> str:
    # imported late: every process of a job reads its settings, few have a wrong name
    from difflib import get_close_matches  # noqa: PLC0415

    return next(iter(get_close_matches(name, sorted(names), 1)), "")


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable with our prefix that is no setting."""
    known = {v for option in OPTIONS for v in option.environ if v.startswith(_PREFIX)}
    known.add("GPUMEM_OTEL_DISABLED")
    warnings = []
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known and not _SERVICE_LINK.search(name):
            near = _nearest(name[len(_PREFIX) :], {variable[len(_PREFIX) :] for variable in known})
            hint = f"; did you mean {_PREFIX}{near}?" if near else ""
            warnings.append(f"{name} is no setting{hint}")
    return warnings


def _value(
    option: Option,
    given: Mapping[str, object],
    environ: Mapping[str, str],
    warnings: list[str],
) -> tuple[object] | None:
    """The option's value in a 1-tuple, None if it is not set."""
    if given.get(option.name) is not None:
        try:
            return (option.parse(given[option.name]),)
        except UnusableError as error:
            raise ConfigError(f"option {option.name!r} {error}") from None
    for variable in option.environ:
        text = environ.get(variable, "")
        if not text.strip():
            continue
        try:
            return (option.parse(text),)
        except UnusableError as error:
            # never the value itself: it may be a secret
            warnings.append(f"{variable} {error}; ignored")
    return None
