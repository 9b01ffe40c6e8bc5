"""What a file is, by content."""

from __future__ import annotations

import gzip
import io
import json

import pytest
from support.hostile import FILES, HARMLESS

from gpumem_otel.errors import SnapshotError
from gpumem_otel.profiles.of_file import parse_snapshot
from gpumem_otel.snapshot import load

RECORDING = b'{"version":1,"format":"gpumem-recording"}\n{"strings":[]}\n'


@pytest.mark.parametrize("name", FILES)
def test_hostile_files_are_refused(name):
    with pytest.raises(SnapshotError) as caught:
        parse_snapshot(FILES[name](), "stranger")
    assert caught.value.source == "stranger"
    assert 0 < len(caught.value.reason) < 250
    assert "\n" not in caught.value.reason


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_ones_are_used_as_any_other(name):
    snapshot = parse_snapshot(HARMLESS[name](), "stranger")
    groups = snapshot.live_groups(0)
    assert sum(group.size_bytes for group in groups) == snapshot.totals(0).allocated_bytes
    assert bool(snapshot.warnings) == ("frees" in name)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"PK\x03\x04" + b"x" * 40, "a zip archive (as torch.save writes), not a memory snapshot"),
        (b"BZh91AY", "a bzip2 file, not a memory snapshot"),
        (b"\xfd7zXZ\0", "an xz file, not a memory snapshot"),
        (b"\x28\xb5\x2f\xfd", "a zstd file, not a memory snapshot"),
        (b"SQLite format 3\0", "an SQLite database, not a memory snapshot"),
        (b"<!DOCTYPE html>", "HTML or XML, not a memory snapshot"),
        (b"hello", "neither a pickle nor JSON nor gzip of one"),
        (b"\0" * 100, "neither a pickle nor JSON nor gzip of one"),
        (gzip.compress(b"", mtime=0), "empty file"),
        (gzip.compress(b"hello", mtime=0), "neither a pickle nor JSON nor gzip of one"),
        (b"\x1f\x8b", "gzip cut short"),
        (b"\x1f\x8b\x08", "gzip cut short"),
        (gzip.compress(b"{}", mtime=0)[:-1], "gzip cut short"),
        (gzip.compress(b"{}", mtime=0) + b"x", "gzip cut short"),
        (
            gzip.compress(b"{}", mtime=0) + b"xy",
            "damaged gzip: Error -3 while decompressing data: ",
        ),
        (b"{", "damaged JSON: Expecting property name"),
        (b'{"a": 1} {"a": 2}', "damaged JSON: Extra data"),
        (b'{"a": "\xff"}', "damaged JSON: invalid start byte at byte 7"),
        (b"\xef\xbb\xbf", "damaged JSON: Expecting value"),
        (b"[NaN, 1e999, -Infinity]", "not a readable memory snapshot: entry of segments 0"),
        (b'{"traceEvents": []}', "not a readable memory snapshot: it has neither 'segments' nor"),
        (b'{"format": "gpumem-recording-of-another"}', "not a readable memory snapshot"),
    ],
)
def test_what_it_is_instead_is_said(data, reason):
    with pytest.raises(SnapshotError) as caught:
        parse_snapshot(data, "x")
    assert caught.value.reason.startswith(reason)


@pytest.mark.parametrize("at", [10, 100, 1000])
def test_a_flipped_bit_in_gzip_is_found(at):
    data = bytearray(gzip.compress(json.dumps(list(range(2000))).encode()))
    data[at] ^= 1
    with pytest.raises(SnapshotError):
        load.decode(bytes(data), "x")


@pytest.mark.parametrize(
    "data",
    [
        RECORDING,
        gzip.compress(RECORDING, mtime=0),
        gzip.compress(RECORDING + b"\0" * 99_999, mtime=0),
    ],
)
def test_a_recording_is_known_by_its_first_line(data):
    assert isinstance(load.decode(data, "x")[0], load.RecordingBytes)


def test_a_recording_without_its_end_is_still_one():
    cut = gzip.compress(RECORDING * 10_000, mtime=0)[:-50]
    assert isinstance(load.decode(cut, "x")[0], load.RecordingBytes)


def test_gzip_of_many_members_reads():
    data = b"".join(gzip.compress(b"%d," % i, mtime=0) for i in range(5000))
    values, size = load.decode(
        gzip.compress(b"[", mtime=0) + data + gzip.compress(b"0]", mtime=0), "x"
    )
    assert values == [*range(5000), 0]
    assert size == len(json.dumps(values, separators=(",", ":")))


def test_equal_frames_of_json_are_one_object():
    frame = {"name": "f", "filename": "f.py", "line": 2**64 - 1}
    odd = {"name": "f", "filename": "f.py", "line": {"a": 1}}
    values, _ = load.decode(json.dumps([frame, frame, odd, odd]).encode(), "x")
    assert values == [frame, frame, odd, odd]
    assert values[0] is values[1]


def test_a_stream_is_read_once_it_looks_right():
    class Endless(io.RawIOBase):
        reads = 0

        def read(self, size=-1):
            self.reads += 1
            assert 0 < size < 1 << 20
            return b"x" * size

    endless = Endless()
    with pytest.raises(SnapshotError):
        load.read_all(endless, "x")
    assert endless.reads == 1
