"""Every verb on every recording, and all of them say one number."""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys
from itertools import pairwise

import pytest
from support.cli_process import WAIT, clean_environ, cli, only_line
from support.recordings import DATA

from gpumem_otel.cli.main import main

OOM = DATA / "h200-torch2.11-oom.pickle.gz"
FILES = sorted(DATA.glob("*.pickle.gz"))


def run_json(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def run(capsys, *arguments):
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def by_device(entries, *keys):
    sums = {}
    for entry in entries:
        one = sums.setdefault(entry["device"], [0] * len(keys))
        for place, key in enumerate(keys):
            one[place] += entry[key]
    return sums


def totals_agree(capsys, path):
    """stats = top = segments = compare with itself; the raw file is the judge."""
    stats = {one["device"]: one for one in run_json(capsys, "stats", path)["devices"]}
    for device, one in stats.items():
        free = one["free_bytes"]
        assert free == sum(one["free"].values())
        assert one["reserved_bytes"] == one["allocated_bytes"] + one["pending_free_bytes"] + free
        assert one["states"]["active_allocated"]["size_bytes"] == one["allocated_bytes"]
        assert one["states"]["inactive"]["size_bytes"] == free
        assert sum(state["blocks"] for state in one["states"].values()) == one["blocks"]
        assert sum(pool["reserved_bytes"] for pool in one["pools"]) == one["reserved_bytes"]
        assert sum(pool["free_bytes"] for pool in one["pools"]) == free
        largest = one["largest_free_block"]
        assert (largest["size_bytes"] if largest else 0) <= free
        for by in ("stack", "file", "line", "pool", "compile-context", "annotation"):
            form = run_json(capsys, "top", path, "--by", by, "--device", device, "-n", 2)
            (top,) = form["devices"]
            shown = sum(row["self_bytes"] for row in top["rows"]) + top["rest"]["self_bytes"]
            assert top["total_bytes"] == shown == one["allocated_bytes"], by
    segments = run_json(capsys, "segments", path)["segments"]
    keys = ("size_bytes", "allocated_bytes", "pending_free_bytes", "free_bytes")
    sums = by_device(segments, *keys)
    for device, one in stats.items():
        if one["segments"]:
            assert sums[device] == [
                one["reserved_bytes"],
                one["allocated_bytes"],
                one["pending_free_bytes"],
                one["free_bytes"],
            ]
    blocks = [block for segment in segments for block in segment["blocks"]]
    assert len(blocks) == sum(one["blocks"] for one in stats.values())
    requested = sum(block["requested_bytes"] or 0 for block in blocks)
    assert requested == sum(one["requested_bytes"] for one in stats.values())
    for device in run_json(capsys, "compare", path, path)["devices"]:
        held = stats[device["device_before"]]["allocated_bytes"]
        assert device["before_bytes"] == device["after_bytes"] == held
        assert device["changes"] == []
    for device in run_json(capsys, "compare", path, path, "--by", "segment")["devices"]:
        assert device["only_before"] == device["only_after"] == []
        assert device["both"]["refilled"] == 0
        assert device["both"]["segments"] == stats[device["device_before"]]["segments"]
    return stats


def trace_agrees(capsys, path, stats):
    """trace lists each event once, and its sums are those of top and of the raw file."""
    raw = pickle.loads(gzip.decompress(path.read_bytes()))
    traces = raw.get("device_traces", []) if isinstance(raw, dict) else []
    for device, one in stats.items():
        events = traces[device] if device < len(traces) else []
        assert one["events"] == len(events)
        assert main(["trace", "--json", str(path), "--device", str(device)]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["event"] for line in lines] == list(range(1, len(events) + 1))
        assert [line["action"] for line in lines] == [event["action"] for event in events]
        made = [line["size_bytes"] for line in lines if line["action"] == "alloc"]
        if len(events) > 1 and made:
            at_the_end = one["states"]["active_allocated"]["requested_bytes"]
            assert one["peak"]["allocated_bytes"] >= at_the_end
            for kind, total in (("allocated", sum(made)), ("peak", one["peak"]["allocated_bytes"])):
                form = run_json(capsys, "top", path, "--kind", kind, "--device", device)
                assert [top["total_bytes"] for top in form["devices"]] == [total]
        else:
            assert one["peak"] is None
        text = run(capsys, "trace", path, "--device", device).splitlines()
        assert len(text) == len(events) + 2 * bool(events)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_one_number(capsys, path):
    trace_agrees(capsys, path, totals_agree(capsys, path))


def test_one_number_in_every_recording(capsys, recordings):
    for path in recordings:
        trace_agrees(capsys, path, totals_agree(capsys, path))


def test_what_is_printed_for_people_of_every_recording(capsys, recordings):
    """Lines of a strip are as wide as asked, and nothing that a terminal acts on is printed."""
    for path in recordings:
        drawn = run(capsys, "segments", path, "--width", "100", "--blocks")
        strips = [line for line in drawn.splitlines() if line.endswith("|")]
        assert {len(line) for line in strips} == {100}
        texts = [drawn, run(capsys, "stats", path), run(capsys, "compare", path, path)]
        for kind in ("live", "allocated", "peak"):
            main(["top", "--kind", kind, str(path)])
            texts.append(capsys.readouterr().out)
        for text in texts:
            assert "\x1b" not in text
            text.encode()


def test_pairs_of_recordings_add_up(capsys, recordings):
    """Neighbours have nothing to do with one another: their differences add up all the same."""
    for before, after in pairwise(recordings):
        for device in run_json(capsys, "compare", before, after)["devices"]:
            parts = device["categories"].values()
            assert sum(part["before_bytes"] for part in parts) == device["before_bytes"]
            assert sum(part["after_bytes"] for part in parts) == device["after_bytes"]
            delta = sum(c["after_bytes"] - c["before_bytes"] for c in device["changes"])
            assert delta == device["after_bytes"] - device["before_bytes"]


@pytest.mark.parametrize("verb", ["stats", "top", "segments", "trace"])
def test_as_a_process_from_standard_input(verb):
    with OOM.open("rb") as file:
        done = subprocess.run(
            [sys.executable, "-m", "gpumem_otel.cli.main", verb, "-"],
            stdin=file,
            capture_output=True,
            text=True,
            env=clean_environ(),
            timeout=WAIT,
        )
    assert done.returncode == 0
    assert done.stdout == cli(verb, str(OOM)).stdout
    assert done.stderr.startswith("gpumem-otel: warning: <stdin>: ")


def test_compare_as_a_process_ends_well_where_nothing_changed():
    done = cli("compare", str(OOM), str(OOM))
    assert done.returncode == 0
    assert "same" in done.stdout


def test_a_reader_that_has_enough_ends_the_trace():
    """GIVEN `trace | head -1` WHEN head goes THEN no traceback and no message."""
    command = f"{sys.executable} -m gpumem_otel.cli.main trace {OOM} | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        env=clean_environ(),
        timeout=WAIT,
    )
    assert done.stdout.startswith("device 0: 4,481 events")
    assert "Traceback" not in done.stderr
    assert "error" not in done.stderr


@pytest.mark.parametrize("verb", ["segments", "trace", "compare", "stats"])
@pytest.mark.parametrize("content", [None, b"", b"junk", b"\x80\x04cos\nsystem\n.", b"[[["])
def test_unreadable_input(tmp_path, verb, content):
    path = tmp_path / "in"
    if content is not None:
        path.write_bytes(content)
    more = [str(OOM)] if verb == "compare" else []
    done = cli(verb, *more, str(path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert str(path) in only_line(done.stderr)
