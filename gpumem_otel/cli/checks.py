"""The checks of `doctor`. Each ends within a time limit, and none changes anything."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpumem_otel.settings.config import Config, ServeConfig

OK = "ok"
MISSING = "missing"
"""Absent, and everything that was asked for works without it."""
PROBLEM = "problem"

_CONNECT_SECONDS = 3.0
_IMPORT_SECONDS = 20.0
_OLDEST_TORCH = (2, 3)
_OTLP_PORTS = {"http": 4318, "https": 4318}
_NOT_READ = "no metrics and profiles could be fetched"
_NO_GPU = "profiles and metrics need a CUDA device; files, demo and the command line work"
_REPAIR_TORCH = "torch itself fails here: repair or reinstall it"
_SET_RUN_DIR = "set GPUMEM_OTEL_RUN_DIR"


class Check(NamedTuple):
    """One line of the report.

    Attributes:
        status: `ok`, `missing` or `problem`.
        advice: what to do about it, "" where nothing is to be done.
    """

    name: str
    status: str
    detail: str
    advice: str = ""


def run_all(
    environ: Mapping[str, str], *, torch_timeout_seconds: float, require_gpu: bool
) -> list[Check]:
    """All checks, in the order of the report."""
    from gpumem_otel.settings.options import resolve

    config = resolve(environ)
    return [
        _python(),
        _ours(),
        *_torch(environ, torch_timeout_seconds, require_gpu=require_gpu),
        _page(),
        *_packages(config),
        *_settings(config),
        _pyroscope(config, environ),
        _otlp(config, environ),
        _port(config),
        _run_dir(config),
        *control(config, environ),
    ]


def _python() -> Check:
    version = f"{platform.python_implementation()} {platform.python_version()} {sys.executable}"
    if sys.platform != "linux":
        return Check("python", MISSING, f"{version} on {sys.platform}", "jobs are read on Linux")
    return Check("python", OK, version)


def _ours() -> Check:
    from gpumem_otel._version import __version__

    return Check("gpumem-otel", OK, f"{__version__} {Path(__file__).resolve().parent.parent}")


def _page() -> Check:
    from gpumem_otel.errors import PageError
    from gpumem_otel.page import html

    try:
        html.require()
    except PageError as error:
        return Check("page", MISSING, "flamegraph and timeline cannot write pages", str(error))
    return Check("page", OK, "flamegraph and timeline write pages")


def _torch(environ: Mapping[str, str], timeout: float, *, require_gpu: bool) -> list[Check]:
    facts = _ask_torch(environ, timeout)
    bad = PROBLEM if require_gpu else MISSING
    if isinstance(facts, Check):
        if require_gpu and facts.status == MISSING:
            return [Check("torch", PROBLEM, "not installed", "pip install torch")]
        return [facts]
    version = str(facts["torch"])
    cuda = facts.get("cuda_build")
    build = f"{version}, built for CUDA {cuda}" if cuda else f"{version}, a build without CUDA"
    driver = _driver()
    checks = [
        Check("torch", bad, build, "torch 2.3 or newer is needed to record")
        if _version_pair(version) < _OLDEST_TORCH
        else Check("torch", OK, build),
        *(Check("torch", PROBLEM, str(error), _REPAIR_TORCH) for error in _list(facts, "errors")),
        driver,
    ]
    devices = _list(facts, "devices")
    if not facts.get("cuda_available") or not devices:
        return [*checks, _no_device(facts, driver, bad)]
    for index, device in enumerate(devices):
        if isinstance(device, dict):
            size = f"{int(device['total_bytes']) / (1 << 30):.1f} GiB"
            checks.append(Check(f"cuda device {index}", OK, f"{device['name']}, {size}"))
    return [*checks, _allocator(facts, environ), _recorder(facts)]


def _no_device(facts: Mapping[str, object], driver: Check, bad: str) -> Check:
    if not facts.get("cuda_build"):
        why = "this torch is built without CUDA, so nothing is recorded"
        return Check("cuda", bad, why, f"install a CUDA build of torch; {_NO_GPU}")
    why = f"torch is built for CUDA {facts['cuda_build']} but sees no device"
    if driver.status != OK:
        return Check("cuda", bad, f"{why}: no NVIDIA driver here, so nothing is recorded", _NO_GPU)
    why += " although a driver is loaded, so nothing is recorded"
    advice = "check nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the driver is new enough"
    return Check("cuda", bad, why, advice)


def _allocator(facts: Mapping[str, object], environ: Mapping[str, str]) -> Check:
    if environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "").strip() not in {"", "0"}:
        why = "PYTORCH_NO_CUDA_MEMORY_CACHING is set: there is no allocator state to read"
        return Check("allocator", PROBLEM, why, "unset it to record")
    backend = facts.get("backend")
    if backend == "native":
        return Check("allocator", OK, "native caching allocator")
    advice = "device metrics only; unset backend: in PYTORCH_CUDA_ALLOC_CONF to record"
    return Check("allocator", PROBLEM, f"allocator backend {backend}", advice)


def _recorder(facts: Mapping[str, object]) -> Check:
    if facts.get("recording") and facts.get("lazy_call"):
        return Check("recording", OK, "this torch's recorder is known")
    why = "this torch's recorder is not known"
    return Check("recording", PROBLEM, why, "report its version to us")


def _ask_torch(environ: Mapping[str, str], timeout: float) -> Check | dict[str, object]:
    """Import torch in a child process; what it reports, or the check that failed."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return Check("torch", MISSING, "not installed: files only, which is fine on a laptop")
    child = _child(("-m", "gpumem_otel.capture.probe"), timeout, environ)
    if child is None:
        why = f"importing torch and asking for devices took over {timeout:g} s"
        advice = "a hanging driver or a slow file system; try nvidia-smi, or a longer --timeout"
        return Check("torch", PROBLEM, why, advice)
    try:
        facts = json.loads(child.stdout)
    except ValueError:
        reason = _last_line(child.stderr) or "no message"
        why = f"the process that imports torch ended with {child.returncode}: {reason}"
        return Check("torch", PROBLEM, why, _REPAIR_TORCH)
    if not isinstance(facts, dict) or "torch" not in facts:
        errors = _list(facts, "errors") if isinstance(facts, dict) else []
        return Check("torch", PROBLEM, "; ".join(map(str, errors)), _REPAIR_TORCH)
    return facts


