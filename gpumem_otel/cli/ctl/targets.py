"""What `gpumem-otel ctl` connects to, and with which credentials."""

from __future__ import annotations

import ipaddress
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from gpumem_otel.errors import ConfigError
from gpumem_otel.settings.files import (
    MOST_TOKEN_BYTES,
    client_context,
    contents,
    load_certificate,
    read_once,
)
from gpumem_otel.yielding.control.roles import LEAST_TOKEN_CHARACTERS

if TYPE_CHECKING:
    import ssl

_PORTS: Final = range(1, 65536)

_UNIX: Final = "unix:"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a process takes commands.

    Attributes:
        url: as given, for messages.
        path: of a Unix socket; "" for TCP.
    """

    url: str
    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False

    @property
    def in_the_clear(self) -> bool:
        """Whether others on the network can read what is sent there."""
        return not self.path and not self.tls and not _is_loopback(self.host)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What is sent over TCP.

    Attributes:
        token_file, cert_file: their files, for messages.
    """

    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    token_file: str = ""
    cert_file: str = ""


def parse_target(url: str) -> Target:
    """The target of a URL: `unix:///path`, `http://host:port`, `https://host:port`.

    Raises:
        ConfigError: it is none of these.
    """
    if url.startswith(_UNIX):
        path = url.removeprefix(_UNIX).removeprefix("//")  # unparsed: a path may hold ? and #
        if not path.startswith("/"):
            raise ConfigError(_bad(url))
        return Target(url, path=path)
    if "@" in url:  # first, since the other messages repeat the URL
        raise ConfigError("a target must hold no user or password: use --token-file")
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
    return f"target {url!r} must be unix:///path/to.sock, http://host:port or https://host:port"


def credentials(token_file: str, ca_file: str, cert_file: str, key_file: str) -> Credentials:
    """The credentials in these files, which may be pipes.

    Raises:
        ConfigError: a file cannot be used.
    """
    with ExitStack() as copies:
        read = (read_once(path, copies) for path in (token_file, ca_file, cert_file, key_file))
        return replace(_credentials(*read), token_file=token_file, cert_file=cert_file)


def _credentials(token_file: str, ca_file: str, cert_file: str, key_file: str) -> Credentials:
    """As `credentials`, for files that can be read more than once."""
    token = ""
    if token_file:
        token = _token_in(token_file)
        if len(token) < LEAST_TOKEN_CHARACTERS:
            raise ConfigError(
                f"token file {token_file}: a token has at least {LEAST_TOKEN_CHARACTERS} characters"
            )
    if key_file and not cert_file:
        raise ConfigError("--key-file needs --cert-file")
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
        raise ConfigError(f"token file {path}: must be ASCII") from None
    except ConfigError as error:
        raise ConfigError(f"token file {error}") from error
    words = text.split()
    if len(words) != 1 or not words[0].isprintable():
        raise ConfigError(f"token file {path}: must hold one token and nothing else")
    return words[0]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
