"""What we rely on of the real torch when an allocation fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumem_otel.oom.observer import is_out_of_memory

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

TESTS = Path(__file__).parents[1]


def test_the_error_is_known_by_its_name():
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("x"))
    assert not is_out_of_memory(RuntimeError("CUDA error: out of memory"))


@pytest.mark.skipif(not torch.version.cuda, reason="a CUDA build of torch")
def test_this_torch_takes_observers():
    assert callable(torch._C._cuda_attach_out_of_memory_observer)


@pytest.mark.skipif(not torch.version.cuda, reason="a CUDA build of torch")
def test_the_observer_is_attached_once_and_not_before_cuda_is_up(tmp_path):
    """Before, torch would crash."""
    script = """
import torch
from support.pretend_cuda import pretend
allocator = pretend(torch)
attached = []
torch._C._cuda_attach_out_of_memory_observer = attached.append
import gpumem_otel
gpumem_otel.install()
assert attached == []
torch.cuda._lazy_init()
assert len(attached) == 1
assert attached[0](0, 1 << 30, 8 << 30, 1 << 20) is None
gpumem_otel.uninstall()
assert attached[0](0, 1 << 30, 8 << 30, 1 << 20) is None
gpumem_otel.install()
assert len(attached) == 1
assert attached[0](0, 1 << 30, 8 << 30, 1 << 20) is None
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={
            "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(TESTS),
            "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run"),
        },
        capture_output=True, text=True, timeout=380,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('{"event":"gpumem_oom"') == 2
