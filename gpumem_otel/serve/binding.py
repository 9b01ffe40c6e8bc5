"""Where a listener listens: a TCP port, or a Unix socket in the run directory."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpumem_otel.errors import ServeError
from gpumem_otel.serve import discovery

if TYPE_CHECKING:
    from gpumem_otel.serve.discovery import RunFile

BACKLOG: Final = 64
"""Connections that wait to be accepted, and are accepted at a time."""


class TcpBinding:
    """One port of one host; may be created and bound again where that failed."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._address: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self._host}:{self._port}"

    def create(self) -> socket.socket:
        """A socket that is not bound yet, of the family that the host has.

        Raises:
            OSError: there is no such family or name.
        """
        family, self._address = _resolve(self._host, self._port)
        # With its protocol named, or asyncio leaves Nagle's algorithm on: 40 ms a request.
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)

    def bind(self, listening: socket.socket) -> tuple[str, int]:
        """Bind and listen; returns (host, port).

        Raises:
            OSError: the address is taken, or not ours.
        """
        # Lets a restarted job bind while connections of the old one linger. Two that listen
        # still exclude one another, as they would not with SO_REUSEPORT.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listening.family == socket.AF_INET6:
            both = self._address[0] == "::"
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if both else 1)
        listening.bind(self._address)
        # Two sockets may be bound to the port by now; only one of them gets past this.
        listening.listen(BACKLOG)
        bound = listening.getsockname()
        return str(bound[0]), int(bound[1])


class UnixBinding:
    """A socket of mode 0600 in the run directory, named after its process.

    It gets that name only once it listens, so that one on which nothing listens may be removed.
    """

    def __init__(self, run_dir: str, local_rank: int) -> None:
        self._run_dir = run_dir
        self._name = discovery.socket_name(local_rank)
        self._run_file: RunFile | None = None

    def __str__(self) -> str:
        return f"{self._run_dir}/{self._name}"

    def create(self) -> socket.socket:
        """A Unix socket that is not bound yet."""
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def bind(self, listening: socket.socket) -> tuple[str, int]:
        """Bind and listen; returns (path, 0). Sockets of dead processes are removed.

        Raises:
            OSError: the directory is not safe to use, or cannot be written.
        """
        try:
            self._run_file = discovery.bind_socket(self._run_dir, self._name, listening, BACKLOG)
        except ServeError as exc:
            raise PermissionError(str(exc)) from exc
        return os.path.join(self._run_dir, self._name), 0  # noqa: PTH118  a string for people

    def remove(self) -> None:
        """Remove the file once nothing listens any more; does nothing a second time."""
        run_file, self._run_file = self._run_file, None
        if run_file is not None:
            run_file.remove()


Binding: TypeAlias = "TcpBinding | UnixBinding"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Family and address to bind; only names go to the resolver."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        # Bytes, since str would import the idna codec on our thread.
        name = host.encode("ascii", "replace")
        addresses = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
        return family, address
    return (socket.AF_INET if version == 4 else socket.AF_INET6), (host, port)  # noqa: PLR2004
