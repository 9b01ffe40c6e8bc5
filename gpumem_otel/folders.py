"""A folder of files that only this user may see, also where it lies in /tmp.

Others can write beside it, and may have put something in its place: what was really opened is
looked at, and must be ours, no symlink, and writable by nobody else.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpumem_otel.errors import GpumemError

__all__ = ["opened", "write_whole"]


@contextlib.contextmanager
def opened(
    folder: str,
    what: str,
    error: type[GpumemError],
    *,
    make: bool = False,
    root_sees_all: bool = False,
) -> Iterator[int]:
    """A descriptor of the folder.

    Args:
        folder: its path.
        what: what it is, for messages: "run directory".
        error: raised where it is not safe to use.
        make: create it and the folders above it, for this user alone, where they are not there.
        root_sees_all: root may open that of another user; what stands in it is theirs.

    Raises:
        OSError: it can not be opened.
    """
    if make:
        _make(Path(folder))
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if not os.path.islink(folder):  # noqa: PTH114  the open below holds against a race
        descriptor = os.open(folder, flags)
    else:
        raise error(f"{what} {folder} is a symlink: give its target")
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() and not (root_sees_all and os.geteuid() == 0):
            raise error(f"{what} {folder} belongs to another user: give your own")
        if stat.S_IMODE(status.st_mode) & 0o022:
            raise error(f"{what} {folder} is writable by others: chmod 700 it")
        yield descriptor
    finally:
        os.close(descriptor)


def _make(folder: Path) -> None:
    """Each folder for this user alone: `mkdir(parents=True)` leaves those above to the umask."""
    for one in (*reversed(folder.parents), folder):
        if not one.exists():
            with contextlib.suppress(FileExistsError):
                one.mkdir(mode=0o700)


def write_whole(folder: int, name: str, data: bytes) -> None:
    """Write a file for this user alone, whole or not at all; one of that name is replaced.

    Args:
        folder: descriptor of the folder.
        name: of the file.
        data: what it holds.

    Raises:
        OSError: it can not be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    temporary = f".{name}"
    try:
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(data)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
