"""The tensor report on a GPU: exact bytes, closed accounting, names of other memory."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]

PRELUDE = """
import gc, torch, gpumem_otel
MIB = 1 << 20

def checked(*args, **options):
    "A report of device 0 whose totals add up."
    report = gpumem_otel.report(*args, **options)
    device = next(one for one in report.devices if one.device == "cuda:0")
    held = torch.cuda.memory_allocated(0)
    assert device.allocated_bytes == held, (device.allocated_bytes, held)
    assert sum(part.size_bytes for part in device.parts) == held, str(report)
    assert sum(part.size_bytes for part in device.classes) == held, str(report)
    assert device.reserved_bytes == torch.cuda.memory_reserved(0)
    assert sum(p.size_bytes for p in device.cached) == device.reserved_bytes - held
    rows = {row.name: row for row in (*device.rows, *device.saved) if row.device == "cuda:0"}
    for row in rows.values():
        if row.block_bytes:
            assert row.requested_bytes >= row.used_bytes or row.shares, row
            assert row.block_bytes >= row.requested_bytes and row.block_bytes % 512 == 0, row
    return report, device, rows
"""


@pytest.fixture
def run(devices):
    """Run a scenario in a process of its own; it prints `ok` at its end."""

    def call(script, *, timeout=250):
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
            capture_output=True, text=True, timeout=timeout,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))},
        )  # fmt: skip
        lines = done.stdout.splitlines()
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert lines[-1:] == ["ok"], done.stdout[-4000:] + done.stderr[-4000:]
        return lines[:-1]

    return call


@pytest.mark.parametrize("installed", [True, False])
def test_a_training_step_in_exact_requested_bytes(run, installed):
    run(f"""
        if {installed}: gpumem_otel.install()
        model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.LayerNorm(1000)).cuda()
        adam = torch.optim.AdamW(model.parameters())
        batch = torch.rand(33, 1000, device="cuda")
        out = model(batch).mean()
        out.backward(); adam.step()
        report, device, rows = checked(model, adam)
        for name, parameter in model.named_parameters():
            size = parameter.numel() * 4
            state = f"AdamW.{{name}}.exp_avg"
            for row in (name, name + ".grad", state, state + "_sq"):
                assert rows[row].used_bytes == rows[row].requested_bytes == size, rows[row]
        assert rows["batch"].used_bytes == 33 * 4000
        classes = {{part.name: part.size_bytes for part in device.classes}}
        def blocks(kind):
            return sum(r.block_bytes or 0 for r in device.rows if r.tensor_class.value == kind)
        for kind in ("parameter", "optimizer_state"):
            assert classes[kind] == blocks(kind) > 0, (kind, classes)
        assert classes["gradient"] >= blocks("gradient") > 0, classes
        if {installed}:
            assert classes.get("workspace", 0) > 0, classes
            assert any(part.name.startswith("workspace of cuBLAS") for part in device.parts)
            places = {{frame.name for frame in rows["batch"].stack}}
            assert any("<module>" in place for place in places), places
        else:
            assert rows["batch"].stack[0].name.startswith("[no stacks"), rows["batch"].stack
        text = str(report)
        for line in ("Storage on cuda:0", "The allocated memory on cuda:0", "Total Tensors"):
            assert line in text
        print("ok")
    """)


def test_the_example_in_which_two_megabytes_were_lost(run):
    run("""
        gpumem_otel.install()
        linear = torch.nn.Linear(1024, 1024).cuda()
        inp = torch.Tensor(512, 1024).cuda()
        out = linear(inp * (inp + 2)).mean()
        report, device, rows = checked(linear)
        row = rows["AddmmBackward0.mat1"]
        assert (row.used_bytes, row.tensor_class.value) == (2 * MIB, "activation"), str(report)
        named = [part.name for part in device.parts]
        assert not any("no Python object" in name and "cuBLAS" not in name for name in named), named
        print("ok")
    """)


def test_flattened_weights_share_one_storage(run):
    run("""
        lstm = torch.nn.LSTM(1024, 1024).cuda()
        inp = torch.Tensor(10, 10, 1024).cuda()
        out, _ = lstm(inp)
        out.mean().backward()
        report, device, rows = checked(lstm)
        first = rows["weight_ih_l0"]
        assert first.used_bytes == first.requested_bytes == 4 * (2 * 4096 * 1024 + 2 * 4096)
        for name in ("weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            assert rows[name].shares == "weight_ih_l0" and not rows[name].used_bytes, rows[name]
        assert "weight_hh_l0(->weight_ih_l0)" in str(report)
        print("ok")
    """)


def test_workspaces_saved_tensors_and_foreign_memory_adds_up(run):
    run("""
        gpumem_otel.install()
        model = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True).cuda()
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda"):
            out = model(torch.rand(4, 64, 256, device="cuda")).float().sum()
        scaler.scale(out)
        report, device, rows = checked(model)
        assert device.saved or any("Backward0" in name for name in rows), str(report)
        unseen = sum(p.size_bytes for p in device.parts if "no Python object (C++" in p.name)
        assert unseen < 0.02 * device.allocated_bytes, str(report)
        print("ok")
    """)


def test_the_walk_allocates_nothing_and_keeps_nothing(run):
    run("""
        import weakref
        model = torch.nn.Linear(512, 512).cuda()
        out = model(torch.rand(8, 512, device="cuda")).sum()
        sparse = torch.eye(16, device="cuda").to_sparse()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        reports = [gpumem_otel.report(model, verbose=True) for _ in range(3)]
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        gone = [weakref.ref(model.weight), weakref.ref(sparse)]
        del model, out, sparse
        assert [one() for one in gone] == [None, None]
        print("ok")
    """)


def test_a_report_makes_no_context_and_breaks_no_capture(run):
    run("""
        kept = torch.zeros(10)
        gpumem_otel.report(); gpumem_otel.holders(kept); gpumem_otel.release_traceback()
        assert not torch.cuda.is_initialized()
        x = torch.ones(1000, device="cuda")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = x * 2
            gpumem_otel.report(); gpumem_otel.holders(x)
            z = y + 1
        graph.replay(); torch.cuda.synchronize()
        assert z[0].item() == 3
        checked()
        print("ok")
    """)


def test_every_line_of_pytorch_memlab_has_one_of_ours(devices, tmp_path):
    if importlib.util.find_spec("pytorch_memlab") is None:
        pytest.skip("pytorch_memlab is not installed")
    out = tmp_path / "out.json"
    script = str(ROOT / "benchmarks" / "tensor_report.py")
    done = subprocess.run(
        [sys.executable, script, "--quick", "--out", str(out)],
        capture_output=True, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    results = json.loads(out.read_text())
    assert len(results["examples"]) == 7
    assert [one["unmatched"] for one in results["examples"]] == [[]] * 7
