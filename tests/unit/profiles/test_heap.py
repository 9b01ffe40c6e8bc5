"""Profiles add up, whatever is done to them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.raw_snapshots import alloc, block, frame, raw_snapshots, segment, snapshot

from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sample
from gpumem_otel.profiles.heap import (
    DiffEntry,
    allocated_profile,
    apply_budget,
    check,
    diff,
    live_profile,
    merge,
)
from gpumem_otel.profiles.of_file import load_snapshot
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.stacks import file_function_namer, identity_namer, with_basename_paths

LEAF, MAIN = frame("leaf", "/x/a.py", 1), frame("main", "/x/a.py", 2)


def live(raw, device=0, **options):
    taken = from_torch(raw)
    options.setdefault("namer", identity_namer)
    profile = live_profile(taken, device, **options)
    assert check(profile, taken.totals(device).allocated_bytes) == ()
    return profile


def rows(profile):
    return [([f.name for f in s.frames], s.objects, s.size_bytes) for s in profile.samples]


def profile_of(*samples, kind=ProfileKind.LIVE, device=0, **more):
    made = tuple(Sample((Frame(n),), objects, size) for n, objects, size in samples)
    return HeapProfile(kind, device, made, **more)


def test_live_blocks_are_summed_by_stack_largest_first():
    stack = [LEAF, MAIN]
    raw = snapshot(
        [
            segment([block(512, stack), block(100, (MAIN,)), block(512, stack)]),
            segment([block(9, stack), block(7, stack, state="inactive")], address=1 << 40),
            segment([block(4096, stack, state="active_pending_free")], address=1 << 41),
            segment([block(5, stack)], device=1, address=1 << 42),
        ]
    )
    assert rows(live(raw)) == [(["leaf", "main"], 3, 1033), (["main"], 1, 100)]
    assert rows(live(raw, 1)) == [(["leaf", "main"], 1, 5)]
    assert rows(live(raw, 7)) == []
    assert live(raw, time_ns=5).time_ns == 5
    assert live(raw).kind is ProfileKind.LIVE
    assert live(raw).duration_ns == 0


def test_stacks_that_become_equal_are_one_sample():
    blocks = [
        block(1, (frame("f", "/a/x.py"), MAIN)),
        block(2, (frame("f", "/a/x.py"), dict(MAIN))),
        block(4, (frame("f", "/b/x.py"), MAIN)),
    ]
    raw = snapshot([segment(blocks)])
    assert [s.size_bytes for s in live(raw).samples] == [4, 3]
    assert rows(live(raw, namer=with_basename_paths(identity_namer))) == [(["f", "main"], 3, 7)]


def test_memory_without_a_stack_says_why():
    blocks = [block(1), block(2), block(4, (LEAF,))]
    raw = snapshot([segment(blocks)], [[alloc(blocks[1]["address"], 2)]])
    assert rows(live(raw)) == [
        (["leaf"], 1, 4),
        (["[no Python frame]"], 1, 2),
        (["[allocated before install]"], 1, 1),
    ]


def test_a_live_source_names_memory_without_a_stack_by_address():
    blocks = [block(1), block(2), block(4)]
    raw = snapshot([segment(blocks)])
    asked = []

    def rule(device, address):
        asked.append((device, address))
        return "[backward]" if address == blocks[1]["address"] else "[allocated before install]"

    profile = live(raw, stackless=rule)
    assert rows(profile) == [
        (["[allocated before install]"], 2, 5),
        (["[backward]"], 1, 2),
    ]
    assert asked == [(0, raw_block["address"]) for raw_block in blocks]


def test_pause_is_called_while_stacks_are_built():
    raw = snapshot([segment([block(n + 1, (frame(str(n)),)) for n in range(40)])])
    calls = []
    profile = live(raw, pause=lambda: calls.append(1))
    assert profile == live(raw)
    assert len(calls) >= 40


def test_equal_sizes_are_ordered_by_stack():
    blocks = [block(8, (frame(name),)) for name in ("b", "c", "a")]
    assert [r[0] for r in rows(live(snapshot([segment(blocks)])))] == [["a"], ["b"], ["c"]]


def allocated(raw, **options):
    options = {"namer": identity_namer, "time_ns": 9, "duration_ns": 2_000_000_000, **options}
    return allocated_profile(from_torch(raw), 0, **options)


def test_allocations_are_scaled_to_the_counters_exactly():
    raw = snapshot([], [[alloc(1, 1, (LEAF,)), alloc(2, 1, (MAIN,)), alloc(3, 1, (MAIN, LEAF))]])
    profile = allocated(raw, requested_total_bytes=100, objects_total=10)
    assert rows(profile) == [(["leaf"], 4, 34), (["main"], 3, 33), (["main", "leaf"], 3, 33)]
    assert profile.comments == (
        "sizes are requested bytes, before the allocator rounds them",
        "window of 2.000 s with 3 recorded allocations",
        "bytes scaled by 33.3333 to requested_bytes.all.allocated",
        "objects scaled by 3.33333 to allocation.all.allocated",
    )
    assert (profile.time_ns, profile.duration_ns) == (9, 2_000_000_000)
    assert profile.kind is ProfileKind.ALLOCATED


def test_allocations_without_counters_are_shown_as_recorded():
    raw = snapshot([], [[alloc(1, 5, (LEAF,)), alloc(1, 7, (LEAF,)), alloc(2, 9)]])
    profile = allocated(raw)
    assert rows(profile) == [(["leaf"], 2, 12), (["[no Python frame]"], 1, 9)]
    assert profile.comments[2:] == (
        "bytes as recorded, not scaled",
        "objects as recorded, not scaled",
    )


def test_a_recorded_allocation_was_never_made_before_install():
    raw = snapshot([], [[alloc(1, 5)]])
    early = allocated(raw, stackless=lambda device, address: "[allocated before install]")
    assert rows(early) == [(["[no Python frame]"], 1, 5)]
    backward = allocated(raw, stackless=lambda device, address: "[backward]")
    assert rows(backward) == [(["[backward]"], 1, 5)]


def test_what_was_counted_but_not_recorded_has_a_row():
    profile = allocated(snapshot([], [[]]), requested_total_bytes=4096, objects_total=3)
    assert rows(profile) == [(["[not recorded]"], 3, 4096)]
    assert profile.comments[2] == "bytes: none recorded, requested_bytes.all.allocated rose by 4096"
    assert allocated(snapshot([], [[]]), requested_total_bytes=0, objects_total=0).samples == ()


def test_events_that_the_counters_do_not_cover_are_shown_all_the_same():
    raw = snapshot([], [[alloc(1, 5, (LEAF,))]])
    profile = allocated(raw, requested_total_bytes=0, objects_total=0)
    assert rows(profile) == [(["leaf"], 1, 5)]
    assert profile.comments[2].endswith("requested_bytes.all.allocated did not move")


def test_what_scales_to_nothing_is_left_out():
    raw = snapshot([], [[alloc(1, 1000, (LEAF,)), alloc(2, 1, (MAIN,))]])
    calls = []
    profile = allocated(
        raw, requested_total_bytes=10, objects_total=1, pause=lambda: calls.append(1)
    )
    assert rows(profile) == [(["leaf"], 1, 10)]
    many = snapshot([], [[alloc(n, 1, (frame(str(n)),)) for n in range(20)]])
    allocated(many, pause=lambda: calls.append(1))
    assert len(calls) >= 5


def test_budget_first_adds_up_equal_stacks():
    profile = profile_of(("a", 1, 5), ("a", 1, 5), ("b", 1, 1))
    assert rows(apply_budget(profile, max_samples=2)) == [(["a"], 2, 10), (["b"], 1, 1)]


def test_budget_merges_the_smallest():
    profile = profile_of(("a", 1, 50), ("b", 2, 30), ("c", 3, 20), ("d", 4, 10), ("e", 9, 0))
    assert apply_budget(profile, max_samples=5) is profile
    small = apply_budget(profile, max_samples=3)
    assert rows(small) == [(["a"], 1, 50), (["[other]"], 16, 30), (["b"], 2, 30)]
    assert rows(apply_budget(profile, max_samples=1)) == [(["[other]"], 19, 110)]
    assert rows(apply_budget(profile, max_samples=0)) == [(["[other]"], 19, 110)]
    assert rows(apply_budget(small, max_samples=2)) == [(["[other]"], 18, 60), (["a"], 1, 50)]


def test_merge_adds_up_equal_stacks():
    one = profile_of(("a", 1, 5), ("b", 1, 3), time_ns=4, comments=("x",))
    two = profile_of(("a", 2, 5), device=1, time_ns=7, comments=("x", "w"))
    both = merge([one, two])
    assert rows(both) == [(["a"], 3, 10), (["b"], 1, 3)]
    assert (both.device, both.time_ns, both.comments) == (-1, 7, ("w", "x"))
    assert merge([one]).device == 0
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([])
    with pytest.raises(ValueError, match="different kinds"):
        merge([one, profile_of(kind=ProfileKind.ALLOCATED)])


def test_diff_is_signed_and_largest_first():
    before = profile_of(("same", 1, 9), ("less", 3, 30), ("gone", 1, 5), ("count", 2, 8))
    after = profile_of(("same", 1, 9), ("less", 2, 10), ("new", 1, 20), ("count", 1, 8))
    entries = diff(before, after)
    assert entries == (
        DiffEntry((Frame("new"),), 1, 20),
        DiffEntry((Frame("less"),), -1, -20),
        DiffEntry((Frame("gone"),), -1, -5),
        DiffEntry((Frame("count"),), -1, 0),
    )
    assert sum(e.size_bytes for e in entries) == after.total_bytes - before.total_bytes


def test_check_finds_what_is_wrong():
    broken = HeapProfile(
        ProfileKind.LIVE,
        3,
        (
            Sample((), 1, 5),
            Sample((Frame("", "", 2**63),), 1, -1),
            Sample((Frame("a"),), 1, 1),
            Sample((Frame("a"),), 1, 1),
        ),
    )
    assert check(broken, 7) == (
        "live profile of device 3 holds 6 bytes, the allocator 7",
        "a sample has no frame",
        "a frame has no name",
        "a line number does not fit a signed 64-bit integer",
        "a sample is negative",
        "two samples have the same stack",
    )
    assert check(profile_of(("a", 1, 2)), 2) == ()
    assert check(profile_of(("a", 1, 2))) == ()


SAMPLES = st.lists(
    st.builds(
        Sample,
        st.lists(st.builds(Frame, st.sampled_from("abc")), min_size=1, max_size=3).map(tuple),
        st.integers(0, 9),
        st.integers(0, 2**50),
        st.sampled_from([(), (("pool", "x"),)]),
    ),
    max_size=8,
    unique_by=lambda sample: (sample.frames, sample.labels),
)
PROFILES = st.builds(
    HeapProfile,
    st.just(ProfileKind.LIVE),
    st.integers(0, 2),
    SAMPLES.map(tuple),
    st.integers(0, 5),
    st.integers(0, 5),
    st.lists(st.sampled_from("xyz"), max_size=2).map(tuple),
)


@given(PROFILES, st.integers(1, 9))
def test_no_budget_changes_totals(profile, limit):
    small = apply_budget(profile, max_samples=limit)
    assert len(small.samples) <= limit
    assert (small.total_bytes, small.total_objects) == (profile.total_bytes, profile.total_objects)
    assert check(small, profile.total_bytes) == ()
    assert apply_budget(small, max_samples=limit) == small


@given(PROFILES, PROFILES, PROFILES)
def test_merge_is_associative_and_commutative(one, two, three):
    assert merge([one, two]) == merge([two, one])
    assert merge([merge([one, two]), three]) == merge([one, merge([two, three])])
    assert merge([one, two]).total_bytes == one.total_bytes + two.total_bytes


@given(PROFILES, PROFILES)
def test_diff_adds_up(one, two):
    assert diff(one, one) == ()
    entries = diff(one, two)
    assert sum(e.size_bytes for e in entries) == two.total_bytes - one.total_bytes
    assert sum(e.objects for e in entries) == two.total_objects - one.total_objects
    assert {e.frames: (-e.objects, -e.size_bytes) for e in diff(two, one) if not e.labels} == {
        e.frames: (e.objects, e.size_bytes) for e in entries if not e.labels
    }


@given(raw_snapshots())
@settings(max_examples=60)
def test_any_live_profile_equals_the_allocator(raw):
    taken = from_torch(raw)
    for device in (0, 1, 2):
        profile = live_profile(taken, device, namer=file_function_namer, max_depth=3)
        totals = taken.totals(device)
        assert check(profile, totals.allocated_bytes) == ()
        stackless = sum(
            s.size_bytes
            for s in profile.samples
            if s.frames[0].name in ("[no Python frame]", "[allocated before install]")
        )
        assert stackless == totals.bytes_without_stack


@given(raw_snapshots(), st.integers(0, 2**60), st.integers(0, 2**40))
@settings(max_examples=60)
def test_any_allocated_profile_equals_the_counters(raw, total, objects):
    taken = from_torch(raw)
    seen = sum(g.size_bytes for g in taken.event_groups(0))
    profile = allocated_profile(
        taken,
        0,
        namer=file_function_namer,
        requested_total_bytes=total,
        objects_total=objects,
        time_ns=1,
        duration_ns=1,
    )
    assert profile.total_bytes == (total or seen)
    assert check(profile) == ()


def test_every_recording_adds_up(recordings):
    for path in recordings:
        taken = load_snapshot(path)
        for device in taken.devices():
            profile = live_profile(taken, device, namer=file_function_namer)
            totals = taken.totals(device)
            assert check(profile, totals.allocated_bytes) == (), path.name
            small = apply_budget(profile, max_samples=10)
            assert small.total_bytes == totals.allocated_bytes
            assert len(small.samples) <= 10
            assert diff(profile, profile) == ()
            scaled = allocated_profile(
                taken,
                device,
                namer=file_function_namer,
                requested_total_bytes=10**15 + 1,
                objects_total=10**6 + 1,
                time_ns=1,
                duration_ns=1,
            )
            assert (scaled.total_bytes, scaled.total_objects) == (10**15 + 1, 10**6 + 1)


def test_devices_that_share_frames_have_them_named_once():
    """GIVEN a stack that a hundred devices have WHEN all are read THEN each frame is named once."""
    stack = [frame(f"f{number}", "f.py", number) for number in range(50)]
    taken = from_torch(snapshot([segment([block(1, stack)], device=n) for n in range(100)]))
    named = []

    def namer(name, filename, line):
        named.append(name)
        return name

    profiles = [live_profile(taken, device, namer=namer) for device in taken.devices()]
    assert len(profiles) == 100
    assert named == [one["name"] for one in stack]
