"""What a recording holds is what was read; what is no recording ends in one kind of error."""

from __future__ import annotations

import gzip
import io
import json
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.raw_snapshots import alloc, block, frame, raw_snapshots, segment, snapshot

from gpumem_otel.core import recordform as form
from gpumem_otel.core.frames import file_function_namer, identity_namer, with_basename_paths
from gpumem_otel.core.heap import allocated_profile, check, live_profile
from gpumem_otel.core.model import BlockState, DeviceStats, Identity, StepStats
from gpumem_otel.core.ports import Reading
from gpumem_otel.core.recording import RecordingWriter, load_recording
from gpumem_otel.core.snapshot import from_torch, load_snapshot, parse_snapshot
from gpumem_otel.errors import SnapshotError

IDENTITY = Identity(
    service_name="job",
    namespace="team",
    run_id="r1",
    restart=2,
    rank=3,
    local_rank=1,
    world_size=8,
    node="n1",
    pid=77,
    tags=(("a", "b"), ("c", "\u00e9")),
    device_uuids={0: "GPU-1", 1: "MIG-2"},
)
STATS = DeviceStats(
    device=1,
    allocated_bytes=5,
    requested_bytes=4,
    active_bytes=6,
    reserved_bytes=7,
    allocations=8,
    frees=3,
    limit_bytes=0,
    device_total_bytes=None,
    host_pinned_bytes=9,
)
STEPS = StepStats(steps=4, last_step_time_ns=99, floor_bytes={0: 5, 1: 0})


def reading_of(raw, **more):
    more = {"time_ns": 5, "before": (), "after": (), **more}
    return Reading(snapshot=from_torch(raw), **more)


def writer_for(file, **more):
    more = {"namer": identity_namer, "facts": {}, "created_ns": 1, **more}
    return RecordingWriter(file, identity=IDENTITY, **more)


def written(*readings, windows=(), steps=STEPS, **more):
    file = io.BytesIO()
    writer = writer_for(file, **more)
    for reading in readings:
        assert writer.add(reading, steps) is True
    for reading, seconds in windows:
        assert writer.add_window(reading, seconds) is True
    writer.close()
    return file.getvalue()


def lines_of(data):
    return [json.loads(line) for line in gzip.decompress(data).splitlines()]


def stackful(size=512):
    leaf, main = frame("leaf", "/x/a.py", 2), frame("main", "/x/a.py", 9)
    blocks = [
        block(size, [leaf, main], requested=size - 12),
        block(1024, [leaf, main], state="inactive", requested=9999),
        block(256, [main], state="active_pending_free"),
        block(128),
    ]
    return snapshot([segment(blocks, device=1, pool=(4, 2), stream=2**63, total=1 << 20)])


def test_header_identity_and_counters_come_back():
    data = written(
        reading_of({"segments": []}, before=(STATS,), after=(STATS,), stall_seconds=0.25),
        facts={"torch": "2.11.0+cu130", "device_names": "NVIDIA H200"},
        created_ns=7,
    )
    recording = load_recording(data, name="r.gz")
    assert recording.source == "r.gz"
    assert recording.identity == IDENTITY
    assert recording.header.version == 1
    assert recording.header.created_ns == 7
    assert recording.header.facts == {"torch": "2.11.0+cu130", "device_names": "NVIDIA H200"}
    assert recording.warnings == ()
    (entry,) = recording.readings
    assert entry.time_ns == 5
    assert entry.before == entry.after == (STATS,)
    assert entry.steps == STEPS
    again = entry.reading()
    assert (again.before, again.time_ns, again.stall_seconds) == ((STATS,), 5, 0.25)
    assert again.stackless is None
    assert not again.raced(1)


def test_a_raced_reading_stays_one():
    later = DeviceStats(
        device=1, allocated_bytes=5, requested_bytes=4, active_bytes=6, reserved_bytes=7, frees=4
    )
    data = written(reading_of({"segments": []}, before=(STATS,), after=(later,)))
    (entry,) = load_recording(data).readings
    assert entry.after == (later,)
    assert entry.reading().raced(1)


