"""What dump writes, read by torch's own tool: it takes all of it, and says the same sums."""

from __future__ import annotations

import base64
import json
import pickle
import re
import subprocess
import sys

import pytest
from support.recordings import DATA, make_recording

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.cli.main import main
from gpumem_otel.profiles.of_file import open_file

pytestmark = pytest.mark.torch

memory_viz = pytest.importorskip("torch.cuda._memory_viz")

FILES = sorted(DATA.glob("*.pickle.gz"))


@pytest.fixture(params=["recording", "snapshot"])
def dumped(request, tmp_path):
    """A dump's path, and what its source says."""
    name = "h200-torch2.11-train-cpp-stacks.pickle.gz"
    source = DATA / name
    if request.param == "recording":
        source = tmp_path / "run.gpumem"
        source.write_bytes(make_recording(name, windows=1))
    out = tmp_path / "out.pickle"
    assert main(["dump", str(source), "-o", str(out)]) == 0
    return out, open_file(source)


def viz(*arguments):
    command = [sys.executable, memory_viz.__file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_stats_says_the_same(dumped):
    path, source = dumped
    totals = [source.snapshot.totals(device) for device in source.snapshot.devices()]
    said = viz("stats", path)
    assert re.search(rf"^segments: {sum(b.segments for b in totals)}$", said, re.MULTILINE)
    reserved, active = (
        memory_viz.Bytes(sum(getattr(b, key) for b in totals))
        for key in ("reserved_bytes", "requested_bytes")
    )
    assert f"total_reserved: {reserved}\n" in said
    assert f"total_allocated: {active}\n" in said


def test_memory_has_the_requested_bytes_of_every_block(dumped):
    """The flame graph's script is not needed: it is given the folded stacks, and we add them."""
    path, source = dumped
    lines = []
    raw = pickle.loads(path.read_bytes())
    memory_viz.memory(raw, format_flamegraph=lambda text: lines.extend(text.splitlines()) or "")
    active = [line for line in lines if ";active_allocated;" in line and "<gaps>" not in line]
    total = sum(int(line.rsplit(" ", 1)[1]) for line in active)
    blocks = [
        block.requested_bytes
        for segment in source.snapshot.segments()
        for block in segment.blocks
        if block.state.value == "active_allocated"
    ]
    assert total == sum(blocks)
    assert len(active) == len(blocks)


def test_trace_counts_every_allocation(dumped):
    path, source = dumped
    said = viz("trace", path)
    allocated = sum(profile.total_objects for profile in source.profiles(ProfileKind.ALLOCATED))
    if source.recording is not None:
        (window,) = source.recording.windows
        allocated = sum(g.objects for g in window.reading().snapshot.event_groups(0))
    assert len(re.findall(r"^\w+ = (?:MEM|seg_\d+|\w+)\[", said, re.MULTILINE)) == allocated


@pytest.mark.parametrize("verb", ["trace_plot", "segment_plot"])
def test_the_pages_hold_the_dump(dumped, tmp_path, verb):
    path, _ = dumped
    page = tmp_path / "out.html"
    viz(verb, path, "-o", page)
    (files,) = re.findall(r"^const local_files = (.*)$", page.read_text(), re.MULTILINE)
    (file,) = json.loads(files)
    assert pickle.loads(base64.b64decode(file["base64"])) == pickle.loads(path.read_bytes())
