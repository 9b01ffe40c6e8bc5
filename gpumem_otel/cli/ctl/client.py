"""The client of the control API: one request, one answer, over a Unix socket or HTTP.

It uses the standard library's HTTP client, which follows no redirects, uses no proxies and repeats
nothing.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.cli.output import CommandFailed
from gpumem_otel.serve.guard import host_port
from gpumem_otel.settings.config import ControlConfig

if TYPE_CHECKING:
    from gpumem_otel.cli.ctl.targets import Credentials, Target

# Why there is no answer or a refusal, and what to do about it: one clause each.

_LOOK_SECONDS: Final = 3.0
"""Time limit of the second connection, which only looks at what listens there."""

_UNAUTHORIZED: Final = 401

_JOBS: Final = (
    "`gpumem-otel ctl state` without --target lists the sockets of running jobs, with --run-dir "
    "those in another folder"
)

_PORT_HINT: Final = f"{ControlConfig().port} + local rank unless GPUMEM_OTEL_CONTROL_PORT is set"

_STOPPED: Final = (
    "its process is stopped (kill -CONT continues it), or blocked in a call that lets no other "
    "thread run"
)

_OTHER_NAME: Final = frozenset({62, 64})
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL's x509_vfy.h."""

_EXPIRED: Final = 10

_OF_CLIENTS: Final = ("CERTIFICATE", "HANDSHAKE_FAILURE", "UNKNOWN_CA")
"""Parts of the names of alerts about client certificates, TLS 1.2 and 1.3."""


def hint_of_status(status: int, shown: Credentials, target: Target, *, ours: bool) -> str:
    """What to do about an HTTP status, "" where the answer says it.

    Args:
        status: of HTTP.
        shown: the credentials that were sent.
        target: where the answer is from.
        ours: whether the answer is one of a control API.
    """
    if not ours:
        return "" if target.path else f"a job's control API has its own port, {_PORT_HINT}"
    if status != _UNAUTHORIZED:
        return ""
    if shown.token:
        return (
            f"the job does not know the token in {shown.token_file}, see its "
            "GPUMEM_OTEL_CONTROL_TOKEN_FILE"
        )
    if shown.cert_file:
        return (
            f"{shown.cert_file} has no role, add it to the job's "
            "GPUMEM_OTEL_CONTROL_CLIENT_ROLES; or use --token-file"
        )
    return "--token-file names a file with the token, --cert-file and --key-file the certificate"


def why_no_answer(
    error: Exception, target: Target, shown: Credentials, waited_seconds: float
) -> str:
    """Why there was no answer. May connect once more to see what listens, without credentials.

    Args:
        error: of the connection.
        target: what was asked.
        shown: the credentials that were sent.
        waited_seconds: time limit of the answer.
    """
    if isinstance(error, TimeoutError) and error.errno is None:  # the kernel's timeouts have one
        lost = "" if target.path else ", or that machine cannot be reached"
        return f"no answer within {waited_seconds:g} s: {_STOPPED}{lost}"
    if target.path:
        return _of_socket(error)
    if isinstance(error, ConnectionRefusedError):
        return (
            "nothing listens there: the job has ended, or takes no commands over TCP (its "
            f"GPUMEM_OTEL_CONTROL_HOST); its port is {_PORT_HINT}"
        )
    if target.tls:
        return _of_tls(error, target, shown)
    connected = isinstance(error, (http.client.HTTPException, ConnectionError))
    if connected and _serves_tls(target):
        return f"it serves TLS: use https://{host_port(target.host, target.port)} in --target"
    return _plain(error)


def _of_socket(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no such socket: {_JOBS}"
    if isinstance(error, NotADirectoryError) or getattr(error, "errno", None) == errno.ENOTSOCK:
        return f"that is not a socket: {_JOBS}"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens there, the job has ended: {_JOBS}"
    if isinstance(error, BlockingIOError):
        return f"its queue of connections is full: {_STOPPED}"
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return f"closed without an answer, the job may have ended: {_JOBS}"
    if isinstance(error, PermissionError):
        return "only the job's user and root may use its socket (sudo -u USER gpumem-otel ctl)"
    return _plain(error)


def _of_tls(error: Exception, target: Target, shown: Credentials) -> str:
    """Where TLS was used or tried."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _not_trusted(error)
    reason = getattr(error, "reason", None) or ""
    if "ALERT" in reason:
        if any(word in reason for word in _OF_CLIENTS):
            return f"TLS: {_of_client(shown)}"
        return f"TLS: {reason.replace('_', ' ').lower()}"
    # asyncio's servers close without an alert where a client certificate is missing
    closed = isinstance(error, (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError))
    if not closed and not isinstance(error, (ssl.SSLError, http.client.HTTPException)):
        return _plain(error)
    if _serves_http(target):
        at = host_port(target.host, target.port)
        return f"it serves plain HTTP, not TLS: use http://{at} in --target"
    if closed:
        return f"closed without an answer: {_of_client(shown)}"
    return f"TLS: {reason.replace('_', ' ').lower()}" if reason else _plain(error)


def _not_trusted(error: ssl.SSLCertVerificationError) -> str:
    why = f"TLS: certificate verify failed ({error.verify_message.rstrip('.')})"
    if error.verify_code in _OTHER_NAME:
        return f"{why}: use a name of the certificate in --target"
    if error.verify_code == _EXPIRED:
        return why
    return f"{why}: give the CA that signed the server's certificate with --ca-file"


def _of_client(shown: Credentials) -> str:
    """Why a server may have refused the client in the handshake."""
    if not shown.cert_file:
        return "it may require a client certificate, --cert-file and --key-file"
    return (
        f"it may not accept {shown.cert_file}, which must be valid and signed by the job's "
        "GPUMEM_OTEL_CONTROL_TLS_CLIENT_CA_FILE"
    )


def _plain(error: Exception) -> str:
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return "it closed the connection without an answer"
    if isinstance(error, http.client.HTTPException):
        return f"the answer is not HTTP; the port of a job is {_PORT_HINT}"
    return getattr(error, "strerror", None) or str(error)


def _serves_tls(target: Target) -> bool:
    """Sends nothing but the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        suppress(OSError, ValueError),
        _connected(target) as plain,
        context.wrap_socket(plain, server_hostname=target.host) as wrapped,
    ):
        with suppress(OSError):
            wrapped.unwrap()  # a server may expect TLS to be closed
        return True
    return False