def _child(
    arguments: Sequence[str], timeout: float, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes] | None:
    """Run this Python to its end; None where it takes longer."""
    try:
        return subprocess.run(  # noqa: S603 - this Python, with fixed arguments
            [sys.executable, *arguments],
            capture_output=True,
            timeout=timeout,
            check=False,
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return None


def _last_line(written: bytes) -> str:
    lines = written.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _list(facts: Mapping[str, object], name: str) -> list[object]:
    value = facts.get(name)
    return value if isinstance(value, list) else []


def _version_pair(version: str) -> tuple[int, int]:
    parts = version.partition("+")[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return (0, 0)


def _driver() -> Check:
    """The version of the kernel module; loads no library and creates no context."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Check("driver", MISSING, "no NVIDIA kernel driver is loaded")
    first = text.splitlines()[0] if text else ""
    words = [word for word in first.split() if word[:1].isdigit() and "." in word]
    return Check("driver", OK, f"NVIDIA {words[0]}" if words else first.strip())


def _packages(config: Config) -> list[Check]:
    otlp = "opentelemetry-exporter-otlp-proto-http"
    driver_level = "pip install 'cuda-bindings>=12.8' nvidia-ml-py (only for driver-level work)"
    wanted = (
        ("OTLP exporter", otlp, config.metrics.otlp, f"pip install {otlp}"),
        ("host profiles", "pyroscope-io", config.host_profiles, "pip install pyroscope-io"),
        ("cuda-bindings", "cuda-bindings", False, driver_level),
    )
    checks = []
    for name, package, asked, advice in wanted:
        bad = PROBLEM if asked else MISSING
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            checks.append(Check(name, bad, f"{package} is not installed", advice))
            continue
        check = Check(name, OK, f"{package} {version}")
        checks.append(_host_profiles(check, bad) if package == "pyroscope-io" else check)
    return checks


def _host_profiles(installed: Check, bad: str) -> Check:
    """Whether its binary fits this Python: tried in a child process, since it is native code."""
    child = _child(("-c", "import pyroscope"), _IMPORT_SECONDS)
    if child is not None and child.returncode == 0:
        return installed
    reason = (
        f"its import took over {_IMPORT_SECONDS:g} s"
        if child is None
        else _last_line(child.stderr) or f"its import ended with {child.returncode}"
    )
    detail = f"{installed.detail} does not work here: {reason}"
    advice = f"install its wheel for Python {platform.python_version()}; only host profiles need it"
    return Check(installed.name, bad, detail, advice)


def _settings(config: Config) -> list[Check]:
    checks = [Check("settings", PROBLEM, warning, "correct it") for warning in config.warnings]
    if not config.enabled:
        disabled = "GPUMEM_OTEL_DISABLED is set: install() does nothing"
        checks.append(Check("settings", PROBLEM, disabled))
    return checks or [Check("settings", OK, "all environment variables can be used")]


def _connect(host: str, port: int) -> str:
    """Why no TCP connection can be made, "" where one can."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


def _endpoint(url: str, default_port: int) -> tuple[str, int] | None:
    parts = urlsplit(url if "//" in url else f"//{url}")
    try:
        port = parts.port
    except ValueError:
        return None
    return (parts.hostname, port or default_port) if parts.hostname else None


def _pyroscope(config: Config, environ: Mapping[str, str]) -> Check:
    url = config.pyroscope.url
    if not url:
        return Check("pyroscope", MISSING, "no server is set", "set PYROSCOPE_SERVER_ADDRESS")
    reason = _push_refusal(config, environ)
    if reason:
        return Check("pyroscope", PROBLEM, f"{url}: {reason}", "profiles will not arrive")
    return Check("pyroscope", OK, f"{url} takes pushes")


def _push_refusal(config: Config, environ: Mapping[str, str]) -> str:
    """Why a push would not arrive, "" where it would.

    Pushes a profile without samples, by the same way as all pushes (proxy, certificates,
    credentials, path): servers answer 200 and store nothing. Their /ready would check less, and an
    Alloy in front of them has none.
    """
    from gpumem_otel.errors import PushError
    from gpumem_otel.profiles import pprof
    from gpumem_otel.push.pyroscope import PyroscopeSink, series_labels
    from gpumem_otel.push.transport import Transport
    from gpumem_otel.settings.identity import identify

    transport = Transport(config.pyroscope, environ=environ)
    sink = PyroscopeSink(transport, config.pyroscope, lambda: identify(environ))
    try:
        labels = series_labels(identify(environ), device=0)
        sink.send(pprof.encode([]), labels, config.pyroscope.timeout_seconds)
    except PushError as error:
        return str(error)
    finally:
        transport.close()
    return ""


def _otlp(config: Config, environ: Mapping[str, str]) -> Check:
    if not config.metrics.otlp:
        return Check("otlp", MISSING, "not asked for", "set OTEL_EXPORTER_OTLP_ENDPOINT")
    url = (
        environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
        or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or "http://localhost:4318"
    )
    where = _endpoint(url, _OTLP_PORTS.get(urlsplit(url).scheme, 4317))
    if where is None:
        return Check("otlp", PROBLEM, f"{url}: no host and port in it", "correct the endpoint")
    reason = _connect(*where)
    if reason:
        return Check("otlp", PROBLEM, f"{url}: {reason}", "metrics will not arrive")
    return Check("otlp", OK, f"{url} takes connections")


def why_not_free(host: str, port: int) -> str:
    """Why nothing can listen there now, "" where something can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _port(config: Config) -> Check:
    serve = config.serve
    if serve.enabled:
        refusal = _refused_files(serve)
        if refusal:
            return Check("port", PROBLEM, f"nothing would listen, because: {refusal}", _NOT_READ)
    name = f"{serve.host}:{serve.port}"
    if not serve.enabled and not serve.port:
        return Check("port", OK, "any free port")
    reason = why_not_free(serve.host, serve.port)
    if reason:
        status = PROBLEM if serve.enabled else MISSING
        advice = "set GPUMEM_OTEL_PORT, or stop what listens there"
        return Check("port", status, f"{name}: {reason}", advice)
    asked = "" if serve.enabled else " (serving was not asked for: GPUMEM_OTEL_SERVE=1)"
    return Check("port", OK, f"{name} is free{asked}")


def _refused_files(serve: ServeConfig) -> str:
    """Why the listener would not take its token or TLS files, "" where it would."""
    from gpumem_otel.errors import ServeError
    from gpumem_otel.serve.auth import Tokens, server_context

    try:
        Tokens(serve.token, serve.token_file)
        server_context(serve)
    except ServeError as error:
        return str(error)
    return ""


def _run_dir(config: Config) -> Check:
    folder = Path(config.serve.run_dir)
    try:
        count = sum(1 for _ in folder.iterdir())
    except FileNotFoundError:
        above = next(parent for parent in folder.absolute().parents if parent.exists())
        # /proc reports that it is writable, and refuses new folders
        if above.is_relative_to("/proc") or not os.access(above, os.W_OK | os.X_OK):
            why = f"{folder} cannot be created in {above}"
            return Check("run folder", PROBLEM, why, _SET_RUN_DIR)
        return Check("run folder", OK, f"{folder} will be made by the first job that serves")
    except OSError as error:
        return Check("run folder", PROBLEM, f"{folder}: {error.strerror}", _SET_RUN_DIR)
    return Check("run folder", OK, f"{folder}, {count} entries")


def control(config: Config, environ: Mapping[str, str]) -> list[Check]:
    """Whether commands would be accepted, by the checks of the control listener itself."""
    from gpumem_otel.serve.guard import host_port
    from gpumem_otel.settings.identity import identify
    from gpumem_otel.yielding.control.listener import port_of, refusals

    asked, run_dir = config.control, config.serve.run_dir
    if not asked.enabled:
        advice = "set GPUMEM_OTEL_CONTROL=1 for 'gpumem-otel ctl'"
        return [Check("control", MISSING, "off: no commands to yield are taken", advice)]
    if not config.enabled:
        return [Check("control", MISSING, "GPUMEM_OTEL_DISABLED is set: no commands are taken")]
    local_rank = identify(environ).local_rank
    refused = refusals(asked, run_dir=run_dir, local_rank=local_rank)
    if asked.host and not refused.port:
        port = port_of(asked, local_rank)
        reason = why_not_free(asked.host, port)
        if reason:
            refused.port.append(f"{host_port(asked.host, port)}: {reason}")
    if refused.port or refused.socket:
        by_socket = bool(run_dir) and not refused.socket
        by_port = bool(asked.host) and not refused.port
        return [
            *(_refused("over TCP ", line, _else(by_socket, "the socket")) for line in refused.port),
            *(_refused("", line, _else(by_port, "the port")) for line in refused.socket),
        ]
    where = [f"a socket in {run_dir}"] if run_dir else []
    if asked.host:
        scheme = "https" if asked.tls_cert_file else "http"
        where.append(f"{scheme}://{host_port(asked.host, asked.port or '(any free port)')}")
    inherited = bool(asked.host and asked.token)
    advice = "GPUMEM_OTEL_CONTROL_TOKEN is inherited by every child process: use a token file"
    detail = f"takes commands at {' and '.join(where)}"
    return [Check("control", OK, detail, advice if inherited else "")]


def _refused(way: str, line: str, advice: str) -> Check:
    return Check("control", PROBLEM, f"{way}would not start, because: {line}", advice)


def _else(other: bool, name: str) -> str:
    return f"{name} still takes commands" if other else "no commands are taken"
