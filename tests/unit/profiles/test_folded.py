"""Folded stacks and JSON, to the character."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sample, Sizes
from gpumem_otel.profiles.folded import escape_name, folded_text, json_form
from gpumem_otel.profiles.heap import live_profile
from gpumem_otel.profiles.of_file import load_snapshot
from gpumem_otel.snapshot.stacks import file_function_namer

LINE = re.compile(r"^(.*)\s+?(\d+(?:\.\d*)?)$")
"""How readers of folded stacks take a line apart."""


def profile_of(*samples, device=0):
    return HeapProfile(ProfileKind.LIVE, device, tuple(Sample(*s) for s in samples))


def test_root_first_with_bytes_or_objects():
    profile = profile_of(((Frame("leaf"), Frame("main")), 3, 96), ((Frame("[backward]"),), 1, 5))
    assert folded_text([profile]) == "main;leaf 96\n[backward] 5\n"
    assert folded_text([profile], objects=True) == "main;leaf 3\n[backward] 1\n"
    assert folded_text([]) == ""
    assert folded_text([profile_of()]) == ""


def test_several_devices_get_a_root_each():
    one = profile_of(((Frame("a"),), 1, 2))
    two = profile_of(((Frame("a"),), 1, 3), device=4)
    assert folded_text([one, two]) == "[device 0];a 2\n[device 4];a 3\n"


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("a;b", r"a\x3bb"),
        ("x\ny", r"x\x0ay"),
        ("a\\b", r"a\x5cb"),
        ("f 12", r"f\x2012"),
        ("f 12.5", r"f\x2012.5"),
        ("f 1 2", r"f 1\x202"),
        ("f 12x", "f 12x"),
        ("at::mm(at::Tensor const&, long)", "at::mm(at::Tensor const&, long)"),
        ("\u2028", r"\u2028"),
        ("\u00e9", "\u00e9"),
    ],
)
def test_escapes(name, escaped):
    assert escape_name(name) == escaped


NAMES = st.text(min_size=1, max_size=8)


@given(st.lists(NAMES, min_size=1, max_size=4), st.integers(0, 2**60))
def test_any_stack_is_one_line_of_as_many_frames(names, size):
    text = folded_text([profile_of((tuple(map(Frame, names)), 1, size))])
    lines = text.splitlines()
    assert len(lines) == 1
    stack, value = LINE.match(lines[0]).groups()
    assert int(value) == size
    assert len(stack.split(";")) == len(names)
    assert LINE.match(stack) is None or not re.search(r"\s\d+(\.\d*)?$", stack)


@given(NAMES, NAMES)
def test_escaping_keeps_names_apart(one, two):
    assert (escape_name(one) == escape_name(two)) == (one == two)


def test_json_form():
    profile = HeapProfile(
        ProfileKind.ALLOCATED,
        2,
        (
            Sample((Frame("f", "a.py", 3), Frame("m", "a.py", 9)), 2, 20, (("pool", "p"),)),
            Sample((Frame("m", "a.py", 9),), 1, 1),
        ),
        7,
        8,
        ("c",),
        Sizes.REQUESTED,
    )
    assert json.loads(json.dumps(json_form(profile))) == {
        "kind": "allocated",
        "device": 2,
        "time_ns": 7,
        "duration_ns": 8,
        "sizes": "requested",
        "total_bytes": 21,
        "total_objects": 3,
        "comments": ["c"],
        "stack_order": "leaf first",
        "frames": [
            {"name": "f", "filename": "a.py", "line": 3},
            {"name": "m", "filename": "a.py", "line": 9},
        ],
        "samples": [
            {"stack": [0, 1], "objects": 2, "size_bytes": 20, "labels": {"pool": "p"}},
            {"stack": [1], "objects": 1, "size_bytes": 1},
        ],
    }


def test_every_recording_folds_to_its_total(recordings):
    for path in recordings:
        taken = load_snapshot(path)
        for device in taken.devices():
            profile = live_profile(taken, device, namer=file_function_namer)
            lines = folded_text([profile]).splitlines()
            values = [int(LINE.match(line).group(2)) for line in lines]
            assert sum(values) == taken.totals(device).allocated_bytes
            form = json_form(profile)
            assert sum(s["size_bytes"] for s in form["samples"]) == sum(values)
