"""Profiles of whatever file was opened: snapshots and recordings give each kind their own way."""

from __future__ import annotations

import pickle

import pytest
from support import raw_snapshots as raw_form
from support.recordings import DATA, START_NS, make_recording

from gpumem_otel.base.profile import HeapProfile, ProfileKind, Sizes
from gpumem_otel.errors import NoHistoryError
from gpumem_otel.profiles import heap
from gpumem_otel.profiles.of_file import load_snapshot, open_bytes, open_file

FILES = sorted(DATA.glob("*.pickle.gz"))
SMALL, LARGE = (
    "h200-torch2.11-cuda-graph.pickle.gz",
    "h200-torch2.11-train-cpp-stacks.pickle.gz",
)
BARE = pickle.dumps(
    raw_form.snapshot([raw_form.segment([raw_form.block(512, (raw_form.frame("f"),))])]), 4
)


def total(profiles):
    return {profile.device: profile.total_bytes for profile in profiles}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_the_kinds_of_a_snapshot_file(path):
    opened = open_file(path)
    snapshot = opened.snapshot
    assert opened.recording is None
    assert opened.window() is None
    live = opened.profiles(ProfileKind.LIVE)
    assert total(live) == {d: snapshot.totals(d).allocated_bytes for d in snapshot.devices()}
    for profile in opened.profiles(ProfileKind.PEAK):
        replay = snapshot.replay(profile.device)
        assert profile.total_bytes == max(replay.allocated_bytes)
        assert profile.kind is ProfileKind.PEAK
        assert profile.sizes is Sizes.REQUESTED
    for profile in opened.profiles(ProfileKind.ALLOCATED):
        events = snapshot.raw_events(profile.device)
        sizes = [event["size"] for event in events if event["action"] == "alloc"]
        assert (profile.total_objects, profile.total_bytes) == (len(sizes), sum(sizes))


def test_one_device_alone():
    opened = open_file(DATA / SMALL)
    assert [profile.device for profile in opened.profiles(ProfileKind.LIVE, 0)] == [0]
    assert opened.profiles(ProfileKind.LIVE, 7) == ()


@pytest.mark.parametrize("kind", [ProfileKind.ALLOCATED, ProfileKind.PEAK])
def test_a_file_without_events_says_so(kind):
    with pytest.raises(NoHistoryError, match="bare: holds no allocation events; record history"):
        open_bytes(BARE, "bare").profiles(kind)
    with pytest.raises(NoHistoryError, match="holds no allocation events"):
        open_bytes(BARE, "bare").profiles(kind, 0)


def test_no_file_holds_growth():
    with pytest.raises(ValueError, match="kind growth"):
        open_bytes(BARE, "bare").profiles(ProfileKind.GROWTH)


def test_a_file_without_pinned_memory_says_what_records_it():
    with pytest.raises(NoHistoryError, match="record_pinned_host_memory=True"):
        open_bytes(BARE, "bare").profiles(ProfileKind.PINNED)
    assert not open_bytes(BARE, "bare").has(ProfileKind.PINNED)


def test_the_peak_of_a_recording_is_the_reading_that_held_most():
    """GIVEN the largest state in the middle WHEN the peak is asked for THEN it is that one."""
    opened = open_bytes(make_recording(SMALL, LARGE, SMALL), "run.gpumem")
    most = load_snapshot(DATA / LARGE).totals(0).allocated_bytes
    (peak,) = opened.profiles(ProfileKind.PEAK, 0)
    (last,) = opened.profiles(ProfileKind.LIVE, 0)
    assert peak.total_bytes == most > last.total_bytes
    assert peak.kind is ProfileKind.PEAK
    assert peak.time_ns == START_NS + 1_000_000_000
    assert peak.comments == (
        "reading 2 of 3, the one that held most: what was alive between readings is not known",
    )
    assert heap.check(peak, most) == ()


def test_empty_profiles_compare_with_any():
    """Of a file without devices, and of one whose events hold nothing."""
    events = [{"action": "alloc"}, {"action": "alloc"}]
    raw = {"segments": [], "device_traces": [events]}
    (peak,) = open_bytes(pickle.dumps(raw, 4), "made").profiles(ProfileKind.PEAK)
    nothing = HeapProfile(ProfileKind.PEAK, -1, ())
    assert peak.samples == ()
    assert heap.diff(nothing, peak) == heap.diff(peak, nothing) == ()


def test_the_peak_of_a_recording_needs_no_window():
    opened = open_bytes(make_recording(SMALL), "run.gpumem")
    assert opened.profiles(ProfileKind.PEAK, 0)[0].total_bytes > 0
    with pytest.raises(NoHistoryError, match=r"run\.gpumem: holds no windows"):
        opened.profiles(ProfileKind.ALLOCATED)


def test_the_last_window_of_a_recording_is_scaled_to_the_counters():
    opened = open_bytes(make_recording(SMALL, windows=2), "run.gpumem")
    (profile,) = opened.profiles(ProfileKind.ALLOCATED)
    assert (profile.total_bytes, profile.total_objects) == (2 * 10**9, 2_000)
    assert profile.duration_ns == 500_000_000


def test_recorded_sizes_are_counted_without_making_the_snapshot():
    opened = open_bytes(make_recording(SMALL, LARGE), "run.gpumem")
    for reading in opened.recording.readings:
        snapshot = reading.snapshot
        for device in (0, 1):
            assert reading.allocated_bytes(device) == snapshot.totals(device).allocated_bytes
