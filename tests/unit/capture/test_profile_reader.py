"""Reader: totals, races, breaches, stalls, shared results, windows."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import pytest
from support import fake_torch
from support.fake_clock import FakeClock

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.profile import DeviceStats, ProfileKind
from gpumem_otel.capture import profile_reader
from gpumem_otel.capture.gil_pacing import Pacer
from gpumem_otel.capture.profile_reader import LiveProfileReader
from gpumem_otel.capture.source import TorchSource
from gpumem_otel.errors import CaptureError
from gpumem_otel.settings.config import ProfileConfig
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.stacks import file_function_namer

EQUAL = "equal to the allocator's own counter of allocated bytes"
RACED = "the job allocated or freed while this was read: counters and snapshot differ"


def frame(name, line=1):
    return {"name": name, "filename": "/job/model.py", "line": line}


@pytest.fixture
def torch(monkeypatch):
    module = fake_torch.make("2.11", devices=2)
    module.contexts = {0}
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def counters():
    return Counters()


@pytest.fixture
def source(torch, counters, clock):
    source = TorchSource(counters=counters, clock=clock)
    source.start()
    yield source
    source.stop()


@pytest.fixture
def make(source, counters, clock):
    def build(**options):
        config = options.pop("config", ProfileConfig())
        return LiveProfileReader(
            options.pop("source", source),
            namer=file_function_namer,
            clock=clock,
            counters=counters,
            config=config,
            pacer=Pacer(now=clock.monotonic, sleep=clock.advance),
            **options,
        )

    return build


def test_a_quiet_job_gives_an_exact_profile(torch, make, counters):
    allocator = torch.allocators[0]
    shared = (frame("forward", 7), frame("main", 2))
    allocator.alloc(1000, shared)
    allocator.alloc(3000, shared)
    allocator.alloc(100, (frame("step", 9),))
    reader = make()
    (profile,) = reader.live()
    assert profile.kind is ProfileKind.LIVE
    assert {
        tuple((f.name, f.line) for f in s.frames): (s.objects, s.size_bytes)
        for s in profile.samples
    } == {
        (("model.py:forward", 7), ("model.py:main", 2), ("unattributed", 0)): (2, 4096),
        (("model.py:step", 9), ("unattributed", 0)): (1, 512),
    }
    assert reader.classes() == {0: {"unattributed": 4608}}
    assert profile.comments == (EQUAL,)
    assert reader.totals()[0].allocated_bytes == profile.total_bytes == 4608
    assert counters.get("readouts_raced") == counters.get("readouts_breached") == 0
    assert counters.get("exporter_runs", stage="read") == 1


def test_a_race_is_counted_as_a_race(torch, make, counters):
    torch.allocators[0].alloc(10)
    torch.on_snapshot.append(lambda: torch.allocators[0].alloc(10))
    (profile,) = make().live()
    assert profile.total_bytes == 512
    assert profile.comments == (RACED,)
    assert counters.get("readouts_raced") == 1
    assert counters.get("readouts_breached") == 0


def test_a_breach_is_counted_and_logged_once(torch, make, counters, caplog):
    torch.allocators[0].alloc(10)
    real = torch._C._cuda_memoryStats

    def lying(device):
        raw = real(device)
        raw["allocated_bytes"]["all"]["current"] += 7
        return raw

    torch._C._cuda_memoryStats = lying
    reader = make(share_seconds=0)
    for _ in range(2):
        (profile,) = reader.live()
    reported = (
        "device 0: profile 512, snapshot 512, allocator 519 bytes allocated, "
        "while nothing was allocated"
    )
    assert profile.comments == (reported,)
    assert counters.get("readouts_breached") == 2
    assert [r.message for r in caplog.records] == [f"accounting mismatch: {reported}"]


@pytest.mark.parametrize("raced", [True, False])
def test_a_profile_that_differs_from_its_own_snapshot_is_a_breach(
    torch, make, counters, monkeypatch, raced
):
    torch.allocators[0].alloc(10)
    torch.allocators[0].alloc(600, (frame("other", 5),))
    if raced:
        torch.on_snapshot.append(lambda: torch.allocators[0].alloc(10))
    real = profile_reader.live_profile

    def loses_one(*args, **options):
        profile = real(*args, **options)
        return replace(profile, samples=profile.samples[1:])

    monkeypatch.setattr(profile_reader, "live_profile", loses_one)
    (profile,) = make().live()
    reported = "device 0: profile 512, snapshot 1536"
    if raced:
        assert profile.comments == (f"{reported} bytes allocated",)
    else:
        reported += ", allocator 1536"
        assert profile.comments == (f"{reported} bytes allocated, while nothing was allocated",)
    assert counters.get("readouts_breached") == 1
    assert counters.get("readouts_raced") == int(raced)


def test_a_device_that_only_the_snapshot_knows_is_compared_with_it(make, counters):
    class Odd:
        """Its counters are silent."""

        def read(self):
            block = {"size": 512, "state": "active_allocated", "address": 1, "frames": [frame("f")]}
            segment = {"device": 0, "address": 1, "total_size": 512, "blocks": [block]}
            return Reading(
                snapshot=from_torch({"segments": [segment]}), time_ns=1, before=(), after=()
            )

    (profile,) = make(source=Odd()).live()
    assert (profile.total_bytes, profile.comments) == (512, (RACED,))
    assert counters.get("readouts_breached") == 0


def test_an_armed_device_without_memory_has_an_empty_profile(torch, make):
    torch.allocators[0].free(torch.allocators[0].alloc(10))
    (profile,) = make().live()
    assert profile.samples == ()
    assert profile.comments == (EQUAL,)


def test_the_budget_keeps_the_total(torch, make):
    for line in range(50):
        torch.allocators[0].alloc(1000 * (line + 1), (frame("f", line),))
    reader = make(config=ProfileConfig(max_samples=10, max_depth=1))
    (profile,) = reader.live()
    assert len(profile.samples) == 10
    assert profile.total_bytes == reader.totals()[0].allocated_bytes
    assert any(s.frames[0].name == "[other]" for s in profile.samples)


def test_callers_within_a_second_share_one_read_out(torch, make, clock):
    torch.allocators[0].alloc(10)
    reader = make()
    first = reader.live()
    clock.advance(0.9)
    assert reader.live() is first
    clock.advance(0.2)
    assert reader.live() is not first
    assert len(torch.snapshots) == 2


def test_a_push_never_shares_a_read_out(torch, make, clock):
    reader = make()
    reader.live()
    clock.advance(0.1)
    pushed = reader.live_now()
    assert len(torch.snapshots) == 2
    assert reader.live() is pushed  # a pull shares that of the push
    assert len(torch.snapshots) == 2


def test_two_threads_never_read_at_once(torch, make):
    torch.allocators[0].alloc(10)
    reader = make(share_seconds=0)
    under_way, most = [], []

    def hook():
        under_way.append(1)
        most.append(len(under_way))
        under_way.pop()

    torch.on_snapshot.append(hook)
    threads = [threading.Thread(target=reader.live) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def test_stall_is_c_calls_and_slices_without_the_sleeps(torch, make, clock, counters):
    for _ in range(100):
        torch.allocators[0].alloc(10)
    torch.on_snapshot.append(lambda: clock.advance(0.125))

    def slow(name, filename, line):
        clock.advance(0.0625)
        return name

    reader = make()
    reader._namer = slow
    reader.live()
    assert reader.last_stall_seconds == pytest.approx(0.1875, abs=0.01)
    assert counters.get("exporter_stall_seconds") == reader.last_stall_seconds


def test_taps_see_every_reading(torch, make):
    torch.allocators[0].alloc(10)
    reader = make(share_seconds=0)
    seen = []
    reader.tap.append(lambda reading: seen.append(reading.snapshot.totals(0).allocated_bytes))
    reader.live()
    torch.allocators[0].alloc(10)
    reader.live()
    assert seen == [512, 1024]


def test_taps_are_in_neither_stall_nor_seconds(torch, make, clock, counters):
    torch.allocators[0].alloc(10)
    torch.on_snapshot.append(lambda: clock.advance(0.125))
    reader = make()
    reader.tap.append(lambda reading: clock.advance(4))
    profiles = reader.live()
    assert counters.get("exporter_seconds", stage="read") == 0.125
    assert reader.last_stall_seconds == pytest.approx(0.125, abs=0.1)
    clock.advance(0.5)
    assert reader.live() is profiles  # shared from the end of the taps on


def test_the_wait_of_a_window_is_in_neither_stall_nor_seconds(torch, make, clock, counters):
    torch.allocators[0].alloc(10)
    torch.on_snapshot.append(lambda: clock.advance(0.125))
    reader = make()
    reader.window_tap.append(lambda reading, seconds: clock.advance(4))
    reader.allocated(0.25, threading.Event())
    assert counters.get("exporter_seconds", stage="window") == 0.25
    assert counters.get("exporter_stall_seconds") == reader.last_stall_seconds == 0.25
    reader.windows.pushed([ProfileKind.ALLOCATED], 0.25, threading.Event())
    assert counters.get("exporter_seconds", stage="window") == 0.5


def test_comments_of_the_agent_come_after_ours(torch, make):
    torch.allocators[0].alloc(10)
    (profile,) = make(describe=lambda: ("rank 3", "torch 2.11")).live()
    assert profile.comments == (EQUAL, "rank 3", "torch 2.11")


def test_allocations_of_a_window_are_scaled_to_the_counters(torch, make, clock, counters):
    allocator = torch.allocators[0]
    allocator.alloc(9999)
    clock.on_wait.append(lambda: allocator.free(allocator.alloc(700, (frame("work", 4),))))
    (profile,) = make().allocated(0.1, threading.Event())
    assert profile.kind is ProfileKind.ALLOCATED
    assert [(s.frames[0].name, s.objects, s.size_bytes) for s in profile.samples] == [
        ("model.py:work", 2, 1400)
    ]
    assert profile.duration_ns == 100_000_000
    assert counters.get("exporter_runs", stage="window") == 1


def test_the_pushed_delta_covers_the_time_between_windows(torch, make, clock):
    allocator = torch.allocators[0]
    allocator.alloc(1)
    clock.on_wait.append(lambda: allocator.free(allocator.alloc(700, (frame("work", 4),))))
    reader = make()
    stop = threading.Event()
    kind = ProfileKind.ALLOCATED
    (first,) = reader.windows.pushed([kind], 0.03125, stop)[kind]
    assert (first.total_objects, first.total_bytes) == (1, 700)
    for _ in range(99):
        allocator.free(allocator.alloc(50))
    clock.advance(64)
    (second,) = reader.windows.pushed([kind], 0.03125, stop)[kind]
    assert (second.total_objects, second.total_bytes) == (100, 99 * 50 + 700)
    assert second.duration_ns == 64_031_250_000
    reader.allocated(0.03125, stop)
    (third,) = reader.windows.pushed([kind], 0.03125, stop)[kind]
    assert third.total_bytes == 1400  # what a pull saw in between is not lost for the push


def test_live_profiles_go_on_while_a_window_is_open(torch, make, clock):
    torch.allocators[0].alloc(10)
    reader = make(share_seconds=0)
    totals = []
    clock.on_wait.append(lambda: totals.append(reader.live()[0].total_bytes))
    reader.allocated(0.05, threading.Event())
    assert totals == [512]
    assert torch.allocators[0].mode == "state"


def test_a_source_without_windows_says_so(make):
    class Still:
        """A source that can only be read."""

        def read(self):
            stats = DeviceStats(
                device=0, allocated_bytes=0, requested_bytes=0, active_bytes=0, reserved_bytes=0
            )
            raw = {"segments": [], "device_traces": []}
            return Reading(snapshot=from_torch(raw), time_ns=1, before=(stats,), after=(stats,))

    reader = make(source=Still())
    assert [p.total_bytes for p in reader.live()] == [0]
    with pytest.raises(CaptureError, match="records no events"):
        reader.allocated(1, threading.Event())


def test_errors_of_the_source_reach_the_caller(torch, make, counters):
    torch.allocators[0].alloc(10)

    def broken(*args):
        raise RuntimeError("device lost")

    reader = make()
    torch._C._cuda_memorySnapshot = broken
    with pytest.raises(CaptureError, match="device lost"):
        reader.live()
    assert counters.get("exporter_errors", stage="read") == 0
