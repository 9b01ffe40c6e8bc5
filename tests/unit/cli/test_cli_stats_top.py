"""`stats` and `top` beyond the totals: states, causes, pools, peaks, labels."""

from __future__ import annotations

import json
import sys

import pytest
from support.raw_snapshots import alloc, block, frame, segment, snapshot
from support.recordings import DATA, make_recording

from gpumem_otel.cli.main import main

OOM = DATA / "h200-torch2.11-oom.pickle.gz"
GRAPH = DATA / "h200-torch2.11-cuda-graph.pickle.gz"
COMPILED = DATA / "h200-torch2.11-compiled-training.pickle.gz"


def run_json(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def written(tmp_path, raw):
    path = tmp_path / "made.json"
    path.write_text(json.dumps(raw))
    return path


# stats


def test_stats_of_a_known_file(capsys):
    (one,) = run_json(capsys, "stats", GRAPH)["devices"]
    assert one["events"] == 621
    assert one["states"]["active_allocated"] == {
        "blocks": 59, "size_bytes": 84921344, "requested_bytes": 84920240,
    }  # fmt: skip
    assert one["states"]["inactive"]["blocks"] == 9
    assert one["free"] == {
        "segments_bytes": 0,
        "expandable_bytes": 0,
        "split_bytes": 5231616,
        "private_pools_bytes": 4218880,
    }
    assert one["free_bytes"] == 9450496
    assert one["largest_free_block"]["size_bytes"] == 2096128
    assert [pool["pool"] for pool in one["pools"]] == [[0, 0], [1, 0]]
    assert one["pools"][1]["reserved_bytes"] == 39845888
    assert one["peak"]["allocated_bytes"] == 87041968
    assert one["peak"]["sizes"] == "requested"


def test_peak_of_what_was_there_before_counts(capsys, tmp_path):
    """GIVEN 100 bytes without an event and 20 with WHEN asked THEN the peak is 120."""
    blocks = [block(100, address=1000), block(20, address=2000)]
    raw = snapshot([segment(blocks)], [[alloc(2000, 20), alloc(3000, 7)]])
    raw["device_traces"][0].append({**alloc(3000, 7), "action": "free_completed"})
    (one,) = run_json(capsys, "stats", written(tmp_path, raw))["devices"]
    assert one["peak"]["allocated_bytes"] == 127
    assert one["peak"]["event"] == 2


@pytest.mark.parametrize("events", [[], [alloc(1, 1)], [{**alloc(1, 1), "action": "oom"}] * 2])
def test_no_peak_without_a_trace(capsys, tmp_path, events):
    raw = snapshot([segment([block(4)])], [events])
    (one,) = run_json(capsys, "stats", written(tmp_path, raw))["devices"]
    assert one["peak"] is None
    assert one["events"] == len(events)


def test_a_failed_allocation_is_said(capsys):
    assert main(["stats", str(OOM)]) == 0
    assert (
        "device 0: an allocation failed once, last at event 4396: out of memory: 67108864 bytes "
        "asked for, 146361417728 free"
    ) in capsys.readouterr().err


def test_stats_of_one_device(capsys, tmp_path):
    raw = snapshot([segment([block(4)]), segment([block(8)], device=1, address=1 << 30)])
    path = written(tmp_path, raw)
    (one,) = run_json(capsys, "stats", path, "--device", 1)["devices"]
    assert (one["device"], one["allocated_bytes"], one["free_bytes"]) == (1, 8, 0)
    assert one["largest_free_block"] is None
    assert main(["stats", str(path), "--device", "2"]) == 2
    assert "device 2 is not in" in capsys.readouterr().err


def test_stats_in_words(capsys, tmp_path):
    raw = snapshot(
        [
            segment([block(1024), block(3072, state="inactive")], is_expandable=True),
            segment([block(2048, state="active_pending_free")], address=1 << 30, pool=(0, 1)),
        ]
    )
    assert main(["stats", str(written(tmp_path, raw))]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "reserved 6.0 KiB 100.0%",
        "allocated 1.0 KiB 16.7%",
        "waiting for a stream 2.0 KiB 33.3%",
        "free 3.0 KiB 50.0%",
        "free split remainders 3.0 KiB 50.0%",
        "largest free block 3.0 KiB (large)",
        "active_pending_free 2.0 KiB in 1",
        "expandable segments, in reserved ranges 1 in 1",
        "pool 0,1 reserved 2.0 KiB",
        "history recorded no",
        "events 0",
    ):
        assert line in lines


def test_stats_on_a_terminal_keep_rows_of_one_name_apart(capsys, monkeypatch):
    """`free` is a row of the device and of each pool."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["stats", str(GRAPH)]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert [row[3] for row in rows if row[1:3] == ["free", "\u2502"]] == ["9.0", "5.0", "4.0"]


def test_ring_overflow_is_said(capsys, tmp_path):
    """GIVEN a live block with a stack that no event made WHEN asked THEN the ring was full."""
    blocks = [block(8, [frame("f")], address=1), block(8, [frame("f")], address=9)]
    raw = snapshot([segment(blocks)], [[alloc(9, 8), alloc(99, 1)]])
    warnings = run_json(capsys, "stats", written(tmp_path, raw))["warnings"]
    assert any("1 live blocks were recorded before the first event" in text for text in warnings)


# top


@pytest.mark.parametrize("kind", ["live", "allocated", "peak"])
@pytest.mark.parametrize(
    "by", ["stack", "function", "file", "line", "pool", "compile-context", "annotation"]
)
def test_every_way_to_sum_up_gives_one_total(capsys, kind, by):
    (plain,) = run_json(capsys, "top", COMPILED, "--kind", kind)["devices"]
    (device,) = run_json(capsys, "top", COMPILED, "--kind", kind, "--by", by, "-n", 3)["devices"]
    assert (device["by"], device["kind"]) == (by, kind)
    assert device["total_bytes"] == plain["total_bytes"]
    shown = sum(row["self_bytes"] for row in device["rows"])
    assert shown + device["rest"]["self_bytes"] == device["total_bytes"]
    objects = sum(row["objects"] for row in device["rows"])
    assert objects + device["rest"]["objects"] == device["total_objects"]


def test_top_peak_is_the_peak_of_stats(capsys):
    (stats,) = run_json(capsys, "stats", OOM)["devices"]
    (top,) = run_json(capsys, "top", OOM, "--kind", "peak")["devices"]
    assert top["total_bytes"] == stats["peak"]["allocated_bytes"]


def test_top_by_pool_and_compile_context(capsys):
    (device,) = run_json(capsys, "top", GRAPH, "--by", "pool")["devices"]
    sizes = {row["name"]: row["self_bytes"] for row in device["rows"]}
    assert sizes == {"default": 49294336, "1,0": 35627008}
    (device,) = run_json(capsys, "top", COMPILED, "--by", "compile-context")["devices"]
    assert "Torch-Compiled Region: 0/0" in {row["name"] for row in device["rows"]}


def test_requested_bytes_are_called_so(capsys):
    assert main(["top", str(OOM), "--kind", "peak", "-n", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("device 0, peak (requested bytes): ")
    assert main(["top", str(OOM), "--kind", "allocated", "--by", "line", "-n", "1"]) == 0
    assert "device 0, allocated (requested bytes): " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["peak", "allocated"])
def test_kinds_that_need_events_say_so(capsys, tmp_path, kind):
    path = written(tmp_path, snapshot([segment([block(4)])]))
    assert main(["top", str(path), "--kind", kind]) == 1
    assert "holds no allocation events" in capsys.readouterr().err


def test_top_allocated_of_a_recording_is_its_last_window(capsys, tmp_path):
    path = tmp_path / "run.gpumem"
    path.write_bytes(make_recording(OOM.name, windows=2))
    for by in ("stack", "pool"):
        form = run_json(capsys, "top", path, "--kind", "allocated", "--by", by)
        assert [one["total_bytes"] for one in form["devices"]] == [2 * 10**9]
