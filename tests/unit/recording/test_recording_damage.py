"""A file that is damaged or not a recording ends in one kind of error."""

from __future__ import annotations

import gzip
import io
import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recording_parts import (
    HEADER,
    SEGMENT,
    reading_of,
    recording_of,
    stackful,
    windowed,
    written,
)

from gpumem_otel.base.profile import Identity
from gpumem_otel.errors import SnapshotError
from gpumem_otel.profiles.heap import live_profile
from gpumem_otel.recording import format as form
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.snapshot.stacks import identity_namer


def test_a_machine_that_is_too_small(monkeypatch):
    def no_memory(text):
        raise MemoryError

    data = written(reading_of(stackful()))
    monkeypatch.setattr(json, "loads", no_memory)
    with pytest.raises(SnapshotError, match="r: too large for this machine's memory"):
        load_recording(data, name="r")


def test_damage_is_refused():
    data = bytearray(written(*(reading_of(stackful(512 + n)) for n in range(200))))
    data[-200:-190] = b"\xff" * 10
    with pytest.raises(SnapshotError, match="damaged"):
        load_recording(bytes(data))
    data = bytearray(written(reading_of(stackful())))
    data[-8] ^= 1
    with pytest.raises(SnapshotError, match="r: damaged gzip"):
        load_recording(bytes(data), name="r")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SnapshotError, match="No such file") as raised:
        load_recording(tmp_path / "none.gz")
    assert raised.value.source == str(tmp_path / "none.gz")


def reading_line(**changes):
    return {"reading": {"time_ns": 1, "segments": [{**SEGMENT, **changes}]}}


def test_the_hand_made_recording_is_one():
    recording = load_recording(recording_of(reading_line(), {"later": 1}, {"stacks": []}))
    assert recording.readings[0].snapshot.totals(0).allocated_bytes == 8
    assert recording.identity == Identity(service_name="")


def test_a_counter_that_is_null_is_unknown_or_zero():
    null = {"device": 1, "ooms": None, "limit_bytes": None}
    recording = load_recording(
        recording_of({"reading": {"time_ns": 1, "segments": [], "before": [null]}})
    )
    (stats,) = recording.readings[0].before
    assert (stats.device, stats.ooms, stats.limit_bytes) == (1, 0, None)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is damaged"),
        ("[1]", "the line is not an object"),
        ("[" * 100_000, "is damaged"),
        ('{"strings": [' + "9" * 5000 + "]}", "is damaged"),
        ({"strings": 1}, "strings is not a list"),
        ({"strings": [1]}, "a string is not text"),
        ({"frames": [[0, 9, 1]]}, "a file name is not a whole number from 0 to 1"),
        ({"frames": [[0, 0, -1]]}, "a line is not a"),
        ({"frames": [[0, 0, 2**63]]}, "a line is not a"),
        ({"frames": [[0, 0]]}, "is damaged"),
        ({"frames": [[True, 0, 1]]}, "a name is not a"),
        ({"stacks": [[1]]}, "a frame is not a whole number from 0 to 0"),
        ({"stacks": [[0.0]]}, "a frame is not a"),
        ({"stacks": [7]}, "frames of stacks is not a list"),
        ({"reading": 1}, "a reading is not an object"),
        ({"reading": {"segments": []}}, "time_ns is not a"),
        ({"reading": {"time_ns": 1}}, "segments is not a list"),
        ({"reading": {"time_ns": 1, "segments": [1]}}, "a segment is not an object"),
        ({"reading": {"time_ns": 1, "segments": [], "before": [{}]}}, "device is not a"),
        ({"reading": {"time_ns": 1, "segments": [], "before": 1}}, "counters is not a list"),
        ({"reading": {"time_ns": 1, "segments": [], "traced": [9999]}}, "device is not a"),
        ({"reading": {"time_ns": 1, "segments": [], "stall_seconds": "1"}}, "stall_seconds is"),
        ('{"reading": {"time_ns": 1, "segments": [], "stall_seconds": NaN}}', "stall_seconds is"),
        ({"reading": {"time_ns": 1, "segments": [], "steps": {"steps": -1}}}, "steps is no"),
        (
            {"reading": {"time_ns": 1, "segments": [], "steps": {"floor_bytes": {"x": 1}}}},
            "a device is not a",
        ),
        (reading_line(d=-1), "device is not a"),
        (reading_line(d=4096), "device is not a"),
        (reading_line(a=-1), "address is not a"),
        (reading_line(a=None), "address is not a"),
        (reading_line(n=-1), "total_size is not a"),
        (reading_line(n=2**63), "total_size is not a"),
        (reading_line(t=5), "segment_type is not text"),
        (reading_line(p=[1]), "is damaged"),
        (reading_line(k=2), "a stack that was never written"),
        (reading_line(b=[[8], None, "1", [2]]), "a stack that was never written"),
        (reading_line(b=[[8], None, "1", [-1]]), "is damaged"),
        (reading_line(b=[[8.5], None, "1", [1]]), "is damaged"),
        (reading_line(b=[[2**63], None, "1", [1]]), "is damaged"),
        (reading_line(b=[[-8], None, "1", [1]]), "a block has a negative size"),
        (reading_line(b=[[8], [-9], "1", [1]]), "a block has a negative size"),
        (reading_line(b=[[8], None, "3", [1]]), "columns of blocks do not fit"),
        (reading_line(b=[[8], None, "11", [1]]), "columns of blocks do not fit"),
        (reading_line(b=[[8], None, "1", []]), "columns of blocks do not fit"),
        (reading_line(b=[[8], [], "1", [1]]), "columns of blocks do not fit"),
        (reading_line(b=[[8], None, "1"]), "is damaged"),
        (reading_line(b={}), "columns is not a list"),
        (reading_line(A=[]), "columns of blocks do not fit"),
        (reading_line(A=["x"]), "an address is not a"),
        ({"window": {"time_ns": 1, "groups": {"0": [[1], [1], []]}}}, "columns of events"),
        ({"window": {"time_ns": 1, "groups": {"0": [[1], [-1], [1]]}}}, "a group is negative"),
        ({"window": {"time_ns": 1, "groups": {"-1": [[], [], []]}}}, "a device is not a"),
        (
            {"window": {"time_ns": 1, "groups": {"0": [[1], [10**7], [1]]}}},
            "more than 1000000 events in a window",
        ),
    ],
)
def test_wrong_content_is_refused_with_the_line_and_the_reason(line, reason):
    with pytest.raises(SnapshotError) as raised:
        load_recording(recording_of(line), name="r")
    assert str(raised.value).startswith("r: line 5")
    assert reason in str(raised.value)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no recording: it has no header"),
        (b"\x1f\x8b", "no recording: it has no header"),
        (b"\x1f\x8bgarbage that is no gzip", "damaged gzip"),
        (b"{}\n", "no recording: it has no header"),
        (b'{"format": "gpumem-recording"}\n', "version is not a"),
        (b'{"format": "gpumem-recording", "version": 2}\n', "newer version"),
        (b'{"format": "gpumem-recording", "version": 1, "facts": {"a": 1}}\n', "facts is not text"),
        (
            b'{"format": "gpumem-recording", "version": 1, "identity": {"rank": "0"}}\n',
            "rank is not a",
        ),
        (
            b'{"format": "gpumem-recording", "version": 1, "identity": {"tags": [["a"]]}}\n',
            "is damaged",
        ),
        (b"\xff\xfe\n", "line 1 is damaged"),
    ],
)
def test_what_is_not_a_recording(data, reason):
    with pytest.raises(SnapshotError, match=reason):
        load_recording(data, name="r")


