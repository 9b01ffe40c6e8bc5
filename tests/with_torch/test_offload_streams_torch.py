"""On which stream of which device memory is allocated again, and what filling it waits for."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from support.offload_parts import (  # noqa: E402
    PIECE,
    Asked,
    Noted,
    candidate,
    candidates_of,
    failing_resize,
    tensor,
)

from gpumem_otel.yielding.copy import placement  # noqa: E402

pytestmark = pytest.mark.torch


def test_each_block_is_allocated_on_its_stream_the_largest_first(make):
    parts = make()
    tensors = [tensor(size) for size in (100, 9000, 300)]
    goes = [
        candidate(one.untyped_storage(), device=device, stream=stream)
        for one, (device, stream) in zip(tensors, [(1, 11), (0, 22), (1, 33)], strict=True)
    ]
    parts.out(goes)
    freed, parts.devices.allocated = parts.devices.allocated, []
    parts.back()
    assert freed == [(0, 0), (1, 0)]  # a block goes back to its own stream by itself
    assert parts.devices.allocated == [(0, 22), (1, 33), (1, 11)]


def test_the_links_of_several_devices_work_at_once(make):
    parts = make()
    tensors = [tensor(PIECE) for _ in range(6)]
    goes = [
        candidate(one.untyped_storage(), device=0 if number < 3 else 1)
        for number, one in enumerate(tensors)
    ]
    order = [one.device for one in placement.in_turn(goes)]
    assert order in ([0, 1, 0, 1, 0, 1], [1, 0, 1, 0, 1, 0])
    parts.out(goes)
    parts.back()


@pytest.mark.parametrize("limit", [None, 0], ids=["pinned", "through the ring"])
def test_filling_waits_for_the_stream_that_had_the_block(make, limit):
    """Its last user may still run there: a block is used again in the order of its stream."""
    parts = make(limit=limit, ring=4096)
    sizes, streams = (100, 9000, 300), (11, 22, 0)
    tensors = [tensor(size) for size in sizes]
    was = [one.clone() for one in tensors]
    goes = [
        candidate(one.untyped_storage(), stream=stream, tensor_class=f"class {stream}")
        for one, stream in zip(tensors, streams, strict=True)
    ]
    parts.out(goes, discard=("class 0",))
    log = []
    parts.devices.lane = lambda device: Noted(log)
    with failing_resize(lambda number, size: log.append(("resize", size))):
        parts.back()
    assert all(torch.equal(one, before) for one, before in zip(tensors[:2], was[:2], strict=True))
    assert not tensors[2].any()
    assert log[:2] == [("resize", 9000), ("after", 22)]
    order = [entry for entry in log if entry[0] in {"resize", "after"}]
    assert order[2:] == [("resize", 300), ("after", 0), ("resize", 100), ("after", 11)]
    assert log[log.index(("after", 0)) + 1] == ("zero", 300)
    assert log.index(("copy", 100)) > log.index(("after", 11))


class _Late(Asked):
    """Of which nothing is done before it is waited for, in any order across two marks."""

    def mark(self):
        asked, self.asked = self.asked, []
        return _LateMark(asked)


class _LateMark:
    def __init__(self, asked):
        self.asked, self.lock = asked, threading.Lock()

    def wait(self):
        with self.lock:
            asked, self.asked = self.asked, []
            for to, source in asked:
                to.copy_(source)


@pytest.mark.parametrize("to", ["pageable", "disk"])
@pytest.mark.parametrize(
    "sizes", [[64] * 1000, [60 << 20, *[256 << 10] * 100]], ids=["many", "beside pinned ones"]
)
def test_a_buffer_is_not_used_again_before_all_copies_of_it_are_done(make, tmp_path, to, sizes):
    """Those that share one are on one mark, however many and whatever was asked for before."""
    room = sizes[0] if to == "disk" else 1 << 40
    limit = sizes[0] if len(sizes) < 200 else 0
    parts = make(ring=16 << 20, room=room, limit=limit, piece=60 << 20)
    parts.devices.lane = lambda device: _Late()
    values = enumerate(sizes)
    tensors = [torch.full((size,), number % 251, dtype=torch.uint8) for number, size in values]
    was = [one.clone() for one in tensors]
    parts.out(candidates_of(tensors), disk_dir=str(tmp_path) if to == "disk" else "")
    parts.back()
    assert [i for i, one in enumerate(tensors) if not torch.equal(one, was[i])] == []