def test_segments_and_blocks_come_back_with_final_names():
    data = written(reading_of(stackful()), namer=file_function_namer)
    taken = load_recording(data).readings[0].snapshot
    assert taken.resolved
    (got,) = taken.segments()
    assert (got.device, got.address, got.size_bytes, got.stream) == (1, 1 << 20, 1 << 20, 2**63)
    assert (got.kind, got.pool_id, got.is_expandable) == ("large", (4, 2), False)
    assert [(b.size_bytes, b.state) for b in got.blocks] == [
        (512, BlockState.ACTIVE_ALLOCATED),
        (1024, BlockState.INACTIVE),
        (256, BlockState.ACTIVE_PENDING_FREE),
        (128, BlockState.ACTIVE_ALLOCATED),
    ]
    assert [b.address - (1 << 20) for b in got.blocks] == [0, 512, 1536, 1792]
    assert [[f.name for f in b.frames] for b in got.blocks] == [
        ["a.py:leaf", "a.py:main"],
        [],
        ["a.py:main"],
        ["[allocated before install]"],
    ]
    assert got.blocks[0].requested_bytes == 500
    assert got.blocks[0].frames[0].filename == "/x/a.py"


def test_blocks_need_not_follow_one_another_nor_have_an_address():
    raw = snapshot([segment([block(8, address=1 << 21), block(8, address=1 << 22)])])
    first = segment([block(8), block(8)])
    for item in first["blocks"]:
        del item["address"]
    raw["segments"].append(first)
    taken = load_recording(written(reading_of(raw))).readings[0].snapshot
    addresses = [[b.address for b in s.blocks] for s in taken.segments()]
    assert addresses == [[1 << 21, 1 << 22], [None, None]]


def test_names_are_written_once():
    data = written(*(reading_of(stackful()) for _ in range(3)))
    tables = [line for line in lines_of(data) if not {"reading", "format"} & line.keys()]
    assert tables == [
        {"strings": ["leaf", "/x/a.py", "main", "[allocated before install]", ""]},
        {"frames": [[0, 1, 2], [2, 1, 9], [3, 4, 0]]},
        {"stacks": [[0, 1], [1], [2]]},
    ]


def test_the_live_rule_names_memory_without_a_stack_and_the_books_still_count_it():
    raw = snapshot([segment([block(8), block(16)])])
    address = raw["segments"][0]["blocks"][1]["address"]
    reading = reading_of(
        raw,
        stackless=lambda device, where: (
            "[backward]" if where == address else "[allocated before install]"
        ),
    )
    taken = load_recording(written(reading)).readings[0].snapshot
    assert taken.books(0).bytes_without_stack == 24
    assert taken.books(0) == reading.snapshot.books(0)
    expected = live_profile(reading.snapshot, 0, namer=identity_namer, stackless=reading.stackless)
    assert live_profile(taken, 0, namer=identity_namer) == expected
    assert [s.frames[0].name for s in expected.samples] == [
        "[backward]",
        "[allocated before install]",
    ]


def test_redacted_paths_never_reach_the_file():
    data = written(reading_of(stackful()), namer=with_basename_paths(identity_namer))
    assert b"/x/" not in gzip.decompress(data)


def windowed(**more):
    leaf, main = frame("leaf"), frame("main")
    trace = [alloc(1, 100, [leaf, main]), alloc(2, 51, [leaf, main]), alloc(3, 7), alloc(4, 0)]
    return reading_of(snapshot([], [[], trace]), **more)


