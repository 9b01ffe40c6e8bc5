"""Where storages go, and in which order they are copied and allocated anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpumem_otel.yielding.copy.mover import InMemory
from gpumem_otel.yielding.copy.placement import in_turn, memory_needed, place, place_first
from gpumem_otel.yielding.values import Candidate

MIB = 1 << 20


def candidate(size_bytes, device=0):
    return Candidate(
        storage=object(),
        device=device,
        address=0,
        size_bytes=size_bytes,
        block_bytes=size_bytes,
        stream=0,
        tensor_class="parameter",
    )


def sizes_of(order):
    return [one.size_bytes for one in order]


def test_the_largest_first_and_the_small_evenly_among_them():
    """Asking for a small copy takes longer than the copy: it is hidden behind a large one."""
    large = [candidate(size * MIB) for size in (2, 8, 4, 2)]
    small = [candidate(size) for size in range(1, 9)]
    order = in_turn([*small, *large])
    assert sizes_of(order) == [
        8 * MIB, 8, 7, 6, 5,
        4 * MIB, 4, 3,
        2 * MIB, 2,
        2 * MIB, 1,
    ]  # fmt: skip


def test_a_block_of_a_mebibyte_has_a_segment_of_the_small_ones():
    order = in_turn([candidate(MIB), candidate(MIB + 1), candidate(MIB + 2)])
    assert sizes_of(order) == [MIB + 2, MIB, MIB + 1]


def test_devices_take_turns_by_the_share_that_is_through():
    order = in_turn([*[candidate(6 * MIB, 0)] * 2, *[candidate(2 * MIB, 1)] * 4])
    assert [one.device for one in order] == [0, 1, 1, 0, 1, 1]


@given(st.lists(st.tuples(st.integers(1, 4 * MIB), st.integers(0, 2)), max_size=40))
def test_all_come_once_and_larger_ones_of_a_kind_and_device_before_smaller(asked):
    given_ = [candidate(*one) for one in asked]
    order = in_turn(given_)
    assert sorted(map(id, order)) == sorted(map(id, given_))
    for device in range(3):
        here = sizes_of(one for one in order if one.device == device)
        for kind in ([s for s in here if s > MIB], [s for s in here if s <= MIB]):
            assert kind == sorted(kind, reverse=True)


def test_small_ones_do_not_take_the_room_of_a_large_one():
    """Else that would go to the disk."""
    candidates = [
        *[candidate(4 * MIB) for _ in range(5)],
        *[candidate(MIB // 2) for _ in range(20)],
    ]
    items, memory_bytes = place(candidates, 21 * MIB, lambda size: size)
    in_memory = [item.size for item in items if isinstance(item.place, InMemory)]
    assert sorted(in_memory) == [MIB // 2] * 2 + [4 * MIB] * 5
    assert memory_bytes == sum(in_memory) == 21 * MIB
    offsets = [item.place.offset for item in items if isinstance(item.place, InMemory)]
    assert offsets == [sum(in_memory[:number]) for number in range(len(in_memory))]
    assert {item.place.file for item in items if item.size not in in_memory} <= {9 * MIB}


def test_each_takes_whole_pieces_of_host_memory():
    assert memory_needed([candidate(1), candidate(512), candidate(513)]) == 512 + 512 + 1024


def test_so_much_of_each_device_is_copied_first():
    candidates = [candidate(4 * MIB, device) for device in (0, 0, 1, 1)]
    first = place_first(candidates, 100 * MIB, 4 * MIB)
    assert [(item.candidate.device, item.place) for item in first] == [
        (0, InMemory(0)),
        (1, InMemory(4 * MIB)),
    ]


def test_what_was_copied_first_has_its_room_already():
    """The disk has what would not fit beside it."""
    candidates = [candidate(4 * MIB) for _ in range(4)]
    first = place_first(candidates, 8 * MIB, 4 * MIB)
    items, memory_bytes = place(candidates, 8 * MIB, lambda size: size, first)
    assert items[: len(first)] == first
    assert memory_bytes == 8 * MIB
    in_memory = [item.place for item in items if isinstance(item.place, InMemory)]
    assert in_memory == [InMemory(0), InMemory(4 * MIB)]


@given(
    st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 2)), max_size=30),
    st.integers(0, 100_000),
    st.integers(0, 20_000),
)
def test_no_two_share_a_byte_of_host_memory_or_of_the_file(asked, room_bytes, each_bytes):
    candidates, made = [candidate(*one) for one in asked], []
    first = place_first(candidates, room_bytes, each_bytes)
    items, memory_bytes = place(candidates, room_bytes, lambda size: made.append(size) or "", first)
    assert sorted(id(item.candidate) for item in items) == sorted(map(id, candidates))
    assert memory_bytes <= room_bytes
    (file_bytes,) = made or [0]
    in_memory = [item for item in items if isinstance(item.place, InMemory)]
    on_disk = [item for item in items if not isinstance(item.place, InMemory)]
    for here, unit, size in ((in_memory, 512, memory_bytes), (on_disk, 4096, file_bytes)):
        starts = [item.place.offset for item in here]
        assert all(start % unit == 0 for start in starts)
        ends = [start + item.size for start, item in zip(starts, here, strict=True)]
        assert all(end <= start for end, start in zip(ends, [*starts[1:], size], strict=False))
        assert size % unit == 0
