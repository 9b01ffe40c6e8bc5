"""Growth and pinned memory out of live read-outs."""

from __future__ import annotations

import logging
import sys

import pytest
from support import fake_torch
from support.fake_clock import FakeClock

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.capture.derived_profiles import DerivedProfiles
from gpumem_otel.capture.gil_pacing import Pacer
from gpumem_otel.capture.profile_reader import LiveProfileReader
from gpumem_otel.capture.source import TorchSource
from gpumem_otel.errors import BusyError, CaptureError
from gpumem_otel.profiles.pinned import CACHED
from gpumem_otel.settings.config import ProfileConfig
from gpumem_otel.snapshot.stacks import NOT_RECORDED, file_function_namer

GROWTH, PINNED = ProfileKind.GROWTH, ProfileKind.PINNED
LOADER = {"name": "pin", "filename": "/job/loader.py", "line": 3}


@pytest.fixture
def make(monkeypatch):
    """A reader with what is beside it, over a fake torch of a version."""
    sources = []

    def build(version="2.15", kinds=("live", "growth", "pinned"), host_bytes=None):
        torch = fake_torch.make(version)
        if host_bytes is not None:
            torch._C._cuda_hostMemoryStats = lambda: {
                "allocated_bytes": {"all": {"current": host_bytes}}
            }
        monkeypatch.setitem(sys.modules, "torch", torch)
        clock, counters = FakeClock(), Counters()
        config = ProfileConfig(kinds=kinds, growth_pushes=1, class_as="off")
        source = TorchSource(counters=counters, clock=clock, pinned="pinned" in kinds)
        source.start()
        sources.append(source)
        common = {"namer": file_function_namer, "counters": counters, "config": config}
        reader = LiveProfileReader(source, clock=clock, share_seconds=0, **common)
        beside = DerivedProfiles(
            pacer=Pacer(),
            stats=source.stats,
            records_pinned=lambda: source.recorder.records_pinned,
            **common,
        )
        reader.tap.append(beside.note)
        torch.allocators[0].alloc(100)
        return torch, reader, beside

    yield build
    for source in sources:
        source.stop()


def by_name(profile):
    return {s.frames[0].name: (s.objects, s.size_bytes) for s in profile.samples}


def test_growth_is_what_live_profiles_differ_by(make):
    torch, reader, beside = make()
    with pytest.raises(CaptureError, match="needs 2 of them"):
        beside.growth()
    assert beside.make(GROWTH, reader.live_now()) == ()
    torch.allocators[0].alloc(1000)
    (profile,) = beside.make(GROWTH, reader.live_now())
    assert by_name(profile) == {"train.py:main": (1, 1024)}
    assert beside.growth() == (profile,)


def test_pinned_memory_by_stack(make):
    torch, reader, beside = make("2.15")
    assert all(call[8] is True for call in torch.allocators[0].calls)
    torch.host_segments += [
        {"address": 1, "size": 4096, "allocated": True, "active": True, "frames": [LOADER]},
        {"address": 2, "size": 512, "allocated": False, "active": False, "frames": []},
    ]
    live = reader.live_now()
    (profile,) = beside.make(PINNED, live)
    assert by_name(profile) == {"loader.py:pin": (1, 4096), CACHED: (1, 512)}
    assert (profile.device, profile.time_ns) == (0, live[0].time_ns)
    torch.host_segments.clear()
    (profile,) = beside.make(PINNED, reader.live_now())
    assert profile.samples == ()


def test_an_older_torch_gives_the_total_and_says_so_once(make, caplog):
    caplog.set_level(logging.INFO, "gpumem_otel")
    torch, reader, beside = make("2.11", host_bytes=7 << 20)
    for _ in range(2):
        (profile,) = beside.make(PINNED, reader.live_now())
        assert by_name(profile) == {NOT_RECORDED: (1, 7 << 20)}
        assert "2.14 and newer" in profile.comments[1]
    assert len([r for r in caplog.records if "pinned" in r.getMessage()]) == 1
    assert all(len(call) == 8 for call in torch.allocators[0].calls)


def test_a_torch_that_does_not_tell_is_no_failure(make):
    _, reader, beside = make("2.3")
    with pytest.raises(BusyError, match="does not report pinned"):
        beside.make(PINNED, reader.live_now())


def test_whoever_did_not_ask_has_nothing_recorded_and_may_ask_for_the_total(make):
    torch, reader, beside = make("2.15", kinds=("live",), host_bytes=99)
    torch.host_segments.append({"address": 1, "size": 4096, "allocated": True, "frames": []})
    reader.live_now()
    (profile,) = beside.pinned(5)
    assert by_name(profile) == {NOT_RECORDED: (1, 99)}
    assert "profile kind pinned" in profile.comments[1]
    assert all(call[8] is False for call in torch.allocators[0].calls)


def test_a_snapshot_that_can_not_be_read_is_counted_and_the_live_profile_is_there(make):
    torch, reader, beside = make("2.15")
    torch.host_segments.append({"address": 1, "size": 1, "allocated": True, "frames": 7})
    (live,) = reader.live_now()
    assert live.total_bytes == 512
    assert beside.make(PINNED, (live,)) == ()
    assert beside._counters.get("exporter_errors", stage="read") == 1
