"""Roles: which bearer tokens, client certificates and local users may send which commands.

A token file has one line for each token, `ROLE[,ROLE] TOKEN [NAME]`:

    # dashboards
    read                 3q6Rr1i9yq2mJ0v8XcZb4w  dashboard
    read,yield,restore   Vw1nq7H0b5YkT2c9LzP8sd  scheduler

Empty lines and those that begin with # are ignored. The name is for the audit log; the default is
the line's number.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from gpumem_otel.base.text import printable
from gpumem_otel.errors import ServeError
from gpumem_otel.serve.auth import WatchedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpumem_otel.serve.peers import Peer
    from gpumem_otel.settings.config import ControlConfig

_MAX_FILE_BYTES: Final = 64 * 1024
_MAX_TOKENS: Final = 64
LEAST_TOKEN_CHARACTERS: Final = 16
"""A shorter one could be guessed."""
_MAX_TOKEN_CHARACTERS: Final = 4096
_WORDS: Final = range(2, 4)
_ROOT: Final = 0


class Role(str, Enum):
    """What a sender may do. One with any role may also read."""

    READ = "read"
    YIELD = "yield"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class Principal:
    """The sender of a request.

    Attributes:
        name: for the audit log and the limits: `token scheduler`, `certificate ops`, `uid 1000`.
        roles: as configured; see `may`.
    """

    name: str
    roles: frozenset[Role]

    def may(self, role: Role) -> bool:
        """Whether it may do what needs this role."""
        return role in self.roles or (role is Role.READ and bool(self.roles))


@dataclass(frozen=True, slots=True)
class _Token:
    value: bytes = field(repr=False)
    principal: Principal


def parse_tokens(data: bytes) -> tuple[tuple[bytes, Principal], ...]:
    """The tokens of a file, see the module.

    Raises:
        ValueError: a line that cannot be used, by its number; or there is no token.
    """
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        raise ValueError("is not ASCII") from None
    tokens: dict[bytes, Principal] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) not in _WORDS:
            raise ValueError(f"line {number} is not ROLE[,ROLE] TOKEN [NAME]")
        roles = _roles(words[0].split(","), f"line {number}")
        token = words[1].encode()
        if not LEAST_TOKEN_CHARACTERS <= len(token) <= _MAX_TOKEN_CHARACTERS:
            raise ValueError(
                f"line {number}: a token has {LEAST_TOKEN_CHARACTERS} to "
                f"{_MAX_TOKEN_CHARACTERS} characters"
            )
        if token in tokens:
            raise ValueError(f"line {number}: this token is also on an earlier line")
        name = words[2] if len(words) > _WORDS.start else f"line {number}"
        tokens[token] = Principal(f"token {name}", roles)
    if not tokens:
        raise ValueError("holds no token")
    if len(tokens) > _MAX_TOKENS:
        raise ValueError(f"holds more than {_MAX_TOKENS} tokens")
    return tuple(tokens.items())


def client_roles(words: Iterable[str]) -> tuple[frozenset[Role], Mapping[str, frozenset[Role]]]:
    """(roles of every client certificate, additional roles by common name).

    Raises:
        ValueError: a word that is neither `role` nor `name=role`.
    """
    everyone: frozenset[Role] = frozenset()
    named: dict[str, frozenset[Role]] = {}
    for word in words:
        name, separator, role = word.rpartition("=")
        roles = _roles([role], repr(word))
        if not separator:
            everyone |= roles
        elif name:
            named[name] = named.get(name, frozenset()) | roles
        else:
            raise ValueError(f"{word!r} is neither ROLE nor NAME=ROLE")
    return everyone, named


def _roles(words: Iterable[str], where: str) -> frozenset[Role]:
    try:
        return frozenset(Role(word) for word in words)
    except ValueError:
        known = ", ".join(role.value for role in Role)
        raise ValueError(f"{where}: a role is one of {known}") from None


class Gatekeeper:
    """Identifies the sender of a request, over TCP or over this user's socket.

    Where the token file vanishes or becomes invalid later, the last tokens stay valid.

    Raises:
        ServeError: a token, a token file or a list of roles that cannot be used.
    """

    def __init__(self, config: ControlConfig) -> None:
        self._fixed: tuple[_Token, ...] = ()
        token = config.token.reveal().strip().encode()
        if token:
            if len(token) < LEAST_TOKEN_CHARACTERS or len(token.split()) > 1:
                raise ServeError(
                    "control_token: a token is one word of at least "
                    f"{LEAST_TOKEN_CHARACTERS} characters"
                )
            self._fixed = (_Token(token, Principal("token of the environment", frozenset(Role))),)
        try:
            self._everyone, self._named = client_roles(config.client_roles)
        except ValueError as exc:
            raise ServeError(f"control_client_roles: {exc}") from exc
        self._file: WatchedFile[tuple[_Token, ...]] | None = None
        if config.token_file:
            self._file = WatchedFile(
                config.token_file,
                what="control token file",
                stays="the last tokens stay",
                parse=lambda data: tuple(_Token(value, who) for value, who in parse_tokens(data)),
                most_bytes=_MAX_FILE_BYTES,
            )

    @property
    def has_tokens(self) -> bool:
        """Whether any token is configured."""
        return bool(self._fixed) or self._file is not None

    @property
    def has_client_roles(self) -> bool:
        """Whether any client certificate has a role."""
        return bool(self._everyone) or bool(self._named)

    @staticmethod
    def local(peer: Peer) -> Principal | None:
        """The sender over our Unix socket: this user or root, with all roles."""
        if peer.uid is None or peer.uid not in {os.geteuid(), _ROOT}:
            return None
        return Principal(f"uid {peer.uid}", frozenset(Role))

    def remote(self, peer: Peer, authorization: str) -> Principal | None:
        """The sender over TCP, None without valid credentials; a token before a certificate."""
        if authorization:
            return self._bearer(authorization)
        if peer.common_name is None:
            return None
        roles = self._everyone | self._named.get(peer.common_name, frozenset())
        # the name is written to logs as it is
        name = printable(peer.common_name)
        return Principal(f"certificate {name}", roles) if roles else None

    def _bearer(self, authorization: str) -> Principal | None:
        from_file = () if self._file is None else self._file.value()
        scheme, _, shown = authorization.strip().partition(" ")
        offered = shown.strip().encode("latin-1", "replace")
        principal = None
        # Always all comparisons, so that the time tells nothing.
        for token in (*self._fixed, *from_file):
            if hmac.compare_digest(token.value, offered):
                principal = token.principal
        return principal if scheme.lower() == "bearer" else None
