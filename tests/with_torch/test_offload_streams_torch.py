"""On which stream of which device memory is allocated again, and what filling it waits for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from support.offload_parts import PIECE, Noted, failing_resize, making, movable, tensor  # noqa: E402

from gpumem_otel.yielding import placement  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def make(tmp_path):
    with making(tmp_path) as parts:
        yield parts


def test_each_block_is_allocated_on_its_stream_the_largest_first(make):
    parts = make()
    tensors = [tensor(size) for size in (100, 9000, 300)]
    goes = [
        movable(one.untyped_storage(), device=device, stream=stream)
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
        movable(one.untyped_storage(), device=0 if number < 3 else 1)
        for number, one in enumerate(tensors)
    ]
    order = [one.device for one in placement._in_turn(goes)]
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
        movable(one.untyped_storage(), stream=stream, tensor_class=f"class {stream}")
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
