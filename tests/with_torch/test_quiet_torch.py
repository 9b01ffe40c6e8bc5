"""The gate before the hooks on the job's own threads, and the helper beside a real torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from support import fake_driver  # noqa: E402

from gpumem_otel.base.gate import QuietGate  # noqa: E402
from gpumem_otel.capture.tensor_table import TensorTable  # noqa: E402
from gpumem_otel.errors import YieldRefusedError  # noqa: E402
from gpumem_otel.yielding.driver.checkpoint import DriverCheckpoint  # noqa: E402
from gpumem_otel.yielding.driver.helper_client import HelperSettings  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def table():
    now = [0.0]
    gate, took = QuietGate(), []
    made = TensorTable(took.append, monotonic=lambda: now[0], host_too=True, gate=gate)
    made.start()
    made.gate, made.took, made.now = gate, took, now
    yield made
    made.stop()


def test_no_table_is_made_while_the_gate_is_closed(table):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    table.watch("", model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert table.gate.close(1.0)
    table.want(0.0)
    table.now[0] += 100
    inputs = torch.ones(1, 4)
    table.stepped(optimizer)
    with torch.no_grad():
        model(inputs)
    assert table.took == []
    assert table.class_at(inputs.untyped_storage().data_ptr()) is None
    table.gate.open()
    table.stepped(optimizer)
    assert len(table.took) == 1
    gradient = model.weight.grad.untyped_storage().data_ptr()
    assert table.class_at(gradient) == "gradient"
    assert table.gate.close(1.0), "a hook has not left"


def test_the_helper_of_a_process_with_torch_has_none(tmp_path, monkeypatch):
    path = tmp_path / "device.json"
    monkeypatch.setenv(fake_driver.VARIABLE, str(path))
    device = fake_driver.Device(path)
    names = {"driver": "support.fake_driver", "nvml": "support.fake_driver"}
    driver = DriverCheckpoint(environ={}, settings=HelperSettings(environ=os.environ, **names))
    driver.lock_and_checkpoint(5.0, None)
    link = driver._link
    maps = Path(f"/proc/{driver.helper_pid}/maps").read_text()
    assert "torch" not in maps
    driver.restore(5.0)
    assert device["state"] == 0
    assert link.join(10)


def test_without_a_driver_the_real_bindings_say_so():
    if not importlib.util.find_spec("cuda") or not importlib.util.find_spec("cuda.bindings"):
        pytest.skip("cuda-bindings is not installed")
    loaded = "cuda.bindings.driver" in sys.modules
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is a driver here")
    driver = DriverCheckpoint()
    none = "there is no NVIDIA driver here (libcuda.so.1 cannot be loaded)"
    assert driver.refusal() == none
    with pytest.raises(YieldRefusedError) as caught:  # of the helper, who asks the bindings
        driver.prepare()
    assert str(caught.value) == f"driver checkpoint: {none}"
    assert (driver.state, driver.helper_pid) == ("running", None)
    assert loaded == ("cuda.bindings.driver" in sys.modules), "it was loaded into the job"
