from __future__ import annotations

import copy
import gzip
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import pprof_proto
from support.heap_profiles import PROFILES, ROOT, SMALL, as_written, live, tower

from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sample
from gpumem_otel.errors import EncodeError
from gpumem_otel.profiles import pprof
from gpumem_otel.profiles.pprof_reader import DecodedSample


def test_small_profile_reads_backas_written():
    data = pprof.encode([SMALL], comments=("torch 2.11",))
    assert pprof_proto.render(pprof_proto.parse(data)) == (
        """\
types inuse_objects/count, inuse_space/bytes, snapshots/count
default inuse_space
period 1 space/bytes
time 1700000000123456789 duration 0
comment rank 3 of 8
comment torch 2.11
mapping 1 gpu_memory functions=True
sample [3, 1536, 0]
  torch.nn.modules.linear.Linear.forward /venv/torch/nn/modules/linear.py:134
  train.main /job/train.py:20
sample [1, 1099511627776, 0] tensor_class=parameter
  torch.nn.modules.linear.Linear.forward /venv/torch/nn/modules/linear.py:135
  train.main /job/train.py:20
sample [2, 2000000000, 0]
  [backward] :0
sample [0, 0, 1]
  (snapshot) :0
"""
    )


def test_two_devices_in_one_pprof_are_told_apart_by_labels():
    profiles = [
        live(Sample((ROOT,), 1, 10, (("tensor_class", "buffer"), ("rank", "9"), ("", "x")))),
        live(Sample((ROOT,), 1, 30), device=1),
    ]
    data = pprof.encode(profiles, device_labels={"rank": "3", "restart": ""})
    assert pprof_proto.render(pprof_proto.parse(data)).splitlines()[5:] == [
        "sample [1, 10, 0] device=0 rank=3 tensor_class=buffer",
        "  train.main /job/train.py:20",
        "sample [1, 30, 0] device=1 rank=3",
        "  train.main /job/train.py:20",
        "sample [0, 0, 1] device=0 rank=3",
        "  (snapshot) :0",
        "sample [0, 0, 1] device=1 rank=3",
        "  (snapshot) :0",
    ]


def test_devices_that_nothing_tells_apart_count_as_one_snapshot():
    data = pprof.encode([live(Sample((ROOT,), 1, 10)), live(device=1)])
    assert pprof.decode(data).total("snapshots") == 1


@pytest.mark.parametrize(
    ("kind", "objects", "space"),
    [
        (ProfileKind.LIVE, "inuse_objects", "inuse_space"),
        (ProfileKind.ALLOCATED, "alloc_objects", "alloc_space"),
        (ProfileKind.PEAK, "peak_objects", "peak_space"),
        (ProfileKind.PINNED, "pinned_objects", "pinned_space"),
    ],
)
def test_each_kind_has_its_types(kind, objects, space):
    profile = HeapProfile(kind, 0, (Sample((ROOT,), 2, 64),), 5, 60_000_000_000)
    decoded = pprof.decode(pprof.encode([profile]))
    assert decoded.sample_types == ((objects, "count"), (space, "bytes"), ("snapshots", "count"))
    assert decoded.default_sample_type == space
    assert (decoded.time_ns, decoded.duration_ns) == (5, 60_000_000_000)
    assert [decoded.total(name) for name, _ in decoded.sample_types] == [2, 64, 1]
    with pytest.raises(KeyError, match="cpu"):
        decoded.total("cpu")


def test_a_moment_without_memory_is_still_counted():
    decoded = pprof.decode(pprof.encode([live()]))
    assert decoded.samples == (DecodedSample((pprof.SNAPSHOT_FRAME,), (0, 0, 1)),)


def test_no_profile_at_all_is_a_valid_pprof_without_samples():
    profile = pprof_proto.parse(pprof.encode([], kind=ProfileKind.ALLOCATED))
    assert pprof_proto.render(profile).splitlines()[0] == (
        "types alloc_objects/count, alloc_space/bytes, snapshots/count"
    )
    assert len(profile.sample) == 0


@given(st.lists(PROFILES, max_size=3))
def test_any_profile_comes_back_whole_from_two_independent_readers(profiles):
    data = pprof.encode(profiles, device_labels={"rank": "0"}, kind=ProfileKind.PEAK)
    expected = [
        as_written(sample, (("rank", "0"), ("device", str(profile.device))))
        for profile in profiles
        for sample in profile.samples
    ]
    message = pprof_proto.parse(data)
    found = pprof_proto.samples_of(message)
    assert [sample for sample, snapshots in found if not snapshots] == expected
    assert sum(snapshots for _, snapshots in found) == len(profiles)
    decoded = pprof.decode(pprof.gzip_bytes(data))
    assert [Sample(s.frames, *s.values[:2], s.labels) for s in decoded.samples] == [
        sample for sample, _ in found
    ]
    assert decoded.time_ns == message.time_nanos == max([p.time_ns for p in profiles], default=0)
    assert decoded.comments == tuple(message.string_table[i] for i in message.comment)
    assert decoded.period_type == ("space", "bytes")
    assert decoded.period == 1


def test_equal_input_gives_equal_bytes():
    other = copy.deepcopy(SMALL)
    assert other.samples[0].frames[0] is not SMALL.samples[0].frames[0]
    assert pprof.encode([SMALL, SMALL]) == pprof.encode([other, SMALL])


@pytest.mark.parametrize(
    "profile",
    [
        live(Sample((ROOT,), -1, 10)),
        live(Sample((ROOT,), 1, -10)),
        live(Sample((ROOT,), 1, 2**63)),
        live(Sample((ROOT,), 2**63, 1)),
        replace(SMALL, time_ns=-1),
        replace(SMALL, time_ns=2**63),
        replace(SMALL, duration_ns=2**63),
    ],
)
def test_numbers_that_do_not_fit_are_refused(profile):
    with pytest.raises(EncodeError):
        pprof.encode([profile])


def test_kinds_are_not_mixed():
    with pytest.raises(EncodeError, match="different kinds"):
        pprof.encode([SMALL, replace(SMALL, kind=ProfileKind.PEAK)])


def test_the_lock_is_offered_every_16_samples():
    calls = []
    samples = tower(160)
    profile = live(*samples, *samples)
    pprof.encode([profile], pause=lambda: calls.append(time.perf_counter_ns()))
    # 20 slices, and once for each stack not met before, `(snapshot)` among them.
    assert len(calls) == 20 + 160 + 1
    before = len(calls)
    pprof.encode([profile], max_bytes=5000, pause=lambda: calls.append(0))
    assert len(calls) > 2 * before


def test_a_line_beyond_int64_is_written_as_unknown():
    profile = live(Sample((Frame("init_gpu_context", "fake_tensor.py", 2**64 - 1),), 1, 1))
    assert pprof.decode(pprof.encode([profile])).samples[0].frames[0].line == 0


def test_gzip_holds_no_time_and_no_name():
    data = pprof.encode([SMALL])
    packed = pprof.gzip_bytes(data)
    assert packed[:8].hex() == "1f8b080000000000"
    assert gzip.decompress(packed) == data
    assert pprof.gzip_bytes(data) == packed
    assert pprof.decode(packed) == pprof.decode(data)
