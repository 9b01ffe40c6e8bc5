"""What changed between two profiles, or two layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.heap_profiles import SAMPLES, live
from support.raw_snapshots import block, raw_snapshots, segment, snapshot

from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sample
from gpumem_otel.profiles.compare import Change, compare_profiles, compare_segments
from gpumem_otel.snapshot.snapshot import from_torch

MAIN = Frame("train.py:main", "/a/train.py", 90)


def stack(name, line=1, folder="/a"):
    return (Frame(f"model.py:{name}", f"{folder}/model.py", line), MAIN)


def sample(name, size, objects=1, **more):
    return Sample(stack(name, **more), objects, size)


def test_each_category_once():
    """GIVEN a stack of each fate WHEN profiles are compared THEN each is named and summed."""
    before = live(
        sample("grows", 10 << 20), sample("shrinks", 90, 3), sample("goes", 7), sample("stays", 5)
    )
    after = live(
        sample("grows", 10 << 30, 4),
        sample("shrinks", 30),
        sample("comes", 8, 2),
        sample("stays", 5),
    )
    found = compare_profiles(before, after)
    told = [
        (c.change.value, c.frames[0].name, c.before_bytes, c.after_bytes) for c in found.changes
    ]
    assert told == [
        ("grown", "model.py:grows", 10 << 20, 10 << 30),
        ("shrunk", "model.py:shrinks", 90, 30),
        ("new", "model.py:comes", 0, 8),
        ("gone", "model.py:goes", 7, 0),
    ]
    assert not any(change.moved for change in found.changes)
    grown = found.changes[0]
    assert (grown.delta_bytes, grown.before_objects, grown.after_objects) == (
        (10 << 30) - (10 << 20), 1, 4,
    )  # fmt: skip
    same = found.categories[Change.SAME]
    assert (same.stacks, same.before_bytes, same.after_bytes, same.delta_bytes) == (1, 5, 5, 0)
    assert list(found.categories) == list(Change)


def test_another_directory_is_the_same_stack():
    found = compare_profiles(
        live(sample("f", 5)), live(sample("f", 9, folder="C:\\runs\\b".replace("\\", "/")))
    )
    (change,) = found.changes
    assert (change.change, change.moved) == (Change.GROWN, False)
    assert change.frames[0].filename == "C:/runs/b/model.py"


def test_moved_lines_are_growth_unless_lines_must_agree():
    before, after = live(sample("f", 5, line=10)), live(sample("f", 9, line=12))
    (change,) = compare_profiles(before, after).changes
    assert (change.change, change.moved, change.before_bytes, change.after_bytes) == (
        Change.GROWN, True, 5, 9,
    )  # fmt: skip
    assert change.frames[0].line == 12
    exact = compare_profiles(before, after, exact_lines=True)
    assert [c.change for c in exact.changes] == [Change.NEW, Change.GONE]
    assert compare_profiles(before, live(sample("f", 5, line=12))).changes == ()


def test_lines_that_agree_are_not_mixed_with_those_that_moved():
    before = live(sample("f", 5, line=10), sample("f", 100, line=20))
    after = live(sample("f", 6, line=10), sample("f", 70, line=21), sample("f", 40, line=31))
    found = compare_profiles(before, after)
    told = [(c.before_bytes, c.after_bytes, c.moved) for c in found.changes]
    assert told == [(100, 110, True), (5, 6, False)]


def test_stacks_in_one_file_only_stay_apart():
    found = compare_profiles(live(), live(sample("f", 5, line=1), sample("f", 6, line=2)))
    assert [(c.change, c.after_bytes) for c in found.changes] == [(Change.NEW, 6), (Change.NEW, 5)]


def test_the_count_decides_where_bytes_are_equal():
    found = compare_profiles(live(sample("f", 8, 1)), live(sample("f", 8, 2)))
    assert [c.change for c in found.changes] == [Change.GROWN]
    assert found.after_bytes - found.before_bytes == 0


def test_kinds_must_agree():
    with pytest.raises(ValueError, match="different kinds"):
        compare_profiles(live(), HeapProfile(ProfileKind.PEAK, 0, ()))


PAIRS = st.tuples(*[st.lists(SAMPLES, max_size=6).map(tuple)] * 2)
FEW = st.builds(
    Sample,
    st.lists(
        st.builds(
            Frame, st.sampled_from("fg"), st.sampled_from(["a.py", "/x/a.py"]), st.integers(1, 3)
        ),
        min_size=1,
        max_size=2,
    ).map(tuple),
    st.integers(0, 3),
    st.integers(0, 9),
)
ALIKE = st.tuples(*[st.lists(FEW, max_size=8).map(tuple)] * 2)


@given(pair=PAIRS | ALIKE, exact=st.booleans())
def test_categories_add_up_to_the_difference_of_totals(pair, exact):
    before, after = live(*pair[0]), live(*pair[1])
    found = compare_profiles(before, after, exact_lines=exact)
    parts = found.categories.values()
    assert sum(part.before_bytes for part in parts) == before.total_bytes == found.before_bytes
    assert sum(part.after_bytes for part in parts) == after.total_bytes == found.after_bytes
    assert sum(part.before_objects for part in parts) == before.total_objects
    assert sum(part.after_objects for part in parts) == after.total_objects
    delta = sum(change.delta_bytes for change in found.changes)
    assert delta == after.total_bytes - before.total_bytes
    assert found.categories[Change.SAME].delta_bytes == 0
    assert all(
        not c.before_bytes and not c.before_objects for c in found.changes if c.change is Change.NEW
    )
    for change in Change:
        if change is not Change.SAME:
            number = sum(c.change is change for c in found.changes)
            assert number == found.categories[change].stacks


@given(samples=st.lists(SAMPLES | FEW, max_size=8).map(tuple))
def test_a_profile_is_as_itself(samples):
    profile = live(*samples)
    assert compare_profiles(profile, profile).changes == ()
    moved = live(
        *(
            replace(s, frames=tuple(replace(f, filename="/other/" + f.filename) for f in s.frames))
            for s in samples
        )
    )
    if all("/" not in f.filename and "\\" not in f.filename for s in samples for f in s.frames):
        assert compare_profiles(profile, moved).changes == ()


@given(pair=ALIKE)
def test_the_other_way_round_is_the_opposite(pair):
    opposite = {
        Change.GROWN: Change.SHRUNK, Change.SHRUNK: Change.GROWN, Change.NEW: Change.GONE,
        Change.GONE: Change.NEW, Change.SAME: Change.SAME,
    }  # fmt: skip
    there = compare_profiles(live(*pair[0]), live(*pair[1])).categories
    back = compare_profiles(live(*pair[1]), live(*pair[0])).categories
    for change, part in there.items():
        assert back[opposite[change]].stacks == part.stacks
        assert back[opposite[change]].delta_bytes == -part.delta_bytes


def segments(*made):
    return list(from_torch(snapshot(made)).segments())


def test_segments_by_device_address_and_size():
    before = segments(
        segment([block(8)], address=100),
        segment([block(8)], address=200),
        segment([block(8)], address=300),
        segment([block(8)], address=400),
    )
    after = segments(
        segment([block(8)], address=100),
        segment([block(4), block(4, state="inactive")], address=200),
        segment([block(16)], address=300),
        segment([block(8)], address=400, device=1),
    )
    found = compare_segments(before, after)
    assert [one.address for one in found.only_before] == [300, 400]
    assert [(one.address, one.device) for one in found.only_after] == [(300, 0), (400, 1)]
    assert [one.address for one, _ in found.both] == [100, 200]
    assert found.refilled == 1


def test_segments_at_one_address_are_matched_one_by_one():
    """Where a file carries no addresses, all of them are 0."""
    one = segment([block(8)], address=0)
    found = compare_segments(segments(one, one), segments(one))
    assert (len(found.only_before), len(found.only_after), len(found.both)) == (1, 0, 1)


@given(raw=raw_snapshots(), other=raw_snapshots())
def test_segments_add_up(raw, other):
    before, after = list(from_torch(raw).segments()), list(from_torch(other).segments())
    found = compare_segments(before, after)
    assert len(found.only_before) + len(found.both) == len(before)
    assert len(found.only_after) + len(found.both) == len(after)
    itself = compare_segments(before, before)
    assert (itself.only_before, itself.only_after, itself.refilled) == ((), (), 0)
