"""Who holds memory of a GPU, and what letting go of a traceback gives back."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(devices):
    """Run a scenario in a process of its own, from a file so that its frames have one."""

    def call(script, path):
        path.write_text(textwrap.dedent(script))
        done = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, timeout=250,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert done.stdout.splitlines()[-1:] == ["ok"], done.stdout[-4000:] + done.stderr[-4000:]

    return call


def test_block_stack_class_and_holders_of_a_tensor_and_an_address(run, tmp_path):
    run("""
        import gpumem_otel; gpumem_otel.install()
        import torch
        def allocate():
            return torch.empty(1000, 1000, device="cuda")
        class Owner: pass
        owner = Owner(); owner.cache = {"k": [allocate()]}
        x = owner.cache["k"][0]
        for subject in (x, x.untyped_storage(), x.data_ptr(), x.data_ptr() + 12345):
            answer = gpumem_otel.holders(subject)
            assert answer.requested_bytes == 4_000_000, answer
            assert answer.block_bytes >= 4_000_000 and answer.block_bytes % 512 == 0
            assert any(frame.name.endswith("allocate") for frame in answer.stack), answer.stack
            assert {h.path for h in answer.held_by} >= {"x", "owner.cache['k'][0]"}, str(answer)
            assert answer.subject.device == "cuda:0"
        model = torch.nn.Linear(8, 8).cuda()
        model(torch.rand(2, 8, device="cuda")).sum().backward()
        assert gpumem_otel.holders(model.weight).tensor_class.value == "parameter"
        gradient = gpumem_otel.holders(model.weight.grad)
        assert gradient.tensor_class.value == "gradient"
        assert any(h.path == "model.weight.grad" for h in gradient.held_by), str(gradient)
        print("ok")
    """, tmp_path / "job.py")  # fmt: skip


def test_after_an_out_of_memory_the_traceback_gives_its_bytes_back(run, tmp_path):
    run("""
        import sys, weakref
        import torch, gpumem_otel
        GIB = 1 << 30
        seen = []
        def fail():
            activations = torch.empty(GIB, dtype=torch.uint8, device="cuda")
            seen.append(weakref.ref(activations))
            free = torch.cuda.mem_get_info()[0]
            torch.empty(free + GIB, dtype=torch.uint8, device="cuda")
        def cell():
            try:
                fail()
            except torch.cuda.OutOfMemoryError as error:
                # what an interactive interpreter keeps of an uncaught error
                sys.last_value, sys.last_traceback = error, error.__traceback__
        cell()
        (holder,) = gpumem_otel.holders(seen[0]()).held_by
        assert (holder.path, holder.kind) == ("activations", "last traceback"), holder
        assert "fail (job.py:" in holder.place, holder
        before = torch.cuda.memory_allocated()
        freed = gpumem_otel.release_traceback()
        assert freed == before - torch.cuda.memory_allocated() == GIB, freed
        assert gpumem_otel.release_traceback() == 0
        print("ok")
    """, tmp_path / "job.py")  # fmt: skip
