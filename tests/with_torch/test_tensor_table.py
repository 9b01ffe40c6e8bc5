"""The address table on real torch: what it finds, what it leaves alone, what it never keeps."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from gpumem_otel.capture import tensor_table  # noqa: E402
from gpumem_otel.capture.objects.storages import (  # noqa: E402
    address_of,
    storages_of,
    tensors_in,
)
from gpumem_otel.capture.steps import StepCounter  # noqa: E402
from gpumem_otel.capture.tensor_table import TensorTable  # noqa: E402

pytestmark = pytest.mark.torch
nn = torch.nn


@pytest.fixture(autouse=True)
def always_allowed(monkeypatch):
    """A table at every chance, whatever the last one took."""
    monkeypatch.setattr(tensor_table, "_MIN_SECONDS", 0.0)
    monkeypatch.setattr(tensor_table, "_COST_FACTOR", 0.0)


@pytest.fixture
def table():
    made = TensorTable(host_too=True)
    made._searched = True  # other files of tests keep models of their own
    made.start()
    counter = StepCounter(on_optimizer=made.stepped)
    counter.start()
    made.counter = counter
    yield made
    counter.stop()
    made.stop()


def train(model, optimizer, make_input, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(make_input())
        output = output[0] if isinstance(output, tuple) else output
        output.float().sum().backward()
        optimizer.step()


def found(table):
    """class -> {address: bytes} of what is alive."""
    table_now = TensorTable.alive(table.snapshot(), lambda: None)
    classes: dict[str, dict[int, int]] = {}
    for address, (size, tensor_class) in table_now.items():
        classes.setdefault(tensor_class.value, {})[address] = size
    return classes


def storage_sizes(tensors):
    """Counted on its own: address -> bytes."""
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t is not None and t.untyped_storage().data_ptr()
    }


def states(optimizer):
    return [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


class Flat(nn.Module):
    """Parameters that are views of one buffer."""

    def __init__(self):
        super().__init__()
        flat = torch.zeros(24)
        self.a = nn.Parameter(flat[:12].view(3, 4))
        self.b = nn.Parameter(flat[12:].view(4, 3))

    def forward(self, x):
        return x @ self.a @ self.b


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), lambda: torch.rand(5, 4)),
    "tied": (Tied, lambda: torch.randint(0, 10, (3,))),
    "flat": (Flat, lambda: torch.rand(2, 3)),
    "lstm": (lambda: nn.LSTM(4, 8, num_layers=2), lambda: torch.rand(3, 2, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_storage_has_its_class_once(table, name):
    make, make_input = MODELS[name]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, make_input)
    reported = found(table)
    assert reported["parameter"] == storage_sizes(model.parameters())
    assert reported["gradient"] == storage_sizes(p.grad for p in model.parameters())
    assert reported["optimizer_state"] == storage_sizes(states(optimizer))
    assert reported.get("buffer", {}) == storage_sizes(model.buffers())


def test_a_model_that_was_built_before_or_copied_is_found():
    model = nn.Sequential(nn.BatchNorm1d(4))
    table = TensorTable(host_too=True)
    table.start()
    copied = copy.deepcopy(model)
    counter = StepCounter(on_optimizer=table.stepped)
    counter.start()
    try:
        train(copied, torch.optim.SGD(copied.parameters(), lr=0.1), lambda: torch.rand(3, 4))
        reported = found(table)
    finally:
        counter.stop()
        table.stop()
    assert storage_sizes(copied.buffers()).items() <= reported["buffer"].items()
    assert storage_sizes(model.buffers()).items() <= reported["buffer"].items()


def test_a_gradient_that_was_freed_does_not_count(table):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, lambda: torch.rand(2, 4))
    gradient = model.weight.grad.untyped_storage().data_ptr()
    assert table.class_at(gradient).value == "gradient"
    optimizer.zero_grad()
    assert "gradient" not in found(table)
    assert table.class_at(gradient) is None


def test_nothing_is_kept_alive(table):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    cache = torch.zeros(100)
    table.watch("kv_cache", cache)
    table.watch("", model)
    train(model, optimizer, lambda: torch.rand(2, 64))
    gone = [weakref.ref(x) for x in (model, optimizer, model.weight, model.weight.grad, cache)]
    del model, optimizer, cache
    gc.collect()
    assert [ref() for ref in gone] == [None] * 5
    assert found(table) == {}


def test_what_the_user_names_has_that_class(table):
    cache = [torch.zeros(10), (torch.zeros(20), {"k": torch.zeros(30)})]

    class Holder:
        pass

    holder = Holder()
    holder.layers = cache
    table.watch("kv_cache", holder)
    assert sum(found(table)["kv_cache"].values()) == 60 * 4
    model = nn.Linear(2, 2)
    table.watch("", model)
    assert found(table)["parameter"] == storage_sizes(model.parameters())


def test_parameters_of_a_model_that_a_cache_refers_to_are_parameters(table):
    class Cache:
        pass

    cache, model = Cache(), nn.Linear(4, 4)
    cache.keys, cache.owner = torch.zeros(3), model
    named = nn.Parameter(torch.zeros(5))
    table.watch("kv_cache", cache)
    table.watch("", model)
    table.watch("workspace", named)
    table.stepped(None)
    reported = found(table)
    assert reported["parameter"] == storage_sizes(model.parameters())
    assert reported["kv_cache"] == storage_sizes([cache.keys])
    assert reported["workspace"] == storage_sizes([named])


def test_a_word_that_is_no_class_is_said(table, caplog):
    table.watch("kvcache", torch.zeros(1))
    assert "watch(kvcache=...): no such class" in caplog.text


def test_caches_are_known_by_their_names(table):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("k_cache", torch.zeros(8))
            self.value_cache = torch.zeros(16)
            self.register_buffer("cached_mask", torch.zeros(32))

    model = Attention()
    table.watch("", model)
    reported = found(table)
    assert sorted(reported["kv_cache"].values()) == [32, 64]
    assert list(reported["buffer"].values()) == [128]


def test_inputs_of_a_watched_model(table):
    model = nn.Linear(4, 4)
    table.watch("", model)
    batch = torch.rand(3, 4)
    with torch.no_grad():
        model(batch)
    assert found(table)["input"] == storage_sizes([batch])


def test_an_input_where_an_older_one_was_is_told(table):
    """The allocator gives out the same address again for each batch."""
    memory = bytearray(64)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    table.watch("", model)
    for _ in range(2):
        batch = torch.frombuffer(memory, dtype=torch.float32).view(4, 4)
        model(batch).sum().backward()
        assert found(table)["input"] == storage_sizes([batch])
        assert table.class_at(batch.untyped_storage().data_ptr()).value == "input"
        optimizer.step()
        del batch


def test_inputs_do_not_pile_up_where_no_optimizer_steps(table):
    model = nn.Linear(4, 4)
    table.watch("", model)
    batches = [torch.rand(2, 4) for _ in range(50)]
    for batch in batches:
        model(batch)
    assert found(table)["input"] == storage_sizes(batches[-1:])
    assert len(table.snapshot()) == 3


def test_inputs_are_noted_for_a_small_part_of_the_time_and_counted(monkeypatch):
    monkeypatch.setattr(tensor_table, "_COST_FACTOR", 500.0)
    clock = iter(range(1000))
    reported = []
    table = TensorTable(reported.append, monotonic=lambda: float(next(clock)), host_too=True)
    table.start()
    try:
        model = nn.Linear(4, 4)
        table.watch("", model)
        first, second = torch.rand(2, 4), torch.rand(2, 4)
        model(first)  # takes a second by this clock
        model(second)
        assert found(table)["input"] == storage_sizes([first])
        table.stepped(None)
        assert reported[0] >= 2  # the second of the input too
    finally:
        table.stop()


def test_an_input_that_raises_costs_the_inputs_alone(table, caplog):
    class Proxy:
        @property
        def __class__(self):
            raise RuntimeError("outside of a request")

    class Model(nn.Linear):
        def forward(self, batch, _):
            return super().forward(batch)

    model = Model(4, 4)
    table.watch("", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.rand(2, 4), Proxy()).sum().backward()
        optimizer.step()
    assert found(table).keys() == {"parameter", "gradient"}
    assert caplog.text.count("inputs of Model are not recorded") == 1


def test_a_watched_model_can_be_saved_and_copied(table):
    model = nn.Sequential(nn.Linear(4, 4))
    table.watch("", model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    batch = torch.rand(2, 4)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert torch.equal(other(batch), model(batch))
        table._inputs = {}
        other(batch)
        assert table._inputs == {}
    model(batch)
    assert table._inputs


def test_a_file_of_a_watched_model_needs_nothing_of_ours(table):
    model = nn.Linear(2, 2)
    table.watch("", model)
    assert b"gpumem_otel" not in pickle.dumps(model)


def test_watched_again_is_hooked_once_and_forgotten_with_its_object(table):
    model = nn.Linear(2, 2)
    for _ in range(3):
        table.watch("", model)
    assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == (1, 1)
    cache = torch.zeros(3)
    for _ in range(3):
        table.watch("kv_cache", cache)
    assert len(table._named) == 1
    assert len(table._roots) == 1
    del model, cache
    gc.collect()
    assert not table._named
    assert not table._roots


def test_another_thread_may_change_a_module_meanwhile(table):
    """GIVEN a cache whose attributes are read, WHEN reading it adds to its module, THEN it holds.

    That stands for another thread, which can be at work at any line.
    """
    module = nn.Module()

    class Cache(dict):
        def values(self):
            setattr(module, f"more_{len(vars(module))}", 1)
            return super().values()

    module.k_cache, module.v_cache = Cache(k=torch.zeros(5)), Cache(k=torch.zeros(6))
    table.watch("", module)
    assert sorted(found(table)["kv_cache"].values()) == [20, 24]
    model = nn.Linear(2, 2)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: torch.rand(2, 2))
    assert "gradient" in found(table)


def test_a_mode_of_the_job_does_not_see_us(table):
    class Seen(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            type(self).calls += 1
            return function(*args, **(kwargs or {}))

    model, cache, batch = nn.Linear(4, 4), torch.zeros(3), torch.rand(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, lambda: batch)
    with Seen():
        table.watch("", model)
        table.watch("kv_cache", cache)
        table._note_inputs(model, ((batch,), {}))
        table.stepped(optimizer)
    assert Seen.calls == 0
    assert found(table).keys() == {"parameter", "gradient", "kv_cache", "input"}


def test_long_lists_and_modules_are_not_walked():
    tensor = torch.zeros(1)
    assert list(tensors_in(([0] * 1000, tensor), torch.Tensor, 10)) == [tensor]
    assert list(tensors_in([[tensor] * 5, [0] * 1000], torch.Tensor, 10)) == []

    class Cache:
        pass

    held = Cache()
    held.library = sys.modules[__name__]
    held.k = tensor
    assert list(tensors_in(held, torch.Tensor)) == [tensor]


def test_no_code_of_an_object_runs():
    class Lazy:
        def __getattr__(self, name):
            raise RuntimeError(name)

        @property
        def __dict__(self):
            raise RuntimeError("no")

    assert list(tensors_in([Lazy()], torch.Tensor)) == []


def test_gradients_are_read_by_the_thread_that_steps_and_no_other(table):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    thread = threading.Thread(target=train, args=(model, optimizer, lambda: torch.rand(2, 4)))
    thread.start()
    thread.join()
    mine = nn.Linear(2, 2)
    train(mine, torch.optim.SGD(mine.parameters(), lr=0.1), lambda: torch.rand(2, 2))
    reported = found(table)
    assert reported["gradient"] == storage_sizes(p.grad for p in mine.parameters())
    assert storage_sizes(model.parameters()).items() <= reported["parameter"].items()
    table.counter.step()  # the job says that no other thread is at work
    assert storage_sizes(p.grad for p in model.parameters()).items() <= (
        found(table)["gradient"].items()
    )


def test_an_optimizer_inside_backward_is_read_in_step_alone(table):
    optim = pytest.importorskip("torch.distributed.optim")
    model = nn.Linear(4, 4)
    optim._apply_optimizer_in_backward(
        torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9}
    )
    model(torch.rand(2, 4)).sum().backward()
    assert "optimizer_state" not in found(table)
    table.counter.step()
    assert sum(found(table)["optimizer_state"].values()) == (16 + 4) * 4


def test_a_compiled_step_is_not_broken(table):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    table.watch("", model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    batch = torch.rand(2, 4)
    assert torch.equal(compiled(batch), model(batch))


@pytest.mark.filterwarnings("ignore::UserWarning")  # some kinds are said to be beta, or to go
@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: torch.zeros(3, 4)[1:], lambda t: [t]),
        (lambda: nn.Parameter(torch.zeros(5)), lambda t: [t]),
        (lambda: torch.eye(3).to_sparse(), lambda t: [t._indices(), t._values()]),
        (
            lambda: torch.eye(3).to_sparse_csr(),
            lambda t: [t.crow_indices(), t.col_indices(), t.values()],
        ),
        (
            lambda: torch.quantize_per_channel(
                torch.ones(4, 2), torch.ones(4), torch.zeros(4), 0, torch.quint8
            ),
            lambda t: [t, t.q_per_channel_scales(), t.q_per_channel_zero_points()],
        ),
        (lambda: torch.zeros(3, dtype=torch.cfloat).conj(), lambda t: [t]),
        (lambda: torch.zeros(7, device="meta"), lambda _: []),
        (nn.UninitializedParameter, lambda _: []),
        (lambda: "no tensor", lambda _: []),
    ],
)
def test_storages_of_every_kind_of_tensor(make, parts):
    tensor = make()
    found = {address_of(s): s.nbytes() for s in storages_of(tensor) if address_of(s)}
    assert found == storage_sizes(parts(tensor))


def test_a_subclass_that_raises_costs_nothing():
    class Bad(torch.Tensor):
        def __tensor_flatten__(self):
            raise RuntimeError("no")

    assert storages_of(torch.zeros(3).as_subclass(Bad)) == []


def test_dtensor_gives_its_shard(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch.distributed leaves its own
    tensor_module = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(tensor_module, "DTensor"):  # before torch 2.5
        tensor_module = pytest.importorskip("torch.distributed._tensor")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        local = torch.zeros(6)
        tensor = tensor_module.DTensor.from_local(local, mesh, [tensor_module.Shard(0)])
        (storage,) = storages_of(tensor)
        assert address_of(storage) == local.untyped_storage().data_ptr()
    finally:
        torch.distributed.destroy_process_group()


def test_stop_takes_every_hook_back(table):
    module = torch.nn.modules.module
    model = nn.Linear(2, 2)
    table.watch("", model)
    table.stop()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not module._global_parameter_registration_hooks
    assert not module._global_buffer_registration_hooks
    table.stepped(torch.optim.SGD(model.parameters(), lr=0.1))
    assert table.snapshot() == {}
