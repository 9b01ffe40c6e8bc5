"""Where storages wait: host memory, pinned or not, disk, room on the device, and the end of it."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from support.offload_parts import PIECE, SIZES, candidates_of, moved, same, tensor  # noqa: E402

from gpumem_otel.errors import YieldRefusedError  # noqa: E402
from gpumem_otel.yielding.copy import offload as offload_module  # noqa: E402
from gpumem_otel.yielding.copy.disk import DiskFile  # noqa: E402
from gpumem_otel.yielding.values import YieldRequest  # noqa: E402

pytestmark = pytest.mark.torch


# host memory


def test_host_memory_that_is_short_refuses_before_anything_moves(make):
    parts = make(room=PIECE)
    one = tensor(PIECE * 3)
    with pytest.raises(YieldRefusedError, match="host memory"):
        parts.offload.admit(candidates_of([one]), YieldRequest())
    assert one.untyped_storage().nbytes() == PIECE * 3
    assert parts.host.held_bytes == 0


def test_what_admission_reserved_abandoning_gives_up(make):
    parts = make()
    host, disk = parts.offload.admit(candidates_of([tensor(PIECE * 3)]), YieldRequest())
    assert (host, disk) == (PIECE * 3, 0)
    assert parts.host.held_bytes == PIECE * 3
    parts.offload.abandon()
    assert parts.host.held_bytes == 0


def test_a_second_yield_while_memory_is_held_is_refused(make):
    parts = make()
    parts.out(candidates_of([tensor(100)]))
    with pytest.raises(YieldRefusedError, match="restore it first"):
        parts.offload.admit(candidates_of([tensor(100)]), YieldRequest())
    parts.back()


def test_the_pool_is_kept_and_used_again(make):
    parts = make()
    one = tensor(PIECE * 3)
    for _ in range(3):
        parts.out(candidates_of([one]))
        parts.back()
        assert parts.offload.host_bytes == parts.host.held_bytes == PIECE * 3
    assert parts.offload.give_back() == PIECE * 3
    assert parts.offload.host_bytes == parts.host.held_bytes == 0


def test_it_is_kept_up_to_a_limit_or_given_back_where_asked(make):
    parts = make(keep=PIECE)
    one = tensor(PIECE * 3)
    parts.out(candidates_of([one]))
    parts.back()
    assert parts.offload.host_bytes == parts.host.held_bytes == PIECE
    parts.out(candidates_of([one]), release_host=True)
    assert parts.offload.give_back() == 0  # something is stored there
    parts.back()
    assert parts.offload.host_bytes == parts.host.held_bytes == 0


@pytest.mark.parametrize("ring", [4096, PIECE * 2], ids=["small ring", "large ring"])
@pytest.mark.parametrize("limit", [0, PIECE * 2], ids=["nothing pinned", "some pinned"])
def test_pageable_memory_goes_through_the_ring(make, limit, ring):
    parts = make(limit=limit, ring=ring)
    tensors = [tensor(size, seed) for seed, size in enumerate(SIZES * 3)]
    before = [one.clone() for one in tensors]
    parts.out(candidates_of(tensors), verify=True)
    assert parts.pool.pinned_bytes <= limit
    assert any("not pinned" in note for note in parts.offload.notes)
    parts.back()
    assert parts.offload.verify() == "equal"
    assert all(torch.equal(one, was) for one, was in zip(tensors, before, strict=True))


@pytest.mark.parametrize("room", [0, PIECE * 3], ids=["all", "what does not fit"])
def test_disk_takes_what_host_memory_can_not(make, tmp_path, monkeypatch, room):
    monkeypatch.setattr(offload_module, "DiskFile", small_disk)
    folder = tmp_path / "disk"
    folder.mkdir()
    parts = make(room=room)
    tensors = [tensor(size, seed) for seed, size in enumerate(SIZES)]
    before = [one.clone() for one in tensors]
    parts.out(candidates_of(tensors), verify=True, disk_dir=str(folder))
    assert parts.offload.host_bytes <= room
    assert parts.offload.disk_bytes >= sum(SIZES) - room
    assert list(folder.iterdir()) == []
    parts.back()
    assert parts.offload.verify() == "equal"
    assert all(torch.equal(one, was) for one, was in zip(tensors, before, strict=True))
    assert parts.offload.disk_bytes == 0


def small_disk(folder, size_bytes):
    return DiskFile(folder, size_bytes, margin_bytes=0)


def test_a_disk_that_is_full_too_refuses_and_reserves_nothing(make, tmp_path):
    parts = make(room=PIECE)
    with pytest.raises(YieldRefusedError, match="no-such"):
        parts.offload.admit(
            candidates_of([tensor(PIECE * 3)]), YieldRequest(disk_dir=str(tmp_path / "no-such"))
        )
    assert parts.host.held_bytes == 0
    assert parts.offload.disk_bytes == 0


# room and speed


def test_memory_that_this_process_has_in_its_cache_is_room(make):
    cached, broken = [0], []
    parts = make(free=lambda device: PIECE * 8 - cached[0])

    def empty_cache():
        cached[0] = 0
        if broken:
            raise broken.pop()

    parts.devices.empty_cache = empty_cache
    one = tensor(PIECE * 4)
    was = moved(parts, [one])
    parts.offload.free()
    cached[0] = PIECE * 8
    parts.back()
    assert same([one], was)
    moved(parts, [one])
    broken.append(RuntimeError("broken"))
    take = parts.devices.allocating

    def allocating(device, stream):  # what is freed goes to the cache
        cached[0] = PIECE * 8
        return take(device, stream)

    parts.devices.allocating = allocating
    with pytest.raises(YieldRefusedError, match="broken; undone"):
        parts.offload.free()
    assert same([one], was)


def test_why_it_waits_for_room_is_said_once_and_it_goes_on_when_there_is(make):
    free, said = [PIECE * 8], []
    parts = make(free=lambda device: free[0])
    parts.offload.on_waiting = said.append
    one = tensor(PIECE * 4)
    was = moved(parts, [one])
    parts.offload.free()
    free[0], sleep = PIECE, parts.gpus._sleep

    def sleeps(seconds):
        if len(slept) == 3:
            free[0] = PIECE * 8
        slept.append(seconds)

    slept = []
    parts.gpus._sleep = sleeps
    parts.offload.copy_back(None, 20.0, lambda done, total: None, lambda: False)
    parts.gpus._sleep = sleep
    assert same([one], was)
    assert len(slept) == 4
    assert len(said) == 1
    assert said[0].startswith("device CPU-0: waits for memory, ")
    assert said[0].endswith(" are missing")


def test_only_large_copies_out_to_memory_that_was_ready_tell_the_speed(make, monkeypatch):
    monkeypatch.setattr(offload_module, "_MEASURED_BYTES", PIECE)
    parts = make()
    seconds, ticks = [1.0], [0.0]

    def monotonic():
        ticks[0] += seconds[0]
        return ticks[0]

    parts.offload._now = parts.offload._reload._now = monotonic
    weights, flag = tensor(PIECE * 4), tensor(4)
    goes = [*candidates_of([weights]), *candidates_of([flag], tensor_class="buffer")]
    total = PIECE * 4 + 4
    parts.out(goes)
    assert parts.offload.bytes_per_second == 0.0  # it waited for pinning
    seconds[0] = 2.0
    parts.back()
    assert parts.offload.bytes_per_second == total / 2  # better than nothing
    seconds[0] = 4.0
    goes = [*candidates_of([weights]), *candidates_of([flag], tensor_class="buffer")]
    parts.out(goes)
    assert parts.offload.bytes_per_second == total / 4
    seconds[0] = 1000.0
    parts.back({"parameter"})
    parts.back()
    assert parts.offload.bytes_per_second == total / 4
    parts.out(candidates_of([flag]))
    parts.back()
    assert parts.offload.bytes_per_second == total / 4


# the end


def test_closing_leaves_nothing_pinned_and_nothing_reserved(make, tmp_path):
    parts, pinned, one = make(), set(), tensor(PIECE * 3)
    parts.devices._pin = lambda address, size: pinned.add(address) or ""
    parts.devices.unregister = pinned.remove
    entries = Path(tmp_path, "reservations")
    was = moved(parts, [one])
    parts.offload.free()
    assert not parts.offload.close()  # it is stored there
    parts.back()
    assert (len(pinned), len(list(entries.glob("host-*")))) == (3, 1)
    assert parts.offload.close()
    assert (pinned, list(entries.glob("host-*"))) == (set(), [])
    assert parts.offload.host_bytes == parts.host.held_bytes == 0
    moved(parts, [one])  # and it can begin anew
    parts.offload.free()
    parts.back()
    assert same([one], was)
    assert parts.offload.close()
