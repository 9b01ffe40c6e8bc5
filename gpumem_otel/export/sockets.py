"""Sockets whose operations share one deadline; only the transport makes any.

A time-out of a socket is one per operation, so that a peer which sends or takes a byte now and
then holds its client for ever. These ask a `Progress` before each operation what is left.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["Progress", "TimedSocket", "TimedTlsSocket", "connect", "reason_of"]


class Progress:
    """The deadline of the request under way and how far it came.

    Attributes:
        connected: the request had a connection, proxy and TLS handshake included.
        reused: that connection had been kept from an earlier request.
        send_failed: the peer closed before it took the whole request.
        received: bytes of the answer seen so far.
    """

    __slots__ = ("_end", "connected", "received", "reused", "send_failed")

    def __init__(self) -> None:
        self.begin(0.0)

    def begin(self, seconds: float) -> None:
        """Start the clock of a request."""
        self._end = time.monotonic() + seconds
        self.restart()

    def restart(self) -> None:
        """Forget how far the request came, but not its deadline."""
        self.connected = self.reused = self.send_failed = False
        self.received = 0

    def left(self) -> float:
        """Seconds that are left, more than 0.

        Raises:
            TimeoutError: there are none.
        """
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("deadline passed")
        return seconds


class TimedSocket(socket.socket):
    """A TCP socket; subclasses bind `progress`."""

    progress: ClassVar[Progress]

    def sendall(self, data: ReadableBuffer, flags: int = 0, /) -> None:
        """Send everything, within what is left."""
        self.settimeout(self.progress.left())
        try:
            super().sendall(data, flags)
        except TimeoutError:
            raise
        except OSError:
            self.progress.send_failed = True
            raise

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """Read what is there, within what is left."""
        self.settimeout(self.progress.left())
        count = super().recv_into(buffer, nbytes, flags)
        self.progress.received += count
        return count


class TimedTlsSocket(ssl.SSLSocket):
    """The same over TLS, handshake included."""

    progress: ClassVar[Progress]

    def do_handshake(self, block: bool = False) -> None:
        """Shake hands, within what is left."""
        self.settimeout(self.progress.left())
        super().do_handshake(block)

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """Send a part, within what is left; `sendall` is made of these."""
        self.settimeout(self.progress.left())
        try:
            return super().send(data, flags)
        except TimeoutError:
            raise
        except OSError:
            self.progress.send_failed = True
            raise

    def recv_into(self, buffer: WriteableBuffer, nbytes: int | None = None, flags: int = 0) -> int:
        """Read what is there, within what is left."""
        self.settimeout(self.progress.left())
        count = super().recv_into(buffer, nbytes, flags)
        self.progress.received += count
        return count


def connect(
    kind: type[TimedSocket], host: str, port: int, options: Iterable[tuple[Any, ...]]
) -> TimedSocket:
    """Connect to the first address of a name that answers; all share the deadline.

    Raises:
        TimeoutError: the deadline passed.
        ConnectionError: no address could be reached, or the name has none.
    """
    name = host[1:-1] if host.startswith("[") else host
    problem = "the name has no address"
    try:
        addresses = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectionError(reason_of(error)) from None
    for family, _, protocol, _, address in addresses:
        sock = kind(family, socket.SOCK_STREAM, protocol)
        try:
            for option in options:
                sock.setsockopt(*option)
            sock.settimeout(kind.progress.left())
            sock.connect(address)
        except TimeoutError:
            sock.close()
            if address is addresses[-1][4]:
                raise
        except OSError as error:
            sock.close()
            # Without an errno: urllib3 passes over some of them when it has sent a request.
            problem = reason_of(error)
        else:
            return sock
    raise ConnectionError(problem)


def reason_of(error: BaseException) -> str:
    """Why, in a few words, without the names of objects that the texts of errors carry."""
    if isinstance(error, ssl.SSLError):
        verify = getattr(error, "verify_message", "")
        return str(verify or error.reason or error.strerror or "TLS failure")
    if isinstance(error, socket.gaierror):
        return f"the name can not be resolved ({error.strerror})"
    if isinstance(error, OSError):
        file = f": {error.filename}" if isinstance(error.filename, str) else ""
        return f"{error.strerror or str(error) or type(error).__name__}{file}"
    return type(error).__name__
