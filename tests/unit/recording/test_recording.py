"""A recording holds what was read."""

from __future__ import annotations

import gzip
import random
from dataclasses import fields

from hypothesis import given, settings
from support.raw_snapshots import alloc, block, frame, raw_snapshots, segment, snapshot
from support.recording_parts import (
    IDENTITY,
    STATS,
    STEPS,
    lines_of,
    reading_of,
    recording_of,
    stackful,
    windowed,
    written,
)

from gpumem_otel.base.profile import BlockState, DeviceStats, Identity, StepStats
from gpumem_otel.profiles.heap import allocated_profile, check, live_profile
from gpumem_otel.profiles.of_file import load_snapshot, parse_snapshot
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.stacks import file_function_namer, identity_namer, with_basename_paths


def test_header_identity_and_counters_come_back():
    data = written(
        reading_of({"segments": []}, before=(STATS,), after=(STATS,), stall_seconds=0.25),
        facts={"torch": "2.11.0+cu130", "device_names": "NVIDIA H200"},
        created_ns=7,
    )
    recording = load_recording(data, name="r.gz")
    assert recording.source == "r.gz"
    assert recording.identity == IDENTITY
    assert recording.header.version == 1
    assert recording.header.created_ns == 7
    assert recording.header.facts == {"torch": "2.11.0+cu130", "device_names": "NVIDIA H200"}
    assert recording.warnings == ()
    (entry,) = recording.readings
    assert entry.time_ns == 5
    assert entry.before == entry.after == (STATS,)
    assert entry.steps == STEPS
    again = entry.reading()
    assert (again.before, again.time_ns, again.stall_seconds) == ((STATS,), 5, 0.25)
    assert again.stackless is None
    assert not again.raced(1)


def test_programs_find_every_field_of_an_identity_and_of_steps():
    """Also those with their defaults: other programs read the lines too."""
    data = written(reading_of({"segments": []}), steps=StepStats())
    header, reading = lines_of(data)[0], lines_of(data)[-1]["reading"]
    assert set(header["identity"]) == {field.name for field in fields(Identity)}
    assert reading["steps"] == {"steps": 0, "last_step_time_ns": 0, "floor_bytes": {}}


def test_a_raced_reading_stays_one():
    later = DeviceStats(
        device=1, allocated_bytes=5, requested_bytes=4, active_bytes=6, reserved_bytes=7, frees=4
    )
    data = written(reading_of({"segments": []}, before=(STATS,), after=(later,)))
    (entry,) = load_recording(data).readings
    assert entry.after == (later,)
    assert entry.reading().raced(1)


def test_segments_and_blocks_come_back_with_final_names():
    data = written(reading_of(stackful()), namer=file_function_namer)
    taken = load_recording(data).readings[0].snapshot
    assert taken.resolved
    (got,) = taken.segments()
    assert (got.device, got.address, got.size_bytes, got.stream) == (1, 1 << 20, 1 << 20, 2**63)
    assert (got.kind, got.pool_id, got.is_expandable) == ("large", (4, 2), False)
    assert [(b.size_bytes, b.state) for b in got.blocks] == [
        (512, BlockState.ACTIVE_ALLOCATED),
        (1024, BlockState.INACTIVE),
        (256, BlockState.ACTIVE_PENDING_FREE),
        (128, BlockState.ACTIVE_ALLOCATED),
    ]
    assert [b.address - (1 << 20) for b in got.blocks] == [0, 512, 1536, 1792]
    assert [[f.name for f in b.frames] for b in got.blocks] == [
        ["a.py:leaf", "a.py:main"],
        [],
        ["a.py:main"],
        ["[allocated before install]"],
    ]
    assert got.blocks[0].requested_bytes == 500
    assert got.blocks[0].frames[0].filename == "/x/a.py"


def test_blocks_may_have_gaps_or_no_addresses():
    raw = snapshot([segment([block(8, address=1 << 21), block(8, address=1 << 22)])])
    first = segment([block(8), block(8)])
    for item in first["blocks"]:
        del item["address"]
    raw["segments"].append(first)
    taken = load_recording(written(reading_of(raw))).readings[0].snapshot
    addresses = [[b.address for b in s.blocks] for s in taken.segments()]
    assert addresses == [[1 << 21, 1 << 22], [None, None]]


def test_names_are_written_once():
    data = written(*(reading_of(stackful()) for _ in range(3)))
    tables = [line for line in lines_of(data) if not {"reading", "format"} & line.keys()]
    assert tables == [
        {"strings": ["leaf", "/x/a.py", "main", "[allocated before install]", ""]},
        {"frames": [[0, 1, 2], [2, 1, 9], [3, 4, 0]]},
        {"stacks": [[0, 1], [1], [2]]},
    ]


def test_the_live_rule_names_memory_without_a_stack_and_the_totals_count_it():
    raw = snapshot([segment([block(8), block(16)])])
    address = raw["segments"][0]["blocks"][1]["address"]
    reading = reading_of(
        raw,
        stackless=lambda device, where: (
            "[backward]" if where == address else "[allocated before install]"
        ),
    )
    taken = load_recording(written(reading)).readings[0].snapshot
    assert taken.totals(0).bytes_without_stack == 24
    assert taken.totals(0) == reading.snapshot.totals(0)
    expected = live_profile(reading.snapshot, 0, namer=identity_namer, stackless=reading.stackless)
    assert live_profile(taken, 0, namer=identity_namer) == expected
    assert [s.frames[0].name for s in expected.samples] == [
        "[backward]",
        "[allocated before install]",
    ]


