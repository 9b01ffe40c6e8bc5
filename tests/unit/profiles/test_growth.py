"""Growth between live profiles: an identity over anything that can happen to them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sample, Sizes
from gpumem_otel.profiles.growth import Growth
from gpumem_otel.profiles.pprof import decode, encode

S = 1_000_000_000


def live(sizes, device=0, time_ns=0):
    samples = tuple(
        Sample((Frame(name), Frame("main")), objects, size)
        for name, (objects, size) in sizes.items()
    )
    return HeapProfile(ProfileKind.LIVE, device, samples, time_ns)


def by_name(profile):
    return {s.frames[0].name: (s.objects, s.size_bytes) for s in profile.samples}


def test_only_what_has_grown_is_there_and_what_has_shrunk_is_told():
    growth = Growth(1)
    assert growth.add([live({"a": (1, 100), "b": (4, 400), "gone": (1, 30)}, time_ns=S)]) == ()
    (found,) = growth.add(
        [live({"a": (3, 160), "b": (5, 350), "new": (2, 70), "same": (0, 0)}, time_ns=61 * S)]
    )
    assert found.kind is ProfileKind.GROWTH
    assert by_name(found) == {"a": (2, 60), "b": (1, 0), "new": (2, 70)}
    assert found.comments == (
        "growth of live memory over 60.000 s, by stack",
        "130 bytes more in stacks that have grown, 80 fewer in stacks that have shrunk; in all +50",
    )
    assert (found.time_ns, found.duration_ns) == (61 * S, 0)
    assert found.sizes is Sizes.ALLOCATED


def test_it_compares_with_so_many_pushes_before():
    growth = Growth(3)
    totals = []
    for number in range(6):
        made = growth.add([live({"leak": (number, 10 * number)}, time_ns=number * S)])
        totals.append([profile.total_bytes for profile in made])
    assert totals == [[], [], [], [30], [30], [30]]


def test_devices_have_histories_of_their_own():
    growth = Growth(1)
    growth.add([live({"a": (1, 10)}, device=0)])
    made = growth.add([live({"a": (1, 15)}, device=0), live({"a": (1, 99)}, device=1)])
    assert [(profile.device, profile.total_bytes) for profile in made] == [(0, 5)]


def test_nothing_of_a_profile_is_kept_but_numbers():
    growth = Growth(5)
    growth.add([live({"a": (1, 10)})])
    (kept,) = growth._kept[0]
    assert list(kept.sizes.values()) == [(1, 10)]
    assert all(isinstance(key, int) for key in kept.sizes)


def test_it_is_a_pprof_of_its_own_types():
    growth = Growth(1)
    growth.add([live({})])
    (found,) = growth.add([live({"a": (1, 10)})])
    read = decode(encode([found]))
    assert [name for name, _ in read.sample_types] == [
        "growth_objects",
        "growth_space",
        "snapshots",
    ]
    assert read.total("growth_space") == 10
    assert read.default_sample_type == "growth_space"


sizes = st.dictionaries(
    st.sampled_from("abcdefgh"), st.tuples(st.integers(0, 50), st.integers(0, 10**12)), max_size=8
)


@given(sizes, sizes)
def test_grown_minus_shrunk_is_the_difference(before, after):
    growth = Growth(1)
    growth.add([live(before)], lambda: None)
    (found,) = growth.add([live(after)], lambda: None)
    grown, shrunk = map(int, re.findall(r"(\d+) (?:bytes more|fewer)", found.comments[1]))
    total = sum(size for _, size in after.values()) - sum(size for _, size in before.values())
    assert grown == found.total_bytes
    assert grown - shrunk == total
    assert found.comments[1].endswith(f"in all {total:+d}")
    assert all(s.objects > 0 or s.size_bytes > 0 for s in found.samples)
