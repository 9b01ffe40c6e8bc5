"""The files of `gpumem-otel record`: set older ones aside before the job, report new ones after."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpumem_otel.base.profile import Identity

Stamps = dict[Path, tuple[int, int, int]]
"""Inode, time and size of each file: another value means a new version."""

_HEADER_BYTES = 64 * 1024

_CLOSED = b"\x00\x00\xff\xff\x03\x00"
"""What precedes the last eight bytes of a closed file: a flush and an empty block (RFC 1951)."""


def stamps(target: Path) -> Stamps:
    """OUT and the files of other ranks, restarts and processes next to it, by rank."""
    from gpumem_otel.recording.file import files_of

    stamped = {}
    with suppress(OSError):  # the job matters more than the list of its files
        for file in files_of(str(target)):
            with suppress(OSError):
                status = file.path.stat()
                stamped[file.path] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return stamped


class RecordedFiles(NamedTuple):
    """An older recording that was renamed.

    Attributes:
        place: where it was, links followed.
        kept: where it is now, a hidden file of the same folder.
    """

    place: Path
    kept: Path


def check_target(out: str, target: Path) -> None:
    """Refuse a file that cannot be written, now rather than after hours of training.

    Raises:
        CommandFailed: it cannot be written.
        click.UsageError: the file exists and is not a recording.
    """
    from gpumem_otel.cli.output import CommandFailed

    if target.is_dir():
        raise CommandFailed(f"{out}: is a directory")
    if not target.parent.is_dir():
        raise CommandFailed(f"{target.parent}: no such directory")
    needed = [target] if target.exists() else []
    if target.is_file() or not needed:
        needed.append(target.parent)  # a file is made again
    if not all(os.access(path, os.W_OK) for path in needed):
        raise CommandFailed(f"{out}: cannot be written")
    if target.is_file() and os.access(target, os.R_OK) and _writer(target) is None:
        raise click.UsageError(f"{out} exists and is not a recording; choose another name")


def set_aside(target: Path, environ: Mapping[str, str]) -> list[RecordedFiles]:
    """Rename what an earlier run left under OUT's names, so that this run can use them.

    Only finished recordings, and those of a process of this machine that has ended, are renamed.
    Where the job starts the command line once per rank, or again after a failure, the files of
    other ranks and of earlier starts belong to the same job and stay.
    """
    from gpumem_otel.recording.file import files_of
    from gpumem_otel.settings.identity import identify

    ours = identify(environ)
    moved = []
    with suppress(OSError):
        for file in files_of(str(target)):
            other_rank = ours.world_size > 1 and file.rank != ours.rank
            if other_rank or file.restart < ours.restart:
                continue
            with suppress(OSError):
                real = Path(os.path.realpath(file.path))  # a link stays a link
                if real.is_file() and os.access(real, os.W_OK) and _is_done(real, ours):
                    kept = real.with_name(f".{real.name}.{os.getpid()}.old")
                    real.rename(kept)
                    moved.append(RecordedFiles(real, kept))
    return moved


def settle(
    moved: Sequence[RecordedFiles], environ: Mapping[str, str], *, replaced: bool
) -> list[str]:
    """Remove what was set aside where new recordings replace it, else put it back.

    Returns:
        lines about it for people.
    """
    from gpumem_otel.settings.identity import identify

    ours = identify(environ)
    names: list[str] = []
    lines = []
    for place, kept in moved:
        try:
            if replaced:
                kept.unlink()
                names.append(place.name)
            elif not place.exists() or not place.stat().st_size or _is_done(place, ours):
                kept.replace(place)  # over a recording without a reading
                names.append(place.name)
            else:
                other = place.with_name(f"{place.name}.old")
                kept.replace(other)
                names.append(other.name)
        except OSError as error:  # noqa: PERF203 - a few files
            lines.append(f"gpumem-otel: {kept}: {error.strerror}")
    if names:
        done = "removed" if replaced else "kept"
        lines.append(f"gpumem-otel: {done} older recordings: {', '.join(names)}")
    return lines


def report(path: Path) -> tuple[int, list[str]]:
    """Number of readings of a recording, 0 where it cannot be read; lines about it for people."""
    from gpumem_otel.base.text import human_bytes
    from gpumem_otel.errors import SnapshotError
    from gpumem_otel.recording.reader import load_recording

    try:
        with path.open("rb") as file:
            size = human_bytes(os.fstat(file.fileno()).st_size)
            recording = load_recording(file, name=str(path))
    except SnapshotError as error:
        return 0, [f"gpumem-otel: {error}"]
    except OSError as error:
        return 0, [f"gpumem-otel: {path}: {error.strerror}"]
    count = len(recording.readings)
    lines = [f"gpumem-otel: {path}: {count} readings, {size}"] if count else []
    lines += [f"gpumem-otel: warning: {path}: {warning}" for warning in recording.warnings]
    return count, lines


def _writer(path: Path) -> Identity | None:
    """The process that wrote a recording, None where the file is not a recording.

    Raises:
        OSError: it cannot be read.
    """
    from gpumem_otel.errors import SnapshotError
    from gpumem_otel.recording.reader import load_recording

    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
    try:
        text = zlib.decompressobj(wbits=31).decompress(head, _HEADER_BYTES)
        return load_recording(text.split(b"\n", 1)[0] + b"\n", name=str(path)).identity
    except (zlib.error, SnapshotError):
        return None


def _is_done(path: Path, ours: Identity) -> bool:
    """Whether the file is a recording that no process still writes."""
    writer = _writer(path)
    if writer is None:
        return False
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - len(_CLOSED) - 8, 0))
        closed = file.read(len(_CLOSED)) == _CLOSED
    return closed or (writer.node == ours.node and not _lives(writer.pid))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # another user's, or another machine's
    return True
