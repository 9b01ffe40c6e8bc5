"""Who may command: roles of bearer tokens, of client certificates, and of this user's processes.

A token file has one line for each token, `ROLE[,ROLE] TOKEN [NAME]`:

    # who watches
    read                 3q6Rr1i9yq2mJ0v8XcZb4w  dashboard
    read,yield,restore   Vw1nq7H0b5YkT2c9LzP8sd  scheduler

Empty lines and those that begin with # are left out. The name is what the audit log says; a token
without one is called by its line.
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
    """What somebody may do. Who may command may look at what became of it."""

    READ = "read"
    YIELD = "yield"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who sends a request.

    Attributes:
        name: for the audit log and the limits: `token scheduler`, `certificate ops`, `uid 1000`.
        roles: what it may do, as given; see `may`.
    """

    name: str
    roles: frozenset[Role]

    def may(self, role: Role) -> bool:
        """Whether it may do this."""
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
        raise ValueError("holds something else than ASCII") from None
    found: dict[bytes, Principal] = {}
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
        if token in found:
            raise ValueError(f"line {number}: this token stands on an earlier line too")
        name = words[2] if len(words) > _WORDS.start else f"line {number}"
        found[token] = Principal(f"token {name}", roles)
    if not found:
        raise ValueError("holds no token")
    if len(found) > _MAX_TOKENS:
        raise ValueError(f"holds more than {_MAX_TOKENS} tokens")
    return tuple(found.items())


def client_roles(words: Iterable[str]) -> tuple[frozenset[Role], Mapping[str, frozenset[Role]]]:
    """(roles of every client certificate, roles of a common name besides those).

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
    """Tells who sends a request over TCP, or over this user's socket.

    A token file that vanishes or breaks later never opens the door: the last tokens stay valid.

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
        """Whether there are tokens at all."""
        return bool(self._fixed) or self._file is not None

    @property
    def has_client_roles(self) -> bool:
        """Whether a client certificate may do anything."""
        return bool(self._everyone) or bool(self._named)

    @staticmethod
    def local(peer: Peer) -> Principal | None:
        """Who is at the other end of our Unix socket: this user or root, with all roles."""
        if peer.uid is None or peer.uid not in {os.geteuid(), _ROOT}:
            return None
        return Principal(f"uid {peer.uid}", frozenset(Role))

    def remote(self, peer: Peer, authorization: str) -> Principal | None:
        """Who came over TCP, None where nobody vouches for them.

        A token that is shown decides, also beside a certificate.
        """
        if authorization:
            return self._bearer(authorization)
        if peer.common_name is None:
            return None
        roles = self._everyone | self._named.get(peer.common_name, frozenset())
        # the name stands in logs as it is
        name = printable(peer.common_name)
        return Principal(f"certificate {name}", roles) if roles else None

    def _bearer(self, authorization: str) -> Principal | None:
        from_file = () if self._file is None else self._file.value()
        scheme, _, shown = authorization.strip().partition(" ")
        offered = shown.strip().encode("latin-1", "replace")
        found = None
        # Every comparison runs, whatever the earlier ones said.
        for token in (*self._fixed, *from_file):
            if hmac.compare_digest(token.value, offered):
                found = token.principal
        return found if scheme.lower() == "bearer" else None
