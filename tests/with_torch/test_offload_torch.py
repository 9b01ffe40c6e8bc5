"""Storages out and back on real torch, in host memory: contents, aliases, undoing, limits."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gpumem_otel.capture.saved import can_be_read, saved_tensors  # noqa: E402
from gpumem_otel.capture.storages import storages_of  # noqa: E402
from gpumem_otel.core.yields import Movable, Phase, YieldRequest  # noqa: E402
from gpumem_otel.errors import YieldFailedError, YieldRefusedError  # noqa: E402
from gpumem_otel.yielding import offload as offload_module  # noqa: E402
from gpumem_otel.yielding import placement  # noqa: E402
from gpumem_otel.yielding.checksums import checksums  # noqa: E402
from gpumem_otel.yielding.copies import Mover  # noqa: E402
from gpumem_otel.yielding.devices import CpuDevices  # noqa: E402
from gpumem_otel.yielding.diskfile import DiskFile  # noqa: E402
from gpumem_otel.yielding.hostlimits import HostRoom  # noqa: E402
from gpumem_otel.yielding.hostmem import HostPool, Piece  # noqa: E402
from gpumem_otel.yielding.ledger import DeviceLedger, HostLedger  # noqa: E402
from gpumem_otel.yielding.offload import Offload  # noqa: E402
from gpumem_otel.yielding.staging import Staging  # noqa: E402

pytestmark = pytest.mark.torch
nn = torch.nn
PIECE = 64 << 10
PLENTY = 1 << 40


class Watched(CpuDevices):
    """Notes where memory is allocated."""

    def __init__(self, **more):
        super().__init__(torch, **more)
        self.allocated = []
        self.emptied = 0

    @contextlib.contextmanager
    def allocating(self, device, stream):
        self.allocated.append((device, stream))
        yield

    def is_short_of_memory(self, error):
        return isinstance(error, torch.cuda.OutOfMemoryError)

    def empty_cache(self):
        self.emptied += 1


class Parts:
    """All that an offload is made of."""

    def __init__(self, folder, *, room=PLENTY, free=None, limit=None, keep=None, ring=8192):
        self.devices = Watched(free=free)
        self.pool = HostPool(self.devices, piece_bytes=PIECE, threads=2, pinned_limit_bytes=limit)
        self.host = HostLedger(f"{folder}/ledger", lambda: HostRoom(room, "the test"))
        self.gpus = DeviceLedger(f"{folder}/ledger")
        self.offload = Offload(
            self.devices, self.pool, self.host, self.gpus, keep_bytes=keep,
            staging=partial(Staging, buffers=4, buffer_bytes=ring, threads=3),
        )  # fmt: skip
        self.said = []

    def progress(self, done, total):
        self.said.append((done, total))

    def out(self, movables, **request):
        self.offload.admit(movables, YieldRequest(**request))
        phase = self.offload.copy_out(self.progress, never)
        self.offload.free()
        return phase

    def back(self, classes=None, wait=0.0, stop=None):
        return self.offload.copy_back(classes, wait, self.progress, stop or never)


@pytest.fixture
def make(tmp_path):
    made = []

    def parts(**more):
        made.append(Parts(tmp_path, **more))
        return made[-1]

    yield parts
    for one in made:
        one.offload._items = []
        one.pool.give_back()
        one.host.close()


def never():
    return False


@contextlib.contextmanager
def failing_resize(when, error=None, *, done=False):
    """Storages can not be resized at some calls, by number from 1 and size; or are, and fail."""
    calls, real = [], torch.UntypedStorage.resize_

    def resize_(storage, size):
        calls.append(size)
        if when(len(calls), size):
            if done:
                real(storage, size)
            raise error or RuntimeError("the driver is gone")
        return real(storage, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", resize_, raising=False)
        yield


def movable(storage, tensor_class="parameter", device=0, stream=0):
    size = storage.nbytes()
    return Movable(storage, device, storage.data_ptr(), size, size, stream, tensor_class)


def movables_of(tensors, **more):
    found = {}
    for tensor in tensors:
        for storage in storages_of(tensor):
            if storage.nbytes():
                found.setdefault(storage._cdata, movable(storage, **more))
    return list(found.values())


def tensor(size_bytes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


# contents and aliases


SIZES = (1, 7, 8, 513, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 3)


def test_sizes_of_every_kind_come_back_bit_for_bit(make):
    parts = make()
    tensors = [tensor(size, seed) for seed, size in enumerate(SIZES)]
    before = [one.clone() for one in tensors]
    phase = parts.out(movables_of(tensors), verify=True)
    assert all(one.untyped_storage().nbytes() == 0 for one in tensors)
    assert (phase.phase, phase.size_bytes) == (Phase.RELEASE, sum(SIZES))
    assert parts.offload.held_bytes == {"parameter": sum(SIZES)}
    assert parts.said[-1] == (sum(SIZES), sum(SIZES))
    assert [done for done, _ in parts.said] == sorted(done for done, _ in parts.said)
    phase = parts.back()
    assert (phase.phase, phase.size_bytes) == (Phase.RELOAD, sum(SIZES))
    assert parts.offload.verify() == "equal"
    assert all(torch.equal(one, was) for one, was in zip(tensors, before, strict=True))
    assert parts.offload.held_bytes == {}


def views():
    base = torch.randn(64, 64)
    return [base, base[3:9, 5], base.t()]


def jagged():
    parts = [torch.randn(3), torch.randn(5)]
    return [torch.nested.nested_tensor(parts, layout=torch.jagged)]


def per_channel():
    scales, zeros = torch.rand(4) + 0.1, torch.zeros(4, dtype=torch.long)
    return [torch.quantize_per_channel(torch.randn(4, 6), scales, zeros, 0, torch.qint8)]


KINDS = {
    "view": views,
    "expanded": lambda: [torch.randn(5, 1).expand(5, 9)],
    "not contiguous": lambda: [torch.randn(6, 7, 8).permute(2, 0, 1)],
    "sparse coo": lambda: [torch.eye(9).to_sparse()],
    "sparse csr": lambda: [torch.eye(9).to_sparse_csr()],
    "complex": lambda: [torch.randn(5, 5, dtype=torch.complex64).conj()],
    "quantized": lambda: [torch.quantize_per_tensor(torch.randn(40), 0.1, 3, torch.quint8)],
    "quantized per channel": per_channel,
    "bool": lambda: [torch.rand(77) > 0.5],
    "float8": lambda: [torch.randn(33).to(torch.float8_e4m3fn)],
    "zero size": lambda: [torch.empty(0), torch.empty(0, 5), torch.randn(3)],
    "scalar": lambda: [torch.tensor(3.5)],
    "nested": lambda: [torch.nested.nested_tensor([torch.randn(3), torch.randn(5)])],
    "jagged": jagged,
    "inference": lambda: [made_in_inference()],
}


def made_in_inference():
    with torch.inference_mode():
        return torch.randn(50)


def plain(one):
    if one.is_quantized:
        return one.int_repr()
    if one.is_nested:
        return torch.cat([part.flatten() for part in one.unbind()])
    one = one.to_dense() if one.layout is not torch.strided else one
    return one.view(torch.uint8) if "float8" in str(one.dtype) else one


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_kind_come_back(make, kind):
    tensors = KINDS[kind]()
    with torch.no_grad():
        before = [plain(one).clone() for one in tensors]
    was = [(one.dtype, one.layout, one.numel()) for one in tensors]
    parts = make()
    parts.out(movables_of(tensors), verify=True)
    parts.back()
    assert parts.offload.verify() in {"equal", ""}
    assert [(one.dtype, one.layout, one.numel()) for one in tensors] == was
    for one, then in zip(tensors, before, strict=True):
        assert torch.equal(plain(one), then)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embedding(tokens))
        return self.head(hidden)


def everything(model, optimizer):
    state = [x for one in optimizer.state.values() for x in one.values() if torch.is_tensor(x)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.parameters(), *model.buffers(), *gradients, *state]


def step(model, optimizer, seed, *, between=lambda loss: None):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50, (4, 6), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    between(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.item()


@pytest.mark.parametrize("foreach", [False, True])
def test_training_goes_on_as_if_nothing_had_happened(make, foreach):
    torch.manual_seed(0)
    model = Tied()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    reference = torch.optim.AdamW(twin.parameters(), foreach=foreach)
    parts = make()
    gradient_ids = None
    for number in range(6):
        assert step(model, optimizer, number) == step(twin, reference, number)
        ids = [id(p.grad) for p in model.parameters()]
        assert gradient_ids in {None, tuple(ids)}
        gradient_ids = tuple(ids)
        tensors = everything(model, optimizer)
        versions = [one._version for one in tensors]
        flat = [w.data_ptr() for w in model.rnn._flat_weights]
        offsets = [address - min(flat) for address in flat]
        parts.out(movables_of(tensors), verify=True)
        assert model.head.weight.untyped_storage().nbytes() == 0
        parts.back()
        assert parts.offload.verify() == "equal"
        assert [one._version for one in tensors] == versions
        assert model.head.weight is model.embedding.weight
        if parts.devices and number == 0 and len(set(offsets)) == len(offsets):
            assert all(w.is_contiguous() for w in model.rnn._flat_weights)
    for mine, theirs in zip(everything(model, optimizer), everything(twin, reference), strict=True):
        assert torch.equal(mine, theirs)


def test_what_autograd_saved_is_there_for_backward(make):
    torch.manual_seed(0)
    model = Tied()
    twin = copy.deepcopy(model)
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    parts = make()

    def yielded(loss):
        mine = [loss, *model.parameters()]
        if not can_be_read(torch):
            pytest.skip("this torch does not show what autograd saved")
        count = len(mine)
        mine += [saved for _, saved in saved_tensors(torch, [loss.grad_fn])]
        assert len(mine) > count
        parts.out(movables_of(mine), verify=True)
        assert loss.untyped_storage().nbytes() == 0
        parts.back()
        assert parts.offload.verify() == "equal"

    assert step(twin, reference, 1) == step(model, optimizer, 1, between=yielded)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_modes_of_the_caller_change_nothing(make):
    one = torch.randn(100, requires_grad=True)
    was = one.detach().clone()
    parts = make()
    with torch.inference_mode():
        parts.out(movables_of([one]), verify=True)
        parts.back()
        assert parts.offload.verify() == "equal"
        assert torch.is_inference_mode_enabled()
    assert torch.equal(one, was)
    (one * 2).sum().backward()
    assert one.grad is not None


# by class, thrown away, in use


def test_classes_come_back_one_after_the_other(make):
    parts = make()
    weights, state = tensor(5000, 1), tensor(7000, 2)
    was = weights.clone(), state.clone()
    goes = movables_of([weights]) + movables_of([state], tensor_class="optimizer_state")
    parts.out(goes, verify=True)
    parts.back({"parameter"})
    assert parts.offload.verify() == "equal"
    assert torch.equal(weights, was[0])
    assert state.untyped_storage().nbytes() == 0
    assert parts.offload.held_bytes == {"optimizer_state": 7000}
    weights.zero_()  # the job uses them already
    assert parts.back().size_bytes == 7000
    assert parts.offload.verify() == "equal"
    assert torch.equal(state, was[1])
    assert not weights.any()


def test_what_is_thrown_away_comes_back_as_zeros(make):
    parts = make()
    weights, state = tensor(5000, 1), tensor(7000, 2)
    was = weights.clone()
    goes = movables_of([weights]) + movables_of([state], tensor_class="optimizer_state")
    assert parts.out(goes, discard=("optimizer_state",)).size_bytes == 5000
    assert parts.offload.held_bytes == {"parameter": 5000}
    assert parts.offload.discarded_bytes == {"optimizer_state": 7000}
    assert parts.offload.host_bytes < 7000 + 5000
    parts.back()
    assert torch.equal(weights, was)
    assert state.untyped_storage().nbytes() == 7000
    assert not state.any()
    assert parts.offload.discarded_bytes == {}


def test_a_storage_that_the_job_filled_meanwhile_is_its_own(make):
    parts = make()
    one, other = tensor(5000, 1), tensor(6000, 2)
    was = other.clone()
    parts.out(movables_of([one, other]), verify=True)
    one.untyped_storage().resize_(5000)
    one.fill_(9)
    parts.back()
    assert parts.offload.verify() == "equal"
    assert (one == 9).all()
    assert torch.equal(other, was)
    (note,) = parts.offload.notes
    assert "5000 bytes of class parameter" in note


# where memory is allocated


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


# undoing


def test_stopped_while_copying_nothing_has_changed(make):
    parts = make()
    tensors = [tensor(PIECE * 2, seed) for seed in range(4)]
    was = [one.clone() for one in tensors]
    addresses = [one.data_ptr() for one in tensors]
    parts.offload.admit(movables_of(tensors), YieldRequest())
    asked = iter([False, False, False, True])
    with pytest.raises(YieldRefusedError, match="stopped"):
        parts.offload.copy_out(parts.progress, lambda: next(asked))
    parts.offload.abandon()
    assert [one.data_ptr() for one in tensors] == addresses
    assert all(torch.equal(one, before) for one, before in zip(tensors, was, strict=True))
    assert parts.offload.held_bytes == {}
    parts.out(movables_of(tensors), verify=True)  # and it can begin anew
    parts.back()
    assert parts.offload.verify() == "equal"


def test_a_storage_that_changed_while_it_was_copied_refuses_all(make):
    parts = make()
    one, other = tensor(5000), tensor(6000)
    parts.offload.admit(movables_of([one, other]), YieldRequest())
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
    parts.offload.admit(movables_of(tensors), YieldRequest())
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
    parts.offload.admit(movables_of(tensors), YieldRequest())
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
    parts.out(movables_of(tensors), verify=True)
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
    parts.out(movables_of(tensors))
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
    parts.out(movables_of(tensors))
    asked = iter([False] * 3 + [True] * 9)
    with pytest.raises(YieldRefusedError, match="stopped"):
        parts.back(stop=lambda: next(asked))
    assert all(one.untyped_storage().nbytes() == 0 for one in tensors)
    parts.back()
    assert all(torch.equal(one, before) for one, before in zip(tensors, was, strict=True))


# host memory


def test_host_memory_that_is_short_refuses_before_anything_moves(make):
    parts = make(room=PIECE)
    one = tensor(PIECE * 3)
    with pytest.raises(YieldRefusedError, match="host memory"):
        parts.offload.admit(movables_of([one]), YieldRequest())
    assert one.untyped_storage().nbytes() == PIECE * 3
    assert parts.host.held_bytes == 0


def test_what_admission_reserved_abandoning_gives_up(make):
    parts = make()
    host, disk = parts.offload.admit(movables_of([tensor(PIECE * 3)]), YieldRequest())
    assert (host, disk) == (PIECE * 3, 0)
    assert parts.host.held_bytes == PIECE * 3
    parts.offload.abandon()
    assert parts.host.held_bytes == 0


def test_a_second_yield_while_memory_is_held_is_refused(make):
    parts = make()
    parts.out(movables_of([tensor(100)]))
    with pytest.raises(YieldRefusedError, match="restore it first"):
        parts.offload.admit(movables_of([tensor(100)]), YieldRequest())
    parts.back()


def test_the_pool_is_kept_and_used_again(make):
    parts = make()
    one = tensor(PIECE * 3)
    for _ in range(3):
        parts.out(movables_of([one]))
        parts.back()
        assert parts.offload.host_bytes == parts.host.held_bytes == PIECE * 3
    assert parts.offload.give_back() == PIECE * 3
    assert parts.offload.host_bytes == parts.host.held_bytes == 0


def test_it_is_kept_up_to_a_limit_or_given_back_where_asked(make):
    parts = make(keep=PIECE)
    one = tensor(PIECE * 3)
    parts.out(movables_of([one]))
    parts.back()
    assert parts.offload.host_bytes == parts.host.held_bytes == PIECE
    parts.out(movables_of([one]), release_host=True)
    assert parts.offload.give_back() == 0  # something is stored there
    parts.back()
    assert parts.offload.host_bytes == parts.host.held_bytes == 0


@pytest.mark.parametrize("ring", [4096, PIECE * 2], ids=["small ring", "large ring"])
@pytest.mark.parametrize("limit", [0, PIECE * 2], ids=["nothing pinned", "some pinned"])
def test_pageable_memory_goes_through_the_ring(make, limit, ring):
    parts = make(limit=limit, ring=ring)
    tensors = [tensor(size, seed) for seed, size in enumerate(SIZES * 3)]
    before = [one.clone() for one in tensors]
    parts.out(movables_of(tensors), verify=True)
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
    parts.out(movables_of(tensors), verify=True, disk_dir=str(folder))
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
            movables_of([tensor(PIECE * 3)]), YieldRequest(disk_dir=str(tmp_path / "no-such"))
        )
    assert parts.host.held_bytes == 0
    assert parts.offload.disk_bytes == 0


# checksums


def test_a_changed_bit_is_found_and_named(make):
    parts = make()
    one, other = tensor(PIECE), tensor(PIECE + 5)
    parts.out(movables_of([one]) + movables_of([other], tensor_class="kv_cache"), verify=True)
    parts.back()
    other[PIECE + 4] ^= 1
    with pytest.raises(YieldFailedError, match="1 of kv_cache") as failed:
        parts.offload.verify()
    assert "parameter" not in str(failed.value)


def test_checksums_see_every_byte_and_its_place():
    (base,) = checksums(torch, [tensor(1003)])
    for at in (0, 7, 8, 500, 999, 1000, 1002):
        changed = tensor(1003)
        changed[at] += 1
        assert checksums(torch, [changed]) != [base]
    words = tensor(1000).view(torch.int64)
    swapped = words.clone()
    swapped[[3, 90]] = words[[90, 3]]
    assert checksums(torch, [swapped.view(torch.uint8)]) != checksums(
        torch, [words.view(torch.uint8)]
    )


def test_checksums_do_not_depend_on_company():
    parts = [tensor(size, size) for size in SIZES]
    together = checksums(torch, [*parts, torch.empty(0, dtype=torch.uint8)])
    assert together == [*(checksums(torch, [one])[0] for one in parts), 0]
    assert len(set(together)) == len(together)


def test_checksums_of_more_than_one_slice(monkeypatch):
    monkeypatch.setattr("gpumem_otel.yielding.checksums._SLICE_WORDS", 16)
    one = tensor(16 * 8 * 3 + 13)
    (before,) = checksums(torch, [one])
    swapped = one.clone()
    swapped[:128], swapped[128:256] = one[128:256], one[:128]
    assert checksums(torch, [swapped]) != [before]
    assert checksums(torch, [one.clone()]) == [before]


# the stream that had a block before


class Noted:
    """A lane that notes what it is asked, and for how many bytes."""

    def __init__(self, log):
        self.log = log

    def copy(self, to, source):
        self.log.append(("copy", len(to)))
        to.copy_(source)

    def zero(self, to):
        self.log.append(("zero", len(to)))
        to.zero_()

    def after(self, stream):
        self.log.append(("after", stream))

    def mark(self):
        return self

    def wait(self):
        """Nothing is under way."""


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


# interrupts and errors half way


def moved(parts, tensors):
    """Copied out, and to be freed."""
    was = [one.clone() for one in tensors]
    parts.offload.admit(movables_of(tensors), YieldRequest())
    parts.offload.copy_out(parts.progress, never)
    return was


def same(tensors, was):
    return all(torch.equal(one, before) for one, before in zip(tensors, was, strict=True))


def emptied_by(devices, *outcomes):
    """What the next calls that empty the cache raise."""
    left = iter(outcomes)

    def empty_cache():
        outcome = next(left, None)
        if outcome is not None:
            raise outcome

    devices.empty_cache = empty_cache


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
    parts.out(movables_of(tensors), verify=True)
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
    parts.offload.admit(movables_of([tensor(PIECE)]), YieldRequest())
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
    mover = Mover(
        parts.devices, parts.pool, progress=parts.progress, stop=never, total_bytes=0,
        staging=partial(Breaking, buffers=2, buffer_bytes=4096),
    )  # fmt: skip
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
    parts.out(movables_of([one]))
    parts.back()
    assert torch.equal(one, was)


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


def test_only_large_copies_out_to_memory_that_was_ready_tell_the_speed(make, monkeypatch):
    monkeypatch.setattr(offload_module, "_MEASURED_BYTES", PIECE)
    wait, asked_for = Piece.wait, threading.Event()

    def waiting(piece):
        asked_for.set()
        wait(piece)

    monkeypatch.setattr(Piece, "wait", waiting)
    parts = make()
    parts.devices._pin = lambda address, size: "" if asked_for.wait(20) else "nobody asked"
    seconds, ticks = [1.0], [0.0]

    def monotonic():
        ticks[0] += seconds[0]
        return ticks[0]

    parts.offload._now = monotonic
    weights, flag = tensor(PIECE * 4), tensor(4)
    goes = [*movables_of([weights]), *movables_of([flag], tensor_class="buffer")]
    total = PIECE * 4 + 4
    parts.out(goes)
    assert parts.offload.bytes_per_second == 0.0  # it waited for pinning
    seconds[0] = 2.0
    parts.back()
    assert parts.offload.bytes_per_second == total / 2  # better than nothing
    seconds[0] = 4.0
    goes = [*movables_of([weights]), *movables_of([flag], tensor_class="buffer")]
    parts.out(goes)
    assert parts.offload.bytes_per_second == total / 4
    seconds[0] = 1000.0
    parts.back({"parameter"})
    parts.back()
    assert parts.offload.bytes_per_second == total / 4
    parts.out(movables_of([flag]))
    parts.back()
    assert parts.offload.bytes_per_second == total / 4


# the end


def test_closing_leaves_nothing_pinned_and_nothing_reserved(make, tmp_path):
    parts, pinned, one = make(), set(), tensor(PIECE * 3)
    parts.devices._pin = lambda address, size: pinned.add(address) or ""
    parts.devices.unregister = pinned.remove
    entries = Path(tmp_path, "ledger")
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
