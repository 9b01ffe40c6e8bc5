"""Profiles that wait on this machine until `gpumem-otel push` sends them.

Each is a gzipped pprof that only this user may read, in a folder of this user's; their number and
total size are bounded. A profile's comments hold the labels of its series, so that the file opens
in any viewer of pprof.

A profile is written before it is sent, so that a process that is killed in between loses nothing.
A name that begins with `sending-` means that a process is sending the file, for up to two minutes.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_otel.errors import SpoolError
from gpumem_otel.settings import files as folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_FILES = 64
MAX_BYTES = 64 << 20
"""Of all files together; the oldest make room for a new one."""

SUFFIX = ".pb.gz"
_SENDING = "sending-"
_SENDING_SECONDS = 120.0
"""No push takes longer than 60 s."""
_LABEL = "series label "
_WHAT = "spool folder"


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the folder."""

    name: str
    size_bytes: int
    age_seconds: float

    @property
    def is_free(self) -> bool:
        """Whether no process is sending it."""
        return not self.name.startswith(_SENDING) or self.age_seconds > _SENDING_SECONDS


def label_comments(labels: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Comments of a profile that name its series."""
    return tuple(f"{_LABEL}{name}={value}" for name, value in labels)


def labels_of(comments: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The labels that `label_comments` wrote; () where it wrote none."""
    texts = (text.removeprefix(_LABEL) for text in comments if text.startswith(_LABEL))
    pairs = (text.partition("=") for text in texts)
    return tuple((name, value) for name, equals, value in pairs if equals)


class Spool:
    """The profiles in one folder, which is made when the first one is written.

    Args:
        folder: its path.
        max_files: how many files it holds at most.
        max_bytes: how many bytes they hold together at most.
        on_dropped: called for each file that is deleted to make room.

    Raises:
        SpoolError: by every method, where the folder is not safe to use or the file system fails.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_files: int = MAX_FILES,
        max_bytes: int = MAX_BYTES,
        on_dropped: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder = folder
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._on_dropped = on_dropped

    def write(self, name: str, data: bytes, *, sending: bool = False) -> str:
        """Keep a profile.

        Args:
            name: of the file, without its suffix.
            data: gzipped pprof.
            sending: whether this process sends it next, and then calls `delete` or `release`.

        Returns:
            The file's name.
        """
        if len(data) > self._max_bytes:
            raise SpoolError(
                f"{_WHAT} {self.folder} holds at most {self._max_bytes} bytes: "
                f"a profile of {len(data)} bytes was not kept"
            )
        file_name = f"{_SENDING if sending else ''}{name}{SUFFIX}"
        with self._opened(make=True) as folder:
            self._make_room(folder, len(data))
            folders.write_whole(folder, file_name, data)
        return file_name

    def release(self, file_name: str) -> str:
        """Leave a file that could not be sent to `gpumem-otel push`; returns its new name."""
        free_name = self.free_name(file_name)
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            os.rename(file_name, free_name, src_dir_fd=folder, dst_dir_fd=folder)
        return free_name

    @staticmethod
    def free_name(file_name: str) -> str:
        """The name that `release` gives a file."""
        return file_name.removeprefix(_SENDING)

    def delete(self, file_name: str) -> None:
        """Delete a file that was sent, if it is still there."""
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            os.unlink(file_name, dir_fd=folder)

    def waiting(self) -> list[str]:
        """Names of the files that no process is sending, the oldest first; [] without a folder."""
        try:
            with self._opened() as folder:
                return [file.name for file in _files(folder) if file.is_free]
        except FileNotFoundError:
            return []

    def read(self, file_name: str) -> bytes:
        """The contents of a file."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with (
            self._opened() as folder,
            os.fdopen(os.open(file_name, flags, dir_fd=folder), "rb") as file,
        ):
            return file.read(self._max_bytes)

    def _make_room(self, folder: int, size_bytes: int) -> None:
        """Delete the oldest until another file fits."""
        files = _files(folder)
        held = sum(file.size_bytes for file in files)
        while files and (len(files) >= self._max_files or held + size_bytes > self._max_bytes):
            oldest = files.pop(0)
            held -= oldest.size_bytes
            with contextlib.suppress(FileNotFoundError):
                os.unlink(oldest.name, dir_fd=folder)
                self._on_dropped()

    @contextlib.contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[int]:
        try:
            with folders.opened(self.folder, _WHAT, SpoolError, make=make) as folder:
                yield folder
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SpoolError(f"{_WHAT} {self.folder}: {error.strerror}") from error


def _files(folder: int) -> list[_File]:
    """Our files, the oldest first; half-written files older than an hour are deleted."""
    spooled = []
    now = time.time()
    for name in os.listdir(folder):
        if not name.endswith(SUFFIX):
            continue
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        age = now - status.st_mtime
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            continue
        if name.startswith("."):
            if age > 3600:  # noqa: PLR2004 - its process was killed while it wrote
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
            continue
        spooled.append(_File(name, status.st_size, age))
    return sorted(spooled, key=lambda file: (-file.age_seconds, file.name))
