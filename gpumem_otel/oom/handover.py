"""The last /metrics of a process, which its supervisor goes on serving after its end.

One JSON file per process, in a folder that the supervisor made. Written when an allocation failed
and when the process ends; the last one counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from gpumem_otel.errors import ServeError
from gpumem_otel.settings import files

if TYPE_CHECKING:
    from gpumem_otel.settings.config import ServeConfig

_WHAT = "hand-over folder"
_NAME = re.compile(r"[1-9]\d{0,9}\.json")
_MAX_FILE_BYTES = 8 << 20
_MAX_FILES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalMetrics:
    """The last exposition of a process.

    Attributes:
        host: address that it listened on.
        guarded: readers had to show a token or a certificate.
        ooms: allocations that failed, on all its devices.
    """

    pid: int
    host: str
    port: int
    scheme: str
    guarded: bool
    ooms: int
    content_type: str
    body: str


def is_guarded(config: ServeConfig) -> bool:
    """Whether readers of a listener must authenticate."""
    return bool(config.token or config.token_file or config.tls_client_ca_file)


def leave(folder: str, final: FinalMetrics) -> None:
    """Write the file of this process completely; replaces an earlier one.

    Raises:
        ServeError: the folder is not safe to use, or cannot be written.
    """
    data = json.dumps(asdict(final)).encode() + b"\n"
    try:
        with files.opened(folder, _WHAT, ServeError) as descriptor:
            files.write_whole(descriptor, f"{final.pid}.json", data)
    except OSError as error:
        raise ServeError(f"{_WHAT} {folder}: {error.strerror}") from error


def left_in(folder: str) -> list[FinalMetrics]:
    """What processes left, in the order of their ports; of one port the latest.

    Raises:
        ServeError: the folder is not safe to read.
    """
    by_port: dict[int, tuple[float, FinalMetrics]] = {}
    try:
        with files.opened(folder, _WHAT, ServeError) as descriptor:
            names = os.listdir(descriptor)  # noqa: PTH208 - of the checked descriptor, not of a path
            for name in sorted(names)[:_MAX_FILES]:
                read = _read(descriptor, name) if _NAME.fullmatch(name) else None
                if read is not None:
                    written, final = read
                    if final.port not in by_port or written > by_port[final.port][0]:
                        by_port[final.port] = read
    except OSError as error:
        raise ServeError(f"{_WHAT} {folder}: {error.strerror}") from error
    return [final for _, (_, final) in sorted(by_port.items())]


def _read(folder: int, name: str) -> tuple[float, FinalMetrics] | None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
                return None
            raw = json.load(file)
        types = {field.name: field.type for field in fields(FinalMetrics)}
        if isinstance(raw, dict) and all(
            type(raw.get(key)).__name__ == kind for key, kind in types.items()
        ):
            return status.st_mtime, FinalMetrics(**{key: raw[key] for key in types})
    return None
