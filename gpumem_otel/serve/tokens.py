"""Bearer tokens of readers: compared in constant time, read again when their file changes."""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_otel.errors import ServeError
from gpumem_otel.logs import named_logger

if TYPE_CHECKING:
    from gpumem_otel.config import Secret

__all__ = ["Tokens"]

_log = named_logger("gpumem_otel.serve")

_MAX_TOKEN_BYTES = 16 * 1024


class Tokens:
    """The tokens that open the listener: the configured one, the one in the file, or both.

    A file that vanishes or empties later never opens the listener: the last token stays valid.

    Raises:
        ServeError: the token file can not be read or holds no token.
    """

    def __init__(self, token: Secret, token_file: str) -> None:
        self._fixed = token.reveal().strip().encode() or None
        self._file = Path(token_file) if token_file else None
        self._from_file: bytes | None = None
        self._seen: tuple[int, int, int] | None = None
        self._warned = False
        if self._file is not None:
            try:
                self._load(self._file)
            except (OSError, ValueError) as exc:
                raise ServeError(f"token file {token_file}: {_reason(exc)}") from exc

    @property
    def required(self) -> bool:
        """Whether readers must show a token at all."""
        return self._fixed is not None or self._file is not None

    def accept(self, authorization: str) -> bool:
        """Whether the value of an Authorization header holds a valid bearer token."""
        if not self.required:
            return True
        self._refresh()
        scheme, _, shown = authorization.strip().partition(" ")
        offered = shown.strip().encode("latin-1", "replace")
        # Every comparison runs, whatever the earlier ones said.
        matches = [
            hmac.compare_digest(token, offered)
            for token in (self._fixed, self._from_file)
            if token is not None
        ]
        return scheme.lower() == "bearer" and any(matches)

    def _refresh(self) -> None:
        if self._file is None:
            return
        try:
            if _stamp(self._file) != self._seen:
                self._load(self._file)
            self._warned = False
        except (OSError, ValueError) as exc:
            if not self._warned:
                self._warned = True
                _log.warning("token file %s: %s: the last token stays", self._file, _reason(exc))

    def _load(self, path: Path) -> None:
        stamp = _stamp(path)
        with path.open("rb") as file:
            token = file.read(_MAX_TOKEN_BYTES + 1).strip()
        if not token:
            raise ValueError("is empty")
        if len(token) > _MAX_TOKEN_BYTES or len(token.split()) > 1:
            raise ValueError("does not hold one token")
        self._from_file, self._seen = token, stamp


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_ino, status.st_size


def _reason(exc: OSError | ValueError) -> str:
    if isinstance(exc, OSError) and exc.errno is not None:
        return os.strerror(exc.errno)
    return str(exc)
