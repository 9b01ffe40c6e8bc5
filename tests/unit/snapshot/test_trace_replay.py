"""The trace played through: by hand, against a pretended allocator, and on real recordings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.raw_snapshots import alloc, block, frame, raw_snapshots, segment, snapshot

from gpumem_otel.base.profile import Frame, ProfileKind
from gpumem_otel.errors import SnapshotError
from gpumem_otel.profiles.heap import (
    allocated_profile,
    check,
    live_profile,
    replayed_profile,
)
from gpumem_otel.profiles.of_file import load_snapshot
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.stacks import BEFORE_INSTALL, NO_PYTHON_FRAME, file_function_namer

A, B = frame("a"), frame("b")


def event(action, address, size, **more):
    return {"action": action, "addr": address, "size": size, "stream": 0, **more}


def free(address, size, **more):
    """Both halves, as torch writes them."""
    return [
        event("free_requested", address, size, **more),
        event("free_completed", address, size, **more),
    ]


def played(segments, trace):
    made = from_torch(snapshot(segments, [trace]))
    return made, made.replay(0)


def stacks_of(profile):
    return {"<".join(f.name for f in s.frames): (s.objects, s.size_bytes) for s in profile.samples}


def peak(made, device=0):
    return replayed_profile(made, device, namer=file_function_namer)


# by hand


def test_what_was_there_before_the_recording_counts_in_the_peak():
    """100 bytes without an allocation and 20 with: 120 at the peak."""
    held = segment([block(512, requested=100, address=1000)], address=1000)
    made, replay = played([held], [alloc(5000, 20, (A,)), *free(5000, 20)])
    assert list(replay.allocated_bytes) == [100, 120, 100, 100]
    assert replay.peak_moment == 1
    assert stacks_of(peak(made)) == {BEFORE_INSTALL: (1, 100), "train.py:a": (1, 20)}
    assert peak(made).kind is ProfileKind.PEAK


def test_the_two_halves_of_a_free_are_one():
    _, replay = played([], [alloc(1, 10), *free(1, 10), alloc(1, 7), *free(1, 7)])
    assert list(replay.allocated_bytes) == [0, 10, 0, 0, 7, 0, 0]
    assert list(replay.born) == [1, 4]
    assert list(replay.died) == [2, 5]


def test_a_delayed_free_gives_back_at_its_request():
    """Another stream still reads the block: other events come between the halves."""
    requested, completed = free(1, 10)
    trace = [alloc(1, 10), requested, alloc(2, 5), completed, *free(2, 5)]
    _, replay = played([], trace)
    assert list(replay.allocated_bytes) == [0, 10, 0, 5, 5, 0, 0]


def test_a_block_that_waits_for_its_stream_at_the_dump_is_not_alive():
    waiting = block(16, state="active_pending_free", requested=10, address=1)
    _, replay = played([segment([waiting], address=1)], [alloc(1, 10), free(1, 10)[0]])
    assert list(replay.allocated_bytes) == [0, 10, 0]
    assert replay.warnings == ()


def test_frees_whose_request_was_not_recorded():
    """A writer may leave out the first half, by `skip_actions` or by being older."""
    completed = [free(1, 10)[1], alloc(1, 4), free(1, 4)[1]]
    _, replay = played([], completed)
    assert list(replay.allocated_bytes) == [10, 0, 4, 0]


def test_a_completion_whose_request_the_ring_dropped_frees_nothing_again():
    trace = [free(1, 10)[1], alloc(2, 4), *free(2, 4)]
    _, replay = played([], trace)
    assert list(replay.allocated_bytes) == [0, 0, 4, 0, 0]


def test_frees_of_memory_that_was_never_seen_are_never_negative():
    made, replay = played([], [*free(1, 10), *free(2, 20), alloc(1, 5, (A,))])
    assert list(replay.allocated_bytes) == [30, 20, 20, 0, 0, 5]
    assert min(replay.allocated_bytes) == 0
    assert "2 frees of memory whose allocation is not in the trace" in made.warnings[0]
    assert stacks_of(peak(made)) == {BEFORE_INSTALL: (2, 30)}


def test_a_second_unseen_free_of_an_address_is_of_a_life_nobody_saw():
    """Recorded without `alloc`: the same place is freed again and again."""
    _, replay = played([], [*free(1, 10), *free(1, 10), *free(1, 10)])
    assert list(replay.allocated_bytes) == [10, 0, 0, 0, 0, 0, 0]


def test_ring_overflow_is_said():
    """A block that carries a stack was recorded: its event has been dropped since."""
    held = segment([block(512, (A,), requested=500, address=1000)], address=1000)
    made, replay = played([held], [alloc(9000, 1), *free(9000, 1)])
    (warning,) = replay.warnings
    assert warning == (
        "device 0: 1 live blocks were recorded before the first event in the trace: its ring of "
        "3 events was full, or was cleared"
    )
    assert stacks_of(peak(made)) == {"train.py:a": (1, 500), NO_PYTHON_FRAME: (1, 1)}


def test_an_address_in_use_is_allocated_again():
    _, replay = played([], [alloc(1, 10), alloc(1, 4), *free(1, 4)])
    assert list(replay.allocated_bytes) == [0, 10, 4, 0, 0]
    assert replay.warnings == (
        "device 0: 1 allocations at addresses that were in use: their frees are not in the trace",
    )


def test_recording_that_ended_before_the_dump():
    """The dump decides what is alive at its moment."""
    there = segment(
        [
            block(512, requested=7, address=1000),  # the trace has it freed
            block(512, requested=9, address=1512),  # the trace has another size
        ],
        address=1000,
    )
    trace = [alloc(1000, 5), *free(1000, 5), alloc(1512, 3), alloc(5000, 100)]
    _, replay = played([there], trace)
    assert list(replay.allocated_bytes) == [0, 5, 0, 0, 3, 16]
    assert replay.alive(5) == [3, 4]
    assert [replay.size_bytes[i] for i in replay.alive(5)] == [7, 9]
    assert list(replay.traced) == [0, 1, 2]
    assert replay.warnings == (
        "device 0: 3 blocks of the dump are not as the trace left them: recording had ended before",
    )


def test_reserved_memory_follows_segments_and_mapped_ranges():
    trace = [
        event("segment_alloc", 1, 100),
        event("segment_map", 200, 20),
        event("segment_unmap", 200, 5),
        event("segment_free", 900, 50),
        event("snapshot", 0, 7_784_960),
    ]
    held = segment([block(120, state="inactive")], address=1)
    _, replay = played([held], trace)
    assert list(replay.reserved_bytes) == [55, 155, 175, 170, 120, 120]
    assert list(replay.allocated_bytes) == [0] * 6


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
def test_out_of_memory_is_a_mark(place):
    oom = {"action": "oom", "size": 4096, "device_free": 100, "stream": 0, "frames": []}
    trace = [alloc(1, 10), alloc(2, 10)]
    trace.insert(place, oom)
    _, replay = played([], trace)
    (mark,) = replay.marks
    assert (mark.moment, mark.action, mark.device_free_bytes) == (place + 1, "oom", 100)
    assert mark.text == "out of memory: 4096 bytes asked for, 100 free"
    assert replay.allocated_bytes[-1] == 20


def test_out_of_memory_alone():
    _, replay = played([], [{"action": "oom", "size": 1, "device_free": 0}])
    assert [mark.action for mark in replay.marks] == ["oom"]
    assert list(replay.allocated_bytes) == [0, 0]


def test_annotations_in_the_trace_are_marks():
    note = event("annotate", 4096, 0, user_metadata='{"step": 3}')
    _, replay = played([], [note])
    assert [(m.action, m.text) for m in replay.marks] == [("annotate", '{"step": 3}')]


def test_times_that_no_reader_can_hold_are_unknown():
    trace = [event("alloc", 1, 1, time_us=2**63), event("alloc", 2, 1), alloc(3, 1)]
    _, replay = played([], trace)
    assert list(replay.time_us) == [-1, -1, -1, 1]


def test_addresses_of_torch_2_0_stand_in_the_history():
    raw = {
        "size": 512,
        "requested_size": 500,
        "state": "active_allocated",
        "history": [{"addr": 77, "real_size": 500, "frames": [A]}],
    }
    held = segment([], address=0)
    held["blocks"], held["total_size"] = [raw], 512
    made, replay = played([held], [event("alloc", 77, 500, frames=[A])])
    assert (list(replay.born), list(replay.died), list(replay.block_bytes)) == ([1], [2], [512])
    assert stacks_of(peak(made)) == {"train.py:a": (1, 500)}


def test_an_empty_trace_is_the_dump_alone():
    held = segment([block(512, (A,), requested=500), block(512, state="inactive")])
    made, replay = played([held], [])
    assert (replay.events, list(replay.allocated_bytes), list(replay.reserved_bytes)) == (
        0,
        [500],
        [1024],
    )
    assert replay.alive(0) == [0]
    assert peak(made).comments[1] == "no events: the dump"


def test_a_moment_that_is_none():
    made, replay = played([], [alloc(1, 1)])
    with pytest.raises(ValueError, match="moment 2: not one of 0 to 1"):
        replay.alive(2)
    with pytest.raises(ValueError, match="moment -1"):
        replayed_profile(made, 0, namer=file_function_namer, moment=-1)


def test_sizes_that_add_up_to_more_than_64_bits():
    held = segment([block(2**62, requested=2**62)], address=1)
    made = from_torch(snapshot([held], [[alloc(9, 2**62), alloc(10, 2**62 - 1)]]))
    with pytest.raises(SnapshotError, match="add up to more than 64 bits hold"):
        made.replay(0)


def test_live_at_a_moment():
    made, _ = played([], [alloc(1, 10, (A,)), alloc(2, 5, (B,)), *free(1, 10)])
    there = replayed_profile(made, 0, namer=file_function_namer, moment=2)
    assert there.kind is ProfileKind.LIVE
    assert stacks_of(there) == {"train.py:a": (1, 10), "train.py:b": (1, 5)}
    assert there.comments[1] == "after event 2 of 4"
    assert there.time_ns == 1000


# labels


def labelled(profile):
    return {sample.labels: sample.size_bytes for sample in profile.samples}


def test_pools_by_event_by_segment_and_unknown():
    held = segment([block(512, requested=5, address=1000)], address=1000, pool=(1, 0))
    trace = [
        event("alloc", 1000, 5),  # before torch 2.12: where the segment is
        event("alloc", 77, 6),  # its segment is gone
        event("alloc", 78, 7, pool_id=(0, 2)),
    ]
    made = from_torch(snapshot([held], [trace]))
    found = allocated_profile(
        made, 0, namer=file_function_namer, time_ns=0, duration_ns=0, label="pool"
    )
    assert labelled(found) == {
        (("pool", "1,0"),): 5,
        (("pool", "[unknown]"),): 6,
        (("pool", "0,2"),): 7,
    }
    live = live_profile(made, 0, namer=file_function_namer, label="pool")
    assert labelled(live) == {(("pool", "1,0"),): 512}


def test_compile_contexts():
    trace = [
        event("alloc", 1, 5, compile_context="Torch-Compiled Region: 0/0"),
        event("alloc", 2, 6, compile_context="N/A"),
        event("alloc", 3, 7),
        *free(4, 8),
    ]
    made = from_torch(snapshot([], [trace]))
    found = replayed_profile(made, 0, namer=file_function_namer, moment=3, label="compile_context")
    assert labelled(found) == {
        (("compile_context", "Torch-Compiled Region: 0/0"),): 5,
        (("compile_context", "[none]"),): 13,
        (("compile_context", "[before the trace]"),): 8,
    }


def test_annotations_name_the_innermost_range():
    raw = snapshot(
        [],
        [
            [
                event("alloc", 1, 1, time_us=5),
                event("alloc", 2, 2, time_us=10),
                event("alloc", 3, 4, time_us=25),
                event("alloc", 4, 8, time_us=40),
                event("alloc", 5, 16),
            ]
        ],
    )
    raw["external_annotations"] = [
        {"name": name, "stage": stage, "device": device, "time_us": time_us}
        for name, stage, device, time_us in (
            ("lone", "END", 0, 1),
            ("step", "START", 0, 10),
            ("forward", "START", 0, 20),
            ("elsewhere", "START", 1, 22),
            ("forward", "END", 0, 30),
            ("step", "END", 0, 40),
        )
    ]
    made = from_torch(raw)
    found = replayed_profile(made, 0, namer=file_function_namer, label="annotation")
    assert labelled(found) == {
        (("annotation", "[none]"),): 1 + 8,
        (("annotation", "step"),): 2,
        (("annotation", "forward"),): 4,
        (("annotation", "[unknown]"),): 16,
    }


@pytest.mark.parametrize("label", ["compile_context", "annotation"])
def test_what_came_after_the_trace_is_not_said_to_be_older(label):
    there = segment([block(512, requested=7, address=1000)], address=1000)
    made, _ = played([there], [alloc(1000, 5), *free(1000, 5)])
    live = live_profile(made, 0, namer=file_function_namer, label=label)
    assert labelled(live) == {((label, "[after the trace]"),): 512}
    unlabelled = live_profile(made, 0, namer=file_function_namer)
    assert stacks_of(live) == stacks_of(unlabelled) == {NO_PYTHON_FRAME: (1, 512)}


def test_no_such_label():
    made, _ = played([], [alloc(1, 1)])
    with pytest.raises(ValueError, match="label 'class': not one of pool, compile_context"):
        replayed_profile(made, 0, namer=file_function_namer, label="class")


# against a pretended allocator


@st.composite
def histories(draw):
    """What an allocator did, how much of it the ring kept, and the truth about the kept part."""
    steps = draw(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 50))))
    stacks = [[frame(name)] for name in "abc"] + [[]]
    live, events, truth = {}, [], [{}]
    for is_alloc, place, size in steps:
        if is_alloc and place not in live:
            live[place] = (size, stacks[size % 4])
            events.append(alloc(1000 * place, size, live[place][1]))
            truth.append(dict(live))
        elif not is_alloc and place in live:
            events += free(1000 * place, live.pop(place)[0])
            truth += [dict(live), dict(live)]
    kept = draw(st.integers(0, len(events)))
    blocks = [
        segment([block(512, frames, requested=size, address=1000 * place)], address=1000 * place)
        for place, (size, frames) in live.items()
    ]
    return blocks, events[len(events) - kept :], truth[len(events) - kept :]


@given(histories())
def test_held_at_every_moment_is_what_the_allocator_held(history):
    segments, events, truth = history
    made, replay = played(segments, events)
    sums = [sum(size for size, _ in live.values()) for live in truth]
    if events and events[0]["action"] == "free_completed":
        # Its first half was dropped, so it was freed before. Only a trace in which no first half
        # is left looks as if it had never had any.
        halves = len(events) == 1 or any(e["action"] == "free_requested" for e in events)
        sums[0] = sums[1] + (0 if halves else events[0]["size"])
    assert list(replay.allocated_bytes) == sums
    assert replay.alive(replay.events) == sorted(replay.alive(replay.events))
    for moment in range(len(events) + 1):
        there = replayed_profile(made, 0, namer=file_function_namer, moment=moment)
        assert there.total_bytes == sums[moment]
        assert check(there) == ()
    assert peak(made).total_bytes == max(replay.allocated_bytes)


@given(histories())
def test_live_is_allocated_less_freed(history):
    segments, events, _ = history
    made, replay = played(segments, events)
    allocated = sum(replay.size_bytes[i] for i in replay.traced)
    freed = sum(
        size for size, died in zip(replay.size_bytes, replay.died, strict=True)
        if died <= replay.events
    )  # fmt: skip
    assert replay.allocated_bytes[-1] == replay.allocated_bytes[0] + allocated - freed
    assert allocated == sum(g.size_bytes for g in made.event_groups(0))
    assert max(replay.allocated_bytes) >= replay.allocated_bytes[-1]


@given(raw_snapshots())
def test_any_snapshot_plays_through_and_its_dump_stands_at_the_end(raw):
    made = from_torch(raw)
    for device in made.devices():
        replay = made.replay(device)
        requested = sum(
            b.requested_bytes
            for s in made.segments(device)
            for b in s.blocks
            if b.state.value == "active_allocated"
        )
        alive = replay.alive(replay.events)
        assert len(replay.allocated_bytes) == replay.events + 1
        assert min(replay.reserved_bytes) >= 0
        if list(made.segments(device)):
            assert replay.allocated_bytes[-1] == requested
            assert sum(replay.block_bytes[i] for i in alive) == made.totals(device).allocated_bytes
        for label in (None, "pool", "compile_context", "annotation"):
            live = live_profile(made, device, namer=file_function_namer, label=label)
            assert live.total_bytes == made.totals(device).allocated_bytes
            top = replayed_profile(made, device, namer=file_function_namer, label=label)
            assert top.total_bytes == max(replay.allocated_bytes)


# on real recordings

FOLDER = os.environ.get("GPUMEM_SNAPSHOTS")
RECORDINGS = sorted(Path(FOLDER or Path(__file__).parents[2] / "data").glob("*.pickle.gz"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda p: p.name)
def test_real_recordings_reconcile(path):
    """What is requested at the dump less the trace's net is what was there before it."""
    made = load_snapshot(path)
    for device in made.devices():
        replay = made.replay(device)
        events = list(made.events(device))
        halves = {e.action for e in events}
        freeing = "free_requested" if "free_requested" in halves else "free_completed"
        if len(events) < 2:
            assert replay.peak_moment == 0
            continue
        net, sums = 0, [0]
        for one in events:
            net += one.size_bytes if one.action == "alloc" else 0
            net -= one.size_bytes if one.action == freeing else 0
            sums.append(net)
        requested = sum(
            b.requested_bytes
            for s in made.segments(device)
            for b in s.blocks
            if b.state.value == "active_allocated"
        )
        base = requested - net
        assert base >= 0
        assert list(replay.allocated_bytes) == [base + held for held in sums]
        assert replayed_profile(made, device, namer=file_function_namer).total_bytes == base + max(
            sums
        )
        assert replay.reserved_bytes[-1] == made.totals(device).reserved_bytes
        assert min(replay.reserved_bytes) >= 0
        assert Frame("") not in {
            f for s in replayed_profile(made, device, namer=file_function_namer).samples
            for f in s.frames
        }  # fmt: skip


def test_of_too_many_marks_the_newest_failures_are_kept():
    """GIVEN 30,000 marks WHEN replayed THEN 20,000 are kept, and a warning says so."""
    events = [{"action": "annotate", "user_metadata": "first"}]
    events += [{"action": "oom", "size": n, "device_free": 1} for n in range(19_998)]
    events += [{"action": "annotate", "user_metadata": str(n)} for n in range(10_001)]
    found = from_torch(snapshot([], [events])).replay(0)
    assert len(found.marks) == 20_000
    assert [mark.moment for mark in found.marks] == list(range(1, 20_001))
    left_out = "device 0: 10000 of 30000 failed allocations and annotations are left out"
    assert [text for text in found.warnings if text.startswith(left_out)] != []
    only = from_torch(snapshot([], [[*events[1:2] * 5, *events[1:-10_001] * 2]])).replay(0)
    assert {mark.action for mark in only.marks} == {"oom"}
    assert only.marks[-1].moment == only.events
