"""Annotated ranges of time."""

from __future__ import annotations

from gpumem_otel.core.model import Annotation
from gpumem_otel.core.spans import Spans


def spans(*marks):
    return Spans([Annotation(name, stage, 0, time) for name, stage, time in marks], 0)


def test_ranges_nest_and_hold_their_start_alone():
    found = spans(
        ("step", "START", 10), ("forward", "START", 20), ("forward", "END", 30), ("step", "END", 40)
    )
    assert [found.at(t) for t in (9, 10, 20, 29, 30, 39, 40)] == [
        (),
        ("step",),
        ("step", "forward"),
        ("step", "forward"),
        ("step",),
        ("step",),
        (),
    ]
    assert found.ranges == [("step", 10, 40), ("forward", 20, 30)]


def test_a_lone_end_and_a_range_without_one():
    found = spans(("old", "END", 1), ("open", "START", 5))
    assert found.at(0) == found.at(4) == ()
    assert found.at(10**18) == ("open",)
    assert found.ranges == [("open", 5, None)]


def test_an_end_closes_the_innermost_of_its_name():
    found = spans(
        ("a", "START", 1), ("b", "START", 2), ("a", "START", 3), ("a", "END", 4), ("b", "END", 5)
    )
    assert found.at(4) == ("a", "b")
    assert found.at(5) == ("a",)


def test_marks_of_a_hostile_file_stay_cheap():
    found = spans(*(("deep", "START", time) for time in range(20_000)))
    assert len(found.at(30_000)) == 256
