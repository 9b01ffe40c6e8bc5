"""Annotated ranges of time."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from gpumem_otel.base.profile import Annotation
from gpumem_otel.snapshot.labels import AnnotatedRanges


def spans(*marks):
    return AnnotatedRanges([Annotation(name, stage, 0, time) for name, stage, time in marks])


def test_ranges_nest_and_hold_their_start_alone():
    found = spans(
        ("step", "START", 10), ("forward", "START", 20), ("forward", "END", 30), ("step", "END", 40)
    )
    assert [found.innermost(t) for t in (9, 10, 20, 29, 30, 39, 40)] == [
        None,
        "step",
        "forward",
        "forward",
        "step",
        "step",
        None,
    ]
    assert found.ranges == [("step", 10, 40), ("forward", 20, 30)]


def test_a_lone_end_and_a_range_without_one():
    found = spans(("old", "END", 1), ("open", "START", 5))
    assert found.innermost(0) is found.innermost(4) is None
    assert found.innermost(10**18) == "open"
    assert found.ranges == [("open", 5, None)]


def test_an_end_closes_the_innermost_of_its_name():
    found = spans(
        ("a", "START", 1), ("b", "START", 2), ("a", "START", 3), ("a", "END", 4), ("b", "END", 5)
    )
    assert [found.innermost(t) for t in (3, 4, 5)] == ["a", "b", "a"]
    assert found.ranges == [("a", 1, None), ("b", 2, 5), ("a", 3, 4)]


def test_a_range_that_ends_before_one_that_it_holds():
    found = spans(
        ("a", "START", 1), ("b", "START", 2), ("a", "END", 3), ("c", "START", 4), ("c", "END", 5)
    )
    assert [found.innermost(t) for t in (2, 3, 4, 5)] == ["b", "b", "c", "b"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["START", "END"])), max_size=30))
def test_as_by_a_list_of_what_is_open(marks):
    found = spans(*((name, stage, time) for time, (name, stage) in enumerate(marks)))
    opened = []
    for time, (name, stage) in enumerate(marks):
        if stage == "START":
            opened.append(name)
        elif name in opened:
            del opened[len(opened) - 1 - opened[::-1].index(name)]
        assert found.innermost(time) == (opened[-1] if opened else None)


def test_what_a_mark_keeps_does_not_grow_with_the_depth():
    marks = [Annotation("deep", "START", 0, time) for time in range(20_000)]
    tracemalloc.start()
    try:
        found = AnnotatedRanges(marks)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.innermost(30_000) == "deep"
    assert peak_bytes < 200 * len(marks)
