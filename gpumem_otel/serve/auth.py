"""TLS and bearer tokens of the listener, and files that are read again when they change."""

from __future__ import annotations

import hmac
import ssl
from typing import TYPE_CHECKING, Generic, TypeVar

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import ConfigError, ServeError
from gpumem_otel.settings.config import ControlConfig
from gpumem_otel.settings.files import (
    MOST_TOKEN_BYTES,
    contents,
    load_authorities,
    load_certificate,
    stamp,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.settings.config import ServeConfig
    from gpumem_otel.settings.parsers import Secret

_log = named_logger("gpumem_otel.serve")

_T = TypeVar("_T")


def server_context(config: ServeConfig | ControlConfig) -> ssl.SSLContext | None:
    """The TLS context that the config asks for (1.2 and newer), None for plain HTTP.

    With a client CA every client must show a certificate of it.

    Raises:
        ServeError: a file is missing, unreadable, or does not fit the others.
    """
    prefix = "control_" if isinstance(config, ControlConfig) else ""
    if not config.tls_cert_file:
        for name in ("tls_key_file", "tls_client_ca_file"):
            if getattr(config, name):
                raise ServeError(
                    f"{prefix}{name} is set without {prefix}tls_cert_file: set both or neither"
                )
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        load_certificate(
            context, config.tls_cert_file, config.tls_key_file, key_setting=f"{prefix}tls_key_file"
        )
    except ConfigError as exc:
        raise ServeError(f"TLS certificate and key: {exc}") from exc
    if config.tls_client_ca_file:
        try:
            load_authorities(context, config.tls_client_ca_file)
        except ConfigError as exc:
            raise ServeError(f"TLS client CA {exc}") from exc
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class WatchedFile(Generic[_T]):
    """The value in a file: read again when the file changes, kept when it breaks.

    Args:
        path: of the file.
        what: its name in messages: `token file`.
        stays: end of the warning about a vanished or broken file.
        parse: makes the value; a ValueError gives the fault in one clause.
        most_bytes: a larger file cannot be used.

    Raises:
        ServeError: it cannot be read or used at the start.
    """

    def __init__(
        self, path: str, *, what: str, stays: str, parse: Callable[[bytes], _T], most_bytes: int
    ) -> None:
        self._path = path
        self._what = what
        self._stays = stays
        self._parse = parse
        self._most_bytes = most_bytes
        self._warned = False
        try:
            self._read_stamp, self._value = self._read()
        except ConfigError as exc:
            raise ServeError(f"{what} {exc}") from exc

    def value(self) -> _T:
        """The value as the file has it now; warns once where it is unusable, never raises."""
        try:
            if not self._read_stamp or stamp(self._path) != self._read_stamp:
                self._read_stamp, self._value = self._read()
            self._warned = False
        except ConfigError as exc:
            if not self._warned:
                self._warned = True
                _log.warning("%s %s: %s", self._what, exc, self._stays)
        return self._value

    def _read(self) -> tuple[tuple[int, ...], _T]:
        before = stamp(self._path)
        data = contents(self._path, self._most_bytes)
        try:
            return before, self._parse(data)
        except ValueError as exc:
            raise ConfigError(f"{self._path}: {exc}") from exc


class Tokens:
    """The tokens that the listener accepts: the configured one, the one in the file, or both.

    A file that vanishes or empties later does not open the listener: the last token stays valid.

    Raises:
        ServeError: the token file cannot be read or holds no token.
    """

    def __init__(self, token: Secret, token_file: str) -> None:
        self._fixed = token.reveal().strip().encode() or None
        self._file: WatchedFile[bytes] | None = None
        if token_file:
            self._file = WatchedFile(
                token_file,
                what="token file",
                stays="the last token stays",
                parse=_token_in,
                most_bytes=MOST_TOKEN_BYTES,
            )

    @property
    def required(self) -> bool:
        """Whether readers must show a token at all."""
        return self._fixed is not None or self._file is not None

    def accept(self, authorization: str) -> bool:
        """Whether the value of an Authorization header holds a valid bearer token."""
        if not self.required:
            return True
        from_file = None if self._file is None else self._file.value()
        scheme, _, credentials = authorization.strip().partition(" ")
        offered = credentials.strip().encode("latin-1", "replace")
        # A list: every comparison runs, whatever the result of the first.
        matches = [
            hmac.compare_digest(t, offered) for t in (self._fixed, from_file) if t is not None
        ]
        return scheme.lower() == "bearer" and any(matches)


def _token_in(data: bytes) -> bytes:
    token = data.strip()
    if not token:
        raise ValueError("is empty")
    if len(token.split()) > 1:
        raise ValueError("does not hold one token")
    return token
