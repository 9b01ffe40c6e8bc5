"""Which settings the control listener refuses: law 5, no door is open to strangers."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from gpumem_otel import folders
from gpumem_otel.errors import ServeError
from gpumem_otel.serve.roles import Gatekeeper
from gpumem_otel.serve.tls import server_context

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from gpumem_otel.config import ControlConfig

__all__ = ["Refusals", "port_of", "refusals", "refuse_open_door"]

_MAX_PORT: Final = 65535

_T = TypeVar("_T")


def refuse_open_door(
    config: ControlConfig, gatekeeper: Gatekeeper, tls: ssl.SSLContext | None
) -> None:
    """Nobody commands a job over TCP without a credential, and no credential goes bare.

    Raises:
        ServeError: the settings would allow that.
    """
    certificates = tls is not None and bool(config.tls_client_ca_file)
    if gatekeeper.has_client_roles and not certificates:
        raise ServeError("control_client_roles needs control_tls_client_ca_file")
    if not gatekeeper.has_tokens and not gatekeeper.has_client_roles:
        raise ServeError(
            f"control over TCP on {config.host} needs credentials: set control_token_file, or "
            "control_tls_client_ca_file with control_client_roles"
        )
    if tls is None and not config.insecure and not _is_loopback(config.host):
        raise ServeError(
            f"control on {config.host} needs TLS, or whoever sees the traffic has the token: set "
            "control_tls_cert_file, or control_insecure where something else encrypts it"
        )


def port_of(config: ControlConfig, local_rank: int) -> int:
    """What this process listens on; 0 for any that is free.

    Raises:
        ServeError: there is none.
    """
    port = config.port + local_rank if config.port else 0
    if not 0 <= port <= _MAX_PORT:
        raise ServeError(
            f"control port {config.port} + local rank {local_rank} is no port: take a lower base "
            "port"
        )
    return port


class Refusals(NamedTuple):
    """Why commands would not be taken, a line for each reason.

    Attributes:
        port: over TCP, where settings speak of it.
        socket: at the socket in the run directory.
    """

    port: list[str]
    socket: list[str]


def refusals(config: ControlConfig, *, run_dir: str, local_rank: int = 0) -> Refusals:
    """What of a listener with these settings would not start; binds nothing."""
    port: list[str] = []
    socket: list[str] = []

    def tried(call: Callable[[], _T], found: list[str] = port) -> _T | None:
        try:
            return call()
        except ServeError as error:
            found.append(str(error))
        return None

    gatekeeper = tried(lambda: Gatekeeper(config))
    if config.host:
        before = len(port)
        tls = tried(lambda: server_context(config))
        if gatekeeper is not None and len(port) == before:
            tried(lambda: refuse_open_door(config, gatekeeper, tls))
        tried(lambda: port_of(config, local_rank))
    if run_dir:
        tried(lambda: _look_into(run_dir), socket)
    elif not config.host:
        socket.append("control: there is neither a run directory nor a host to listen on")
    return Refusals(port, socket)


def _look_into(run_dir: str) -> None:
    """Whether the socket could lie there; a folder that is not there is made by the job.

    Raises:
        ServeError: it can not.
    """
    try:
        with suppress(FileNotFoundError), folders.opened(run_dir, "run directory", ServeError):
            pass
    except OSError as error:
        raise ServeError(f"run directory {run_dir}: {error.strerror}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
