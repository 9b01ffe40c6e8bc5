"""An unnamed file on fast local storage (mode 0600, unlinked from the start).

A crash leaves nothing behind. Reads and writes bypass the page cache where the file system allows
it (`O_DIRECT`), since its pages count as memory of the cgroup that is short of memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.copy.gc_control import register_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable

DISK_BLOCK: Final = 4096
"""Offsets, lengths and addresses of direct transfers are multiples of it."""

_MARGIN: Final = 256 << 20
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


class DiskFile:
    """Disk space of a given size, allocated at once.

    Args:
        folder: for the file.
        size_bytes: to allocate.
        margin_bytes: must stay free on the file system.

    Raises:
        YieldRefusedError: the folder is not writable, too small, or in memory.
    """

    def __init__(self, folder: str, size_bytes: int, margin_bytes: int = _MARGIN) -> None:
        try:
            kind = _file_system(folder)
            if kind in _IN_MEMORY:
                raise YieldRefusedError(
                    f"disk: {folder} is a {kind}, which is host memory; give a folder on disk"
                )
            status = os.statvfs(folder)
            free = status.f_bavail * status.f_frsize
            if free < size_bytes + margin_bytes:
                raise YieldRefusedError(
                    f"disk: {folder} has {_mib(free)} MiB free, {_mib(size_bytes)} and a margin of "
                    f"{_mib(margin_bytes)} are needed; give another folder or yield less"
                )
            self._file = _unnamed(folder)
        except OSError as error:
            raise YieldRefusedError(f"disk: {folder}: {error}; give another folder") from error
        register_after_fork(self)
        self.size_bytes = size_bytes
        try:
            os.posix_fallocate(self._file, 0, max(size_bytes, 1))
        except OSError as error:
            self.close()
            raise YieldRefusedError(
                f"disk: no {_mib(size_bytes)} MiB in {folder}: {error}; give another folder"
            ) from error
        self._direct = False
        self._set_direct(on=True)

    def write(self, offset: int, data: memoryview) -> None:
        """Write all data at an offset; both multiples of `DISK_BLOCK`.

        Raises:
            YieldRefusedError: writing failed.
        """
        try:
            self._whole(lambda at: os.pwrite(self._file, data[at:], offset + at), len(data))
        except OSError as error:
            raise YieldRefusedError(f"disk: writing failed: {error}; nothing was freed") from error

    def read(self, offset: int, data: memoryview) -> None:
        """Fill the data from an offset; both multiples of `DISK_BLOCK`.

        Raises:
            YieldFailedError: reading failed.
        """
        try:
            self._whole(lambda at: os.preadv(self._file, [data[at:]], offset + at), len(data))
        except OSError as error:
            raise YieldFailedError(
                f"disk: reading back failed: {error}; the file is kept, try again"
            ) from error

    def close(self) -> None:
        """Free the disk space."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def forget_parent(self) -> None:
        """In a forked child, which would keep the space allocated as long as it lives."""
        self.close()

    def _whole(self, move: Callable[[int], int], size: int) -> None:
        at = 0
        while at < size:
            try:
                moved = move(at)
            except OSError as error:
                if error.errno == errno.EINVAL and self._direct:
                    self._set_direct(on=False)  # a different block size
                    continue
                raise
            if moved <= 0:
                raise OSError(errno.EIO, "the file is shorter than it was made")
            at += moved
            if at % DISK_BLOCK and self._direct:
                self._set_direct(on=False)

    def _set_direct(self, *, on: bool) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
        self._direct = False
        with contextlib.suppress(OSError):  # not supported, as in memory
            fcntl.fcntl(self._file, fcntl.F_SETFL, wanted)
            self._direct = on


def _file_system(folder: str) -> str:
    """The file system type of a folder by `/proc/self/mountinfo`, "" if unknown; see proc(5)."""
    device = Path(folder).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2:3] == [number]:
                return after.split()[0]
    return ""


def _unnamed(folder: str) -> int:
    with contextlib.suppress(OSError):  # not supported here
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    file, path = tempfile.mkstemp(prefix=".gpumem-", dir=folder)
    os.unlink(path)  # noqa: PTH108
    return file


def _mib(size_bytes: int) -> int:
    return size_bytes >> 20
