"""Where the demo serves: the wait for its listener, and what can be done with the address."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.common import CommandFailed
from gpumem_otel.serve.hosts import host_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.agent import Agent
    from gpumem_otel.config import Config

__all__ = ["await_listener", "base_url", "greet", "scrape_config"]

_WAIT_SECONDS = 0.05
_OF_THIS_MACHINE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (it is replaced)
"""An address to ask, where all are listened on."""


def await_listener(agent: Agent, check: Callable[[], None], patience_seconds: float) -> None:
    """Wait until the port is bound.

    Args:
        agent: started.
        check: called again and again; raises where there is nothing to wait for any more.
        patience_seconds: for reasons that nobody knows of.

    Raises:
        CommandFailed: it does not listen, and why.
    """
    deadline = time.monotonic() + patience_seconds
    while not agent.wait_listening(_WAIT_SECONDS):
        check()
        error = agent.listen_error
        if isinstance(error, OSError):
            raise CommandFailed(_no_port(agent, error)) from error
        if error is not None:
            raise CommandFailed(error)
        if time.monotonic() > deadline:
            raise CommandFailed(
                f"nothing listens after {patience_seconds:g} s; gpumem-otel doctor may know why"
            )
        time.sleep(_WAIT_SECONDS)  # without a listener `wait_listening` does not wait


def _no_port(agent: Agent, error: OSError) -> str:
    serve = agent.config.serve
    rank = agent.answers.identity().local_rank if agent.answers is not None else 0
    where = host_port(serve.host, serve.port + rank if serve.port else 0)
    if error.errno == errno.EADDRINUSE:
        return f"{where} is taken; choose another with --port (0: any free one)"
    reason = error.strerror or type(error).__name__
    return f"can not listen on {where}: {reason}; choose another with --host or --port"


def greet(address: tuple[str, int], config: Config) -> None:
    """Say what can be looked at meanwhile."""
    url = base_url(address, tls=bool(config.serve.tls_cert_file))
    click.echo("  look at it while it runs:")
    click.echo(f"    go tool pprof -http=: {url}/debug/pprof/gpumem")
    click.echo(f"    curl {url}/metrics")
    click.echo(f"    {scrape_config(url)}  # in prometheus.yml")
    if config.pyroscope.url:
        click.echo(f"  pushing to {config.pyroscope.url} as {config.service_name}")
    click.echo()


def base_url(address: tuple[str, int], *, tls: bool) -> str:
    """The URL to ask on this machine."""
    host, port = address
    return f"{'https' if tls else 'http'}://{host_port(_OF_THIS_MACHINE.get(host, host), port)}"


def scrape_config(url: str) -> str:
    """A line of YAML that makes a Prometheus scrape this URL."""
    scheme, _, target = url.partition("://")
    tls = "" if scheme == "http" else f"scheme: {scheme}, "
    job = f"job_name: gpumem, {tls}static_configs: [{{targets: ['{target}']}}]"
    return f"scrape_configs: [{{{job}}}]"
