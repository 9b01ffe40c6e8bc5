"""What can leave a device, found on real torch; only the allocator is the test's own."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
import types

import pytest

torch = pytest.importorskip("torch")

from gpumem_otel.base.profile import SourceStatus  # noqa: E402
from gpumem_otel.capture.objects.shared_storages import SharedStorages  # noqa: E402
from gpumem_otel.capture.objects.storages import storages_of  # noqa: E402
from gpumem_otel.capture.tensor_table import TensorTable  # noqa: E402
from gpumem_otel.tensors.saved import can_be_read  # noqa: E402
from gpumem_otel.yielding.copy.devices import CpuDevices  # noqa: E402
from gpumem_otel.yielding.copy.host_memory import HostPool  # noqa: E402
from gpumem_otel.yielding.copy.prefetch import Prefetch  # noqa: E402
from gpumem_otel.yielding.scan.candidates import CandidateFinder  # noqa: E402

pytestmark = pytest.mark.torch
nn = torch.nn


ALIVE = "active_allocated"


class Owner:
    """What a job may have instead of a module."""


class Allocator:
    """A source whose blocks are the given storages."""

    def __init__(self):
        self.segments = []
        self.exports = SharedStorages()
        self.tensors = None
        self.recorder = self
        self.reason = ""
        self.roots = {}

    def status(self):
        return SourceStatus(armed=True, supported=not self.reason, reason=self.reason, devices=(0,))

    def snapshot(self, *, traces):
        assert not traces
        return {"segments": self.segments, "device_traces": []}

    def as_before_restores(self, raw):
        """There were none; what the block of a root would be is known all the same."""
        return self.roots

    def holds(self, *tensors, pool=(0, 0), stream=0, frames=()):
        """Blocks of these tensors, a segment each."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                self.block(storage.data_ptr(), storage.nbytes(), pool, stream, frames)

    def block(self, address, size, pool=(0, 0), stream=0, frames=(), *, state=ALIVE):
        # not rounded: behind a storage in host memory another may begin at once
        self.segments.append({
            "device": 0, "address": address, "total_size": size, "stream": stream,
            "segment_pool_id": pool, "segment_type": "small",
            "blocks": [{
                "address": address, "size": size, "requested_size": size, "state": state,
                "frames": list(frames),
            }],
        })  # fmt: skip


@pytest.fixture
def source():
    made = Allocator()
    made.exports.start(torch)
    made.exports.began(())
    yield made
    made.exports.stop()
    if made.tensors is not None:
        made.tensors.stop()


def find(source, *, assume_private=False, environ=None):
    finder = CandidateFinder(source, environ or {}, device_type="cpu")
    return finder.find(assume_private=assume_private)


def blocks(found):
    """address -> class."""
    return {one.address: one.tensor_class for one in found.movables}


def whys(found):
    return {stay.why for stay in found.stays if stay.cause == "foreign"} - {
        "memory that is not of torch's allocator: imported, or registered"
    }


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_each_storage_once_with_block_stream_and_class(source):
    model = nn.Linear(40, 30)
    model.register_buffer("seen", torch.zeros(7))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(2, 40)).sum().backward()
    optimizer.step()
    alias = model.weight.detach()[3:]
    source.holds(model.weight, stream=77)
    source.holds(model.bias, model.seen, model.weight.grad)
    moment = optimizer.state[model.weight]["exp_avg"]
    source.holds(moment)
    batch = torch.randn(5)
    source.holds(batch)
    found = find(source)
    assert blocks(found) == {
        address(model.weight): "parameter",
        address(model.bias): "parameter",
        address(model.seen): "buffer",
        address(model.weight.grad): "gradient",
        address(moment): "optimizer_state",
        address(batch): "unattributed",
    }
    assert len(found.movables) == 6
    (weight,) = [one for one in found.movables if one.address == address(alias)]
    assert (weight.size_bytes, weight.block_bytes, weight.stream) == (4800, 4800, 77)
    assert weight.storage.data_ptr() == address(model.weight)
    assert not found.refusal


def test_who_allocated_it_goes_with_it(source):
    """As it was recorded; of memory without a stack the root that is known."""
    frames = [{"name": "build", "filename": "/job/train.py", "line": 3}]
    named, bare = torch.randn(5), torch.randn(6)
    source.holds(named, frames=frames)
    source.holds(bare)
    source.roots = {(0, address(bare)): "[before install]", (0, address(named) + 1): "[other]"}
    reported = {one.address: (list(one.frames), one.root) for one in find(source).movables}
    assert reported == {
        address(named): (frames, ""),
        address(bare): ([], "[before install]"),
    }


def test_a_gradient_that_no_object_of_python_stood_for(source):
    weight = nn.Parameter(torch.randn(100))
    (weight * 2).sum().backward()
    gc.collect()
    where = weight.grad.untyped_storage().data_ptr()
    source.block(where, 400)
    assert blocks(find(source)) == {where: "gradient"}


