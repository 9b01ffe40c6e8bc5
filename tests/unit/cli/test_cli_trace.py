"""Events as text and as JSON lines."""

from __future__ import annotations

import json

import pytest
from support.raw_snapshots import alloc, block, frame, segment, snapshot
from support.recordings import DATA, make_recording

from gpumem_otel.cli.main import main

OOM = DATA / "h200-torch2.11-oom.pickle.gz"
START = 1_795_910_400_000_000  # 2026-11-29T00:00:00Z


def event(action, address, size, seconds, **more):
    time_us = START + round(seconds * 1e6)
    return {**alloc(address, size), "action": action, "time_us": time_us, **more}


EVENTS = [
    event("free_requested", 0x9000, 64, 0.0),
    event("free_completed", 0x9000, 64, 0.25),
    event("alloc", 0x1000, 3 << 20, 1.0, frames=[frame("attend", "/x/model.py", 7), frame("run")]),
    event("oom", 0, 1 << 40, 1.5, device_free=2048, addr=None),
    event("alloc", 0x2000, 10, 2.0, user_metadata="fwd\x1b", pool_id=[0, 1], stream=7),
]


@pytest.fixture
def made(tmp_path):
    path = tmp_path / "made.json"
    second = [{key: value for key, value in EVENTS[2].items() if key != "time_us"}]
    path.write_text(json.dumps(snapshot([segment([block(4)])], [EVENTS, second])))
    return str(path)


def run(capsys, *arguments):
    assert main(["trace", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def numbers(capsys, *arguments):
    """Places in the trace; events are numbered from 1."""
    return [json.loads(line)["event"] - 1 for line in run(capsys, "--json", *arguments)]


def test_lines(capsys, made):
    lines = [" ".join(line.split()) for line in run(capsys, made, "--device", "0")]
    assert lines == [
        "device 0: 5 events in 2.000000 s from 2026-11-29T00:00:00.000000+00:00",
        "event seconds action size address stream pool where",
        "1 0.000000 free_requested 64 B 0x9000 0x0 - [alloc not seen]",
        "2 0.250000 free_completed 64 B 0x9000 0x0 - [alloc not seen]",
        "3 1.000000 alloc 3.0 MiB 0x1000 0x0 - attend (model.py:7)",
        "4 1.500000 oom 1.0 TiB - 0x0 - [device had 2.0 KiB free]",
        "5 2.000000 alloc 10 B 0x2000 0x7 0,1 [fwd\\u001b]",
    ]


def test_columns_stand_under_their_headers(capsys, made):
    lines = run(capsys, made, "--device", "0")
    for name, column in (("action", "alloc"), ("address", "0x1000"), ("where", "attend")):
        assert lines[1].index(name) == lines[4].index(column)


def test_frames_and_times_of_day(capsys, made):
    lines = run(capsys, made, "--device", "0", "--absolute", "--frames", "--stack", "attend")
    assert lines[2].split()[:2] == ["3", "2026-11-29T00:00:01.000000+00:00"]
    assert [line.strip() for line in lines[3:]] == [
        "model.py:attend (model.py:7)",
        "train.py:run (train.py:1)",
    ]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ([], [0, 1, 2, 3, 4]),
        (["-n", "2"], [0, 1]),
        (["--tail", "2"], [3, 4]),
        (["--min-size", "3MiB"], [2, 3]),
        (["--min-size", "3.1M", "--max-size", "1TiB"], [3]),
        (["--max-size", "10"], [4]),
        (["--action", "free"], [0, 1]),
        (["--action", "free_completed", "--action", "oom"], [1, 3]),
        (["--action", "segment"], []),
        (["--since", "1"], [2, 3, 4]),
        (["--since", "0.25", "--until", "1.5"], [1, 2]),
        (["--since", "2026-11-29T00:00:01.5Z"], [3, 4]),
        (["--since", "2026-11-29T00:00:01.4999999"], [3, 4]),
        (["--until", "2026-11-29T01:00:01+01:00"], [0, 1]),
        (["--until", "2026-11-29 00:00:01"], [0, 1]),
        (["--address", "0x1001"], [2]),
        (["--address", "4096"], [2]),
        (["--stack", r"model\.py"], [2]),
        (["--stack", "nowhere"], []),
        (["--stack", "run", "--tail", "9"], [2]),
    ],
)
def test_filters(capsys, made, options, found):
    assert numbers(capsys, made, "--device", "0", *options) == found


