"""The files of `gpumem-otel record`: older ones removed before the job, new ones told after it."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpumem_otel.core.model import Identity

__all__ = ["Stamps", "remove_older", "report", "stamps"]

Stamps = dict[Path, tuple[int, int, int]]
"""Files with what tells a new version of each."""

_HEADER_BYTES = 64 * 1024

_CLOSED = b"\x00\x00\xff\xff\x03\x00"
"""Before the eight bytes that end a gzip: a flush, then a last empty block (RFC 1951, 3.2.6)."""


def stamps(target: Path) -> Stamps:
    """OUT and the files of ranks, restarts and further processes beside it, by rank."""
    from gpumem_otel.export.recordfile import files_of

    found = {}
    with suppress(OSError):  # the job is more than the list of its files
        for file in files_of(str(target)):
            with suppress(OSError):
                status = file.path.stat()
                found[file.path] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return found


def remove_older(target: Path, environ: Mapping[str, str]) -> None:
    """Remove what an earlier run left under OUT's names, so that this one gets them.

    Only finished recordings (or those of a process of this machine that is gone) and empty files
    are removed. Where this is one rank of a job that starts the command line once per rank, or a
    restart of it, the files of other ranks and of earlier starts are this very job's and stay.
    """
    from gpumem_otel.export.recordfile import files_of
    from gpumem_otel.ranks import identify

    ours = identify(environ)
    removed = []
    with suppress(OSError):
        for file in files_of(str(target)):
            others = ours.world_size > 1 and file.rank != ours.rank
            if others or file.restart < ours.restart:
                continue
            with suppress(OSError):
                real = Path(os.path.realpath(file.path))  # a link stays a link
                if real.is_file() and os.access(real, os.W_OK) and _is_done(real, ours):
                    real.unlink()
                    removed.append(file.path.name)
    if removed:
        click.echo(f"gpumem-otel: removed older recordings: {', '.join(removed)}", err=True)


def report(path: Path) -> int:
    """Say what is in a recording; number of its readings, 0 where it can not be read."""
    from gpumem_otel.cli.common import warn
    from gpumem_otel.core.recording import load_recording
    from gpumem_otel.core.text import human_bytes
    from gpumem_otel.errors import SnapshotError

    try:
        with path.open("rb") as file:
            size = human_bytes(os.fstat(file.fileno()).st_size)
            recording = load_recording(file, name=str(path))
    except SnapshotError as error:
        click.echo(f"gpumem-otel: {error}", err=True)
        return 0
    except OSError as error:
        click.echo(f"gpumem-otel: {path}: {error.strerror}", err=True)
        return 0
    count = len(recording.readings)
    if count:
        click.echo(f"gpumem-otel: {path}: {count} readings, {size}", err=True)
    for warning in recording.warnings:
        warn(f"{path}: {warning}")
    return count


def _is_done(path: Path, ours: Identity) -> bool:
    """Whether the file is empty, or a recording that nobody writes any more."""
    from gpumem_otel.core.recording import load_recording
    from gpumem_otel.errors import SnapshotError

    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
        if not head:
            return True
        file.seek(max(file.seek(0, os.SEEK_END) - len(_CLOSED) - 8, 0))
        closed = file.read(len(_CLOSED)) == _CLOSED
    try:
        text = zlib.decompressobj(wbits=31).decompress(head, _HEADER_BYTES)
        writer = load_recording(text.split(b"\n", 1)[0] + b"\n", name=str(path)).identity
    except (zlib.error, SnapshotError):
        return False
    return closed or (writer.node == ours.node and not _lives(writer.pid))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
