"""What stands in the way of an answer, and the way out, in one clause each."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from gpumem_otel.config import ControlConfig
from gpumem_otel.serve.hosts import host_port

if TYPE_CHECKING:
    from gpumem_otel.cli.ctl_client import Credentials, Target

__all__ = ["hint_of_status", "why_no_answer"]

_LOOK_SECONDS: Final = 3.0
"""For a second look at what listens there."""

_UNAUTHORIZED: Final = 401

_JOBS: Final = (
    "`gpumem-otel ctl state` without --target lists those of the jobs that run, with --run-dir "
    "those in another folder"
)

_PORTS: Final = (
    f"{ControlConfig().port} + local rank unless its GPUMEM_OTEL_CONTROL_PORT is another"
)

_STANDS_STILL: Final = (
    "its process is stopped (kill -CONT goes on with it), or stands still in a call that lets no "
    "other thread run"
)

_OTHER_NAME: Final = frozenset({62, 64})
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL's x509_vfy.h."""

_EXPIRED: Final = 10

_OF_CLIENTS: Final = ("CERTIFICATE", "HANDSHAKE_FAILURE", "UNKNOWN_CA")
"""Words of the alerts about what a client showed, TLS 1.2 and 1.3."""


def hint_of_status(status: int, shown: Credentials, target: Target, *, ours: bool) -> str:
    """What helps where this status is the answer, "" where it says so itself.

    Args:
        status: of HTTP.
        shown: what was shown.
        target: who answered.
        ours: the answer is one of a control API.
    """
    if not ours:
        return "" if target.path else f"that of a job has a port of its own, {_PORTS}"
    if status != _UNAUTHORIZED:
        return ""
    if shown.token:
        return (
            f"the one in {shown.token_file} is none that the job knows, see its "
            "GPUMEM_OTEL_CONTROL_TOKEN_FILE"
        )
    if shown.cert_file:
        return (
            f"{shown.cert_file} has none, which the job's GPUMEM_OTEL_CONTROL_CLIENT_ROLES gives; "
            "or take --token-file"
        )
    return "--token-file names a file with the token, --cert-file and --key-file the certificate"


def why_no_answer(
    error: Exception, target: Target, shown: Credentials, waited_seconds: float
) -> str:
    """Why there was none; may connect once more to see what listens there. Shows nothing there.

    Args:
        error: what the connection came to.
        target: who was asked.
        shown: what was shown.
        waited_seconds: how long for an answer.
    """
    if isinstance(error, TimeoutError) and error.errno is None:  # else the kernel's own
        lost = "" if target.path else ", or nothing reaches that machine"
        return f"no answer within {waited_seconds:g} s: {_STANDS_STILL}{lost}"
    if target.path:
        return _of_socket(error)
    if isinstance(error, ConnectionRefusedError):
        return (
            "nobody listens there: the job has ended, or takes no commands over TCP (its "
            f"GPUMEM_OTEL_CONTROL_HOST); its port is {_PORTS}"
        )
    if target.tls:
        return _of_tls(error, target, shown)
    spoken = isinstance(error, (http.client.HTTPException, ConnectionError))
    if spoken and _speaks_tls(target):
        return f"it speaks TLS: take https://{host_port(target.host, target.port)} in --target"
    return _plain(error)


def _of_socket(error: Exception) -> str:
    """Over a Unix socket."""
    if isinstance(error, FileNotFoundError):
        return f"there is no such socket: {_JOBS}"
    if isinstance(error, NotADirectoryError) or getattr(error, "errno", None) == errno.ENOTSOCK:
        return f"that is no socket: {_JOBS}"
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens there any more, the job has ended: {_JOBS}"
    if isinstance(error, BlockingIOError):
        return f"as many wait there as may: {_STANDS_STILL}"
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return f"closed without an answer, as by a job that ends: {_JOBS}"
    if isinstance(error, PermissionError):
        return "only the job's user and root may use its socket (sudo -u USER gpumem-otel ctl)"
    return _plain(error)


def _of_tls(error: Exception, target: Target, shown: Credentials) -> str:
    """Over TLS, or where it was tried."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _not_trusted(error)
    reason = getattr(error, "reason", None) or ""
    if "ALERT" in reason:
        if any(word in reason for word in _OF_CLIENTS):
            return f"TLS: {_of_client(shown)}"
        return f"TLS: {reason.replace('_', ' ').lower()}"
    # one that closes says nothing: asyncio's servers do where they miss a certificate
    closed = isinstance(error, (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError))
    if not closed and not isinstance(error, (ssl.SSLError, http.client.HTTPException)):
        return _plain(error)
    if _speaks_http(target):
        at = host_port(target.host, target.port)
        return f"it speaks plain HTTP, no TLS: take http://{at} in --target"
    if closed:
        return f"closed without an answer: {_of_client(shown)}"
    return f"TLS: {reason.replace('_', ' ').lower()}" if reason else _plain(error)


def _not_trusted(error: ssl.SSLCertVerificationError) -> str:
    why = f"TLS: certificate verify failed ({error.verify_message.rstrip('.')})"
    if error.verify_code in _OTHER_NAME:
        return f"{why}: take a name that it has in --target"
    if error.verify_code == _EXPIRED:
        return why
    return f"{why}: --ca-file names the certificate of who signed the server's"


def _of_client(shown: Credentials) -> str:
    """What a server may have had against what was shown in the handshake."""
    if not shown.cert_file:
        return "it may want a client certificate, --cert-file and --key-file"
    return (
        f"it may not take {shown.cert_file}, which has to be valid and signed by the job's "
        "GPUMEM_OTEL_CONTROL_TLS_CLIENT_CA_FILE"
    )


def _plain(error: Exception) -> str:
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return "it closed the connection without an answer"
    if isinstance(error, http.client.HTTPException):
        return f"what answers there is no HTTP; the port of a job is {_PORTS}"
    return getattr(error, "strerror", None) or str(error)


def _speaks_tls(target: Target) -> bool:
    """Whoever it is: nothing is sent to it but the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        suppress(OSError, ValueError),
        _connected(target) as plain,
        context.wrap_socket(plain, server_hostname=target.host) as spoken,
    ):
        with suppress(OSError):
            spoken.unwrap()  # a server is told that it ends, as it may expect
        return True
    return False


def _speaks_http(target: Target) -> bool:
    """Nothing is sent to it but a request without credentials."""
    with suppress(OSError, ValueError), _connected(target) as plain:
        plain.sendall(b"GET /v1/state HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return plain.recv(5) == b"HTTP/"
    return False


def _connected(target: Target) -> socket.socket:
    return socket.create_connection((target.host, target.port), timeout=_LOOK_SECONDS)
