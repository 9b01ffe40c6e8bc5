"""ReplaySource: a recording played as if the job ran now."""

from __future__ import annotations

import io
import threading
from dataclasses import replace

import pytest
from support.fake_clock import FakeClock
from support.recordings import DATA, SECOND_NS, START_NS, make_recording, stats_of

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.profile import Identity, SourceStatus, StepStats
from gpumem_otel.capture.profile_reader import LiveProfileReader
from gpumem_otel.errors import BusyError, CaptureError
from gpumem_otel.profiles.of_file import load_snapshot
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.recording.source import ReplaySource
from gpumem_otel.recording.writer import RecordingWriter
from gpumem_otel.settings.config import ProfileConfig
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.stacks import file_function_namer, identity_namer

PYTHON = "h200-torch2.11-train-python-stacks.pickle.gz"
COMPILED = "h200-torch2.11-compiled-training.pickle.gz"
OOM = "h200-torch2.11-oom.pickle.gz"
ALLOCATED = {PYTHON: 121_323_520, COMPILED: 126_912_512, OOM: 129_712_128}
COUNTERS = ("allocations", "frees", "allocation_bytes", "requested_allocation_bytes", "ooms")


def recording_with_windows():
    """Three readings a second apart, windows that end at 0.5 s and 1.5 s."""
    snapshot = load_snapshot(DATA / PYTHON)
    file = io.BytesIO()
    writer = RecordingWriter(
        file,
        identity=Identity(service_name="recorded"),
        created_ns=START_NS,
        facts={"devices": "NVIDIA H200"},
        namer=file_function_namer,
    )
    for turn in range(3):
        stats = (stats_of(snapshot, 0, turn),)
        at = START_NS + turn * SECOND_NS
        reading = Reading(snapshot=snapshot, time_ns=at, before=stats, after=stats)
        writer.add(reading, StepStats(steps=7 * turn, last_step_time_ns=at - SECOND_NS // 4))
        if turn < 2:
            later = tuple(
                replace(s, allocations=s.allocations + 50, requested_allocation_bytes=1 << 40)
                for s in stats
            )
            window = replace(reading, time_ns=at + SECOND_NS // 2, after=later)
            assert writer.add_window(window, 0.25)
    writer.close()
    return load_recording(file.getvalue())


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def source(clock):
    return ReplaySource(load_recording(make_recording(PYTHON, COMPILED, OOM)), clock)


def test_is_armed_with_the_recorded_devices(source):
    assert source.status() == SourceStatus(armed=True, supported=True, devices=(0,))


def test_each_reading_holds_until_the_next_one(source, clock):
    """GIVEN readings at 0, 1 and 2 s WHEN time passes THEN the last one before now is read."""
    seen = []
    for _ in range(7):
        reading = source.read()
        allocated = reading.snapshot.totals(0).allocated_bytes
        assert source.stats()[0].allocated_bytes == allocated
        assert not reading.raced(0)
        assert reading.time_ns == clock.now_ns
        seen.append(allocated)
        clock.advance(0.5)
    first, second, third = ALLOCATED[PYTHON], ALLOCATED[COMPILED], ALLOCATED[OOM]
    # the third reading lasts as long as the others, then it begins again
    assert seen == [first, first, second, second, third, third, first]


def test_counters_never_go_back_over_the_end(source, clock):
    previous = None
    for _ in range(40):
        stats = source.stats()[0]
        if previous is not None:
            for name in COUNTERS:
                assert getattr(stats, name) >= getattr(previous, name), name
            assert stats.allocated_peak_bytes >= previous.allocated_peak_bytes
        previous = stats
        clock.advance(0.25)


def test_live_count_is_that_of_the_reading_in_every_turn(source, clock):
    """The jump from the last state to the first counts as the frees that it takes."""
    first_turn = []
    for _ in range(3):
        stats = source.stats()[0]
        first_turn.append(stats.allocations - stats.frees)
        clock.advance(1.0)
    assert first_turn == [100, 200, 300]
    clock.advance(3.0 * 5)
    later = []
    for _ in range(3):
        stats = source.stats()[0]
        later.append(stats.allocations - stats.frees)
        clock.advance(1.0)
    assert later == first_turn


def test_bytes_grow_by_what_was_allocated_in_one_turn(source, clock):
    start = source.stats()[0].allocation_bytes
    clock.advance(3.0)
    assert source.stats()[0].allocation_bytes - start == 2 * 10**9
    clock.advance(3.0)
    assert source.stats()[0].allocation_bytes - start == 4 * 10**9


def test_steps_go_on_and_their_time_is_now(source, clock):
    assert source.steps().steps == 10
    assert source.steps().last_step_time_ns == clock.now_ns
    clock.advance(2.5)
    assert source.steps().steps == 30
    assert source.steps().last_step_time_ns == clock.now_ns - SECOND_NS // 2
    clock.advance(0.5)
    assert source.steps().steps == 30
    clock.advance(1.0)
    assert source.steps().steps == 40


def test_speed_and_no_loop(clock):
    recording = load_recording(make_recording(PYTHON, COMPILED, OOM))
    source = ReplaySource(recording, clock, speed=10.0, loop=False)
    clock.advance(0.1)
    assert source.stats()[0].allocated_bytes == ALLOCATED[COMPILED]
    clock.advance(100.0)
    assert source.stats()[0].allocated_bytes == ALLOCATED[OOM]
    assert source.stats()[0].allocations == 3000


def test_single_reading_stays(clock):
    source = ReplaySource(load_recording(make_recording(PYTHON)), clock)
    before = source.stats()
    clock.advance(12.3)
    assert source.stats() == before


def test_no_reading_is_an_error(clock):
    with pytest.raises(CaptureError, match="holds no readings"):
        ReplaySource(load_recording(make_recording()), clock)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_speed_must_be_positive(clock, speed):
    with pytest.raises(CaptureError, match="speed"):
        ReplaySource(load_recording(make_recording(PYTHON)), clock, speed=speed)


def test_window_without_recorded_ones_says_so(source):
    assert not source.has_windows
    with pytest.raises(CaptureError, match="holds no windows of events"):
        source.window(1.0, threading.Event())


def test_window_waits_and_gives_the_last_one_recorded(clock):
    source = ReplaySource(recording_with_windows(), clock)
    assert source.has_windows
    assert source.facts["devices"] == "NVIDIA H200"
    started = clock.seconds
    reading = source.window(0.6, threading.Event())
    assert clock.seconds - started == pytest.approx(0.6)
    assert reading.time_ns == clock.now_ns
    assert [s.allocations for s in (*reading.before, *reading.after)] == [1000, 1050]
    clock.advance(1.0)
    reading = source.window(0.0, threading.Event())
    assert [s.allocations for s in (*reading.before, *reading.after)] == [2000, 2050]
    # the next turn, before its first window has ended: the last one of the previous turn
    clock.advance(1.5)
    reading = source.window(0.0, threading.Event())
    assert [s.allocations for s in (*reading.before, *reading.after)] == [2000, 2050]
    clock.advance(0.5)
    reading = source.window(0.0, threading.Event())
    assert [s.allocations for s in (*reading.before, *reading.after)] == [3000, 3050]


def test_window_before_any_has_ended_gives_the_first(clock):
    source = ReplaySource(recording_with_windows(), clock)
    reading = source.window(0.1, threading.Event())
    assert [s.allocations for s in (*reading.before, *reading.after)] == [1000, 1050]


def test_window_ends_early_when_told(clock):
    source = ReplaySource(recording_with_windows(), clock)
    stop = threading.Event()
    stop.set()
    source.window(60.0, stop)
    assert clock.seconds == 0.0


def test_one_window_at_a_time(clock):
    source = ReplaySource(recording_with_windows(), clock)
    refused = []

    def second() -> None:
        with pytest.raises(BusyError, match="another window is open"):
            source.window(0.1, threading.Event())
        refused.append(True)

    clock.on_wait.append(second)
    source.window(0.1, threading.Event())
    assert refused == [True]
    clock.on_wait.clear()
    source.window(0.1, threading.Event())


def test_reader_adds_up_on_every_reading(source, clock):
    """The code that reads a live process, over two turns: no race and no breach."""
    counters = Counters()
    reader = LiveProfileReader(
        source, namer=identity_namer, clock=clock, counters=counters, config=ProfileConfig()
    )
    totals = []
    for _ in range(6):
        (profile,) = reader.live()
        totals.append(profile.total_bytes)
        clock.advance(1.5)
    assert set(totals) <= set(ALLOCATED.values())
    assert counters.get("readouts_raced") == 0
    assert counters.get("readouts_breached") == 0


def test_reader_makes_true_deltas_of_windows(clock):
    source = ReplaySource(recording_with_windows(), clock)
    reader = LiveProfileReader(
        source, namer=identity_namer, clock=clock, counters=Counters(), config=ProfileConfig()
    )
    (profile,) = reader.allocated(0.6, threading.Event())
    assert profile.total_bytes == (1 << 40) - 10**9
    assert profile.total_objects == 50
