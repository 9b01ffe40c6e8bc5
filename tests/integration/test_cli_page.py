"""`flamegraph` and `timeline`: the files that they write, and their errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli_process import WAIT, clean_environ, cli, only_line
from support.page_payload import payload_of
from support.recordings import make_recording

from gpumem_otel.page import html

PACKAGE = Path(html.__file__).parents[1]
TRAIN = "h200-torch2.11-train-python-stacks.pickle.gz"
OOM = "h200-torch2.11-oom.pickle.gz"
DDP = "h200-torch2.11-ddp-rank1-of-2.pickle.gz"

needs_page = pytest.mark.skipif(
    not html.available(), reason="the page is not built: npm was missing at installation"
)


@needs_page
def test_the_name_of_the_page_follows_the_input(data_dir, tmp_path):
    done = cli("flamegraph", str(data_dir / TRAIN), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.iterdir()
    assert made.name == "h200-torch2.11-train-python-stacks.flamegraph.html"
    assert done.stdout.startswith(f"{made.name}: {made.stat().st_size:,} bytes")
    found = payload_of(made.read_text())
    assert (found.header["view"], found.header["kind"]) == ("flamegraph", "live")
    said = json.loads(cli("stats", "--json", str(data_dir / TRAIN)).stdout)
    total = sum(size for _, size in found.profile("live").values())
    assert total == said["devices"][0]["allocated_bytes"]


@needs_page
@pytest.mark.parametrize("form", [["{a}", "{b}"], ["{b}", "--before", "{a}"]])
def test_two_files_are_compared(data_dir, tmp_path, form):
    names = {"a": data_dir / TRAIN, "b": data_dir / OOM}
    output = tmp_path / "change.html"
    arguments = [part.format(**names) for part in form]
    done = cli("flamegraph", *arguments, "-o", str(output), "--kind", "peak")
    assert done.returncode == 0, done.stderr
    found = payload_of(output.read_text())
    assert (found.header["view"], found.header["kind"]) == ("difference", "peak")
    assert [Path(s["name"]).name for s in found.header["sources"]] == [TRAIN, OOM]
    totals = [sum(s for _, s in found.profile("live", 0, i).values()) for i in (0, 1)]
    assert totals == [121323520, 129712128]


@needs_page
def test_from_stdin_to_stdout(data_dir):
    data = (data_dir / OOM).read_bytes()
    done = cli("timeline", "-", "-o", "-", input=data, text=False)
    assert done.returncode == 0, done.stderr
    found = payload_of(done.stdout.decode("ascii"))
    assert found.header["view"] == "timeline"
    assert found.header["sources"][0]["name"] == "<stdin>"
    assert found.header["timelines"][0]["marks"][0]["action"] == "oom"


@needs_page
def test_a_recording_has_its_readings(tmp_path):
    source = tmp_path / "run.gpumem"
    source.write_bytes(make_recording(TRAIN, OOM, windows=2))
    done = cli("timeline", str(source), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = payload_of((tmp_path / "run.timeline.html").read_text())
    (timeline,) = found.header["timelines"]
    assert timeline["what"] == "readings"
    assert len(found[timeline["allocated"]]) == 2
    assert {p["kind"] for p in found.header["profiles"]} == {"live", "peak", "allocated"}


@needs_page
def test_one_device_of_several(data_dir, tmp_path):
    output = tmp_path / "one.html"
    done = cli("flamegraph", str(data_dir / DDP), "--device", "1", "-o", str(output))
    assert done.returncode == 0, done.stderr
    found = payload_of(output.read_text())
    assert {p["device"] for p in found.header["profiles"]} == {1}
    wrong = cli("flamegraph", str(data_dir / DDP), "--device", "7", "-o", str(output))
    assert wrong.returncode == 2
    assert "device 7 is not in" in only_line(wrong.stderr)


@needs_page
def test_what_can_not_be_written_or_read(data_dir, tmp_path):
    broken = tmp_path / "broken.pickle"
    broken.write_bytes(b"\x80\x04.")
    done = cli("flamegraph", str(broken), cwd=tmp_path)
    assert done.returncode == 2
    assert "broken.pickle" in only_line(done.stderr)
    assert list(tmp_path.iterdir()) == [broken]
    done = cli("flamegraph", str(data_dir / TRAIN), "-o", str(tmp_path / "no" / "x.html"))
    assert done.returncode == 1
    assert "error: " in done.stderr
    done = cli("flamegraph", "-", "--before", "-")
    assert done.returncode == 2
    assert "only one input can be standard input" in only_line(done.stderr)
    done = cli("flamegraph", "a", "b", "--before", "c")
    assert done.returncode == 2
    assert "once" in only_line(done.stderr)


@needs_page
def test_the_same_input_gives_the_same_page(data_dir):
    first, second = (cli("flamegraph", str(data_dir / TRAIN), "-o", "-").stdout for _ in "ab")
    assert first == second


def test_without_the_page_the_verbs_say_what_is_missing(data_dir, tmp_path):
    """GIVEN a package that was built without npm WHEN a page is asked for THEN one line says it."""
    kept = shutil.ignore_patterns("web", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "gpumem_otel", ignore=kept)
    environ = clean_environ(PYTHONPATH=str(tmp_path))
    for verb in ("flamegraph", "timeline"):
        done = subprocess.run(
            [sys.executable, "-m", "gpumem_otel.cli.main", verb, str(data_dir / TRAIN)],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=WAIT,
        )
        assert done.returncode == 1
        line = only_line(done.stderr)
        assert "npm" in line
        assert "install gpumem-otel again" in line
    assert [path.name for path in tmp_path.iterdir()] == ["gpumem_otel"]
