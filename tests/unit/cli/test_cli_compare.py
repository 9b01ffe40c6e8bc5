"""Two files compared, by stack and by segment."""

from __future__ import annotations

import io
import json
import sys

import pytest
from support.raw_snapshots import alloc, block, frame, segment, snapshot
from support.recordings import DATA

from gpumem_otel.cli.main import main

PYTHON = DATA / "h200-torch2.11-train-python-stacks.pickle.gz"
OOM = DATA / "h200-torch2.11-oom.pickle.gz"
RANK1 = DATA / "h200-torch2.11-ddp-rank1-of-2.pickle.gz"


def written(tmp_path, name, *segments, traces=()):
    path = tmp_path / name
    path.write_text(json.dumps(snapshot(segments, traces)))
    return str(path)


def one(name, size, folder="/a", line=3):
    return block(size, [frame(name, f"{folder}/model.py", line), frame("main", f"{folder}/run.py")])


@pytest.fixture
def pair(tmp_path):
    """A stack that grew a thousandfold and a new one; another directory, the same segment."""
    before = written(tmp_path, "before.json", segment([one("grow", 10 << 20), one("stay", 512)]))
    after = written(
        tmp_path,
        "after.json",
        segment([one("grow", 10 << 30, "/b"), one("stay", 512, "/b"), one("come", 1024, "/b")]),
    )
    return before, after


