from __future__ import annotations

import pytest
from support import pprof_proto
from support.heap_profiles import as_written

from gpumem_otel.base.profile import Sample
from gpumem_otel.profiles import heap, pprof
from gpumem_otel.profiles.of_file import load_snapshot
from gpumem_otel.snapshot.stacks import file_function_namer


def _profiles_of(path):
    snapshot = load_snapshot(path)
    for device in snapshot.devices():
        yield heap.live_profile(snapshot, device, namer=file_function_namer)


def _check_whole(path):
    profiles = list(_profiles_of(path))
    assert profiles
    for profile in profiles:
        found = pprof_proto.samples_of(pprof_proto.parse(pprof.encode([profile])))
        assert [sample for sample, _ in found[:-1]] == [as_written(s) for s in profile.samples]
        assert found[-1] == (Sample((pprof.SNAPSHOT_FRAME,), 0, 0), 1)
    return sum(profile.total_bytes for profile in profiles)


def test_every_sample_of_every_recording_comes_back(recordings):
    totals = {path.name: _check_whole(path) for path in recordings}
    assert all(totals.values()), totals


def test_every_sample_of_the_shipped_recordings_comes_back(data_dir):
    found = sorted(data_dir.glob("*.pickle.gz"))
    if not found:
        pytest.skip(f"no recording in {data_dir}")
    for path in found:
        _check_whole(path)
