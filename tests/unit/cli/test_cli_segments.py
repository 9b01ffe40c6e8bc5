"""Segments drawn in the terminal, and every block as JSON."""

from __future__ import annotations

import json
import re
import sys

import pytest
from support.raw_snapshots import block, frame, segment, snapshot
from support.recordings import DATA, make_recording

from gpumem_otel.cli.main import main

GRAPH = DATA / "h200-torch2.11-cuda-graph.pickle.gz"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def made(tmp_path):
    """Three segments: half full, full of a private pool, free and expandable."""
    stack = [frame("grow"), frame("main", line=9)]
    path = tmp_path / "made.json"
    raw = snapshot(
        [
            segment(
                [block(512, stack), block(512, state="inactive", requested=99)], address=0x3000
            ),
            segment([block(2048, stack)], address=0x1000, pool=(0, 1), stream=5),
            segment(
                [block(4096, state="inactive")],
                address=0x9000,
                is_expandable=True,
                segment_type="small",
            ),
            segment([block(64, state="active_pending_free")], device=1, address=0x20000),
        ]
    )
    path.write_text(json.dumps(raw))
    return str(path)


def run(capsys, *arguments):
    assert main(["segments", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def addresses(lines):
    return [found[1] for line in lines if (found := re.match(r" +\d +(0x[0-9a-f]+) ", line))]


def test_drawn(capsys, made):
    lines = run(capsys, made, "--device", "0", "--width", "119")
    assert lines[0] == "3 segments, 7.0 KiB reserved, 2.5 KiB allocated (35.7%)"
    assert "#= allocated, block by block" in lines[1]
    assert lines[2].split() == [
        "device", "address", "size", "used", "blocks", "stream", "pool", "kind",
    ]  # fmt: skip
    strips = [re.search(r"\|(.*)\|$", line)[1] for line in lines[3:]]
    (cells,) = {len(drawn) for drawn in strips}
    assert strips == ["#" * cells, "#" * (cells // 2) + "." * (cells // 2), "." * cells]
    assert cells % 2 == 0
    assert all(len(line) == 119 for line in lines[3:])
    assert lines[3].split()[1:9] == ["0x1000", "2.0", "KiB", "100.0%", "1", "0x5", "0,1", "large"]
    assert "small expandable" in lines[5]


@pytest.mark.parametrize("width", [40, 60, 79, 80, 132, 200])
def test_no_line_of_strips_is_wider_or_narrower_than_asked(capsys, made, width):
    lines = run(capsys, made, "--width", str(width))
    drawn = [line for line in lines if line.endswith("|")]
    assert len(drawn) == 4
    assert {len(line) for line in drawn} == {width}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ([], ["0x1000", "0x3000", "0x9000", "0x20000"]),
        (["--sort", "size"], ["0x9000", "0x1000", "0x3000", "0x20000"]),
        (["--sort", "free"], ["0x9000", "0x3000", "0x1000", "0x20000"]),
        (["--sort", "free", "-n", "2"], ["0x9000", "0x3000"]),
        (["--pool", "private"], ["0x1000"]),
        (["--pool", "0,1"], ["0x1000"]),
        (["--pool", "default", "--device", "0"], ["0x3000", "0x9000"]),
        (["--pool", "7,7"], []),
    ],
)
def test_filters_and_order(capsys, made, options, found):
    assert addresses(run(capsys, made, *options)) == found


def test_what_is_not_shown_is_said(capsys, made):
    last = run(capsys, made, "-n", "1")[-1]
    assert last == "not shown: 3 segments, 5.1 KiB reserved, 512 B allocated (9.9%)"
    assert run(capsys, made, "--pool", "7,7")[-1].endswith("no segment of any device in pool 7,7")


def test_blocks_are_named(capsys, made):
    lines = run(capsys, made, "--blocks", "--device", "0", "--sort", "free")
    blocks = [" ".join(line.split()) for line in lines if line.startswith("    0x")]
    assert blocks == [
        "0x9000 4.0 KiB inactive",
        "0x3000 512 B active_allocated grow (train.py:1)",
        "0x3200 512 B inactive",
        "0x1000 2.0 KiB active_allocated grow (train.py:1)",
    ]


def test_colour_only_on_a_terminal_and_not_where_it_is_unwanted(capsys, made, monkeypatch):
    plain = run(capsys, made, "--width", "100")
    assert not any("\x1b" in line for line in plain)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = run(capsys, made, "--width", "100")
    assert any("\x1b[32m#" in line for line in coloured)
    assert [ESCAPES.sub("", line) for line in coloured] == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(capsys, made, "--width", "100") == plain


def test_width_is_the_terminals(capsys, made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "91")
    assert {len(line) for line in run(capsys, made) if line.endswith("|")} == {91}


def test_json_has_every_block(capsys, made):
    assert main(["segments", "--json", "--sort", "size", "-n", "3", made]) == 0
    form = json.loads(capsys.readouterr().out)
    assert list(form) == ["segments", "rest", "stacks", "warnings"]
    expandable, private, half = form["segments"]
    assert (expandable["expandable"], expandable["kind"], expandable["free_bytes"]) == (
        True, "small", 4096,
    )  # fmt: skip
    assert (private["pool"], private["stream"]) == ([0, 1], 5)
    assert half["blocks"] == [
        {"address": 0x3000, "size_bytes": 512, "requested_bytes": 512,
         "state": "active_allocated", "stack": 0},
        {"address": 0x3200, "size_bytes": 512, "requested_bytes": None,
         "state": "inactive", "stack": None},
    ]  # fmt: skip
    assert private["blocks"][0]["stack"] == 0
    assert [frame["name"] for frame in form["stacks"][0]] == ["train.py:grow", "train.py:main"]
    assert form["rest"] == {"segments": 1, "size_bytes": 64, "allocated_bytes": 0}


@pytest.mark.parametrize("pool", ["x", "1", "0,1,2", "-1,0", "", "9" * 30 + ",1"])
def test_no_pool(capsys, made, pool):
    assert main(["segments", made, f"--pool={pool}"]) == 2
    assert "--pool" in capsys.readouterr().err


def test_of_a_recording_and_of_nothing(capsys, tmp_path):
    path = tmp_path / "run.gpumem"
    path.write_bytes(make_recording(GRAPH.name))
    assert run(capsys, str(path))[0] == "15 segments, 90.0 MiB reserved, 81.0 MiB allocated (90.0%)"
    empty = tmp_path / "empty.json"
    empty.write_text('{"segments": []}')
    assert run(capsys, str(empty)) == [f"{empty}: no segment of any device"]


def test_a_hostile_name_does_not_reach_the_terminal(capsys, tmp_path):
    path = tmp_path / "made.json"
    raw = snapshot([segment([block(1, [frame("\x1b[2Jf")])], segment_type="\x1b]0;x\x07")])
    path.write_text(json.dumps(raw))
    assert main(["segments", "--blocks", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
