"""A file whose contents count as they are now: read again when it changes, kept when it breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from gpumem_otel.errors import ConfigError, ServeError
from gpumem_otel.logs import named_logger
from gpumem_otel.settingfiles import contents, stamp

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WatchedFile"]

_log = named_logger("gpumem_otel.serve")

_T = TypeVar("_T")


class WatchedFile(Generic[_T]):
    """What a file held when it could last be used.

    Args:
        path: of the file.
        what: its name in messages: `token file`.
        stays: what a warning says of the value where the file has vanished or broken.
        parse: makes the value; a ValueError says in one clause what is wrong.
        most_bytes: a larger one can not be used.

    Raises:
        ServeError: it can not be read, or not be used, at the start.
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
            self._seen, self._value = self._read()
        except ConfigError as exc:
            raise ServeError(f"{what} {exc}") from exc

    def value(self) -> _T:
        """The value, after a look at whether the file has changed; warns once, never raises."""
        try:
            if not self._seen or stamp(self._path) != self._seen:
                self._seen, self._value = self._read()
            self._warned = False
        except ConfigError as exc:
            if not self._warned:
                self._warned = True
                _log.warning("%s %s: %s", self._what, exc, self._stays)
        return self._value

    def _read(self) -> tuple[tuple[int, ...], _T]:
        seen = stamp(self._path)
        data = contents(self._path, self._most_bytes)
        try:
            return seen, self._parse(data)
        except ValueError as exc:
            raise ConfigError(f"{self._path}: {exc}") from exc