def test_what_autograd_alone_holds(source):
    if not can_be_read(torch):
        pytest.skip("this torch does not show what autograd saved")
    x = torch.randn(100, requires_grad=True)
    hidden = x.exp()  # its result is saved
    where = address(hidden)
    loss = hidden.sum()
    del hidden
    source.block(where, 400)
    assert where in blocks(find(source))
    loss.backward()
    assert torch.equal(x.grad, x.exp())


def test_what_the_collector_was_told_to_leave_alone(source):
    source.tensors = TensorTable(host_too=True)
    source.tensors._searched = True
    source.tensors.start()
    cache = torch.randn(64)
    holder = Owner()
    holder.cache = cache
    source.tensors.watch("kv_cache", holder)
    source.holds(cache)
    gc.freeze()
    try:
        assert blocks(find(source)) == {address(cache): "kv_cache"}
    finally:
        gc.unfreeze()


def test_tied_weights_and_views_of_views_go_once(source):
    embedding, head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)
    head.weight = embedding.weight
    rnn = nn.LSTM(8, 8)
    flat = torch.cat([w.detach().flatten() for w in rnn.parameters()])
    at = 0
    for one in rnn.parameters():  # as cuDNN lays them out: views of one storage
        one.data = flat[at : at + one.numel()].view_as(one)
        at += one.numel()
    source.holds(embedding.weight, flat)
    assert sorted(blocks(find(source)).values()) == ["parameter", "parameter"]


@pytest.mark.filterwarnings("ignore")
def test_parts_of_sparse_and_quantized_tensors(source):
    sparse = torch.eye(20).to_sparse()
    scales, zeros = torch.rand(4) + 0.1, torch.zeros(4, dtype=torch.long)
    quantized = torch.quantize_per_channel(torch.randn(4, 60), scales, zeros, 0, torch.qint8)
    source.holds(sparse)
    source.holds(quantized)
    found = find(source)
    assert len(found.movables) == len(source.segments) == 2 + 3


def test_a_storage_of_no_bytes_is_nothing(source):
    sharded = torch.randn(50)
    source.block(address(sharded), 200, state="inactive")
    sharded.untyped_storage().resize_(0)  # as FSDP2 leaves what it gathered
    assert find(source).movables == ()


# what stays


def test_blocks_that_nobody_reaches_stay(source):
    source.block(1 << 20, 3072)
    found = find(source)
    assert found.movables == ()
    (stay,) = [one for one in found.stays if one.cause == "unknown"]
    assert (stay.device, stay.size_bytes) == (0, 3072)


def test_memory_of_others_is_foreign(source):
    imported = torch.frombuffer(bytearray(4096), dtype=torch.uint8)
    found = find(source)
    assert address(imported) not in blocks(found)
    assert sum(one.size_bytes for one in found.stays if one.cause == "foreign") >= 4096


def test_a_storage_that_can_not_be_resized_stays(source):
    fixed = torch.frombuffer(bytearray(4096), dtype=torch.uint8)
    source.holds(fixed)
    assert not fixed.untyped_storage().resizable()
    found = find(source, assume_private=True)
    assert found.movables == ()
    assert any("resized" in why for why in whys(found))


def test_two_storages_on_one_block_stay_both(source):
    one = torch.randn(100)
    twin = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(one))
    assert twin.untyped_storage()._cdata != one.untyped_storage()._cdata
    source.holds(one)
    found = find(source, assume_private=True)
    assert found.movables == ()
    assert whys(found) == {"several storages share its memory"}


def test_a_storage_in_the_middle_of_a_block_keeps_it(source):
    whole = torch.randn(1000)
    pointer = whole.untyped_storage().data_ptr()
    inside = torch.frombuffer(
        (ctypes.c_char * 400).from_address(pointer + 400), dtype=torch.float32
    )
    source.holds(whole)
    found = find(source, assume_private=True)
    assert found.movables == ()
    assert whys(found) == {"several storages share its memory"}
    del inside


@pytest.mark.parametrize(
    "function", ["to_dlpack", "__dlpack__", "from_dlpack", "_share_cuda_", "cuda"]
)
def test_a_shared_storage_stays_until_it_is_gone(source, function):
    one, other = torch.randn(100), torch.randn(100)
    source.holds(one, other)
    assert len(find(source).movables) == 2
    if function == "to_dlpack":
        torch.utils.dlpack.to_dlpack(one[3:])
    elif function == "__dlpack__":
        one.__dlpack__()
    elif function == "from_dlpack":
        torch.from_dlpack(one)
    elif function == "_share_cuda_":
        with pytest.raises(RuntimeError):  # there is no device
            torch.UntypedStorage._share_cuda_(one.untyped_storage())
    else:
        source.exports._seen(one)  # the interface itself raises without a device
    found = find(source)
    assert blocks(found) == {address(other): "unattributed"}
    assert any("DLPack" in why for why in whys(found))
    assert len(find(source, assume_private=True).movables) == 2
    assert source.exports.calls >= 1