def test_windows_come_back_with_their_counters():
    before = STATS
    after = DeviceStats(
        device=1,
        allocated_bytes=5,
        requested_bytes=4,
        active_bytes=6,
        reserved_bytes=7,
        requested_allocation_bytes=1000,
        allocations=20,
    )
    reading = windowed(before=(before,), after=(after,))
    (window,) = load_recording(written(windows=[(reading, 2.5)])).windows
    assert window.seconds == 2.5
    again = window.reading()
    assert (again.before, again.after, again.time_ns) == ((before,), (after,), 5)
    options = {"namer": identity_namer, "time_ns": 1, "duration_ns": 2}
    for total in (None, 1000):
        expected = allocated_profile(
            reading.snapshot, 1, requested_total_bytes=total, objects_total=12, **options
        )
        got = allocated_profile(
            again.snapshot, 1, requested_total_bytes=total, objects_total=12, **options
        )
        assert got == expected
        assert [s.objects for s in got.samples] == [6, 6]


def test_a_window_keeps_only_what_was_allocated():
    free = {"action": "free_completed", "addr": 1, "size": 5, "stream": 0, "frames": []}
    reading = reading_of(snapshot([], [[free], [alloc(1, 5, [frame("f")])]]))
    (window,) = load_recording(written(windows=[(reading, 1.0)])).windows
    assert window.reading().snapshot.devices() == (1,)
    none = {"window": {"time_ns": 1, "groups": {"0": [[1], [0], [0]]}}}
    assert load_recording(recording_of(none)).windows[0].reading().snapshot.devices() == ()


def test_a_machine_that_is_too_small(monkeypatch):
    def no_memory(text):
        raise MemoryError

    data = written(reading_of(stackful()))
    monkeypatch.setattr(json, "loads", no_memory)
    with pytest.raises(SnapshotError, match="r: too large for this machine's memory"):
        load_recording(data, name="r")


def test_a_window_with_too_many_events_is_left_out(monkeypatch):
    monkeypatch.setattr(form, "MAX_WINDOW_EVENTS", 3)
    file = io.BytesIO()
    writer = writer_for(file)
    assert writer.add_window(windowed(), 1.0) is False
    assert not writer.full
    assert writer.add(reading_of(stackful()), STEPS) is True
    writer.close()
    assert len(load_recording(file.getvalue()).readings) == 1


def test_a_killed_writer_leaves_every_reading_it_added():
    file = io.BytesIO()
    writer = writer_for(file)
    sizes = []
    for turn in range(3):
        blocks = [block(number * 7919 % 4096, state="inactive") for number in range(400)]
        raw = stackful() if turn < 2 else snapshot([segment(blocks)])
        writer.add(reading_of(raw), STEPS)
        sizes.append(len(file.getvalue()))
    data = file.getvalue()
    for count, size in enumerate(sizes, 1):
        recording = load_recording(data[:size])
        assert len(recording.readings) == count
        assert recording.warnings == ("the recording was not closed: its writer was stopped",)
    cut = load_recording(data[: sizes[2] - 99])
    assert len(cut.readings) == 2
    assert "the recording is cut: its last line is left out" in cut.warnings
    writer.close()
    writer.close()
    assert load_recording(file.getvalue()).warnings == ()
    assert writer.add(reading_of(stackful()), STEPS) is False
    assert not file.closed


def test_damage_is_refused():
    data = bytearray(written(*(reading_of(stackful(512 + n)) for n in range(200))))
    data[-200:-190] = b"\xff" * 10
    with pytest.raises(SnapshotError, match="damaged"):
        load_recording(bytes(data))
    data = bytearray(written(reading_of(stackful())))
    data[-8] ^= 1
    with pytest.raises(SnapshotError, match="r: damaged gzip"):
        load_recording(bytes(data), name="r")


