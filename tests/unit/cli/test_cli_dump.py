"""`dump`: what it writes is read back without loss."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import pickletools

import pytest
from support import raw_snapshots as raw_form
from support.recordings import DATA, START_NS, make_recording

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.cli.main import main
from gpumem_otel.profiles.of_file import load_snapshot, open_bytes, open_file
from gpumem_otel.recording import torch_dump

FILES = sorted(DATA.glob("*.pickle.gz"))
SMALL, LARGE = (
    "h200-torch2.11-cuda-graph.pickle.gz",
    "h200-torch2.11-train-cpp-stacks.pickle.gz",
)


@pytest.fixture
def dump(tmp_path):
    """A function from a file's bytes to what dump makes of them."""

    def run(data, *more):
        source, out = tmp_path / "in", tmp_path / "out.pickle"
        source.write_bytes(data)
        assert main(["dump", str(source), "-o", str(out), *more]) == 0
        return out.read_bytes()

    return run


def totals_of(snapshot):
    return {device: snapshot.totals(device) for device in snapshot.devices()}


@pytest.mark.parametrize("name", [path.name for path in FILES])
def test_a_reading_has_the_same_totals(dump, name):
    data = make_recording(name)
    expected = totals_of(open_bytes(data, "recording").snapshot)
    made = open_bytes(dump(data), "dumped").snapshot
    assert {d: b for d, b in totals_of(made).items() if b.segments} == {
        d: b for d, b in expected.items() if b.segments
    }


def test_it_is_a_plain_pickle_of_protocol_4(dump):
    data = dump(make_recording(SMALL, windows=1))
    names = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert data[:2] == b"\x80\x04"
    assert not names & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ"}
    raw = pickle.loads(data)
    assert list(raw) == [
        "segments",
        "device_traces",
        "allocator_settings",
        "external_annotations",
    ]


def test_the_reading_that_was_asked_for(dump):
    data = make_recording(SMALL, LARGE, SMALL)
    most = load_snapshot(DATA / LARGE).totals(0).allocated_bytes
    assert open_bytes(dump(data, "--at", "2"), "2").snapshot.totals(0).allocated_bytes == most
    last, third = dump(data), dump(data, "--at", "3")
    assert last == third
    assert open_bytes(last, "3").snapshot.totals(0).allocated_bytes < most


@pytest.mark.parametrize("at", ["0", "3", "-1", "first", "1" * 5000, ""])
def test_a_reading_that_does_not_exist(capsys, tmp_path, at):
    source = tmp_path / "run.gpumem"
    source.write_bytes(make_recording(SMALL, SMALL))
    assert main(["dump", str(source), "-o", str(tmp_path / "out"), f"--at={at}"]) == 2
    assert "--at" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_windows_become_events_that_leave_the_dump_as_it_is(dump):
    """GIVEN windows WHEN dumped THEN allocated adds up, and the blocks are alive at the end."""
    data = make_recording(SMALL, windows=2)
    recording = open_bytes(data, "recording").recording
    recorded = [window.reading().snapshot.event_groups(0) for window in recording.windows]
    opened = open_bytes(dump(data), "dumped")
    (allocated,) = opened.profiles(ProfileKind.ALLOCATED, 0)
    groups = [group for window in recorded for group in window]
    assert allocated.total_bytes == sum(group.size_bytes for group in groups)
    assert allocated.total_objects == sum(group.objects for group in groups)
    replay = opened.snapshot.replay(0)
    assert replay.allocated_bytes[-1] == opened.snapshot.totals(0).requested_bytes
    assert replay.events == 3 * allocated.total_objects
    assert list(replay.time_us) == sorted(replay.time_us)
    assert replay.time_us[1] == START_NS // 1000
    assert replay.time_us[-1] < START_NS // 1000 + 1_500_000
    marks = [(mark.name, mark.stage) for mark in opened.snapshot.annotations if mark.device == 0]
    assert sorted(marks) == sorted(
        (name, stage) for name in ("reading", "window 1", "window 2") for stage in ("START", "END")
    )


def test_windows_that_came_after_the_reading_are_left_out(dump):
    """Reading 1 is of second 0, reading 2 of second 1; window 1 ends at half a second."""
    data = make_recording(SMALL, SMALL, SMALL, windows=2)
    events = [
        sum(map(len, pickle.loads(dump(data, "--at", str(n)))["device_traces"])) for n in (1, 2, 3)
    ]
    assert events[0] == 0
    assert events[1] * 2 == events[2] > 0


def test_too_many_events_leave_out_the_oldest_windows(dump, capsys, monkeypatch):
    data = make_recording(SMALL, windows=3)
    one = sum(map(len, pickle.loads(dump(make_recording(SMALL, windows=1)))["device_traces"]))
    monkeypatch.setattr(torch_dump, "MAX_EVENTS", 2 * one)
    raw = pickle.loads(dump(data))
    assert sum(map(len, raw["device_traces"])) == 2 * one
    assert "1 of 3 windows are left out, the oldest" in capsys.readouterr().err


def test_memory_without_a_stack_stays_without(dump):
    frames = (raw_form.frame("f"),)
    blocks = [raw_form.block(512, frames), raw_form.block(1024)]
    raw = raw_form.snapshot([raw_form.segment(blocks)], [])
    made = pickle.loads(dump(pickle.dumps(raw, 4)))
    assert [block["frames"] for block in made["segments"][0]["blocks"]] == [list(frames), []]
    totals = totals_of(open_bytes(dump(make_recording(LARGE)), "x").snapshot)[0]
    assert totals.bytes_without_stack == load_snapshot(DATA / LARGE).totals(0).bytes_without_stack


# snapshots, which are only unpacked


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_gzipped_snapshot_comes_out_plain(dump, path):
    data = path.read_bytes()
    assert pickle.loads(dump(data)) == pickle.loads(gzip.decompress(data))


def test_json_becomes_what_torch_wrote(dump):
    raw = pickle.loads(gzip.decompress((DATA / SMALL).read_bytes()))
    for trace in raw["device_traces"]:
        for event in trace:
            event["pool_id"] = (0, 1)
    assert pickle.loads(dump(json.dumps(raw).encode())) == raw


def test_the_bare_list_becomes_a_dict(dump):
    segments = [raw_form.segment([raw_form.block(512)])]
    made = pickle.loads(dump(pickle.dumps(segments, 4)))
    assert made == {"segments": segments, "device_traces": []}


def test_a_snapshot_has_no_readings(capsys, tmp_path):
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(raw_form.snapshot([]), 4))
    assert main(["dump", str(path), "-o", str(tmp_path / "out"), "--at", "1"]) == 2
    assert "is a snapshot, only recordings have readings" in capsys.readouterr().err


def test_what_is_no_snapshot_is_refused(capsys, tmp_path):
    path = tmp_path / "a.pickle"
    path.write_bytes(b"\x80\x04cos\nsystem\n.")
    assert main(["dump", str(path), "-o", str(tmp_path / "out")]) == 2
    assert "refused as a pickle" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_from_stdin_to_stdout(capfdbinary, monkeypatch):
    class Stdin:
        buffer = io.BytesIO((DATA / SMALL).read_bytes())

    monkeypatch.setattr("sys.stdin", Stdin)
    assert main(["dump", "-", "-o", "-"]) == 0
    expected = totals_of(open_file(DATA / SMALL).snapshot)
    assert totals_of(open_bytes(capfdbinary.readouterr().out, "x").snapshot) == expected
