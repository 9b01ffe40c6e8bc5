"""What kind of file it is, by content and never by name, and its values as plain objects.

Known are pickle (protocols 2 to 5), JSON (UTF-8, or UTF-16 and UTF-32 with a byte order mark)
and our own recordings; each plain, in gzip, or in gzip twice, which is what a server makes of a
`.gz` file when it compresses what it sends.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from gpumem_otel.errors import SnapshotError
from gpumem_otel.snapshot.unpickle import loads

RECORDING_FORMAT: Final = "gpumem-recording"
"""Value of the key "format" in the first line of a recording of ours."""

_MAX_BYTES = 8 << 30
_HEAD_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_PPROF = b"\x0a"
"""A message begins with its first field, of bytes: the sample types."""
_GZIP_LAYERS = 2

# Real files shrink to between a fifth and a sixtieth, zeros to a thousandth.
_MAX_RATIO = 100
_RATIO_FLOOR_BYTES = 32 << 20

_INT64 = 2**63

_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive (as torch.save writes)",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"SQLite format 3": "an SQLite database",
    b"<": "HTML or XML",
}


@dataclass(frozen=True, slots=True)
class RecordingBytes:
    """Bytes of one of our recordings, for `recording` to read.

    Attributes:
        data: its bytes, plain or in gzip (which may lack its end).
    """

    data: bytes


def read_all(
    path: str | os.PathLike[str] | BinaryIO, name: str | None, *, pprof: bool = False
) -> tuple[bytes, str]:
    """The bytes of a file, and what to call it.

    The first bytes must look like a known format before the rest is read, so that /dev/zero or
    the wrong file of 100 GB costs nothing.

    Args:
        path: file name, or a file open for reading bytes.
        name: what to call it.
        pprof: a plain pprof profile is accepted too.

    Raises:
        SnapshotError: it cannot be read, or is no snapshot.
    """
    if isinstance(path, str | os.PathLike):
        source = name or os.fspath(path)
        try:
            with open(path, "rb") as file:  # noqa: PTH123 (a name, or anything that has one)
                return _read(file, source, pprof=pprof), source
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise SnapshotError(source, reason[:1].lower() + reason[1:]) from None
    source = name or str(getattr(path, "name", "<stream>"))
    try:
        return _read(path, source, pprof=pprof), source
    except (OSError, ValueError) as error:
        raise SnapshotError(source, str(error) or type(error).__name__) from None


def _read(file: BinaryIO, source: str, *, pprof: bool) -> bytes:
    try:
        head = file.read(_HEAD_BYTES)
        if not isinstance(head, bytes):
            raise SnapshotError(source, "opened as text, it has to be opened for reading bytes")
        if not (pprof and head.startswith(_PPROF)):
            _refuse_other_formats(head, source)
        if _is_whole(file, head):
            file.seek(0)
            return file.read()  # without a copy
        # in pieces: read(n) would take memory for n bytes at once
        pieces = [head]
        size = len(head)
        while piece := file.read(_CHUNK_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > _MAX_BYTES:
                raise SnapshotError(source, f"larger than {_MAX_BYTES} bytes")
        return b"".join(pieces)
    except MemoryError:
        raise SnapshotError(source, "it does not fit into memory") from None


def _is_whole(file: BinaryIO, head: bytes) -> bool:
    """Whether it is a file on disk, read from its beginning, of a size that may be read at once."""
    try:
        about = os.fstat(file.fileno())
        return (
            stat.S_ISREG(about.st_mode)
            and file.tell() == len(head)
            and len(head) < about.st_size <= _MAX_BYTES
        )
    except (OSError, AttributeError):
        return False


def decode(data: bytes, source: str) -> tuple[object, int]:
    """The values in a file, or a `RecordingBytes`, and its size in bytes, uncompressed.

    Raises:
        SnapshotError: it is of none of the known kinds, damaged, or made to do harm.
    """
    allowance = len(data)
    for layer in range(_GZIP_LAYERS + 1):
        _refuse_other_formats(data, source)
        if data[:2] != _GZIP:
            break
        if layer == _GZIP_LAYERS:
            raise SnapshotError(source, f"gzip in gzip, more than {_GZIP_LAYERS} times")
        if _is_recording(_gunzip_head(data)):
            return RecordingBytes(data), len(data)
        data = _gunzip(data, source, allowance)
    if data[:1] == b"\x80":
        return loads(data, source), len(data)
    if _is_recording(data[:_HEAD_BYTES]):
        return RecordingBytes(data), len(data)
    return _json(data, source), len(data)


def _refuse_other_formats(data: bytes, source: str) -> None:
    if not data:
        raise SnapshotError(source, "empty file")
    if data[:2] == _GZIP or data[:1] == b"\x80":
        return
    if data.startswith(_BYTE_ORDER_MARKS) or data[:_HEAD_BYTES].lstrip()[:1] in (b"{", b"["):
        return
    for magic, format_name in _OTHER_FORMATS.items():
        if data.startswith(magic):
            raise SnapshotError(source, f"{format_name}, not a memory snapshot")
    raise SnapshotError(source, "neither a pickle nor JSON nor gzip of one")


def _gunzip_head(data: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(data[:_HEAD_BYTES], _HEAD_BYTES)
    except zlib.error:
        return b""


def _gunzip(data: bytes, source: str, allowance: int) -> bytes:
    """Decompress all members; refuses a bomb once it is out of proportion.

    Args:
        data: gzip.
        source: name for messages.
        allowance: bytes of the file itself, of which `data` may be an inner layer.
    """
    out: list[bytes] = []
    size = used = 0
    try:
        while used < len(data):
            if out and not data[used] and not data[used:].strip(b"\0"):
                break  # padding, as tapes and tar leave it
            member = zlib.decompressobj(wbits=31)
            while not member.eof:
                chunk = member.unconsumed_tail
                if not chunk:
                    chunk = data[used : used + _HEAD_BYTES]
                    used += len(chunk)
                piece = member.decompress(chunk, _CHUNK_BYTES)
                if not chunk and not piece:
                    raise SnapshotError(source, "gzip cut short")
                out.append(piece)
                size += len(piece)
                read = min(used - len(member.unconsumed_tail), allowance)
                if size > _RATIO_FLOOR_BYTES + _MAX_RATIO * read or size > _MAX_BYTES:
                    raise SnapshotError(source, f"gzip that grows to more than {size} bytes")
            used -= len(member.unused_data)
        return b"".join(out)
    except zlib.error as error:
        raise SnapshotError(source, f"damaged gzip: {error}") from None
    except MemoryError:
        raise SnapshotError(source, "it does not fit into memory") from None


def _is_recording(head: bytes) -> bool:
    line = head.split(b"\n", 1)[0]
    if RECORDING_FORMAT.encode() not in line:
        return False
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and first.get("format") == RECORDING_FORMAT


def _json(data: bytes, source: str) -> object:
    # A pickle shares repeated frames and JSON cannot. They are shared again here, since grouping
    # by stack compares frames by identity, and a long trace repeats few frames very often.
    frames: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}

    def share(value: dict[str, Any]) -> dict[str, Any]:
        if "filename" not in value or "line" not in value:
            return value
        for part in value.values():
            # neither containers nor huge numbers, of which many can have the same hash
            if type(part) is not str and not (type(part) is int and -_INT64 <= part < 2 * _INT64):
                return value
        return frames.setdefault(tuple(value.items()), value)

    try:
        return json.loads(data, object_hook=share)
    except RecursionError:
        raise SnapshotError(source, "JSON nested too deep") from None
    except MemoryError:
        raise SnapshotError(source, "it does not fit into memory") from None
    except json.JSONDecodeError as error:
        raise SnapshotError(source, f"damaged JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise SnapshotError(source, f"damaged JSON: {error.reason} at byte {error.start}") from None
    except ValueError:  # what is left: Python refuses numbers of more than 4300 digits
        raise SnapshotError(source, "JSON with a number of too many digits") from None