def test_the_writer_stops_at_its_limit_and_what_it_wrote_is_whole():
    file = io.BytesIO()
    writer = writer_for(file, max_bytes=3000)
    count = 0
    while writer.add(reading_of(stackful()), STEPS):
        count += 1
    assert writer.full
    assert writer.add(reading_of({"segments": []}), STEPS) is False
    assert writer.add_window(windowed(), 1.0) is False
    writer.close()
    assert count > 2
    assert len(gzip.decompress(file.getvalue())) <= 3000
    assert lines_of(file.getvalue())[-1] == {"end": {"why": "full"}}
    recording = load_recording(file.getvalue())
    assert len(recording.readings) == count
    assert recording.warnings == ("the recording stopped at its limit after 0 s",)


def test_a_recording_that_was_full_at_once_says_so():
    file = io.BytesIO()
    writer = writer_for(file, max_bytes=100)
    assert writer.add(reading_of(stackful()), STEPS) is False
    writer.close()
    assert load_recording(file.getvalue()).warnings == (
        "the recording stopped at its limit after 0 s",
    )


def test_a_limit_of_blocks_holds_for_writer_and_reader(monkeypatch):
    data = written(reading_of(stackful()), reading_of(stackful()))
    monkeypatch.setattr(form, "MAX_BLOCKS", 7)
    with pytest.raises(SnapshotError, match="more than 3 blocks"):
        load_recording(data)
    file = io.BytesIO()
    writer = writer_for(file)
    assert writer.add(reading_of(stackful()), STEPS) is True
    assert writer.add(reading_of(stackful()), STEPS) is False
    writer.close()
    assert len(load_recording(file.getvalue()).readings) == 1


class _FullDisk(io.BytesIO):
    room = 10**9

    def write(self, data):
        if self.tell() + len(data) > self.room:
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_a_full_disk_ends_the_recording_and_keeps_what_it_has():
    file = _FullDisk()
    writer = writer_for(file)
    writer.add(reading_of(stackful()), STEPS)
    file.room = file.tell() + 1
    with pytest.raises(OSError, match="No space left"):
        writer.add(reading_of(stackful(2048)), STEPS)
    assert writer.full
    file.room = 10**9
    assert writer.add(reading_of(stackful()), STEPS) is False
    writer.close()
    assert len(load_recording(file.getvalue()).readings) == 1


def test_a_pause_may_end_it_at_any_moment():
    """GIVEN a pause that raises WHEN it does so at each of its calls THEN no reading is lost."""

    class StoppedError(Exception):
        pass

    def pause():
        nonlocal left
        left -= 1
        if not left:
            raise StoppedError

    raw = snapshot([segment([block(512, [frame(str(n))]) for n in range(300)])])
    readings = []
    for calls in range(1, 10**6):
        file, left = io.BytesIO(), calls
        writer = writer_for(file)
        assert writer.add(reading_of(stackful()), STEPS) is True
        try:
            writer.add(reading_of(raw), STEPS, pause)
        except StoppedError:
            added = writer.add(reading_of(raw), STEPS)
            writer.close()
            readings.append(len(load_recording(file.getvalue()).readings))
            assert readings[-1] == 1 + added
        else:
            break
    # before it writes a line it may go on, from then on it may not
    assert sorted(set(readings), reverse=True) == [2, 1]
    assert readings == sorted(readings, reverse=True)
    assert calls > 300


def test_pause_is_called_and_changes_nothing():
    blocks = [block(512, [frame(str(n))]) for n in range(3000)]
    calls = []
    file = io.BytesIO()
    writer = writer_for(file)
    writer.add(reading_of(snapshot([segment(blocks)])), STEPS, lambda: calls.append(1))
    writer.close()
    assert file.getvalue() == written(reading_of(snapshot([segment(blocks)])))
    assert len(calls) > 3000


def test_equal_input_gives_equal_bytes():
    assert written(reading_of(stackful())) == written(reading_of(stackful()))


