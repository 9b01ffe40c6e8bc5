"""What `doctor` says about the control listener."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_otel.cli.checks import MISSING, OK, PROBLEM, Check, why_not_free

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpumem_otel.config import Config

__all__ = ["control"]


def control(config: Config, environ: Mapping[str, str]) -> list[Check]:
    """Whether commands would be taken, with the checks of the listener itself."""
    from gpumem_otel.ranks import identify
    from gpumem_otel.serve.control_settings import port_of, refusals
    from gpumem_otel.serve.hosts import host_port

    asked, run_dir = config.control, config.serve.run_dir
    if not asked.enabled:
        advice = "set GPUMEM_OTEL_CONTROL=1 for 'gpumem-otel ctl'"
        return [Check("control", MISSING, "off: no commands to yield are taken", advice)]
    if not config.enabled:
        return [Check("control", MISSING, "GPUMEM_OTEL_DISABLED is set: no commands are taken")]
    local_rank = identify(environ).local_rank
    found = refusals(asked, run_dir=run_dir, local_rank=local_rank)
    if asked.host and not found.port:
        port = port_of(asked, local_rank)
        reason = why_not_free(asked.host, port)
        if reason:
            found.port.append(f"{host_port(asked.host, port)}: {reason}")
    if found.port or found.socket:
        by_socket = bool(run_dir) and not found.socket
        by_port = bool(asked.host) and not found.port
        return [
            *(_refused("over TCP ", line, _else(by_socket, "the socket")) for line in found.port),
            *(_refused("", line, _else(by_port, "the port")) for line in found.socket),
        ]
    where = [f"a socket in {run_dir}"] if run_dir else []
    if asked.host:
        scheme = "https" if asked.tls_cert_file else "http"
        where.append(f"{scheme}://{host_port(asked.host, asked.port or '(any free port)')}")
    inherited = bool(asked.host and asked.token)
    advice = "GPUMEM_OTEL_CONTROL_TOKEN is inherited by every child process: use a token file"
    detail = f"takes commands at {' and '.join(where)}"
    return [Check("control", OK, detail, advice if inherited else "")]


def _refused(door: str, line: str, advice: str) -> Check:
    return Check("control", PROBLEM, f"{door}would not start, because: {line}", advice)


def _else(other: bool, name: str) -> str:
    return f"{name} takes commands all the same" if other else "no commands are taken"
