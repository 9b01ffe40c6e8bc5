"""Labels of recorded allocations: few values, no running numbers."""

from __future__ import annotations

import pytest

from gpumem_otel.base.profile import Annotation
from gpumem_otel.snapshot.labels import (
    MAX_REGIONS,
    phase_of_annotation,
    region_labels,
    region_metadata,
    region_of,
    with_phases,
)
from gpumem_otel.snapshot.stacks import BACKWARD


def test_a_region_comes_back_as_it_went():
    assert region_of(region_metadata("loss head")) == "loss head"
    assert len(region_of(region_metadata("x" * 1000))) == 100


@pytest.mark.parametrize("metadata", ["", None, 7, "mine", '{"a": 1}', {"a": 1}])
def test_what_is_not_ours_is_no_region(metadata):
    assert region_of(metadata) == ""


def test_regions_are_few():
    labels_of = region_labels()
    seen = [
        labels_of({"action": "alloc", "user_metadata": region_metadata(f"step {number}")})
        for number in range(1000)
    ]
    assert len(set(seen)) == MAX_REGIONS + 1
    assert seen[-1] == (("region", "[other]"),)
    assert seen[0] == (("region", "step 0"),)
    assert labels_of({"action": "alloc"}) == labels_of({"user_metadata": "mine"}) == ()


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("Optimizer.step#AdamW.step", "optimizer.step"),
        ("Optimizer.zero_grad#SGD.zero_grad", "zero_grad"),
        ("DistributedDataParallel.forward", "forward"),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "data"),
        ("ProfilerStep#4711", "ProfilerStep"),
        ("train step 17", "train step"),
        ("epoch-3", "epoch"),
        ("layer1.conv", "layer1.conv"),
        ("12", "[none]"),
        ("", "[none]"),
    ],
)
def test_phases_of_annotations(name, phase):
    assert phase_of_annotation(name) == phase


def mark(name, stage, time_us):
    return Annotation(name, stage, 0, time_us)


def phase_of(event, annotations=(), root="[no Python frame]"):
    labels_of = with_phases(lambda event: (), annotations, lambda device, address: root, 0)
    return dict(labels_of({"action": "alloc", **event}))["phase"]


def test_the_innermost_range_counts_before_the_stack():
    frames = [{"name": "_call_impl", "filename": "/v/torch/nn/modules/module.py", "line": 1}]
    marks = [
        mark("outer", "START", 10), mark("inner", "START", 20),
        mark("inner", "END", 30), mark("outer", "END", 40),
    ]  # fmt: skip
    at = [phase_of({"frames": frames, "time_us": t}, marks) for t in (5, 15, 25, 35, 45)]
    assert at == ["forward", "outer", "inner", "outer", "forward"]


def test_memory_without_a_stack_is_of_backward_where_that_is_known():
    assert phase_of({}, root=BACKWARD) == "backward"
    assert phase_of({}) == "[none]"
    assert phase_of({"time_us": None, "frames": []}, root=BACKWARD) == "backward"


def test_a_forward_inside_backward_is_a_forward():
    """Checkpointing: the innermost frame that says something."""
    frames = [
        {"name": "linear", "filename": "/v/torch/nn/functional.py", "line": 1},
        {"name": "_wrapped_call_impl", "filename": "/v/torch/nn/modules/module.py", "line": 1},
        {"name": "_engine_run_backward", "filename": "/v/torch/autograd/graph.py", "line": 1},
        {"name": "main", "filename": "/job/train.py", "line": 1},
    ]
    assert phase_of({"frames": frames}) == "forward"
    assert phase_of({"frames": frames[2:]}) == "backward"
    assert phase_of({"frames": frames[3:]}) == "[none]"


def test_phases_are_few_too():
    labels_of = with_phases(lambda event: (), [], None, 0)
    marks = [
        mark(f"kind {chr(0x4E00 + number)}", stage, 10 * number + end)
        for number in range(200)
        for stage, end in (("START", 0), ("END", 9))
    ]
    labels_of = with_phases(lambda event: (), marks, None, 0)
    found = {labels_of({"action": "alloc", "time_us": 10 * number}) for number in range(200)}
    assert len(found) == MAX_REGIONS + 1
