"""What all verbs on files share: recordings, units, inputs that must not be overwritten."""

from __future__ import annotations

import json
import sys

import pytest
from support.raw_snapshots import alloc, block, frame, segment, snapshot
from support.recordings import DATA, make_recording

import gpumem_otel
from gpumem_otel.cli.main import main

OOM = DATA / "h200-torch2.11-oom.pickle.gz"
TRAIN = DATA / "h200-torch2.11-train-python-stacks.pickle.gz"
HELD = 129712128  # of the oom recording, in the allocator's rounded bytes


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "run.gpumem"
    path.write_bytes(make_recording(TRAIN.name, OOM.name, windows=2))
    return str(path)


def run_json(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_peak_of_a_recording_is_its_fullest_reading_for_every_verb(capsys, recording, tmp_path):
    (top,) = run_json(capsys, "top", "--kind", "peak", recording)["devices"]
    (compared,) = run_json(capsys, "compare", "--kind", "peak", recording, recording)["devices"]
    out = tmp_path / "peak.json"
    assert main(["convert", recording, "--kind", "peak", "--format", "json", "-o", str(out)]) == 0
    (converted,) = json.loads(out.read_text())["profiles"]
    loaded = gpumem_otel.load_snapshot(recording).profile("peak")
    assert top["total_bytes"] == converted["total_bytes"] == loaded.total_bytes == HELD
    assert (compared["before_bytes"], compared["after_bytes"]) == (HELD, HELD)
    assert converted["sizes"] == "allocated"
    capsys.readouterr()
    assert main(["top", "--kind", "peak", "-n", "1", recording]) == 0
    assert capsys.readouterr().out.startswith("device 0, peak: 123.7 MiB")


def test_requested_and_rounded_bytes_are_not_compared(capsys, recording):
    assert main(["compare", "--kind", "peak", recording, str(OOM)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "gpumem-otel: error: peak of a recording and of a snapshot file: requested bytes (of a "
        "trace) and bytes of the allocator's blocks do not compare"
    )
    recorded = gpumem_otel.load_snapshot(recording).profile("peak")
    file = gpumem_otel.load_snapshot(OOM).profile("peak")
    for mix in (lambda: recorded.diff(file), lambda: file.merge(recorded)):
        with pytest.raises(gpumem_otel.ConfigError, match="do not compare"):
            mix()


def test_a_single_event_is_no_timeline_for_any_verb(capsys, tmp_path):
    path = tmp_path / "state.json"
    held = segment([block(512, [frame("f")], address=1)])
    path.write_text(json.dumps(snapshot([held], [[alloc(1, 512)]])))
    assert run_json(capsys, "stats", path)["devices"][0]["peak"] is None
    for verb in (["top"], ["convert", "-o", "-"]):
        assert main([*verb, str(path), "--kind", "peak"]) == 1
        assert "holds a single event, which is no timeline" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["convert", "dump", "flamegraph", "timeline"])
def test_an_input_is_never_written_over(capsys, tmp_path, verb):
    path = tmp_path / "only.pickle.gz"
    path.write_bytes(OOM.read_bytes())
    link = tmp_path / "link"
    link.symlink_to(path)
    for source, output in ((path, path), (link, path), (path, link)):
        assert main([verb, str(source), "-o", str(output)]) == 2
        assert f"{output} is the input; give another name" in capsys.readouterr().err
    assert path.read_bytes() == OOM.read_bytes()


@pytest.mark.parametrize("before", [["--before"], []])
def test_what_is_compared_with_is_not_written_over(capsys, tmp_path, before):
    path = tmp_path / "before.pickle.gz"
    path.write_bytes(OOM.read_bytes())
    files = [str(TRAIN), *before, str(path)] if before else [str(path), str(TRAIN)]
    assert main(["flamegraph", *files, "-o", str(path)]) == 2
    assert path.read_bytes() == OOM.read_bytes()


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream_takes_nothing(monkeypatch, closed):
    monkeypatch.setattr(sys, closed, None)
    assert main(["stats", str(OOM)]) == 0
    assert getattr(sys, closed) is None


def test_closed_streams_are_said(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["stats", "-"]) == 2
    assert capsys.readouterr().err == "gpumem-otel: error: <stdin>: standard input is closed\n"


def test_names_of_files_do_not_drive_the_terminal(capsys, tmp_path):
    assert main(["stats", str(tmp_path / "a\x1b[31mb")]) == 2
    assert "a\\u001b[31mb" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["top", "segments", "trace"])
def test_more_rows_than_there_can_be(capsys, verb):
    assert main([verb, str(OOM), "-n", str(10**22)]) == 2
    assert "is not in the range" in capsys.readouterr().err