def test_redacted_paths_never_reach_the_file():
    data = written(reading_of(stackful()), namer=with_basename_paths(identity_namer))
    assert b"/x/" not in gzip.decompress(data)


def test_windows_come_back_with_their_counters():
    before = STATS
    after = DeviceStats(
        device=1,
        allocated_bytes=5,
        requested_bytes=4,
        active_bytes=6,
        reserved_bytes=7,
        requested_allocation_bytes=1000,
        allocations=20,
    )
    reading = windowed(before=(before,), after=(after,))
    (window,) = load_recording(written(windows=[(reading, 2.5)])).windows
    assert window.seconds == 2.5
    again = window.reading()
    assert (again.before, again.after, again.time_ns) == ((before,), (after,), 5)
    options = {"namer": identity_namer, "time_ns": 1, "duration_ns": 2}
    for total in (None, 1000):
        expected = allocated_profile(
            reading.snapshot, 1, requested_total_bytes=total, objects_total=12, **options
        )
        got = allocated_profile(
            again.snapshot, 1, requested_total_bytes=total, objects_total=12, **options
        )
        assert got == expected
        assert [s.objects for s in got.samples] == [6, 6]


def test_a_window_keeps_only_what_was_allocated():
    free = {"action": "free_completed", "addr": 1, "size": 5, "stream": 0, "frames": []}
    reading = reading_of(snapshot([], [[free], [alloc(1, 5, [frame("f")])]]))
    (window,) = load_recording(written(windows=[(reading, 1.0)])).windows
    assert window.reading().snapshot.devices() == (1,)
    none = {"window": {"time_ns": 1, "groups": {"0": [[1], [0], [0]]}}}
    assert load_recording(recording_of(none)).windows[0].reading().snapshot.devices() == ()


def test_equal_input_gives_equal_bytes():
    assert written(reading_of(stackful())) == written(reading_of(stackful()))


def test_a_recording_is_a_snapshot_file(tmp_path):
    data = written(reading_of(stackful()), reading_of(stackful(4096)))
    assert parse_snapshot(data, "r").totals(1).allocated_bytes == 4096 + 128
    path = tmp_path / "r.gz"
    path.write_bytes(data)
    assert load_snapshot(path).totals(1).allocated_bytes == 4096 + 128
    assert len(load_recording(path).readings) == 2
    assert load_recording(str(path)).source == str(path)
    with path.open("rb") as file:
        assert load_recording(file).source == str(path)
    plain = load_recording(gzip.decompress(data))
    assert len(plain.readings) == 2


@given(raw_snapshots())
@settings(max_examples=80)
def test_any_snapshot_comes_back_with_equal_totals_and_profiles(raw):
    taken = from_torch(raw)
    data = written(
        Reading(snapshot=taken, time_ns=1, before=(), after=()), namer=file_function_namer
    )
    again = load_recording(data).readings[0].snapshot
    assert again.devices() == taken.devices()
    for device in (0, 1, 2):
        assert again.totals(device) == taken.totals(device)
        expected = live_profile(taken, device, namer=file_function_namer)
        assert live_profile(again, device, namer=file_function_namer) == expected
        assert check(expected, again.totals(device).allocated_bytes) == ()


@given(raw_snapshots())
@settings(max_examples=40)
def test_any_window_comes_back_with_equal_allocations(raw):
    taken = from_torch({"segments": [], "device_traces": raw["device_traces"]})
    reading = Reading(snapshot=taken, time_ns=1, before=(), after=())
    again = load_recording(written(windows=[(reading, 1.0)])).windows[0].reading().snapshot
    options = {"namer": identity_namer, "time_ns": 1, "duration_ns": 1}
    for device in (0, 1, 2):
        assert allocated_profile(again, device, **options) == allocated_profile(
            taken, device, **options
        )


def test_a_recording_of_a_recording_is_equal():
    first = written(reading_of(stackful()), namer=file_function_namer)
    entry = load_recording(first).readings[0]
    again = written(entry.reading(), namer=file_function_namer)
    assert again == first


def test_thirty_readings_of_a_small_job_are_small():
    """250 blocks with stacks of 40 frames, moving from reading to reading: under 300 kB."""
    chance = random.Random(7)
    frames = [frame(f"function_{n}", f"/venv/torch/module_{n}.py", n) for n in range(400)]
    stacks = [[chance.choice(frames) for _ in range(40)] for _ in range(60)]
    readings = []
    for turn in range(30):
        segments = [
            segment(
                [block(512 * chance.randrange(1, 2**15), chance.choice(stacks)) for _ in range(10)],
                address=0x7F00_0000_0000 + (number << 24),
            )
            for number in range(25)
        ]
        readings.append(reading_of(snapshot(segments), time_ns=turn, before=(STATS,)))
    data = written(*readings)
    assert len(data) < 150_000
    assert len(load_recording(data).readings) == 30


def test_every_snapshot_file_comes_back(recordings):
    for path in recordings:
        taken = load_snapshot(path)
        reading = Reading(snapshot=taken, time_ns=1, before=(), after=())
        data = written(reading, reading, namer=file_function_namer)
        again = load_recording(data).readings[1].snapshot
        assert again.devices() == taken.devices()
        for device in taken.devices():
            assert again.totals(device) == taken.totals(device), path.name
            assert live_profile(again, device, namer=identity_namer) == live_profile(
                taken, device, namer=file_function_namer
            ), path.name
