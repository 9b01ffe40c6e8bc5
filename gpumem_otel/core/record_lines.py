"""The lines of a recording file, gzip or plain, whatever became of its end."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gpumem_otel.core import recordform as form
from gpumem_otel.errors import SnapshotError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

__all__ = ["read_content", "whole_lines"]

_CHUNK = 1 << 20


def read_content(
    data: bytes | str | os.PathLike[str] | BinaryIO, name: str | None
) -> tuple[bytes, str]:
    """Bytes and name of a file.

    Raises:
        SnapshotError: it can not be read, or is too large.
    """
    if isinstance(data, bytes | bytearray | memoryview):
        content, source = bytes(data), name or "<recording>"
    else:
        try:
            if hasattr(data, "read"):
                source = name or str(getattr(data, "name", "<recording>"))
                content = data.read(form.MAX_FILE_BYTES + 1)
            else:
                source = name or str(data)
                with Path(data).open("rb") as file:
                    content = file.read(form.MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            raise SnapshotError(source, getattr(error, "strerror", None) or str(error)) from None
    if len(content) > form.MAX_FILE_BYTES:
        raise SnapshotError(source, f"larger than {form.MAX_FILE_BYTES} bytes")
    return content, source


def whole_lines(content: bytes, source: str, warnings: list[str]) -> Iterator[bytes]:
    """Whole lines of the text; what is missing at its end is told in `warnings`.

    A process that was killed leaves a file without an end: what follows the last newline is left
    out.

    Raises:
        SnapshotError: damaged, or more text than a recording may hold.
    """
    pending: list[bytes] = []
    length = total = 0
    for piece in _pieces(content, source, warnings):
        total += len(piece)
        if total > form.MAX_TEXT_BYTES:
            raise SnapshotError(source, f"holds more than {form.MAX_TEXT_BYTES} bytes of text")
        first, *rest = piece.split(b"\n")
        pending.append(first)
        length += len(first)
        if length > form.MAX_LINE_BYTES:
            raise SnapshotError(source, f"a line is longer than {form.MAX_LINE_BYTES} bytes")
        for part in rest:
            yield b"".join(pending)
            pending, length = [part], len(part)
    if length:
        warnings.append("the recording is cut: its last line is left out")


def _pieces(content: bytes, source: str, warnings: list[str]) -> Iterator[bytes]:
    if content[:2] != b"\x1f\x8b":
        for start in range(0, len(content), _CHUNK):
            yield content[start : start + _CHUNK]
        return
    inflate = zlib.decompressobj(wbits=31)
    given = 0
    while not inflate.eof:
        data = inflate.unconsumed_tail
        if not data:
            data = content[given : given + _CHUNK]
            given += len(data)
        try:
            piece = inflate.decompress(data, _CHUNK)
        except zlib.error:
            raise SnapshotError(source, "damaged gzip") from None
        if piece:
            yield piece
        elif not data:
            warnings.append("the recording was not closed: its writer was stopped")
            return
