"""The tensor report on real CPU tensors: names, sharing, structure."""

from __future__ import annotations

import gc
import importlib

import pytest
from support.reported import by_name, run

import gpumem_otel
from gpumem_otel.capture.objects.storages import parts_of, storages_of
from gpumem_otel.errors import ConfigError
from gpumem_otel.tensors.walk import walk

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left_of_other_tests")]


def test_a_trained_model_by_name_in_exact_bytes():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(3, 8)
    model(batch).sum().backward()
    optimizer.step()
    report = gpumem_otel.report(model, optimizer)
    # torch 2.3 keeps a tensor of its own on meta
    names = [row.name for row in report.tensors if row.device == "cpu"]
    assert names[:4] == ["weight", "weight.grad", "bias", "bias.grad"]
    rows = {row.name: row for row in report.tensors}
    assert [rows[name].used_bytes for name in names[:4]] == [128, 128, 16, 16]
    assert rows["weight"].shape == (4, 8)
    assert rows["weight"].dtype == "float32"
    assert rows["Adam.weight.exp_avg"].used_bytes == 128
    assert rows["Adam.bias.exp_avg_sq"].used_bytes == 16
    assert {name: rows[name].tensor_class.value for name in ("weight", "weight.grad", "batch")} == {
        "weight": "parameter", "weight.grad": "gradient", "batch": "unattributed",
    }  # fmt: skip
    assert rows["Adam.weight.exp_avg"].tensor_class.value == "optimizer_state"


def test_names_come_from_variables_when_nothing_is_given():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    rows = by_name(gpumem_otel.report())
    assert rows["model.0.weight"].tensor_class.value == "parameter"
    assert rows["model.1.running_mean"].tensor_class.value == "buffer"
    assert rows["model.0.weight.grad"].tensor_class.value == "gradient"
    assert "SGD.model.0.weight.momentum_buffer" in rows


def test_variables_name_what_is_in_containers_objects_and_callers():
    class Holder:
        pass

    holder = Holder()
    holder.cache = {"k": [torch.zeros(5)]}
    batch = (torch.zeros(6), torch.zeros(7))

    def inner():
        local = torch.zeros(8)
        assert local is not None
        return by_name(gpumem_otel.report())

    rows = inner()
    assert rows["local"].shape == (8,)
    caller = "test_variables_name_what_is_in_containers_objects_and_callers():"
    assert rows[f"{caller}batch[1]"].shape == (7,)
    assert rows[f"{caller}holder.cache['k'][0]"].shape == (5,)
    assert batch is not None


def test_several_models_and_a_dict_of_them():
    first, second = nn.Linear(2, 2), nn.Linear(2, 3)
    rows = by_name(gpumem_otel.report([first, second]))
    assert rows["Linear0.weight"].shape == (2, 2)
    assert rows["Linear1.weight"].shape == (3, 2)
    assert "encoder.weight" in by_name(gpumem_otel.report({"encoder": first}))


def test_tied_weights_are_one_row_with_two_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    report = gpumem_otel.report(model, verbose=True)
    (row,) = [row for row in report.tensors if row.address == model.embed.weight.data_ptr()]
    assert (row.name, row.aliases, row.used_bytes) == ("embed.weight", ("head.weight",), 160)
    assert "head.weight(->embed.weight)" in str(report)


def test_views_of_one_storage_count_once():
    flat = torch.zeros(100)
    weight = nn.Parameter(flat[:60].view(6, 10))
    bias = nn.Parameter(flat[60:70])
    rows = by_name(gpumem_otel.report())
    assert rows["flat"].used_bytes == 400
    assert (rows["weight"].used_bytes, rows["weight"].shares) == (0, "flat")
    assert (rows["bias"].used_bytes, rows["bias"].shares) == (0, "flat")
    assert rows["weight"].tensor_bytes == 240
    assert weight.shape[0] + bias.shape[0] == 16


def test_an_empty_view_that_holds_a_storage_is_a_row():
    nothing = torch.zeros(1000)[:0]
    empty = torch.zeros(0)
    rows = by_name(gpumem_otel.report())
    assert rows["nothing"].used_bytes == 4000
    assert "empty" not in rows
    assert nothing.numel() == empty.numel() == 0


def test_the_total_is_that_of_the_distinct_storages():
    model = nn.LSTM(8, 8, num_layers=2)
    out, _ = model(torch.randn(2, 3, 8))
    out.sum().backward()
    kept = [out, out[0], out.detach()]
    report = gpumem_otel.report(model)
    # counted again by hand, over all that the collector knows and its gradients
    storages = {}
    for item in gc.get_objects():
        if torch.Tensor in type(item).__mro__:
            for tensor in (item, item.grad if item.is_leaf else None):
                for storage in storages_of(tensor) if tensor is not None else ():
                    if storage.device.type == "cpu":
                        storages[storage.data_ptr()] = storage.nbytes()
    (here,) = [device for device in report.devices if device.device == "cpu"]
    assert here.used_bytes == sum(storages.values())
    assert len(kept) == 3


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_several_inside():
    dense = torch.eye(8)
    coo, csr = dense.to_sparse(), dense.to_sparse_csr()
    scales = torch.ones(4, dtype=torch.float64)
    quantized = torch.quantize_per_channel(
        torch.randn(4, 4), scales, torch.zeros(4, dtype=torch.int64), 0, torch.qint8
    )  # fmt: skip
    jagged = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)
    strided = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(4)])
    rows = by_name(gpumem_otel.report())
    sizes = {name: row.used_bytes for name, row in rows.items()}
    assert (sizes["coo.indices"], sizes["coo.values"]) == (128, 32)
    for part in ("crow_indices", "col_indices", "values"):
        assert sizes[f"csr.{part}"] == getattr(csr, part)().untyped_storage().nbytes()
    assert (sizes["quantized"], sizes["scales"], sizes["quantized.zero_points"]) == (16, 32, 32)
    assert rows["quantized.scales"].shares == "scales"
    assert sizes["jagged.values"] == 72
    assert rows["csr.values"].kind == "Tensor sparse_csr"
    assert rows["strided"].used_bytes == 24
    assert coo.shape == dense.shape
    assert jagged.is_nested
    assert strided.is_nested
    assert quantized.is_quantized