def test_json_lines(capsys, made):
    lines = [json.loads(line) for line in run(capsys, made, "--json", "--frames")]
    assert [line["device"] for line in lines] == [0] * 5 + [1]
    assert lines[2] == {
        "device": 0, "event": 3, "action": "alloc", "time_us": START + 1_000_000,
        "size_bytes": 3 << 20, "address": 0x1000, "stream": 0, "pool": None,
        "allocation_seen": True, "device_free_bytes": None, "compile_context": "",
        "user_metadata": "", "where": "attend (model.py:7)",
        "frames": [
            {"name": "model.py:attend", "filename": "/x/model.py", "line": 7},
            {"name": "train.py:run", "filename": "train.py", "line": 1},
        ],
    }  # fmt: skip
    assert (lines[0]["allocation_seen"], lines[3]["address"]) == (False, None)
    assert (lines[4]["pool"], lines[4]["user_metadata"]) == ([0, 1], "fwd\x1b")
    assert "frames" not in json.loads(run(capsys, made, "--json")[0])


def test_nothing_matches_and_nothing_recorded(capsys, tmp_path, made):
    assert run(capsys, made, "--device", "0", "--min-size", "2TiB")[-1] == "no event matches"
    path = tmp_path / "none.json"
    path.write_text(json.dumps(snapshot([segment([block(4)])])))
    assert main(["trace", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "holds no events; record history" in err


def test_time_filters_need_times(capsys, made):
    assert main(["trace", made, "--device", "1", "--since", "1"]) == 1
    assert "--since" in capsys.readouterr().err
    assert run(capsys, made, "--device", "1")[2].split()[1] == "-"


def test_times_beyond_the_calendar(capsys, tmp_path):
    path = tmp_path / "far.json"
    path.write_text(json.dumps(snapshot([], [[{**alloc(1, 1), "time_us": 2**63}]])))
    assert f"{2**63} us" in run(capsys, str(path), "--absolute")[2]


@pytest.mark.parametrize(
    "options",
    [
        ["--min-size", "much"],
        ["--address", "here"],
        ["--stack", "("],
        ["--since", "yesterday"],
        ["--action", "allocate"],
        ["-n", "1", "--tail", "1"],
        ["-n", "0"],
    ],
)
def test_bad_usage(capsys, made, options):
    """The error names each option, and its value."""
    assert main(["trace", made, *options]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert all(option in err for option in options if not option.isdecimal())
    assert err.endswith("--help')")


def test_a_word_that_only_this_trace_knows(capsys, tmp_path):
    path = tmp_path / "new.json"
    path.write_text(json.dumps(snapshot([], [[{**alloc(1, 1), "action": "segment_pin"}]])))
    assert numbers(capsys, str(path), "--action", "segment_pin") == [0]


def test_ring_overflow_is_said(capsys, tmp_path):
    path = tmp_path / "full.json"
    blocks = [block(8, [frame("f")], address=1), block(8, [frame("f")], address=9)]
    raw = snapshot([segment(blocks)], [[alloc(9, 8), alloc(99, 1)]])
    path.write_text(json.dumps(raw))
    assert main(["trace", str(path)]) == 0
    assert "1 live blocks were recorded before the first event" in capsys.readouterr().err


def test_of_a_recording_its_last_window(capsys, tmp_path):
    path = tmp_path / "run.gpumem"
    path.write_bytes(make_recording(OOM.name, windows=1))
    made = numbers(capsys, str(path), "--action", "alloc")
    assert made == list(range(len(made)))
    assert len(made) == len(numbers(capsys, str(OOM), "--action", "alloc"))
    path.write_bytes(make_recording(OOM.name))
    assert main(["trace", str(path)]) == 1
    assert "record with --profiles live,allocated" in capsys.readouterr().err
