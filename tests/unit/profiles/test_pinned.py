"""Pinned host memory. No recording of a real job exists yet: these snapshots are made by hand,
after the structures of torch 2.14 (`HostSegmentInfo`)."""

from __future__ import annotations

import pickle

import pytest

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.profiles.of_file import open_bytes, parse_snapshot
from gpumem_otel.profiles.pinned import CACHED, pinned_profile, pinned_total
from gpumem_otel.profiles.pprof import decode, encode
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.stacks import NOT_RECORDED, file_function_namer

LOADER = {"name": "pin", "filename": "/job/loader.py", "line": 3}
SAVE = {"name": "save", "filename": "/job/checkpoint.py", "line": 9}


def segment(address, size, frames=(), *, allocated=True, active=None):
    return {
        "address": address,
        "size": size,
        "allocated": allocated,
        "active": allocated if active is None else active,
        "segment_pool_id": (0, 0),
        "frames": list(frames),
    }


SEGMENTS = [
    segment(1, 4096, [LOADER]),
    segment(2, 8192, [LOADER]),
    segment(3, 512, [SAVE]),
    segment(4, 100),
    segment(5, 1000, [SAVE], allocated=False, active=True),  # a copy still goes on
    segment(6, 2000, [SAVE], allocated=False),
    segment(7, 3000, allocated=False),
]
RAW = {"segments": [], "device_traces": [[]], "host_segments": SEGMENTS, "host_traces": []}


def by_name(profile):
    return {s.frames[0].name: (s.objects, s.size_bytes) for s in profile.samples}


def test_by_stack_and_nothing_of_it_is_left_out():
    profile = pinned_profile(from_torch(RAW), 2, namer=file_function_namer, time_ns=7)
    assert by_name(profile) == {
        "loader.py:pin": (2, 12288),
        CACHED: (2, 5000),
        "checkpoint.py:save": (2, 1512),
        NOT_RECORDED: (1, 100),
    }
    assert profile.total_bytes == sum(one["size"] for one in SEGMENTS)
    assert (profile.kind, profile.device, profile.time_ns) == (ProfileKind.PINNED, 2, 7)
    read = decode(encode([profile]))
    assert read.total("pinned_space") == profile.total_bytes
    assert read.total("pinned_objects") == 7


def test_other_spellings_of_the_same():
    """Where torch writes a total size, or a state as of blocks."""
    raw = {
        "segments": [],
        "host_segments": [
            {"address": 1, "total_size": 5, "state": "active_allocated", "frames": [LOADER]},
            {"address": 2, "total_size": 7, "state": "inactive", "frames": [LOADER]},
            {"address": 3},
        ],
    }
    profile = pinned_profile(from_torch(raw), 0, namer=file_function_namer)
    assert by_name(profile) == {"loader.py:pin": (1, 5), CACHED: (1, 7), NOT_RECORDED: (1, 0)}


def test_where_only_the_total_is_known():
    profile = pinned_total(1 << 30, 1, 9, "an older torch")
    assert by_name(profile) == {NOT_RECORDED: (1, 1 << 30)}
    assert profile.comments == ("pinned host memory of this process", "an older torch")
    assert pinned_total(0, 1, 9, "").samples == ()


def test_out_of_a_file():
    opened = open_bytes(pickle.dumps(RAW), "made.pickle")
    (profile,) = opened.profiles(ProfileKind.PINNED)
    assert profile.total_bytes == sum(one["size"] for one in SEGMENTS)
    assert profile.device == 0
    assert opened.has(ProfileKind.PINNED)
    (chosen,) = opened.profiles(ProfileKind.PINNED, 3)
    assert chosen.device == 3


@pytest.mark.parametrize(
    "wrong",
    [
        7,
        [7],
        [{"size": "large"}],
        [{"size": -1}],
        [{"size": 2**62}, {"size": 2**62}],
        [{"address": 2**65}],
        [{"frames": [1]}],
        [{"frames": 1}],
    ],
)
def test_a_strangers_segments_are_left_out_where_they_are_none(wrong):
    snapshot = parse_snapshot(pickle.dumps({**RAW, "host_segments": wrong}), "made.pickle")
    assert list(snapshot.host_segments) == []
    assert snapshot.devices() == ()
