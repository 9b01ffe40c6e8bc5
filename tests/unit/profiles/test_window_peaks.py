"""The peak of a window, on real recordings and on made ones."""

from __future__ import annotations

import pytest
from support.recordings import DATA

from gpumem_otel.base.profile import DeviceStats, ProfileKind
from gpumem_otel.profiles.heap import check, replayed_profile
from gpumem_otel.profiles.of_file import load_snapshot
from gpumem_otel.profiles.window_peak import PeakCounter, window_peak
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.stacks import BACKWARD, BEFORE_INSTALL, file_function_namer
from gpumem_otel.snapshot.tensor_classes import Classifier, TensorClass

FILES = sorted(DATA.glob("*.pickle.gz"))
CALL = {"name": "_call_impl", "filename": "/v/torch/nn/modules/module.py", "line": 1}
MAIN = {"name": "main", "filename": "/job/train.py", "line": 7}


def stats(requested_peak=0, allocated_peak=0):
    return DeviceStats(
        device=0,
        allocated_bytes=0,
        requested_bytes=0,
        active_bytes=0,
        reserved_bytes=0,
        requested_peak_bytes=requested_peak,
        allocated_peak_bytes=allocated_peak,
    )


def reading(snapshot, **more):
    return Reading(snapshot=snapshot, time_ns=10**18, before=(), after=(), **more)


def peak(read, counter=None, **more):
    return window_peak(read, 0, namer=file_function_namer, counter=counter or PeakCounter(), **more)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_that_of_the_file(path):
    """Of a file whose frees tell who freed, the total is the same as without their stacks."""
    snapshot = load_snapshot(path)
    device = snapshot.devices()[0]
    expected = replayed_profile(load_snapshot(path), device, namer=file_function_namer)
    pauses = []
    found = window_peak(
        reading(snapshot),
        device,
        namer=file_function_namer,
        counter=PeakCounter(),
        pause=lambda: pauses.append(1),
    )
    assert (found.kind, found.sizes) == (ProfileKind.PEAK, expected.sizes)
    assert (found.total_bytes, found.total_objects) == (
        expected.total_bytes,
        expected.total_objects,
    )
    assert found.total_bytes == max(snapshot.replay(device).allocated_bytes)
    assert check(found) == ()
    assert len(pauses) >= len(snapshot.raw_events(device)) // 32


def alloc(address, size, frames=(MAIN,)):
    return {"action": "alloc", "addr": address, "size": size, "frames": list(frames)}


def free(address, size, frames=()):
    return {"action": "free_requested", "addr": address, "size": size, "frames": list(frames)}


def block(address, size, frames=()):
    return {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
        "frames": list(frames),
    }


def made(events, blocks=()):
    segment = {"device": 0, "address": 1, "total_size": 10**6, "blocks": list(blocks)}
    return from_torch({"segments": [segment], "device_traces": [events]})


def names(profile):
    return {tuple(f.name for f in s.frames): s.size_bytes for s in profile.samples}


def test_frees_tell_the_stack_of_what_is_older_than_the_window():
    found = peak(reading(made([free(1, 100, [MAIN]), free(2, 30)])))
    assert names(found) == {("train.py:main",): 100, (BEFORE_INSTALL,): 30}


def test_memory_without_a_stack_is_named_by_the_rules_of_its_time():
    snapshot = made([alloc(1, 10, ()), alloc(2, 20, ()), free(3, 40)], [block(4, 80)])
    found = peak(
        reading(
            snapshot,
            stackless=lambda device, address: BACKWARD,
            stackless_blocks=lambda device, address: f"old {address}",
        )
    )
    # 3 and 4 are older; at the peak, before 3 is freed, all four are there
    assert names(found) == {("[backward]",): 30, ("old 3",): 40, ("old 4",): 80}


def test_classes_are_the_root_frame_by_address_and_by_stack():
    """An address speaks of what lives there now: 1 was freed, so its stack decides."""
    classifier = Classifier(
        {1: (10, TensorClass.PARAMETER), 2: (20, TensorClass.PARAMETER), 4: (7, TensorClass.INPUT)}
    )
    snapshot = made(
        [alloc(1, 10, [CALL]), alloc(2, 20, [CALL]), alloc(3, 30), free(1, 10)],
        [block(2, 20, [CALL]), block(3, 30, [MAIN]), block(4, 80, [MAIN])],
    )
    found = peak(
        reading(snapshot, classifier=classifier, stackless=lambda *_: BACKWARD), max_depth=2
    )
    assert names(found) == {
        ("module.py:_call_impl", "activation"): 10,
        ("module.py:_call_impl", "parameter"): 20,
        ("train.py:main", "unattributed"): 110,  # 4 is not as large as the table says
    }
    labelled = peak(
        reading(made([alloc(9, 10, ())], [block(9, 10)]), classifier=classifier), class_as="label"
    )
    assert [(s.frames[0].name, s.labels) for s in labelled.samples] == [
        ("[no Python frame]", (("tensor_class", "unattributed"),))
    ]
    without = peak(reading(snapshot, classifier=classifier), class_as=None)
    assert {len(frames) for frames in names(without)} == {1}


@pytest.mark.parametrize(
    ("before", "now", "allocated", "reached"),
    [
        (0, 500, 600, 500),
        (500, 500, 600, 0),
        (400, 500, 600, 500),
        (900, 500, 600, 500),
        (400, 700, 600, 600),
    ],
)
def test_what_the_counter_tells(before, now, allocated, reached):
    assert PeakCounter(before, stats(now, allocated)).reached_bytes() == reached


def test_a_counter_below_the_window_adds_nothing():
    found = peak(reading(made([alloc(1, 100)], [block(1, 100)])), PeakCounter(0, stats(60, 60)))
    assert found.total_bytes == 100
    assert PeakCounter(7, None).reached_bytes() == 0


@pytest.mark.parametrize(
    ("event_us", "expected_ns"),
    [
        (10**15 - 5_000_000, 10**18 - 5 * 10**9),
        (1, 10**18),  # a server refuses what is an hour old
        (10**15 + 1, 10**18),
        (None, 10**18),
    ],
)
def test_its_time_is_that_of_the_moment_where_that_can_be(event_us, expected_ns):
    events = [{**alloc(1, 100), "time_us": event_us}, {**free(1, 100), "time_us": event_us}]
    assert peak(reading(made(events))).time_ns == expected_ns
