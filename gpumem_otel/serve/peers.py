"""Who is at the other end of a connection, as the kernel or TLS reports it."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio

_UCRED: Final = "3i"
"""pid, uid, gid: `struct ucred`, unix(7)."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection; None where something is not known.

    Attributes:
        uid: of the process at the other end of a Unix socket.
        pid: of that process; 0 where it is in another pid namespace.
        common_name: of a client certificate that our CA signed; "" where it has none.
    """

    uid: int | None = None
    pid: int | None = None
    common_name: str | None = None


def peer_of(transport: asyncio.BaseTransport) -> Peer:
    """What is known about a connection that is just made; never raises."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family == socket.AF_UNIX:
        return process_of(sock)
    # Empty where no certificate was asked for, and so none was checked.
    certificate = transport.get_extra_info("peercert")
    return Peer(common_name=_common_name(certificate)) if certificate else Peer()


def process_of(sock: Any) -> Peer:
    """The process at the other end of a Unix socket, unknown of any other; never raises."""
    if sock.family != socket.AF_UNIX:
        return Peer()
    size = struct.calcsize(_UCRED)
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    except OSError:
        return Peer()
    pid, uid, _ = struct.unpack(_UCRED, raw)
    return Peer(uid=uid, pid=pid)


def origin_of(peer: Peer, address: tuple[Any, ...] | None) -> str:
    """Where a connection comes from, for logs; `address` is that of a TCP connection."""
    if peer.uid is not None:
        return f"pid {peer.pid}"
    return f"{address[0]} port {address[1]}" if address else "unknown"


def _common_name(certificate: dict[str, Any]) -> str:
    """The last common name of the subject, as `ssl.SSLSocket.getpeercert` gives it."""
    names = [
        value
        for part in certificate.get("subject", ())
        for name, value in part
        if name == "commonName"
    ]
    return str(names[-1]) if names else ""