def test_a_bomb_stops_at_the_limit(monkeypatch):
    monkeypatch.setattr(form, "MAX_TEXT_BYTES", 8 << 20)
    monkeypatch.setattr(form, "MAX_LINE_BYTES", 4 << 20)
    squeeze = zlib.compressobj(9, wbits=31)
    zeros = b"0" * (1 << 20)
    one_line = b"".join(squeeze.compress(zeros) for _ in range(16)) + squeeze.flush()
    with pytest.raises(SnapshotError, match="a line is longer than 4194304 bytes"):
        load_recording(one_line)
    header = json.dumps(HEADER).encode() + b"\n"
    lines = gzip.compress(header + (b'{"later": ' + b" " * 10**6 + b"1}\n") * 9)
    assert len(lines) < 100_000
    with pytest.raises(SnapshotError, match="holds more than 8388608 bytes of text"):
        load_recording(lines)
    monkeypatch.setattr(form, "MAX_FILE_BYTES", 10)
    with pytest.raises(SnapshotError, match="larger than 10 bytes"):
        load_recording(lines)
    with pytest.raises(SnapshotError, match="larger than 10 bytes"):
        load_recording(io.BytesIO(lines))


@pytest.mark.parametrize(
    ("limit", "line"),
    [
        ("MAX_STRINGS", {"strings": ["a", "b"]}),
        ("MAX_FRAMES", {"frames": [[0, 0, 1], [0, 0, 1], [0, 0, 1]]}),
        ("MAX_STACKS", {"stacks": [[], [], []]}),
        ("MAX_FRAME_REFERENCES", {"stacks": [[0, 0, 0]]}),
        ("MAX_OBJECTS", {"reading": {"time_ns": 1, "segments": [SEGMENT] * 3}}),
        (
            "MAX_OBJECTS",
            {
                "reading": {
                    "time_ns": 1,
                    "segments": [],
                    "steps": {"floor_bytes": {"0": 1, "1": 1, "2": 1}},
                }
            },
        ),
        ("MAX_OBJECTS", {"reading": {"time_ns": 1, "segments": [], "before": [{"device": 1}] * 3}}),
    ],
)
def test_what_a_file_may_make_us_hold_is_limited(monkeypatch, limit, line):
    monkeypatch.setattr(form, limit, 3)
    with pytest.raises(SnapshotError, match="more than"):
        load_recording(recording_of(line))


@given(st.binary(max_size=300), st.integers(0, 400), st.booleans())
@settings(max_examples=150)
def test_any_damage_ends_in_a_recording_or_a_snapshot_error(noise, where, packed):
    whole = written(reading_of(stackful()), windows=[(windowed(), 1.0)])
    data = whole if packed else gzip.decompress(whole)
    damaged = data[:where] + noise + data[where + len(noise) :]
    try:
        recording = load_recording(damaged)
        for entry in recording.readings:
            for device in entry.snapshot.devices():
                entry.snapshot.totals(device)
        for window in recording.windows:
            window.reading()
    except SnapshotError:
        pass


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(
    st.sampled_from(["strings", "frames", "stacks", "reading", "window", "d", "b", "A", "p", "k"]),
    JSON,
)
@settings(max_examples=150)
def test_any_value_in_any_place_ends_in_a_recording_or_a_snapshot_error(key, value):
    line = {key: value} if len(key) > 1 else reading_line(**{key: value})
    try:
        recording = load_recording(recording_of(line))
        for entry in recording.readings:
            live_profile(entry.snapshot, 0, namer=identity_namer)
    except SnapshotError:
        pass
