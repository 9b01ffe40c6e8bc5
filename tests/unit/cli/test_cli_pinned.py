"""`--kind pinned` of the file verbs, on snapshots made by hand after torch 2.14's structures."""

from __future__ import annotations

import json

import pytest
from support.page_payload import payload_of
from support.raw_snapshots import block, segment, snapshot
from support.recordings import DATA

from gpumem_otel.cli.main import main
from gpumem_otel.page import html
from gpumem_otel.profiles.pprof_reader import decode

LOADER = [{"name": "pin", "filename": "/job/loader.py", "line": 3}]


@pytest.fixture
def path(tmp_path):
    raw = snapshot([segment([block(1000, address=1)])])
    raw["host_segments"] = [
        {"address": 1, "size": 3 << 20, "allocated": True, "active": True, "frames": LOADER},
        {"address": 2, "size": 1 << 20, "allocated": False, "active": False, "frames": []},
    ]
    path = tmp_path / "made.json"
    path.write_text(json.dumps(raw))
    return path


def test_top(path, capsys):
    assert main(["top", str(path), "--kind", "pinned"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "device 0, pinned: 4.0 MiB in 2 allocations, 2 stacks"
    assert lines[1].split() == ["3.0", "MiB", "75.0%", "1x", "loader.py:pin", "(loader.py:3)"]
    assert "[cached pinned memory]" in lines[2]


def test_convert(path, tmp_path):
    output = tmp_path / "pinned.pb.gz"
    assert main(["convert", str(path), "-o", str(output), "--kind", "pinned"]) == 0
    profile = decode(output.read_bytes())
    assert profile.total("pinned_space") == 4 << 20
    assert profile.default_sample_type == "pinned_space"


@pytest.mark.skipif(not html.available(), reason="the page is not built")
def test_flamegraph(path, tmp_path):
    output = tmp_path / "page.html"
    assert main(["flamegraph", str(path), "-o", str(output), "--kind", "pinned"]) == 0
    found = payload_of(output.read_text())
    assert found.header["kind"] == "pinned"
    assert sum(size for _, size in found.profile("pinned").values()) == 4 << 20


def test_a_file_without_it_says_what_records_it(capsys):
    older = DATA / "h200-torch2.11-oom.pickle.gz"
    assert main(["top", str(older), "--kind", "pinned"]) != 0
    assert "holds no pinned host memory; torch 2.14 and newer" in capsys.readouterr().err
