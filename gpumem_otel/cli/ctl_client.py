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
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from gpumem_otel.cli.common import CommandFailed
from gpumem_otel.cli.ctl_hints import hint_of_status, why_no_answer
from gpumem_otel.errors import ConfigError
from gpumem_otel.serve.roles import LEAST_TOKEN_CHARACTERS
from gpumem_otel.settingfiles import (
    MOST_TOKEN_BYTES,
    client_context,
    contents,
    load_certificate,
    read_once,
)

if TYPE_CHECKING:
    import ssl

__all__ = [
    "CONNECT_SECONDS",
    "Client",
    "Credentials",
    "Reply",
    "Target",
    "Unreachable",
    "credentials",
    "parse_target",
]

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
