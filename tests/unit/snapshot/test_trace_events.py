"""Which events of a trace are asked for, and what is known about each."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.raw_snapshots import alloc, block, frame, segment

from gpumem_otel.snapshot.events import (
    ACTIONS,
    KNOWN_ACTIONS,
    EventFilter,
    first_time_us,
    pick,
    recorded_before,
    size_from_text,
)


def event(action, address=None, size=0, **more):
    made = {"action": action, "size": size, "stream": 0, **more}
    return made if address is None else {**made, "addr": address}


def picked(events, **wanted):
    """Places in the list; events are numbered from 1."""
    return [one.number - 1 for one in pick(events, EventFilter(**wanted))]


TRACE = [
    event("segment_alloc", 0x1000, 4096, time_us=10),
    event("alloc", 0x1000, 100, time_us=20, frames=[frame("attend", "/x/model.py")]),
    event("alloc", 0x1200, 200, time_us=30, frames=[frame("step", "loss.py")]),
    event("oom", size=1 << 40, time_us=40, device_free=7),
    event("free_requested", 0x1000, 100, time_us=50),
    event("free_completed", 0x1000, 100, time_us=60),
    event("snapshot", 0, 0x2000, time_us=70),
]


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"min_size_bytes": 200, "max_size_bytes": 4096}, [0, 2]),
        ({"max_size_bytes": 100}, [1, 4, 5]),
        ({"stack": re.compile("att")}, [1]),
        ({"stack": re.compile(r"loss\.py$")}, [2]),
        ({"since_us": 20, "until_us": 40}, [1, 2]),
        ({"address": 0x1000}, [0, 1, 4, 5]),
        ({"address": 0x1063}, [0, 1, 4, 5]),  # the last byte of 100
        ({"address": 0x1064}, [0]),
        ({"address": 0x10}, []),  # not in what a `snapshot` entry calls its size
        ({"actions": frozenset({"oom", "alloc"})}, [1, 2, 3]),
        ({"actions": frozenset({"alloc"}), "min_size_bytes": 150, "address": 0x1200}, [2]),
    ],
)
def test_filters(wanted, numbers):
    assert picked(TRACE, **wanted) == numbers


def test_events_without_a_time_are_in_no_range_of_time():
    events = [event("alloc", 1, 1), event("alloc", 2, 1, time_us=5)]
    assert picked(events, since_us=0) == [1]
    assert picked(events, until_us=9) == [1]
    assert first_time_us(events) == 5
    assert first_time_us(events[:1]) is None


def test_what_an_event_tells():
    made = event(
        "alloc", 4, 3, time_us=2**63, pool_id=(0, 1), compile_context="0/0", user_metadata="fwd"
    )
    (one,) = pick([{**made, "stream": 2**64 - 1}], EventFilter())
    assert (one.action, one.size_bytes, one.address, one.stream) == ("alloc", 3, 4, 2**64 - 1)
    assert (one.time_us, one.pool_id) == (2**63, (0, 1))
    assert (one.compile_context, one.user_metadata) == ("0/0", "fwd")
    assert (one.device_free_bytes, one.unseen, one.frames) == (None, False, ())
    (one,) = pick([event("oom", compile_context="N/A", device_free=7)], EventFilter())
    assert (one.compile_context, one.device_free_bytes, one.address) == ("", 7, None)
    (one,) = pick([{"action": None, "size": None, "stream": "x", "pool_id": 3}], EventFilter())
    assert one == (1, "", 0, None, 0, None, None, None, "", "", False, ())


FREE = ("free_requested", "free_completed")


@pytest.mark.parametrize(
    ("actions", "unseen"),
    [
        ([*FREE], [True, True]),
        (["alloc", *FREE], [False, False, False]),
        (["alloc", *FREE, *FREE], [False, False, False, True, True]),
        (["alloc", "free_completed"], [False, False]),  # requests were not recorded
        (["alloc", "free_requested"], [False, False]),  # still waiting at the end
        (["alloc", *FREE, "alloc", *FREE], [False] * 6),
        (["alloc", "free_requested", "free_requested"], [False, False, True]),
        (["free_completed", "alloc"], [True, False]),
    ],
)
def test_frees_of_what_was_never_seen(actions, unseen):
    events = [event(action, 1, 5) for action in actions]
    assert [one.unseen for one in pick(events, EventFilter())] == unseen


def test_a_filter_does_not_change_what_was_seen():
    events = [event("alloc", 1, 5), event("free_completed", 1, 5)]
    (one,) = pick(events, EventFilter(actions=frozenset({"free_completed"})))
    assert not one.unseen


@given(
    events=st.lists(
        st.builds(
            event, st.sampled_from(sorted(KNOWN_ACTIONS)), st.integers(0, 3), st.integers(0, 9)
        ),
        max_size=20,
    ),
    low=st.integers(0, 9),
    high=st.integers(0, 9),
)
def test_filters_only_leave_out(events, low, high):
    everything = list(pick(events, EventFilter()))
    assert [one.number for one in everything] == list(range(1, len(events) + 1))
    some = list(pick(events, EventFilter(min_size_bytes=low, max_size_bytes=high)))
    assert some == [one for one in everything if low <= one.size_bytes <= high]


def test_live_blocks_from_before_the_trace():
    """GIVEN four live blocks WHEN only one is in the trace THEN those with a stack were lost."""
    stack = [frame("f")]
    blocks = [
        block(1, stack, address=1),
        block(1, stack, address=2),
        block(1, address=3),  # older than the recording
        block(1, stack, address=4, state="inactive"),
    ]
    segments = [segment(blocks)]
    assert recorded_before(segments, [alloc(1, 1)]) == 1
    assert recorded_before(segments, [alloc(1, 1), alloc(2, 1)]) == 0


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512B", 512),
        ("10MiB", 10 << 20),
        ("10M", 10 << 20),
        ("10mb", 10_000_000),
        ("1.5 GiB", 3 << 29),
        (".5K", 512),
        ("2.k", 2048),
        ("3T", 3 << 40),
        ("1PB", 10**15),
        ("0.1GB", 100_000_000),
    ],
)
def test_size_from_text(written, size):
    assert size_from_text(written) == size


@pytest.mark.parametrize(
    "written", ["", "MiB", "-1", "1QiB", "1 0", "iB", "5iB", "1e3", ".", "0x10"]
)
def test_no_size(written):
    with pytest.raises(ValueError, match="is no size: write it as"):
        size_from_text(written)


def test_words_for_several_actions():
    assert set(ACTIONS["free"]) | set(ACTIONS["segment"]) < KNOWN_ACTIONS
    assert not set(ACTIONS) & KNOWN_ACTIONS