@pytest.mark.filterwarnings("ignore")
def test_parts_have_the_storages_that_the_classes_use():
    for tensor in (
        torch.eye(4), torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(),
        torch.eye(4).to_sparse_csc(), torch.eye(4).to_sparse_bsr((2, 2)),
        torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(4)], layout=torch.jagged),
    ):  # fmt: skip
        parts = {part.untyped_storage().data_ptr() for _, part in parts_of(torch, tensor)}
        assert parts == {storage.data_ptr() for storage in storages_of(tensor)}


def test_meta_and_fake_tensors_hold_nothing():
    fake_mode = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode
    meta = torch.zeros(1 << 20, device="meta")
    with fake_mode():
        fake = torch.zeros(1 << 20)
    report = gpumem_otel.report()
    rows = {row.name: row for row in report.tensors}
    assert (rows["meta"].used_bytes, rows["meta"].device) == (0, "meta")
    assert "fake" not in rows
    assert any("fake tensors" in note for note in report.notes)
    assert fake.shape == meta.shape


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_parameters_and_hostile_subclasses_do_no_harm():
    class Angry(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args, **kwargs):
            raise RuntimeError("asked")

    lazy = nn.LazyLinear(4)
    angry = torch.zeros(4).as_subclass(Angry)
    rows = by_name(gpumem_otel.report())
    assert rows["angry"].used_bytes == 16
    assert "lazy.weight" not in rows
    assert isinstance(lazy, nn.LazyLinear)
    assert type(angry) is Angry


def test_frozen_objects_are_found_through_models_and_noted():
    out = run("""
        import gc, torch, gpumem_otel
        model = torch.nn.Linear(3, 3)
        loose = [torch.zeros(5)]
        gc.collect(); gc.freeze()
        report = gpumem_otel.report(model)
        print([row.name for row in report.tensors][:2], any("freeze" in n for n in report.notes))
    """)
    assert out == "['weight', 'bias'] True\n"


def test_watched_models_and_caches_are_named():
    class Cache:
        pass

    cache = torch.zeros(12)
    gpumem_otel.watch(kv_cache=cache)
    try:
        tensors, _ = walk(watched=[("kv_cache", cache)])
        (row,) = [row for row in tensors if row.name == "kv_cache"]
        assert row.tensor_class.value == "kv_cache"
        assert by_name(gpumem_otel.report())["kv_cache"].tensor_class.value == "kv_cache"
    finally:
        gpumem_otel.uninstall()


def test_pandas_has_the_rows():
    pandas = pytest.importorskip("pandas")
    model = nn.Linear(4, 4)
    report = gpumem_otel.report(model)
    table = report.to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert table.loc[table["name"] == "weight", "used_bytes"].tolist() == [64]
    assert table["used_bytes"].sum() == sum(d.used_bytes for d in report.devices)


def test_a_device_of_which_there_is_nothing():
    report = gpumem_otel.report(device=7)
    assert report.tensors == ()
    assert "No tensors" in str(report)
    kept = torch.zeros(3, device="meta")
    assert {row.device for row in gpumem_otel.report(device="meta").tensors} == {"meta"}
    assert gpumem_otel.report(device=torch.device("cpu")).devices[0].device == "cpu"
    assert kept.is_meta


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_or_models": 3}, "'int' is no model"),
        ({"model_or_models": [nn.Linear(1, 1), "x"]}, "'str' is no model"),
        ({"optimizer": 3}, "'int' is no optimizer"),
        ({"device": "gpu zero"}, "not one like"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        gpumem_otel.report(**arguments)
    assert "\n" not in str(caught.value)


def test_compiled_models_and_the_compiler_stay_out_of_each_others_way():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(2, 4)).sum().backward()
    rows = by_name(gpumem_otel.report(model))
    assert rows["0.weight"].used_bytes == 64
    assert rows["0.weight.grad"].used_bytes == 64
    assert "_orig_mod.0.weight" in by_name(gpumem_otel.report(compiled))


def test_sharded_models_count_the_shards_that_are_here():
    pytest.importorskip("torch.distributed.fsdp", reason="FSDP")
    out = run("""
        import tempfile, torch, torch.distributed as dist, gpumem_otel
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:
            print("none"); raise SystemExit
        dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0,
                                world_size=1)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.randn(2, 8)).sum().backward()
        rows = {row.name: row for row in gpumem_otel.report(model).tensors}
        for name in ("0.weight", "0.weight.grad", "0.bias"):
            row = rows[name]
            print(name, row.kind, row.shape, row.used_bytes, row.tensor_class.value)
        shard = model[0].weight._local_tensor.untyped_storage().data_ptr()
        same = [row for row in rows.values() if row.address == shard]
        print({row.tensor_class.value for row in same}, sum(row.used_bytes for row in same))
        dist.destroy_process_group()
    """)
    if out.strip() == "none":
        pytest.skip("this torch has no fully_shard")
    weight, gradient, bias, shard = out.splitlines()[
        -4:
    ]  # gloo of torch 2.8 prints something first
    assert weight == "0.weight DTensor (8, 8) 256 parameter"
    assert gradient.startswith("0.weight.grad DTensor (8, 8) ")
    assert bias == "0.bias DTensor (8,) 32 parameter"
    assert shard == "{'parameter'} 256"
