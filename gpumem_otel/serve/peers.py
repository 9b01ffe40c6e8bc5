"""Who is at the other end of a connection, as the kernel or TLS vouches for it."""

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
    """One end of a connection; None where that is not known of it.

    Attributes:
        uid: of a process at the other end of a Unix socket.
        pid: likewise; 0 where it is in another pid namespace.
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
    # Empty where no certificate was asked for, so that nobody vouches for it.
    certificate = transport.get_extra_info("peercert")
    return Peer(common_name=_common_name(certificate)) if certificate else Peer()


def process_of(sock: Any) -> Peer:
    """The process at the other end of a Unix socket, nobody of any other; never raises."""
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
    """Where a connection comes from, as far as the kernel knows it, for logs.

    Args:
        peer: who is there.
        address: host and port of a TCP connection.
    """
    if peer.uid is not None:
        return f"pid {peer.pid}"
    return f"{address[0]} port {address[1]}" if address else "unknown"


def _common_name(certificate: dict[str, Any]) -> str:
    """Of the subject, as `ssl.SSLSocket.getpeercert` gives it; the last one counts."""
    names = [
        value
        for part in certificate.get("subject", ())
        for name, value in part
        if name == "commonName"
    ]
    return str(names[-1]) if names else ""
