"""Storages out and back on real torch, in host memory: contents, aliases, classes."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from support.offload_parts import SIZES, candidates_of, tensor  # noqa: E402

from gpumem_otel.tensors.saved import can_be_read, saved_tensors  # noqa: E402
from gpumem_otel.yielding.values import Phase  # noqa: E402

pytestmark = pytest.mark.torch
nn = torch.nn


# contents and aliases


def test_sizes_of_every_kind_come_back_bit_for_bit(make):
    parts = make()
    tensors = [tensor(size, seed) for seed, size in enumerate(SIZES)]
    before = [one.clone() for one in tensors]
    phase = parts.out(candidates_of(tensors), verify=True)
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
    parts.out(candidates_of(tensors), verify=True)
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
        parts.out(candidates_of(tensors), verify=True)
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
        parts.out(candidates_of(mine), verify=True)
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
        parts.out(candidates_of([one]), verify=True)
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
    goes = candidates_of([weights]) + candidates_of([state], tensor_class="optimizer_state")
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
    goes = candidates_of([weights]) + candidates_of([state], tensor_class="optimizer_state")
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
    parts.out(candidates_of([one, other]), verify=True)
    one.untyped_storage().resize_(5000)
    one.fill_(9)
    parts.back()
    assert parts.offload.verify() == "equal"
    assert (one == 9).all()
    assert torch.equal(other, was)
    (note,) = parts.offload.notes
    assert "5000 bytes of class parameter" in note