def test_a_recording_is_a_snapshot_file(tmp_path):
    data = written(reading_of(stackful()), reading_of(stackful(4096)))
    assert parse_snapshot(data, "r").books(1).allocated_bytes == 4096 + 128
    path = tmp_path / "r.gz"
    path.write_bytes(data)
    assert load_snapshot(path).books(1).allocated_bytes == 4096 + 128
    assert len(load_recording(path).readings) == 2
    assert load_recording(str(path)).source == str(path)
    with path.open("rb") as file:
        assert load_recording(file).source == str(path)
    plain = load_recording(gzip.decompress(data))
    assert len(plain.readings) == 2


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SnapshotError, match="No such file") as raised:
        load_recording(tmp_path / "none.gz")
    assert raised.value.source == str(tmp_path / "none.gz")


HEADER = {"format": "gpumem-recording", "version": 1, "created_ns": 1}
TABLES = [{"strings": ["f", ""]}, {"frames": [[0, 1, 3]]}, {"stacks": [[0]]}]
SEGMENT = {"d": 0, "a": 0, "n": 8, "b": [[8], None, "1", [1]]}


def recording_of(*lines, header=HEADER):
    return "\n".join(
        line if isinstance(line, str) else json.dumps(line)
        for line in (header, *TABLES, *lines, "")
    ).encode()


def reading_line(**changes):
    return {"reading": {"time_ns": 1, "segments": [{**SEGMENT, **changes}]}}


def test_the_hand_made_recording_is_one():
    recording = load_recording(recording_of(reading_line(), {"later": 1}, {"stacks": []}))
    assert recording.readings[0].snapshot.books(0).allocated_bytes == 8
    assert recording.identity == Identity(service_name="")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is damaged"),
        ("[1]", "the line is no object"),
        ("[" * 100_000, "is damaged"),
        ('{"strings": [' + "9" * 5000 + "]}", "is damaged"),
        ({"strings": 1}, "strings is no list"),
        ({"strings": [1]}, "a string is no text"),
        ({"frames": [[0, 9, 1]]}, "a file name is no number from 0 to 1"),
        ({"frames": [[0, 0, -1]]}, "a line is no number"),
        ({"frames": [[0, 0, 2**63]]}, "a line is no number"),
        ({"frames": [[0, 0]]}, "is damaged"),
        ({"frames": [[True, 0, 1]]}, "a name is no number"),
        ({"stacks": [[1]]}, "a frame is no number from 0 to 0"),
        ({"stacks": [[0.0]]}, "a frame is no number"),
        ({"stacks": [7]}, "frames of stacks is no list"),
        ({"reading": 1}, "a reading is no object"),
        ({"reading": {"segments": []}}, "time_ns is no number"),
        ({"reading": {"time_ns": 1}}, "segments is no list"),
        ({"reading": {"time_ns": 1, "segments": [1]}}, "a segment is no object"),
        ({"reading": {"time_ns": 1, "segments": [], "before": [{}]}}, "device is no number"),
        ({"reading": {"time_ns": 1, "segments": [], "before": 1}}, "counters is no list"),
        ({"reading": {"time_ns": 1, "segments": [], "traced": [9999]}}, "device is no number"),
        ({"reading": {"time_ns": 1, "segments": [], "stall_seconds": "1"}}, "is no number"),
        ('{"reading": {"time_ns": 1, "segments": [], "stall_seconds": NaN}}', "is no number"),
        ({"reading": {"time_ns": 1, "segments": [], "steps": {"steps": -1}}}, "steps is no"),
        (
            {"reading": {"time_ns": 1, "segments": [], "steps": {"floor_bytes": {"x": 1}}}},
            "a device is no number",
        ),
        (reading_line(d=-1), "device is no number"),
        (reading_line(d=4096), "device is no number"),
        (reading_line(a=-1), "an address is no number"),
        (reading_line(n=-1), "a size is no number"),
        (reading_line(n=2**63), "a size is no number"),
        (reading_line(t=5), "a kind is no text"),
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
        (reading_line(b={}), "columns is no list"),
        (reading_line(A=[]), "columns of blocks do not fit"),
        (reading_line(A=["x"]), "an address is no number"),
        ({"window": {"time_ns": 1, "groups": {"0": [[1], [1], []]}}}, "columns of events"),
        ({"window": {"time_ns": 1, "groups": {"0": [[1], [-1], [1]]}}}, "a group is negative"),
        ({"window": {"time_ns": 1, "groups": {"-1": [[], [], []]}}}, "a device is no number"),
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
        (b'{"format": "gpumem-recording"}\n', "version is no number"),
        (b'{"format": "gpumem-recording", "version": 2}\n', "newer version"),
        (b'{"format": "gpumem-recording", "version": 1, "facts": {"a": 1}}\n', "facts is no text"),
        (
            b'{"format": "gpumem-recording", "version": 1, "identity": {"rank": "0"}}\n',
            "rank is no number",
        ),
        (
            b'{"format": "gpumem-recording", "version": 1, "identity": {"tags": [["a"]]}}\n',
            "is damaged",
        ),
        (b"\xff\xfe\n", "line 1 is damaged"),
    ],
)
def test_what_is_no_recording(data, reason):
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
                entry.snapshot.books(device)
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


