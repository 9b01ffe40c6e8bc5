"""What is undone where a yield or a restore fails half way, is stopped or interrupted."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from support.offload_parts import (  # noqa: E402
    PIECE,
    PLENTY,
    Noted,
    candidates_of,
    emptied_by,
    failing_resize,
    moved,
    never,
    same,
    tensor,
)

from gpumem_otel.errors import YieldFailedError, YieldRefusedError  # noqa: E402
from gpumem_otel.yielding.copy.mover import Mover  # noqa: E402
from gpumem_otel.yielding.copy.staging import Staging  # noqa: E402
from gpumem_otel.yielding.values import YieldRequest  # noqa: E402

pytestmark = pytest.mark.torch


# undoing


def test_stopped_while_copying_nothing_has_changed(make):
    parts = make()
    tensors = [tensor(PIECE * 2, seed) for seed in range(4)]
    was = [one.clone() for one in tensors]
    addresses = [one.data_ptr() for one in tensors]
    parts.offload.admit(candidates_of(tensors), YieldRequest())
    asked = iter([False, False, False, True])
    with pytest.raises(YieldRefusedError, match="stopped"):
        parts.offload.copy_out(parts.progress, lambda: next(asked))
    parts.offload.abandon()
    assert [one.data_ptr() for one in tensors] == addresses
    assert all(torch.equal(one, before) for one, before in zip(tensors, was, strict=True))
    assert parts.offload.held_bytes == {}
    parts.out(candidates_of(tensors), verify=True)  # and it can begin anew
    parts.back()
    assert parts.offload.verify() == "equal"


def test_a_storage_that_changed_while_it_was_copied_refuses_all(make):
    parts = make()
    one, other = tensor(5000), tensor(6000)
    parts.offload.admit(candidates_of([one, other]), YieldRequest())
    parts.offload.copy_out(parts.progress, never)
    other.untyped_storage().resize_(9000)
    with pytest.raises(YieldRefusedError, match="class parameter changed"):
        parts.offload.free()
    assert one.untyped_storage().nbytes() == 5000
    parts.offload.abandon()


def test_freeing_that_fails_half_way_is_undone(make):
    parts = make()
    tensors = [tensor(5000 + seed, seed) for seed in range(4)]
    was = [one.clone() for one in tensors]
    parts.offload.admit(candidates_of(tensors), YieldRequest())
    parts.offload.copy_out(parts.progress, never)
    with (
        failing_resize(lambda number, size: number == 3),
        pytest.raises(YieldRefusedError, match="undone"),
    ):
        parts.offload.free()
    assert all(torch.equal(one, before) for one, before in zip(tensors, was, strict=True))
    parts.offload.abandon()
    assert parts.offload.held_bytes == {}


def test_freeing_that_can_not_be_undone_keeps_the_copy(make):
    parts = make()
    tensors = [tensor(5000 + seed, seed) for seed in range(4)]
    was = [one.clone() for one in tensors]
    parts.offload.admit(candidates_of(tensors), YieldRequest())
    parts.offload.copy_out(parts.progress, never)
    with (
        failing_resize(lambda number, size: number in {3, 5}),
        pytest.raises(YieldFailedError, match="restore again"),
    ):
        parts.offload.free()
    with pytest.raises(YieldFailedError, match="restore them first"):
        parts.offload.abandon()
    parts.back()
    assert all(torch.equal(one, before) for one, before in zip(tensors, was, strict=True))


def test_no_room_at_restore_says_what_is_missing_and_stays(make):
    free = [0]
    parts = make(free=lambda device: free[0])
    tensors = [tensor(PIECE * 2, seed) for seed in range(3)]
    was = [one.clone() for one in tensors]
    parts.out(candidates_of(tensors), verify=True)
    with pytest.raises(YieldRefusedError, match="are missing"):
        parts.back()
    assert all(one.untyped_storage().nbytes() == 0 for one in tensors)
    assert parts.offload.held_bytes == {"parameter": PIECE * 6}
    free[0] = PLENTY
    parts.back()
    assert parts.offload.verify() == "equal"
    assert all(torch.equal(one, before) for one, before in zip(tensors, was, strict=True))


@pytest.mark.parametrize("short", [True, False], ids=["out of memory", "another error"])
def test_restore_that_fails_half_way_frees_again(make, short):
    parts = make()
    tensors = [tensor(PIECE * 2, seed) for seed in range(4)]
    was = [one.clone() for one in tensors]
    parts.out(candidates_of(tensors))
    problem = torch.cuda.OutOfMemoryError("full") if short else RuntimeError("broken")
    with (
        failing_resize(lambda number, size: size and number == 3, problem),
        pytest.raises(
            YieldRefusedError if short else RuntimeError,
            match=f"last {PIECE * 4} bytes of {PIECE * 8}" if short else "broken",
        ),
    ):
        parts.back()
    assert all(one.untyped_storage().nbytes() == 0 for one in tensors)
    emptied = parts.devices.emptied
    assert emptied == 2  # after the yield, after the failure
    parts.back()
    assert all(torch.equal(one, before) for one, before in zip(tensors, was, strict=True))


def test_stopped_while_restoring_it_stays_away(make):
    parts = make()
    tensors = [tensor(PIECE * 2, seed) for seed in range(4)]
    was = [one.clone() for one in tensors]
    parts.out(candidates_of(tensors))
    asked = iter([False] * 3 + [True] * 9)
    with pytest.raises(YieldRefusedError, match="stopped"):
        parts.back(stop=lambda: next(asked))
    assert all(one.untyped_storage().nbytes() == 0 for one in tensors)
    parts.back()
    assert all(torch.equal(one, before) for one, before in zip(tensors, was, strict=True))


# interrupts and errors half way


def test_freeing_whose_last_part_fails_is_undone(make):
    parts, tensors = make(), [tensor(5000 + seed, seed) for seed in range(4)]
    was = moved(parts, tensors)
    emptied_by(parts.devices, RuntimeError("an error of CUDA"))
    with pytest.raises(YieldRefusedError, match="an error of CUDA; undone"):
        parts.offload.free()
    assert same(tensors, was)
    assert parts.offload.held_bytes == {}
    parts.offload.abandon()


def test_undoing_that_fails_altogether_keeps_the_copy(make):
    parts, tensors = make(), [tensor(5000 + seed, seed) for seed in range(4)]
    was = moved(parts, tensors)
    emptied_by(parts.devices, *[RuntimeError("an error of CUDA")] * 2)
    with (
        failing_resize(lambda number, size: number == 7),  # while they are brought back
        pytest.raises(YieldFailedError, match="restore again"),
    ):
        parts.offload.free()
    assert sum(parts.offload.held_bytes.values()) == sum(map(len, was))
    parts.back()
    assert same(tensors, was)


@pytest.mark.parametrize("where", ["before a storage", "after a storage", "the cache"])
def test_freeing_that_is_interrupted_shows_what_is_empty(make, where):
    parts, tensors = make(), [tensor(5000 + seed, seed) for seed in range(4)]
    was = moved(parts, tensors)
    if where == "the cache":
        emptied_by(parts.devices, KeyboardInterrupt())
    with (
        failing_resize(
            lambda number, size: "a storage" in where and number == 3,
            KeyboardInterrupt(),
            done="after" in where,
        ),
        pytest.raises(KeyboardInterrupt),
    ):
        parts.offload.free()
    empty = sum(one.untyped_storage().nbytes() == 0 for one in tensors)
    assert empty == {"before a storage": 2, "after a storage": 3, "the cache": 4}[where]
    assert parts.offload.held_bytes["parameter"] >= empty * 5000
    with pytest.raises(YieldFailedError, match="restore them first"):
        parts.offload.abandon()
    parts.back()
    assert same(tensors, was)
    assert parts.offload.held_bytes == {}
    assert parts.offload.notes == []  # none of it is taken for what the job did


def test_what_two_interrupts_left_half_filled_is_filled_by_the_next_restore(make):
    parts, tensors = make(), [tensor(PIECE * 2, seed) for seed in range(4)]
    was = [one.clone() for one in tensors]
    parts.out(candidates_of(tensors), verify=True)
    asked = itertools.count()

    def stop():
        if next(asked) == 5:
            raise KeyboardInterrupt
        return False

    with (
        # and one while that is undone
        failing_resize(lambda number, size: size == 0, KeyboardInterrupt()),
        pytest.raises(KeyboardInterrupt),
    ):
        parts.back(stop=stop)
    there = [one for one in tensors if one.untyped_storage().nbytes()]
    assert len(there) >= 2
    for one in there:
        one.fill_(255)
    assert parts.offload.held_bytes == {"parameter": PIECE * 8}
    parts.back()
    assert same(tensors, was)
    assert parts.offload.verify() == "equal"
    assert parts.offload.notes == []


class Breaking(Staging):
    """A ring that breaks when it is stopped."""

    def stop(self):
        super().stop()
        raise RuntimeError("the ring broke")


def test_a_ring_that_breaks_hides_no_error(make):
    parts = make(limit=0)
    parts.offload._staging = partial(Breaking, buffers=4, buffer_bytes=4096, threads=3)
    asked = itertools.count()
    parts.offload.admit(candidates_of([tensor(PIECE)]), YieldRequest())
    with pytest.raises(YieldRefusedError, match="stopped"):
        parts.offload.copy_out(parts.progress, lambda: next(asked) == 3)
    parts.offload.abandon()


def test_a_ring_that_breaks_leaves_nothing_under_way(make):
    parts = make()
    waited = []

    class Slow(Noted):
        def wait(self):
            waited.append(len(waited))
            if len(waited) == 1:
                raise KeyboardInterrupt

    parts.devices.lane = lambda device: Slow([])
    ring_of = partial(Breaking, buffers=2, buffer_bytes=4096)
    mover = Mover(parts.devices, parts.pool, staging=ring_of)
    ring = mover._ring(mover._lane(0))
    with pytest.raises(RuntimeError, match="the ring broke"):
        mover.close()
    assert len(waited) == 3  # what was interrupted, once more, and the end
    assert ring._pool.capacity_bytes == 0


def test_threads_that_can_not_be_set_up_for_a_device_hang_nothing(make):
    parts, one = make(limit=0), tensor(PIECE * 3)
    was = one.clone()

    def use(device):
        raise RuntimeError("no such device")

    parts.devices.use = use
    parts.out(candidates_of([one]))
    parts.back()
    assert torch.equal(one, was)
