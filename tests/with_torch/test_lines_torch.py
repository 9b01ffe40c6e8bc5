"""The line profiler with a real torch: no CUDA, a pretended one, and `torch.compile`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

TESTS = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path):
    """Run a script in a Python of its own; what it printed."""

    def start(script):
        file = tmp_path / "job.py"
        file.write_text(textwrap.dedent(script))
        done = subprocess.run(
            [sys.executable, str(file)], capture_output=True, text=True, timeout=380,
            env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return start


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_lines_run_and_cuda_is_left_alone(run):
    output = run("""
        import gpumem_otel, torch

        @gpumem_otel.profile
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 4)

            def forward(self, x):
                return self.layer(x)

        net = Net()
        net(torch.ones(2, 4)).sum().backward()
        assert net.layer.weight.grad is not None
        assert not torch.cuda.is_initialized()
    """)
    assert "## __main__.Net.forward (job.py:10), 1 call" in output
    assert "(no GPU memory was used by this process)" in output


@pytest.mark.skipif(not torch.version.cuda, reason="a CUDA build of torch")
def test_the_own_counters_of_torch_are_as_without_us(run):
    output = run("""
        import torch
        from support.pretend_cuda import pretend
        allocator = pretend(torch)
        from support import line_memory
        memory = line_memory.Memory()
        c = torch._C
        c._cuda_memoryStats, c._cuda_resetPeakMemoryStats = memory.stats, memory.reset_peaks
        torch.cuda._lazy_init()
        import gpumem_otel

        def work():
            kept = memory.alloc(1 << 20)
            memory.alloc(4 << 20).free()
            return kept

        memory.alloc(64 << 20).free()
        with gpumem_otel.LineProfiler(work) as lines:
            kept = work()
            assert torch.cuda.max_memory_allocated(0) == 64 << 20
        assert torch.cuda.max_memory_allocated(0) == 64 << 20
        assert torch.cuda.memory_allocated(0) == 1 << 20
        torch.cuda.reset_peak_memory_stats(0)
        assert torch.cuda.max_memory_allocated(0) == 1 << 20
        assert c._cuda_memoryStats == memory.stats
        print(lines.display())
    """)
    (line,) = (text for text in output.splitlines() if "memory.alloc(4 << 20)" in text)
    assert "5.0 MiB" in line


def test_a_profiled_function_compiles_as_without_us(run):
    output = run("""
        import gpumem_otel, torch

        @gpumem_otel.profile
        def inner(x):
            y = x + 1
            return y * 2

        def outer(x):
            return inner(x) - 1

        compiled = torch.compile(outer, backend="eager", fullgraph=True)
        x = torch.arange(4.0)
        assert torch.equal(compiled(x), outer(x))
        direct = torch.compile(inner, backend="eager", fullgraph=True)
        assert torch.equal(direct(x), (x + 1) * 2)
    """)
    assert "inner (job.py:4), 1 call" in output
    assert "y = x + 1" in output
