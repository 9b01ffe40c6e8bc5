"""The verbs that read files: stats, top, convert. Totals are checked against the raw pickles."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import stat
import sys
from pathlib import Path

import pytest
from support import raw_snapshots as raw_form
from support.recordings import DATA, make_recording

from gpumem_otel.cli.main import main
from gpumem_otel.profiles import pprof

PYTHON = DATA / "h200-torch2.11-train-python-stacks.pickle.gz"
FILES = sorted(DATA.glob("*.pickle.gz"))
KEYS = [
    "device",
    "reserved_bytes",
    "allocated_bytes",
    "active_bytes",
    "requested_bytes",
    "segments",
    "blocks",
    "bytes_without_stack",
    "history",
]
KNOWN = {
    "h200-torch2.11-train-python-stacks.pickle.gz": (38, 222, 180355072, 121323520, 121323520),
    "h200-torch2.11-compiled-training.pickle.gz": (41, 244, 239075328, 126912512, 126912128),
    "h200-torch2.11-cuda-graph.pickle.gz": (15, 68, 94371840, 84921344, 84920240),
    "h200-torch2.11-ddp-rank1-of-2.pickle.gz": (37, 183, 455081984, 288694272, 286314112),
    "h200-torch2.11-oom.pickle.gz": (71, 249, 2961178624, 129712128, 129712128),
    "h200-torch2.11-train-cpp-stacks.pickle.gz": (120, 671, 1140850688, 690192384, 675512320),
}
"""Segments, blocks, reserved, active_allocated and requested bytes, counted by other code."""


def by_hand(path: Path) -> dict[int, dict[str, int]]:
    """Totals of a trusted file, without our code."""
    raw = pickle.loads(gzip.decompress(path.read_bytes()))
    segments = raw if isinstance(raw, list) else raw["segments"]
    sums: dict[int, dict[str, int]] = {}
    for segment in segments:
        one = sums.setdefault(
            segment.get("device", 0), {"reserved": 0, "allocated": 0, "segments": 0, "blocks": 0}
        )
        one["reserved"] += segment["total_size"]
        one["segments"] += 1
        for block in segment["blocks"]:
            one["blocks"] += 1
            if block["state"] == "active_allocated":
                one["allocated"] += block["size"]
    return sums


def stats_json(capsys, path: object) -> dict:
    assert main(["stats", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def three_totals(capsys, tmp_path, path: Path) -> None:
    """stats, convert and the file itself agree, device by device."""
    expected = by_hand(path)
    devices = {one["device"]: one for one in stats_json(capsys, path)["devices"]}
    out = tmp_path / "live.pb.gz"
    assert main(["convert", str(path), "-o", str(out)]) == 0
    decoded = pprof.decode(out.read_bytes())
    space = [name for name, _ in decoded.sample_types].index("inuse_space")
    totals: dict[str, int] = {}
    for sample in decoded.samples:
        device = dict(sample.labels)["device"]
        totals[device] = totals.get(device, 0) + sample.values[space]
    for device, sums in expected.items():
        assert devices[device]["allocated_bytes"] == sums["allocated"]
        assert devices[device]["reserved_bytes"] == sums["reserved"]
        assert devices[device]["segments"] == sums["segments"]
        assert devices[device]["blocks"] == sums["blocks"]
        assert totals[str(device)] == sums["allocated"]
        assert main(["top", "--json", "-n", "3", "--device", str(device), str(path)]) == 0
        (top,) = json.loads(capsys.readouterr().out)["devices"]
        shown = sum(row["self_bytes"] for row in top["rows"]) + top["rest"]["self_bytes"]
        assert top["total_bytes"] == shown == sums["allocated"]
    everything = sum(sums["allocated"] for sums in expected.values())
    assert sum(totals.values()) == everything
    assert main(["convert", str(path), "-o", "-", "--format", "folded"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == everything


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_three_totals_one_number(capsys, tmp_path, path):
    three_totals(capsys, tmp_path, path)


def test_three_totals_of_every_recording(capsys, tmp_path, recordings):
    for path in recordings:
        three_totals(capsys, tmp_path, path)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_stats_of_known_files(capsys, name):
    devices = [one for one in stats_json(capsys, DATA / name)["devices"] if one["segments"]]
    (one,) = devices
    segments, blocks, reserved, allocated, requested = KNOWN[name]
    assert one["segments"] == segments
    assert one["blocks"] == blocks
    assert one["reserved_bytes"] == reserved
    assert one["allocated_bytes"] == allocated
    assert one["requested_bytes"] == requested


def test_stats_json_shape(capsys):
    form = stats_json(capsys, PYTHON)
    assert list(form) == ["devices", "warnings"]
    (device,) = form["devices"]
    assert list(device)[: len(KEYS)] == KEYS
    assert device["history"] is True
    assert all(type(device[key]) is int for key in KEYS[:-1])
    assert all(isinstance(text, str) for text in form["warnings"])


def test_stats_for_people(capsys):
    assert main(["stats", str(PYTHON)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split() == [
        "0", "172.0", "MiB", "115.7", "MiB", "115.7", "MiB", "115.7", "MiB", "38", "222",
        "79.1", "MiB", "yes",
    ]  # fmt: skip
    assert err.startswith("gpumem-otel: warning: ")
    assert err.count("\n") == 1


def test_stats_on_a_terminal_is_a_table(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["stats", str(PYTHON)]) == 0
    out = capsys.readouterr().out
    assert "device 0" in out
    assert "115.7 MiB" in out
    assert "free split remainders" in out


def test_empty_snapshot(capsys, tmp_path):
    path = tmp_path / "empty.json"
    path.write_text('{"segments": [], "device_traces": []}')
    assert stats_json(capsys, path) == {"devices": [], "warnings": []}
    for verb in ("stats", "top"):
        assert main([verb, str(path)]) == 0
        assert "no memory of any device" in capsys.readouterr().out
    out = tmp_path / "empty.pb.gz"
    assert main(["convert", str(path), "-o", str(out)]) == 0
    assert pprof.decode(out.read_bytes()).total("inuse_space") == 0


def test_standard_input(capsys, monkeypatch):
    expected = stats_json(capsys, PYTHON)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PYTHON.read_bytes())))
    assert stats_json(capsys, "-")["devices"] == expected["devices"]


def test_recording_is_read_at_its_last_reading(capsys, tmp_path):
    path = tmp_path / "run.gpumem"
    path.write_bytes(make_recording("h200-torch2.11-oom.pickle.gz", PYTHON.name))
    (device,) = stats_json(capsys, path)["devices"]
    assert device["allocated_bytes"] == KNOWN[PYTHON.name][3]
    out = tmp_path / "x.pb.gz"
    assert main(["convert", str(path), "-o", str(out)]) == 0
    assert pprof.decode(out.read_bytes()).total("inuse_space") == KNOWN[PYTHON.name][3]


# top


@pytest.mark.parametrize("by", ["stack", "function", "file"])
def test_top_json(capsys, by):
    assert main(["top", "--json", "--by", by, "-n", "4", str(PYTHON)]) == 0
    form = json.loads(capsys.readouterr().out)
    assert list(form) == ["devices", "warnings"]
    (device,) = form["devices"]
    keys = ["device", "by", "kind", "total_bytes", "total_objects", "rows", "rest"]
    assert list(device) == keys
    assert device["by"] == by
    rows = device["rows"]
    assert len(rows) == 4
    sizes = [row["self_bytes"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert all(row["total_bytes"] >= row["self_bytes"] for row in rows)
    keys = ["name", "objects", "self_bytes", "total_bytes"]
    assert list(rows[0]) == ([*keys, "frames"] if by == "stack" else keys)
    objects = sum(row["objects"] for row in rows) + device["rest"]["objects"]
    assert objects == device["total_objects"]


def test_top_for_people(capsys):
    assert main(["top", "-n", "3", "--frames", "2", str(PYTHON)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("device 0: 115.7 MiB in 197 allocations, ")
    assert lines[1].split()[:4] == ["67.0", "MiB", "57.9%", "4x"]
    assert lines[-1].endswith("more stacks")
    assert any(line.strip().endswith("more frames") for line in lines)
    assert main(["top", "-n", "3", "--by", "function", str(PYTHON)]) == 0
    assert "function" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (1, ["a0", "... 7 more frames"]),
        (2, ["a0", "... 6 more frames", "main"]),
        (4, ["a0", "... 3 more frames", "own", "... 1 more frame", "run", "main"]),
        (7, ["a0", "a1", "a2", "a3", "own", "... 1 more frame", "run", "main"]),
        (8, ["a0", "a1", "a2", "a3", "own", "between", "run", "main"]),
    ],
)
def test_top_shows_the_ends_and_the_first_frame_that_is_not_of_torch(
    capsys, tmp_path, number, shown
):
    frames = [raw_form.frame(f"a{i}", "/lib/torch/nn.py") for i in range(4)]
    frames += [raw_form.frame(name, "mine.py") for name in ("own", "between", "run", "main")]
    path = tmp_path / "state.json"
    path.write_text(
        json.dumps(raw_form.snapshot([raw_form.segment([raw_form.block(512, frames)])]))
    )
    assert main(["top", "--frames", str(number), str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    names = [line.rsplit("  ", 1)[1].split(" (")[0].split(":")[-1] for line in lines]
    assert names == shown


def test_top_says_one_more_stack(capsys, tmp_path):
    path = tmp_path / "state.json"
    blocks = [raw_form.block(size, [raw_form.frame(str(size))]) for size in (512, 1024)]
    path.write_text(json.dumps(raw_form.snapshot([raw_form.segment(blocks)])))
    assert main(["top", "-n", "1", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" in 1 more stack")


# convert


def test_convert_is_deterministic(tmp_path):
    first, second = tmp_path / "a.pb.gz", tmp_path / "b.pb.gz"
    for out in (first, second):
        assert main(["convert", str(PYTHON), "-o", str(out)]) == 0
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[:2] == b"\x1f\x8b"


def test_convert_to_standard_output(capsysbinary, tmp_path):
    out = tmp_path / "a.pb.gz"
    assert main(["convert", str(PYTHON), "-o", str(out)]) == 0
    assert main(["convert", str(PYTHON), "-o", "-"]) == 0
    assert capsysbinary.readouterr().out == out.read_bytes()


def test_convert_folded_and_json(capsys):
    assert main(["convert", str(PYTHON), "-o", "-", "--format", "folded"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == KNOWN[PYTHON.name][3]
    assert main(["convert", str(PYTHON), "-o", "-", "--format", "json"]) == 0
    (profile,) = json.loads(capsys.readouterr().out)["profiles"]
    assert profile["total_bytes"] == KNOWN[PYTHON.name][3]
    assert sum(sample["size_bytes"] for sample in profile["samples"]) == profile["total_bytes"]


def test_convert_allocated(tmp_path):
    """All alloc events of the trace, in requested bytes."""
    raw = pickle.loads(gzip.decompress(PYTHON.read_bytes()))
    allocs = [e for e in raw["device_traces"][0] if e["action"] == "alloc"]
    out = tmp_path / "made.pb.gz"
    assert main(["convert", str(PYTHON), "-o", str(out), "--kind", "allocated"]) == 0
    decoded = pprof.decode(out.read_bytes())
    assert decoded.total("alloc_space") == sum(event["size"] for event in allocs)
    assert decoded.total("alloc_objects") == len(allocs)


def test_convert_allocated_needs_events(capsys, tmp_path):
    path = tmp_path / "state.json"
    path.write_text('{"segments": [], "device_traces": [[]]}')
    assert main(["convert", str(path), "-o", str(tmp_path / "x"), "--kind", "allocated"]) == 1
    assert "holds no allocation events" in one_line(capsys)
    assert not (tmp_path / "x").exists()


def test_convert_allocated_of_a_recording_is_its_last_window(capsys, tmp_path):
    """Scaled to the growth of the counters, as a push of that window is."""
    path, out = tmp_path / "run.gpumem", tmp_path / "made.pb.gz"
    path.write_bytes(make_recording(PYTHON.name, windows=2))
    (device,) = stats_json(capsys, path)["devices"]
    assert device["history"] is True
    assert main(["convert", str(path), "-o", str(out), "--kind", "allocated"]) == 0
    decoded = pprof.decode(out.read_bytes())
    assert decoded.total("alloc_space") == 2 * 10**9
    assert decoded.total("alloc_objects") == 2000
    assert decoded.time_ns == 1_800_000_001_500_000_000


def test_convert_allocated_of_a_recording_without_windows_says_how(capsys, tmp_path):
    path = tmp_path / "run.gpumem"
    path.write_bytes(make_recording(PYTHON.name))
    assert main(["convert", str(path), "-o", str(tmp_path / "x"), "--kind", "allocated"]) == 1
    assert "record with --profiles live,allocated" in one_line(capsys)


def test_convert_keeps_mode_and_link(tmp_path):
    """An existing output keeps its mode; a link stays a link to the new content."""
    target = tmp_path / "target.pb.gz"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link = tmp_path / "link.pb.gz"
    link.symlink_to(target)
    assert main(["convert", str(PYTHON), "-o", str(link)]) == 0
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert pprof.decode(target.read_bytes()).total("inuse_space") == KNOWN[PYTHON.name][3]
    new = tmp_path / "new.pb.gz"
    mask = os.umask(0o027)
    try:
        assert main(["convert", str(PYTHON), "-o", str(new)]) == 0
    finally:
        os.umask(mask)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.pb.gz", "new.pb.gz", "target.pb.gz"]


def test_convert_to_a_device(tmp_path):
    assert main(["convert", str(PYTHON), "-o", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()


# errors


def one_line(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpumem-otel: error: ")
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("verb", ["stats", "top", "convert", "push"])
@pytest.mark.parametrize(
    "content", [None, b"", b"junk", b"\x80\x04cos\nsystem\n.", b"\x1f\x8b\x08", b"{}", b"[[["]
)
def test_unreadable_input(capsys, tmp_path, verb, content):
    """GIVEN a missing, empty or damaged file WHEN any verb reads it THEN one line and 2."""
    path = tmp_path / "in"
    if content is not None:
        path.write_bytes(content)
    more = {"convert": ["-o", str(tmp_path / "out")], "push": ["--url", "http://127.0.0.1:1"]}
    assert main([verb, str(path), *more.get(verb, [])]) == 2
    assert str(path) in one_line(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["top", str(PYTHON), "--device", "7"],
        ["convert", str(PYTHON), "-o", "x", "--device", "7"],
        ["convert", str(PYTHON), "-o", "x", "--device", "-1"],
        ["convert", str(PYTHON), "-o", "x", "--kind", "nonsense"],
        ["convert", str(PYTHON), "-o", "x", "--format", "nonsense"],
        ["convert", str(PYTHON)],
        ["top", str(PYTHON), "-n", "0"],
        ["top", str(PYTHON), "--by", "nonsense"],
        ["stats"],
        ["stats", str(PYTHON), "more"],
        ["stats", "--nonsense", str(PYTHON)],
        ["nonsense"],
        [],
    ],
)
def test_bad_usage(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert "--help'" in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["stats", "top", "convert", "convert --kind allocated"])
@pytest.mark.parametrize("from_stdin", [False, True])
def test_a_profile_is_named_as_one(capsys, monkeypatch, tmp_path, *, verb, from_stdin):
    path = tmp_path / "live.pb.gz"
    assert main(["convert", str(PYTHON), "-o", str(path)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    more = ["-o", str(tmp_path / "x")] if "convert" in verb else []
    assert main([*verb.split(), "-" if from_stdin else str(path), *more]) == 2
    name = "<stdin>" if from_stdin else str(path)
    reason = "a pprof profile, not a snapshot: go tool pprof reads it"
    assert one_line(capsys) == f"gpumem-otel: error: {name}: {reason}\n"


def test_a_bad_device_names_the_known_ones(capsys):
    assert main(["top", str(PYTHON), "--device", "7"]) == 2
    assert "(devices: 0)" in one_line(capsys)


@pytest.mark.parametrize("out", ["missing/x.pb.gz", ".", "file/x"])
def test_unwritable_output(capsys, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert main(["convert", str(PYTHON), "-o", out]) == 1
    assert out in one_line(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