def _serves_http(target: Target) -> bool:
    """Sends nothing but a request without credentials."""
    with suppress(OSError, ValueError), _connected(target) as plain:
        plain.sendall(b"GET /v1/state HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return plain.recv(5) == b"HTTP/"
    return False


def _connected(target: Target) -> socket.socket:
    return socket.create_connection((target.host, target.port), timeout=_LOOK_SECONDS)


CONNECT_SECONDS: Final = 10.0

_MAX_ANSWER_BYTES: Final = 4 << 20

_ERRORS: Final = 400
"""The lowest status of errors."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer; value is its JSON, or None.

    Attributes:
        hint: what to do about an error, "" where the answer says it.
    """

    status: int
    value: Any
    hint: str = ""

    @property
    def error(self) -> str:
        """The error of the answer, for people."""
        detail = _detail(self.value) or "no control API answers here"
        return f"{detail}{': ' if self.hint else ''}{self.hint} (HTTP {self.status})"


class Unreachable(CommandFailed):
    """No answer came.

    Attributes:
        waited: whether the time limit was reached.
    """

    def __init__(self, message: str, *, waited: bool = False) -> None:
        super().__init__(message)
        self.waited = waited


class Client:
    """Requests to one target, from any thread."""

    def __init__(self, target: Target, shown: Credentials) -> None:
        self.target = target
        self._shown = shown

    def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        key: str = "",
        timeout: float = CONNECT_SECONDS,
    ) -> Reply:
        """One request on a connection of its own.

        Raises:
            Unreachable: no answer came.
        """
        headers = {"Accept": "application/json", "Connection": "close"}
        if self._shown.token and not self.target.path:
            headers["Authorization"] = f"Bearer {self._shown.token}"
        if key:
            headers["Idempotency-Key"] = key
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        connection = self._connection(timeout)
        try:
            connection.request(method, path, body=data, headers=headers)
            answer = connection.getresponse()
            raw = answer.read(_MAX_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            reason = why_no_answer(error, self.target, self._shown, timeout)
            waited = isinstance(error, TimeoutError)
            raise Unreachable(f"{self.target.url}: {reason}", waited=waited) from error
        finally:
            connection.close()
        return self._reply(answer.status, _value(raw))

    def _reply(self, status: int, value: Any) -> Reply:
        ours = bool(_detail(value)) or (status < _ERRORS and isinstance(value, dict))
        return Reply(status, value, hint_of_status(status, self._shown, self.target, ours=ours))

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        target = self.target
        if target.path:
            return _UnixConnection(target.path, timeout)
        if target.tls:
            return http.client.HTTPSConnection(
                target.host, target.port, timeout=timeout, context=self._shown.tls
            )
        return http.client.HTTPConnection(target.host, target.port, timeout=timeout)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect through a descriptor of the folder: a path may be longer than an address."""
        folder = os.open(Path(self._path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(f"/proc/self/fd/{folder}/{Path(self._path).name}")
        except OSError as error:
            self.sock.close()
            # connect(2) reports the same for a file that is not a socket
            if isinstance(error, ConnectionRefusedError) and not Path(self._path).is_socket():
                raise OSError(errno.ENOTSOCK, "not a socket") from None
            raise
        finally:
            os.close(folder)


def _value(raw: bytes) -> Any:
    try:
        return json.loads(raw) if len(raw) <= _MAX_ANSWER_BYTES else None
    except (ValueError, RecursionError):
        return None


def _detail(value: Any) -> Any:
    """The text of a problem (RFC 9457), None where the answer is none."""
    return value.get("detail") if isinstance(value, dict) else None
