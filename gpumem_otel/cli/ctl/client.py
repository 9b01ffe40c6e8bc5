"""The client of the control API: one request, one answer, over a Unix socket or HTTP.

The standard library's HTTP client: it follows no redirects, knows no proxies and repeats nothing.
"""

from __future__ import annotations

import errno
import http.client
import ipaddress
import json
import os
import socket
import ssl
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from gpumem_otel.cli.common import CommandFailed
from gpumem_otel.errors import ConfigError
from gpumem_otel.serve.guard import host_port
from gpumem_otel.settings.config import ControlConfig
from gpumem_otel.settings.files import (
    MOST_TOKEN_BYTES,
    client_context,
    contents,
    load_certificate,
    read_once,
)
from gpumem_otel.yielding.control.roles import LEAST_TOKEN_CHARACTERS

# What stands in the way of an answer, and the way out, in one clause each.


_LOOK_SECONDS: Final = 3.0
"""For a second look at what listens there."""

_UNAUTHORIZED: Final = 401

_JOBS: Final = (
    "`gpumem-otel ctl state` without --target lists those of the jobs that run, with --run-dir "
    "those in another folder"
)

_PORT_HINT: Final = (
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
        return "" if target.path else f"that of a job has a port of its own, {_PORT_HINT}"
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
            f"GPUMEM_OTEL_CONTROL_HOST); its port is {_PORT_HINT}"
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
        return f"what answers there is no HTTP; the port of a job is {_PORT_HINT}"
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


CONNECT_SECONDS: Final = 10.0

_MAX_ANSWER_BYTES: Final = 4 << 20

_PORTS: Final = range(1, 65536)

_ERRORS: Final = 400
"""Statuses from here on are errors."""

_UNIX: Final = "unix:"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a process takes commands.

    Attributes:
        url: as it was given, for messages.
        path: of a Unix socket; "" over TCP.
    """

    url: str
    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False

    @property
    def in_the_clear(self) -> bool:
        """Whether others may see what is sent there."""
        return not self.path and not self.tls and not _is_loopback(self.host)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What is shown over TCP.

    Attributes:
        token_file, cert_file: where it is from, for messages.
    """

    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    token_file: str = ""
    cert_file: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer whose body is JSON, or nothing.

    Attributes:
        hint: what helps where it is an error, "" where it says so itself.
    """

    status: int
    value: Any
    hint: str = ""

    @property
    def error(self) -> str:
        """What a problem says, for people."""
        said = _detail(self.value) or "no control API answers here"
        return f"{said}{': ' if self.hint else ''}{self.hint} (HTTP {self.status})"


class Unreachable(CommandFailed):
    """No answer came.

    Attributes:
        waited: all the time that there was.
    """

    def __init__(self, message: str, *, waited: bool = False) -> None:
        super().__init__(message)
        self.waited = waited


def parse_target(url: str) -> Target:
    """A target of its URL: `unix:///path`, `http://host:port`, `https://host:port`.

    Raises:
        ConfigError: it is something else.
    """
    if url.startswith(_UNIX):
        path = url.removeprefix(_UNIX).removeprefix("//")  # as it is: it may hold ? and #
        if not path.startswith("/"):
            raise ConfigError(_bad(url))
        return Target(url, path=path)
    if "@" in url:  # looked at first: no other message may repeat it
        raise ConfigError("a target holds no user or password: --token-file takes a token")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ConfigError(_bad(url)) from None
    plain = not (parts.path.strip("/") or parts.query or parts.fragment)
    if parts.scheme not in {"http", "https"} or not host or port not in _PORTS or not plain:
        raise ConfigError(_bad(url))
    return Target(url, host=host, port=port or 0, tls=parts.scheme == "https")


def _bad(url: str) -> str:
    return f"target {url!r} is none of unix:///path/to.sock, http://host:port, https://host:port"


def credentials(token_file: str, ca_file: str, cert_file: str, key_file: str) -> Credentials:
    """What the files hold.

    Raises:
        ConfigError: one can not be used.
    """
    with ExitStack() as kept:
        read = (read_once(path, kept) for path in (token_file, ca_file, cert_file, key_file))
        return replace(_held(*read), token_file=token_file, cert_file=cert_file)


def _held(token_file: str, ca_file: str, cert_file: str, key_file: str) -> Credentials:
    """As `credentials`, of files that can be read more than once."""
    token = ""
    if token_file:
        token = _token_in(token_file)
        if len(token) < LEAST_TOKEN_CHARACTERS:
            raise ConfigError(
                f"token file {token_file}: a token has at least {LEAST_TOKEN_CHARACTERS} characters"
            )
    if key_file and not cert_file:
        raise ConfigError("--key-file goes with --cert-file")
    try:
        context = client_context(ca_file)
    except ConfigError as error:
        raise ConfigError(f"--ca-file {error}") from error
    try:
        if cert_file:
            load_certificate(context, cert_file, key_file, key_setting="--key-file")
    except ConfigError as error:
        raise ConfigError(f"client certificate {error}") from error
    return Credentials(token, context)


def _token_in(path: str) -> str:
    try:
        text = contents(path, MOST_TOKEN_BYTES).decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"token file {path}: holds something else than ASCII") from None
    except ConfigError as error:
        raise ConfigError(f"token file {error}") from error
    words = text.split()
    if len(words) != 1 or not words[0].isprintable():
        raise ConfigError(f"token file {path}: must hold one token and nothing else")
    return words[0]


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
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect, through a descriptor of the folder: a path may be longer than an address."""
        folder = os.open(Path(self._path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(f"/proc/self/fd/{folder}/{Path(self._path).name}")
        except OSError as error:
            self.sock.close()
            # of what is no socket at all it says the same, connect(2)
            if isinstance(error, ConnectionRefusedError) and not Path(self._path).is_socket():
                raise OSError(errno.ENOTSOCK, "that is no socket") from None
            raise
        finally:
            os.close(folder)


def _value(raw: bytes) -> Any:
    try:
        return json.loads(raw) if len(raw) <= _MAX_ANSWER_BYTES else None
    except (ValueError, RecursionError):
        return None


def _detail(value: Any) -> Any:
    """Of a problem."""
    return value.get("detail") if isinstance(value, dict) else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
