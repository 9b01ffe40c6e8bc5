"""Tensor classes on a real GPU, against counts that the code under test has no part in."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
CLASSES = ROOT / "benchmarks" / "classes.py"


def job(name: str, tmp_path: Path) -> dict:
    out = tmp_path / "out.json"
    command = [sys.executable, str(CLASSES), name, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    row = json.loads(out.read_text())["jobs"][name]
    assert done.returncode == 0, row.get("error")
    return row


def check(row: dict) -> None:
    reported = {name: row["classes"].get(name, 0) for name in row["counted"]}
    assert reported == row["counted"]
    forward = row["forward"]
    assert forward["saved"] <= forward["activation"] <= forward["saved"] * 1.01
    assert row["unattributed_ratio"] < 0.02, forward["stacks"]
    assert forward["unattributed_ratio"] < 0.02, forward["stacks"]


@pytest.mark.parametrize(
    "name", ["mlp", "transformer", "lstm", "tied", "amp", "checkpointing", "compiled"]
)
@pytest.mark.usefixtures("devices")
def test_classes_are_what_the_job_holds(name, tmp_path):
    check(job(name, tmp_path))


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_classes_of_two_ranks(name, tmp_path, devices):
    if devices < 2:
        pytest.skip("needs two GPUs")
    check(job(name, tmp_path))


def run(body: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        capture_output=True, text=True, timeout=250, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ok", done.stdout + done.stderr


@pytest.mark.usefixtures("devices")
def test_classes_are_read_while_autograd_writes_gradients():
    """Reading `.grad` from another thread ends this loop with a segmentation fault."""
    run("""
        import threading, time
        import gpumem_otel
        gpumem_otel.install(interval_seconds=0.1, serve=False)
        import torch
        from gpumem_otel.api import lifecycle
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(40)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        agent = lifecycle.current()
        stop, reads, errors = threading.Event(), [], []
        def read():
            while not stop.wait(0.005):
                agent.tensors.want(0)
                try:
                    agent.reader.live_now()
                except Exception as error:
                    errors.append(error)
                reads.append(sum(agent.reader.classes()[0].values()))
        thread = threading.Thread(target=read)
        thread.start()
        end = time.monotonic() + 40
        steps = 0
        while time.monotonic() < end:
            optimizer.zero_grad()
            model(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            steps += 1
        stop.set()
        thread.join()
        assert not errors, errors
        assert steps > 100 and len(reads) > 100, (steps, len(reads))
        assert agent.counters.get("readouts_breached") == 0
        print("ok")
    """)


@pytest.mark.usefixtures("devices")
def test_gauge_and_flame_graph_show_the_same_number():
    run("""
        import gpumem_otel
        gpumem_otel.install(interval_seconds=3600, serve=False, metrics_level="full")
        import torch
        from gpumem_otel.api import lifecycle
        from gpumem_otel.snapshot.tensor_classes import classes_of
        from gpumem_otel.metrics.table import Level, rows
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        gpumem_otel.watch(model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(64, 512, device="cuda")).sum().backward()
            optimizer.step()
        agent = lifecycle.current()
        (profile,) = agent.reader.live_now()
        reported = {found.value: size for found, size in classes_of(profile).items()}
        gauge = {
            attributes["tensor_class"]: value
            for metric, attributes, value in rows(agent.observe(), Level.FULL)
            if metric.prometheus == "gpumem_class_bytes"
        }
        assert {name: size for name, size in gauge.items() if size} == reported, (gauge, reported)
        assert sum(reported.values()) == torch.cuda.memory_allocated()
        print("ok")
    """)


@pytest.mark.usefixtures("devices")
def test_an_inference_server_has_its_classes():
    """No optimizer: a watched model and a cache by name."""
    run("""
        import gpumem_otel
        gpumem_otel.install(interval_seconds=3600, serve=False)
        import torch
        from gpumem_otel.api import lifecycle
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).cuda().eval()
        cache = [torch.zeros(1 << 20, device="cuda") for _ in range(3)]
        gpumem_otel.watch(model, kv_cache=cache)
        agent = lifecycle.current()
        batch = torch.randn(64, 512, device="cuda")
        with torch.inference_mode():
            for _ in range(3):
                out = model(batch)
        agent.reader.live_now()
        found = agent.reader.classes()[0]
        assert found["kv_cache"] == 3 * (4 << 20), found
        assert found["parameter"] >= 8 * 512 * 513 * 4, found
        assert found["input"] == 64 * 512 * 4, found
        assert found.get("unattributed", 0) == 0, found
        print("ok")
    """)


@pytest.mark.usefixtures("devices")
def test_a_captured_graph_is_left_alone():
    run("""
        import threading
        import gpumem_otel
        gpumem_otel.install(interval_seconds=0.1, serve=False)
        import torch
        from gpumem_otel.api import lifecycle
        model = torch.nn.Linear(256, 256).cuda()
        optimizer = torch.optim.Adam(model.parameters(), capturable=True)
        batch = torch.randn(32, 256, device="cuda")
        agent = lifecycle.current()
        def step():
            optimizer.zero_grad(set_to_none=True)
            model(batch).sum().backward()
            optimizer.step()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        stop = threading.Event()
        def read():
            while not stop.wait(0.002):
                agent.tensors.want(0)
                agent.reader.live_now()
        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(30):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            graph.replay()
        stop.set()
        thread.join()
        torch.cuda.synchronize()
        print("ok")
    """)
