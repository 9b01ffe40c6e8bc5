"""What the benchmark measures on: the generated snapshot is a consistent one."""

from __future__ import annotations

import pickle

import pytest
from support.large_snapshots import make

from gpumem_otel.profiles import heap
from gpumem_otel.profiles.of_file import parse_snapshot
from gpumem_otel.snapshot.stacks import file_function_namer


@pytest.fixture(scope="module")
def raw():
    return make(9_000, 1_000)


@pytest.fixture(scope="module")
def snapshot(raw):
    return parse_snapshot(pickle.dumps(raw, protocol=4), "large")


def test_it_has_the_size_that_was_asked_for(raw):
    (trace,) = raw["device_traces"]
    blocks = [block for segment in raw["segments"] for block in segment["blocks"]]
    assert len(trace) == 9_000
    assert sum(block["state"] == "active_allocated" for block in blocks) == 1_000
    assert any(block["state"] == "inactive" for block in blocks)


def test_it_is_always_the_same(raw):
    assert pickle.dumps(make(9_000, 1_000), 4) == pickle.dumps(raw, 4)
    assert make(9_000, 1_000, seed=2)["device_traces"] != raw["device_traces"]


def test_it_is_refused_where_it_can_not_be_consistent():
    with pytest.raises(ValueError, match="too few"):
        make(3_000, 1_000)


def test_every_free_is_requested_and_completed(raw):
    (trace,) = raw["device_traces"]
    waiting = []
    for event in trace:
        if event["action"] == "free_requested":
            waiting.append((event["addr"], event["size"]))
        elif event["action"] == "free_completed":
            waiting.remove((event["addr"], event["size"]))
    assert waiting == []


def test_what_is_alive_by_the_events_is_what_the_segments_hold(raw, snapshot):
    replay = snapshot.replay(0)
    blocks = [b for s in raw["segments"] for b in s["blocks"] if b["state"] != "inactive"]
    assert sorted(replay.address[i] for i in replay.alive(replay.events)) == sorted(
        block["address"] for block in blocks
    )
    assert replay.allocated_bytes[-1] == sum(block["requested_size"] for block in blocks)
    assert replay.reserved_bytes[-1] == sum(s["total_size"] for s in raw["segments"])
    assert replay.allocated_bytes[replay.peak_moment] > replay.allocated_bytes[-1]


def test_segments_are_the_sums_of_their_blocks(raw):
    for segment in raw["segments"]:
        active = [b for b in segment["blocks"] if b["state"] == "active_allocated"]
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        assert sum(block["size"] for block in active) == segment["allocated_size"]
        addresses = [block["address"] for block in segment["blocks"]]
        ends = [block["address"] + block["size"] for block in segment["blocks"]]
        assert addresses == [segment["address"], *ends[:-1]]


def test_profiles_add_up(snapshot):
    live = heap.live_profile(snapshot, 0, namer=file_function_namer)
    peak = heap.replayed_profile(snapshot, 0, namer=file_function_namer)
    assert live.total_bytes == snapshot.totals(0).allocated_bytes
    assert live.total_objects == 1_000
    assert peak.total_bytes == max(snapshot.replay(0).allocated_bytes)
