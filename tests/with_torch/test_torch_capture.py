"""Arming, recording, symbols and names on the real torch of this environment, GPU or not.

Most of it runs in processes of its own, since arming and imports happen once per process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpumem_otel.capture.recorder import Recorder, known_arity, torch_version
from gpumem_otel.snapshot.snapshot import from_torch

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]


def run(script, *, timeout=110):
    """Run a script; it prints `ok` at its end. Returns the lines before that."""
    environ = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:gpumem_otel", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=timeout, env=environ,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[-1:] == ["ok"], done.stdout + done.stderr
    return lines[:-1]


@pytest.mark.parametrize("order", ["before", "after"])
def test_arming_on_the_real_queue(order):
    """The bodies that `_lazy_init` would run, run here by hand: there may be no GPU."""
    run(f"""
        import sys
        from gpumem_otel.capture.arming import Arming
        path = list(sys.meta_path)
        heard = []
        arming = Arming(lambda: heard.append("armed"),
                        on_import=lambda t: heard.append((t.__name__, hasattr(t, "compile"))))
        if {order == "after"}:
            import torch
        arming.start()
        assert "torch" in sys.modules or heard == []
        import torch.cuda
        assert heard == [("torch", True)], heard
        assert sys.meta_path == path
        assert type(torch.__spec__.loader).__name__ == "SourceFileLoader"
        assert "exec_module" not in vars(torch.__spec__.loader)
        assert not torch.cuda.is_initialized()

        def ours():
            queued = [call for call, _ in torch.cuda._queued_calls]
            return [call for call in queued if call.__module__.startswith("gpumem")]

        assert len(ours()) == 1
        arming.stop()
        assert ours() == []
        arming.start()
        (call,) = ours()
        call()
        assert heard[-1] == "armed" and heard.count("armed") == 1
        call()
        assert heard.count("armed") == 1
        arming.stop()
        print("ok")
        """)


def test_a_machine_without_a_gpu_is_silent():
    """CUDA is asked for in vain: the job gets torch's own error, we read and record nothing."""
    run("""
        import logging, sys, threading
        logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
        from gpumem_otel.capture.arming import Arming
        from gpumem_otel.capture.source import TorchSource
        from gpumem_otel.base.counters import Counters
        source = TorchSource(counters=Counters())
        assert source.status().reason == "no_torch"
        arming = Arming(source.start, on_import=source.prepare)
        arming.start()
        import torch
        original = source.recorder._record
        if original is not None:
            assert torch._C._cuda_record_memory_history is not original
        assert source.status().reason in {"not_initialised", "no_cuda"}
        assert source.stats() == ()
        assert not torch.cuda.is_initialized()
        assert threading.active_count() == 1
        arming.stop()
        source.stop()
        if original is not None:
            assert torch._C._cuda_record_memory_history is original
        assert torch.__getattr__.__module__ == "torch"
        assert source.status().reason == "disabled"
        print("ok")
        """)


def test_the_real_signature_is_known():
    record = getattr(torch._C, "_cuda_record_memory_history", None)
    if record is None:
        pytest.skip("this torch was built without CUDA")
    assert known_arity(record, (0, 0)) == known_arity(None, torch_version(torch))


def test_an_empty_snapshot_is_read():
    if not hasattr(torch._C, "_cuda_memorySnapshot"):
        pytest.skip("this torch was built without CUDA")
    recorder = Recorder()
    recorder.prepare(torch)
    try:
        for traces in (False, True):
            assert from_torch(recorder.snapshot(traces=traces)).devices() == ()
    finally:
        recorder.stop()


def test_symbolization_imports_nothing_and_a_real_import_beside_it_works():
    run("""
        import sys, threading, torch
        from gpumem_otel.capture.patching import InductorGuard
        guard = InductorGuard()
        original = torch.__dict__["__getattr__"]
        guard.install(torch)
        profiler = torch._C._profiler

        def symbolize():
            with guard.ours():
                return profiler.symbolize_tracebacks(
                    [profiler.gather_traceback(python=True, script=False, cpp=False)])

        loaded = set(sys.modules)
        for _ in range(100):
            frames = symbolize()
        assert frames[0][0]["name"] == "symbolize"
        assert set(sys.modules) - loaded == set(), sorted(set(sys.modules) - loaded)[:5]
        assert "torch._inductor" not in sys.modules
        sys.setswitchinterval(1e-5)
        stop, errors = threading.Event(), []

        def loop():
            while not stop.is_set():
                try:
                    symbolize()
                except Exception as error:
                    errors.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        import torch._inductor
        assert torch._inductor is sys.modules["torch._inductor"]
        stop.set()
        thread.join()
        assert errors == []
        guard.uninstall()
        assert torch.__dict__["__getattr__"] is original
        print("ok")
        """)


def test_torchs_own_functions_get_their_qualified_names():
    lines = run("""
        import sys, torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from gpumem_otel.capture.frame_names import QualifiedNamer

        frames = set()

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                frame = sys._getframe()
                while frame is not None:
                    code = frame.f_code
                    frames.add((code.co_name, code.co_filename, frame.f_lineno))
                    frame = frame.f_back
                return func(*args, **(kwargs or {}))

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))

            def forward(self, x):
                return self.body(x)

        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())
        with Watch():
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        before = set(sys.modules)
        namer = QualifiedNamer()
        print("\\n".join(sorted({namer(*frame) for frame in frames})))
        assert set(sys.modules) == before
        print("ok")
        """)
    names = set(lines)
    assert {
        "torch.nn.modules.linear.Linear.forward",
        "torch.nn.modules.normalization.LayerNorm.forward",
        "torch.nn.modules.container.Sequential.forward",
        "torch.nn.modules.module.Module._call_impl",
        "torch.nn.functional.layer_norm",
        "torch._tensor.Tensor.backward",
        "torch.autograd.backward",
        "torch.optim.optimizer.Optimizer.profile_hook_step.<locals>.wrapper",
    } <= names
    assert any(
        name.startswith(("torch.optim.adam", "torch.optim.adamw")) and name.endswith(".step")
        for name in names
    )


def test_wrapping_the_recorder_does_not_change_what_compile_sees():
    script = """
        import sys, torch
        from torch._dynamo.utils import counters
        from gpumem_otel.capture.recorder import Recorder
        recorder = Recorder()
        if {installed}:
            recorder.prepare(torch)

        @torch.compile(backend="eager")
        def work(x):
            if torch.cuda.is_available():
                x = x + 1
            return torch.relu(x) * 2

        for size in (2, 3, 4):
            work(torch.ones(size))
        print(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
        recorder.stop()
        print("ok")
        """
    assert run(script.format(installed=False)) == run(script.format(installed=True))
