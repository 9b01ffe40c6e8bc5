from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import pprof_proto
from support.heap_profiles import ROOT, SAMPLES, SMALL, live, tower

from gpumem_otel.base.profile import Frame, Sample
from gpumem_otel.errors import EncodeError
from gpumem_otel.profiles import pprof
from gpumem_otel.snapshot.stacks import OTHER


def _sums(data):
    """(objects, bytes, snapshots) per device and tensor class."""
    sums = Counter()
    for sample in pprof.decode(data).samples:
        labels = dict(sample.labels)
        for index, value in enumerate(sample.values):
            sums[labels.get("device"), labels.get("tensor_class"), index] += value
    return +sums


def _classed(samples):
    return tuple(
        replace(sample, labels=(("tensor_class", "parameter" if n % 3 else "buffer"),))
        for n, sample in enumerate(samples)
    )


@pytest.mark.parametrize("percent", [2, 3, 5, 10, 25, 50, 75, 90, 99])
def test_a_byte_limit_keeps_sums_and_the_largest(percent):
    big = tower(600)
    profiles = [live(*_classed(big)), live(*big[:300], device=1)]
    full = pprof.encode(profiles, device_labels={"rank": "0"})
    limit = len(full) * percent // 100
    data = pprof.encode(profiles, device_labels={"rank": "0"}, max_bytes=limit)
    assert len(data) <= limit
    assert len(data) > limit * 0.85
    assert _sums(data) == _sums(full)
    kept = [sample for sample, _ in pprof_proto.samples_of(pprof_proto.parse(data))]
    assert {sample.frames[0].name for sample in kept[-2:]} == {"(snapshot)"}
    known = [sample for sample in kept[:-2] if sample.frames[0].name != OTHER]
    everything = [sample for sample, _ in pprof_proto.samples_of(pprof_proto.parse(full))]
    places = [everything.index(sample) for sample in known]
    assert places == sorted(places)
    # A smaller stack may still fit where a larger one did not, but not the other way round for
    # long: what is kept is more than a plain cut at the same number would be likely to miss.
    largest = sorted((sample.size_bytes for sample in everything), reverse=True)[: len(known)]
    assert sum(sample.size_bytes for sample in known) >= 0.9 * sum(largest)


@settings(deadline=None)
@given(st.lists(SAMPLES, min_size=1, max_size=8), st.integers(150, 900))
def test_any_limit_holds_or_is_refused(samples, limit):
    samples = [replace(s, objects=s.objects >> 4, size_bytes=s.size_bytes >> 4) for s in samples]
    full = pprof.encode([live(*samples)])
    try:
        data = pprof.encode([live(*samples)], max_bytes=limit)
    except EncodeError:
        assert len(full) > limit
        assert len(pprof.encode([live(Sample((Frame(OTHER),), 2**60, 2**60))])) > limit - 20
        return
    assert len(data) <= limit
    for name in ("inuse_objects", "inuse_space", "snapshots"):
        assert pprof.decode(data).total(name) == pprof.decode(full).total(name)


def test_what_fits_is_left_as_it_is():
    full = pprof.encode([SMALL])
    assert pprof.encode([SMALL], max_bytes=len(full)) == full


def test_an_existing_other_is_extended():
    samples = (Sample((Frame(OTHER),), 5, 1 << 50), *tower(100))
    full = pprof.encode([live(*samples)])
    decoded = pprof.decode(pprof.encode([live(*samples)], max_bytes=len(full) // 2))
    other = [sample for sample in decoded.samples if sample.frames[0].name == OTHER]
    assert len(other) == 1
    assert other[0].values[1] > 1 << 50
    assert decoded.total("inuse_space") == pprof.decode(full).total("inuse_space")


def test_a_stack_that_can_never_fit_does_not_push_out_the_others():
    giant = Sample((Frame("x" * 50_000), ROOT), 1, 1 << 40)
    data = pprof.encode([live(giant, *tower(100))], max_bytes=40_000)
    decoded = pprof.decode(data)
    assert len(decoded.samples) == 102
    assert decoded.samples[-2].values == (1, 1 << 40, 0)
    assert decoded.samples[-2].frames == (Frame(OTHER),)


def test_labels_of_small_samples_go_before_the_limit_breaks():
    samples = [
        replace(sample, labels=(("watch", f"tensor number {n}"),))
        for n, sample in enumerate(tower(300))
    ]
    full = pprof.encode([live(*samples)])
    data = pprof.encode([live(*samples)], max_bytes=len(full) // 10)
    assert len(data) <= len(full) // 10
    other = [s for s in pprof.decode(data).samples if s.frames == (Frame(OTHER),)]
    assert [sample.labels for sample in other] == [()]
    assert pprof.decode(data).total("inuse_space") == pprof.decode(full).total("inuse_space")


def test_a_limit_below_the_least_is_refused():
    with pytest.raises(EncodeError, match="100 are allowed"):
        pprof.encode([SMALL], max_bytes=100)