@given(raw_snapshots())
@settings(max_examples=80)
def test_any_snapshot_comes_back_with_equal_books_and_profiles(raw):
    taken = from_torch(raw)
    data = written(
        Reading(snapshot=taken, time_ns=1, before=(), after=()), namer=file_function_namer
    )
    again = load_recording(data).readings[0].snapshot
    assert again.devices() == taken.devices()
    for device in (0, 1, 2):
        assert again.books(device) == taken.books(device)
        expected = live_profile(taken, device, namer=file_function_namer)
        assert live_profile(again, device, namer=file_function_namer) == expected
        assert check(expected, again.books(device).allocated_bytes) == ()


@given(raw_snapshots())
@settings(max_examples=40)
def test_any_window_comes_back_with_equal_allocations(raw):
    taken = from_torch({"segments": [], "device_traces": raw["device_traces"]})
    reading = Reading(snapshot=taken, time_ns=1, before=(), after=())
    again = load_recording(written(windows=[(reading, 1.0)])).windows[0].reading().snapshot
    options = {"namer": identity_namer, "time_ns": 1, "duration_ns": 1}
    for device in (0, 1, 2):
        assert allocated_profile(again, device, **options) == allocated_profile(
            taken, device, **options
        )


def test_a_recording_of_a_recording_is_equal():
    first = written(reading_of(stackful()), namer=file_function_namer)
    entry = load_recording(first).readings[0]
    again = written(entry.reading(), namer=file_function_namer)
    assert again == first


def test_thirty_readings_of_a_small_job_are_small():
    """250 blocks with stacks of 40 frames, moving from reading to reading: under 300 kB."""
    chance = random.Random(7)
    frames = [frame(f"function_{n}", f"/venv/torch/module_{n}.py", n) for n in range(400)]
    stacks = [[chance.choice(frames) for _ in range(40)] for _ in range(60)]
    readings = []
    for turn in range(30):
        segments = [
            segment(
                [block(512 * chance.randrange(1, 2**15), chance.choice(stacks)) for _ in range(10)],
                address=0x7F00_0000_0000 + (number << 24),
            )
            for number in range(25)
        ]
        readings.append(reading_of(snapshot(segments), time_ns=turn, before=(STATS,)))
    data = written(*readings)
    assert len(data) < 150_000
    assert len(load_recording(data).readings) == 30


def test_every_snapshot_file_comes_back(recordings):
    for path in recordings:
        taken = load_snapshot(path)
        reading = Reading(snapshot=taken, time_ns=1, before=(), after=())
        data = written(reading, reading, namer=file_function_namer)
        again = load_recording(data).readings[1].snapshot
        assert again.devices() == taken.devices()
        for device in taken.devices():
            assert again.books(device) == taken.books(device), path.name
            assert live_profile(again, device, namer=identity_namer) == live_profile(
                taken, device, namer=file_function_namer
            ), path.name
