"""Bearer tokens of readers: compared in constant time, read again when their file changes."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from gpumem_otel.serve.watchedfile import WatchedFile
from gpumem_otel.settingfiles import MOST_TOKEN_BYTES

if TYPE_CHECKING:
    from gpumem_otel.config import Secret

__all__ = ["Tokens"]


class Tokens:
    """The tokens that open the listener: the configured one, the one in the file, or both.

    A file that vanishes or empties later never opens the listener: the last token stays valid.

    Raises:
        ServeError: the token file can not be read or holds no token.
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
        scheme, _, shown = authorization.strip().partition(" ")
        offered = shown.strip().encode("latin-1", "replace")
        # Every comparison runs, whatever the earlier ones said.
        matches = [
            hmac.compare_digest(token, offered)
            for token in (self._fixed, from_file)
            if token is not None
        ]
        return scheme.lower() == "bearer" and any(matches)


def _token_in(data: bytes) -> bytes:
    token = data.strip()
    if not token:
        raise ValueError("is empty")
    if len(token.split()) > 1:
        raise ValueError("does not hold one token")
    return token