def run_json(capsys, *arguments):
    assert main(["compare", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_growth_is_growth(capsys, pair):
    assert main(["compare", *pair]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines == [
        "device 0, live: 10.0 MiB -> 10.0 GiB (+10.0 GiB), 2 -> 3 allocations",
        "change before after count count after stacks",
        "grown +10.0 GiB 10.0 MiB 10.0 GiB 1 1 1",
        "shrunk 0 B 0 B 0 B 0 0 0",
        "new +1.0 KiB 0 B 1.0 KiB 0 1 1",
        "gone 0 B 0 B 0 B 0 0 0",
        "same 0 B 512 B 512 B 1 1 1",
        "grown +10.0 GiB 10.0 MiB -> 10.0 GiB 1x -> 1x",
        "model.py:grow (model.py:3)",
        "run.py:main (run.py:1)",
        "new +1.0 KiB 0 B -> 1.0 KiB 0x -> 1x",
        "model.py:come (model.py:3)",
        "run.py:main (run.py:1)",
    ]


def test_json(capsys, pair):
    form = run_json(capsys, *pair)
    assert list(form) == ["by", "kind", "devices", "warnings"]
    (device,) = form["devices"]
    assert (device["device_before"], device["device_after"]) == (0, 0)
    assert list(device["categories"]) == ["grown", "shrunk", "new", "gone", "same"]
    delta = sum(c["after_bytes"] - c["before_bytes"] for c in device["categories"].values())
    assert delta == device["after_bytes"] - device["before_bytes"] == (10 << 30) - (10 << 20) + 1024
    first, second = device["changes"]
    assert (first["change"], second["change"]) == ("grown", "new")
    assert first["lines_moved"] is False
    assert first["frames"][0] == {"name": "model.py:grow", "filename": "/b/model.py", "line": 3}
    assert device["changes_left_out"] == 0
    (device,) = run_json(capsys, *pair, "-n", 1)["devices"]
    assert (len(device["changes"]), device["changes_left_out"]) == (1, 1)


def test_moved_lines(capsys, tmp_path):
    before = written(tmp_path, "a.json", segment([one("f", 512)]))
    after = written(tmp_path, "b.json", segment([one("f", 1024, line=8)]))
    assert main(["compare", before, after]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "grown +512 B 512 B -> 1.0 KiB 1x -> 1x lines moved" in lines
    (device,) = run_json(capsys, before, after, "--exact-lines")["devices"]
    assert [c["change"] for c in device["changes"]] == ["new", "gone"]


def test_rows_that_are_not_shown_are_counted(capsys, tmp_path):
    before = written(tmp_path, "a.json", segment([]))
    after = written(tmp_path, "b.json", segment([one(f"f{n}", 512 * n) for n in range(1, 14)]))
    assert main(["compare", before, after]) == 0
    assert capsys.readouterr().out.endswith("... 3 more changed stacks\n")
    assert main(["compare", before, after, "-n", "12", "--frames", "1"]) == 0
    assert capsys.readouterr().out.endswith("... 1 more changed stack\n")


@pytest.mark.parametrize("options", [[], ["--kind", "peak"], ["--kind", "allocated"]])
def test_a_file_is_as_itself(capsys, options):
    (device,) = run_json(capsys, OOM, OOM, *options)["devices"]
    assert device["changes"] == []
    assert device["before_bytes"] == device["after_bytes"] > 0
    same = device["categories"]["same"]
    assert same["before_bytes"] == same["after_bytes"] == device["before_bytes"]


@pytest.mark.parametrize("kind", ["peak", "allocated"])
def test_kinds_are_those_of_top(capsys, kind):
    (device,) = run_json(capsys, PYTHON, OOM, "--kind", kind)["devices"]
    for path, key in ((PYTHON, "before_bytes"), (OOM, "after_bytes")):
        assert main(["top", "--json", "--kind", kind, str(path)]) == 0
        (top,) = json.loads(capsys.readouterr().out)["devices"]
        assert device[key] == top["total_bytes"]


def test_single_devices_are_compared_whatever_their_numbers(capsys):
    (device,) = run_json(capsys, OOM, RANK1)["devices"]
    assert (device["device_before"], device["device_after"]) == (0, 1)
    assert main(["compare", str(OOM), str(RANK1), "-n", "1"]) == 0
    assert capsys.readouterr().out.startswith("device 0 before, 1 after, live: ")


def test_devices_that_one_file_lacks(capsys, tmp_path):
    before = written(tmp_path, "a.json", segment([one("f", 5)]))
    after = written(
        tmp_path,
        "b.json",
        segment([one("f", 5)]),
        segment([one("f", 7)], device=1, address=1 << 30),
    )
    zero, lone = run_json(capsys, before, after)["devices"]
    assert (zero["device_before"], zero["device_after"], zero["changes"]) == (0, 0, [])
    assert (lone["device_before"], lone["device_after"], lone["after_bytes"]) == (None, 1, 7)
    (device,) = run_json(capsys, after, before, "--device", 1)["devices"]
    assert (device["device_after"], device["categories"]["gone"]["before_bytes"]) == (None, 7)
    assert main(["compare", after, before, "--device", "1"]) == 0
    assert capsys.readouterr().out.startswith("device 1 (only before), live: 7 B -> 0 B (-7 B)")


def test_by_segment(capsys, tmp_path):
    before = written(
        tmp_path, "a.json", segment([one("f", 8)], address=100), segment([one("f", 8)], address=200)
    )
    after = written(
        tmp_path,
        "b.json",
        segment([one("f", 8)], address=100),
        segment([one("f", 16)], address=200),
        segment([block(4, state="inactive")], address=300, pool=(0, 1)),
    )
    assert main(["compare", "--by", "segment", before, after]) == 0
    assert capsys.readouterr().out.splitlines() == [
        (
            "device 0: 1 segment only before (8 B), 2 only after (20 B), 1 in both (8 B), "
            "0 of these hold more or less"
        ),
        "only_before = [200]",
        "only_after = [200, 300]",
        "only_before  0xc8         8 B  allocated        8 B  stream 0x0  pool default  large",
        "only_after   0xc8        16 B  allocated       16 B  stream 0x0  pool default  large",
        "only_after   0x12c         4 B  allocated        0 B  stream 0x0  pool 0,1  large",
    ]
    (device,) = run_json(capsys, "--by", "segment", before, after)["devices"]
    assert [s["address"] for s in device["only_after"]] == [200, 300]
    assert device["both"] == {"segments": 1, "size_bytes": 8, "refilled": 0}
    (device,) = run_json(capsys, "--by", "segment", before, before)["devices"]
    assert (device["only_before"], device["only_after"]) == ([], [])


def test_one_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(OOM.read_bytes())))
    (device,) = run_json(capsys, "-", OOM)["devices"]
    assert device["changes"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-", "-"], "only one of BEFORE and AFTER"),
        ([str(OOM), str(OOM), "--by", "segment", "--kind", "live"], "--kind is about stacks"),
        ([str(OOM), str(OOM), "--device", "4"], "device 4 is in neither file (devices: 0)"),
        ([str(OOM)], "AFTER"),
    ],
)
def test_bad_usage(capsys, arguments, said):
    assert main(["compare", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_kinds_need_events_in_both(capsys, tmp_path):
    bare = written(tmp_path, "a.json", segment([one("f", 5)]))
    full = written(tmp_path, "b.json", segment([one("f", 5)]), traces=[[alloc(1, 1)]])
    assert main(["compare", "--kind", "allocated", full, bare]) == 1
    assert f"{bare}: holds no allocation events" in capsys.readouterr().err


def test_nothing_in_either(capsys, tmp_path):
    empty = written(tmp_path, "a.json")
    assert main(["compare", empty, empty]) == 0
    assert capsys.readouterr().out == "no memory of any device in either file\n"


def test_warnings_name_their_file(capsys):
    assert run_json(capsys, PYTHON, OOM)["warnings"][-1].startswith(f"{OOM}: device 0: ")