def test_what_was_there_before_the_watch_is_not_known(source):
    old, new = torch.randn(100), torch.randn(100)
    source.holds(old)
    source.exports.began(source.segments)
    source.holds(new)
    found = find(source)
    assert set(blocks(found)) == {address(new)}
    assert any("assume_private" in why for why in whys(found))
    assert len(find(source, assume_private=True).movables) == 2


def test_without_a_watch_nothing_is_known(source):
    one = torch.randn(100)
    source.holds(one)
    source.exports.stop()
    assert find(source).movables == ()
    assert len(find(source, assume_private=True).movables) == 1


def test_the_doors_are_as_they_were_once_the_watch_ends():
    def functions():
        storage = torch.UntypedStorage
        return (
            torch._C._to_dlpack,
            torch.utils.dlpack.to_dlpack,
            torch.to_dlpack,
            "_share_cuda_" in vars(storage),
            vars(torch.Tensor)["__cuda_array_interface__"],
            torch.Tensor.__dlpack__,
        )

    before = functions()
    exports = SharedStorages()
    exports.start(torch)
    exports.start(torch)
    assert functions() != before
    one = torch.arange(6)
    assert torch.equal(torch.from_dlpack(one), one)
    assert not hasattr(one, "__cuda_array_interface__")  # as any tensor of the host
    with pytest.raises(AttributeError, match="non-CUDA"):
        one.__cuda_array_interface__  # noqa: B018
    exports.stop()
    assert functions() == before
    assert not exports.watches


def test_private_pools_and_captured_graphs(source):
    one = torch.randn(100)
    source.holds(one)
    source.block(1 << 20, 5000, pool=(3, 0))
    found = find(source)
    assert found.movables == ()
    assert set(found.refusal) == {0}
    assert {stay.cause for stay in found.stays if stay.cause != "foreign"} == {"graphs"}
    assert sum(s.size_bytes for s in found.stays if s.cause == "graphs") == 5000 + 400


def test_memory_that_nccl_knows_stays(source):
    one = torch.randn(100)
    source.holds(one)
    found = find(source, environ={"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"})
    assert found.movables == ()
    assert "NCCL" in found.refusal[0]
    assert [s.size_bytes for s in found.stays if s.cause == "communicator"] == [400]


def test_an_allocator_that_can_not_be_read_refuses(source):
    source.reason = "allocator_backend"
    assert "allocator_backend" in find(source).refusal[0]


def test_a_class_by_the_stack_where_nothing_else_tells(source):
    one = torch.randn(100)
    frames = [{"name": "forward", "filename": "/x/torch/nn/functional.py", "line": 3}]
    source.holds(one, frames=frames)
    assert blocks(find(source)) == {address(one): "activation"}


@contextlib.contextmanager
def copies_begin():
    """A thread of ours that begins copies waits in torch, where a thread of the job would work."""
    waits, inner = threading.Lock(), {}
    waits.acquire()
    torch_file = torch.cuda.Event.synchronize.__code__.co_filename
    exec(compile("def synchronize(wait):\n    wait()\n", torch_file, "exec"), inner)
    mover = types.SimpleNamespace(begin=lambda: inner["synchronize"](waits.acquire))
    head = Prefetch((), CpuDevices(torch), HostPool(CpuDevices(torch)), mover, 0)
    thread = threading.Thread(target=head._begin, name="gpumem-copy", daemon=True)
    thread.start()
    while not any(  # until it waits there
        frame.f_code.co_filename == torch_file for frame in sys._current_frames().values()
    ):
        threading.Event().wait(0.001)
    try:
        yield
    finally:
        waits.release()
        thread.join()


def test_a_copy_that_runs_beside_the_look_hides_nothing_of_autograd(source):
    hidden = torch.randn(100, requires_grad=True).exp()
    where = address(hidden)
    loss = hidden.sum()
    del hidden
    source.block(where, 400)
    weight = torch.nn.Parameter(torch.randn(100))
    (weight * 2).sum().backward()
    gradient = address(weight.grad)
    source.block(gradient, 400)
    finder = CandidateFinder(source, {}, device_type="cpu")
    with copies_begin():
        found = blocks(finder.find(assume_private=False))
    assert found[gradient] == "gradient"
    assert where in found
    del loss


def test_what_was_probable_is_of_no_authority(source):
    """Held by C++ alone by now: what the prefetch holds on to does not make it go."""
    big = torch.zeros(2 << 20, dtype=torch.uint8)
    where = address(big)
    source.block(where, 2 << 20)
    finder = CandidateFinder(source, {}, device_type="cpu")
    assert where in blocks(finder.find(assume_private=False))
    held = torch._C.ScriptDict({"a": big})
    del big
    gc.collect()
    without = where in blocks(finder.find(assume_private=False))
    big = held["a"]
    finder.find(assume_private=False)
    del big
    gc.collect()
    kept = finder.probable()
    assert len(kept) == 1
    assert (where in blocks(finder.find(assume_private=False))) == without
