"""install() beside a real torch: silent without a GPU, harmless with one (a pretended one here).

Everything runs in processes of its own, since imports, CUDA and hooks happen once per process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpumem_otel.cli.launch import site_hook_folder

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

TESTS = Path(__file__).parents[1]
NO_GPU = pytest.mark.skipif(
    not torch.version.cuda or torch.cuda.is_available(), reason="a CUDA build without a GPU"
)
CUDA_BUILD = pytest.mark.skipif(not torch.version.cuda, reason="a CUDA build of torch")

PRETEND = """
import torch
from support.pretend_cuda import pretend
allocator = pretend(torch)
"""
"""After it `torch.cuda._lazy_init()` works, and arms."""


@pytest.fixture
def environ(tmp_path):
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(TESTS),
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }


@pytest.fixture
def run(environ):
    """Run a script in a Python of its own; its stdout and stderr."""

    def start(script, *arguments, command=(sys.executable,), **more):
        done = subprocess.run(
            [*command, "-c", textwrap.dedent(script), *arguments],
            capture_output=True, text=True, timeout=380, env={**environ, **more},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return start


@NO_GPU
@pytest.mark.parametrize("order", ["before", "after"])
def test_without_a_gpu_install_is_silent_and_uninstall_leaves_nothing(run, order):
    """GIVEN a CUDA build and no GPU WHEN installed, used, uninstalled THEN torch is as it was."""
    out, err = run(
        """
        import os, sys, threading
        import gpumem_otel

        def state():
            optimizer = sys.modules["torch.optim.optimizer"]
            hooks = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
            record = torch._C._cuda_record_memory_history
            return {
                "record": id(record), "legacy": id(torch._C._cuda_record_memory_history_legacy),
                "getattr": id(torch.__dict__["__getattr__"]),
                "queue": [id(call) for call, _ in torch.cuda._queued_calls],
                "hooks": [list(one) for one in hooks],
                "loader": sorted(vars(torch.__spec__.loader)),
                "meta_path": [id(finder) for finder in sys.meta_path],
                "excepthook": id(sys.excepthook),
            }

        def sockets():
            links = []
            for entry in os.listdir("/proc/self/fd"):
                try:
                    links.append(os.readlink(f"/proc/self/fd/{entry}"))
                except OSError:
                    pass
            return [link for link in links if link.startswith("socket:")]

        def install():
            gpumem_otel.install(serve=True, otlp=True, pyroscope_url="http://127.0.0.1:9")

        if sys.argv[1] == "before":
            install()
            assert "torch" not in sys.modules
            import torch
        else:
            import torch
            before = state()
            modules = set(sys.modules)
            install()
            new = {name for name in set(sys.modules) - modules if name.startswith("torch")}
            assert new == set(), new
        assert "torch._inductor" not in sys.modules
        assert threading.active_count() == 1
        assert sockets() == []
        assert not torch.cuda.is_initialized()
        # a job on the CPU, with all that could wake us
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            gpumem_otel.step()
        assert not torch.cuda.is_available()
        torch.manual_seed(1)
        try:
            torch.ones(1, device="cuda")
        except (RuntimeError, AssertionError) as error:
            shown = str(error)
        assert "NVIDIA driver" in shown, shown
        assert threading.active_count() == 1
        assert sockets() == []
        assert not torch.cuda.is_initialized()
        installed = state()
        assert installed["hooks"] == [[], []]
        gpumem_otel.uninstall()
        after = state()
        if sys.argv[1] == "after":
            assert after == before, (after, before)
        assert after["record"] != installed["record"]
        ours = [call for call, _ in torch.cuda._queued_calls
                if str(call.__module__).startswith("gpumem")]
        assert ours == []
        assert type(torch._C._cuda_record_memory_history).__name__ in (
            "builtin_function_or_method", "nb_func"), torch._C._cuda_record_memory_history
        assert torch.__dict__["__getattr__"].__module__ == "torch"
        assert torch.__dict__["__getattr__"].__code__.co_filename == torch.__file__
        assert "exec_module" not in after["loader"]
        assert threading.active_count() == 1 and sockets() == []
        assert not os.path.exists(os.environ["GPUMEM_OTEL_RUN_DIR"])
        """,
        order,
    )
    assert (out, err) == ("", "")


@NO_GPU
def test_doctor_says_why_nothing_is_recorded(environ):
    done = subprocess.run(
        [sys.executable, "-m", "gpumem_otel.cli.main", "doctor", "--json"],
        capture_output=True, text=True, timeout=380, env=environ,
    )  # fmt: skip
    report = json.loads(done.stdout)
    cuda = next(check for check in report["checks"] if check["name"] == "cuda")
    assert cuda["status"] == "missing"
    assert f"built for CUDA {torch.version.cuda} but sees no device" in cuda["detail"]
    assert "nothing is recorded" in cuda["detail"]
    assert cuda["advice"]
    assert done.returncode == (0 if report["ok"] else 1)


OWN_METRICS = """
import sys
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest

which = sys.argv[1]
if which != "without":
    import gpumem_otel
    gpumem_otel.install(serve=True, port=0, otlp=which == "otlp")
own = CollectorRegistry()
done = Counter("job_steps", "Steps of the job.", ["phase"], registry=own)
default = {name for name in REGISTRY._names_to_collectors if not name.endswith("_created")}
torch.cuda._lazy_init()
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
counter = metrics.get_meter("job").create_counter("job.steps")
if which != "without":
    from gpumem_otel.api import lifecycle
    assert lifecycle.current().wait_listening(30)
    allocator.alloc(1000)
for _ in range(3):
    done.labels("train").inc()
    counter.add(1)
names = {m.name for r in reader.get_metrics_data().resource_metrics
         for s in r.scope_metrics for m in s.metrics}
assert {n for n in REGISTRY._names_to_collectors if not n.endswith("_created")} == default
print(repr(generate_latest(own)))
print(repr(sorted(default)))
print(sorted(n for n in names if not n.startswith("gpumem.")))
print("gpumem.allocated" in names, any(n.startswith("gpumem.") for n in names))
assert type(metrics.get_meter_provider()) is MeterProvider
if which != "without":
    gpumem_otel.uninstall()
"""


@CUDA_BUILD
def test_a_job_with_its_own_registry_and_provider_exports_what_it_did(run):
    """GIVEN an armed agent WHEN the job exports by itself THEN not a byte of it changes."""
    # what makes created-at samples equal: they are left out
    quiet = {"PROMETHEUS_DISABLE_CREATED_SERIES": "true"}
    found = {
        which: run(PRETEND + OWN_METRICS, which, **quiet)[0].splitlines()
        for which in ("without", "with", "otlp")
    }
    assert "job_steps_total" in found["without"][0]
    assert found["without"][2] == "['job.steps']"
    assert found["with"] == found["without"]
    assert found["otlp"][:3] == found["without"][:3]
    assert found["without"][3] == "False False"
    assert found["otlp"][3] == "True True"


COMPILE = """
import json, sys
which, backend = sys.argv[1:]
if which == "with":
    import gpumem_otel
    gpumem_otel.install(serve=True, port=0, interval_seconds=0.2)
    torch.cuda._lazy_init()
    allocator.alloc(1000)
from torch._dynamo.utils import counters

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x):
        x = self.body(x)
        x = x + 1
        torch._dynamo.graph_break()
        return self.head(x)

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, backend=backend)
losses = []
for size in (2, 3, 4, 2):  # recompiles
    loss = compiled(torch.ones(size, 8)).pow(2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(round(float(loss), 5))
if which == "with":
    from gpumem_otel.api import lifecycle
    agent = lifecycle.current()
    assert agent.wait_listening(30) and agent.flush(30) is not None
    steps = agent.observe().steps.steps
    assert steps == 4, steps
    gpumem_otel.uninstall()
print(json.dumps([
    counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"],
    sum(counters["graph_break"].values()), dict(counters.get("recompiles", {})),
    dict(counters["frames"]), losses,
]))
"""


@CUDA_BUILD
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_sees_the_same_with_and_without_an_armed_agent(run, backend):
    """GIVEN hooks, recorder and read-outs on WHEN a model is compiled THEN all counts are equal."""
    lines = {
        which: run(PRETEND + COMPILE, which, backend)[0].splitlines()[-1]
        for which in ("without", "with")
    }
    assert lines["with"] == lines["without"]
    graphs, _, breaks, *_ = json.loads(lines["with"])
    assert graphs >= 2
    assert breaks >= 1


@CUDA_BUILD
def test_a_forked_worker_that_owns_the_gpu_is_armed_anew(run):
    """GIVEN a parent that never uses CUDA WHEN a forked child does THEN the child is the target."""
    out, _ = run(
        PRETEND
        + """
import json, multiprocessing, os, threading, urllib.request
import gpumem_otel
from gpumem_otel.api import lifecycle
from gpumem_otel.serve import discovery as rundir
gpumem_otel.install(serve=True, port=0)

def work(pipe):
    agent = lifecycle.current()
    before = (threading.active_count(), agent.observe() is None, agent.address is None)
    torch.cuda._lazy_init()
    allocator.alloc(4096)
    assert agent.wait_listening(30)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    host, port = agent.address
    with urllib.request.urlopen(f"http://{host}:{port}/metrics") as answer:
        text = answer.read().decode()
    (entry,) = rundir.targets(os.environ["GPUMEM_OTEL_RUN_DIR"])
    pipe.send([before, os.getpid() == entry.pid == agent.queries.identity().pid, entry.port == port,
               [line for line in text.splitlines()
                if line.startswith(("gpumem_allocated_bytes{", "gpumem_steps_total{"))],
               allocator.mode])
    pipe.recv()

context = multiprocessing.get_context("fork")
ours, theirs = context.Pipe()
child = context.Process(target=work, args=(theirs,))
child.start()
answer = ours.recv()
assert lifecycle.current().observe() is None and lifecycle.current().address is None
assert threading.active_count() == 1 and allocator.mode is None
ours.send("done")
child.join(30)
left = rundir.targets(os.environ["GPUMEM_OTEL_RUN_DIR"])
print(json.dumps([answer, child.exitcode, len(left)]))
"""
    )
    answer, code, targets = json.loads(out)
    before, own_pid, own_port, lines, mode = answer
    assert before == [1, True, True]
    assert own_pid
    assert own_port
    assert lines == [
        'gpumem_allocated_bytes{device="0",rank="0"} 4096.0',
        'gpumem_steps_total{device="0",rank="0"} 1.0',
    ]
    assert mode == "state"
    assert code == 0
    assert targets == 0


@CUDA_BUILD
def test_run_arms_a_job_that_does_not_know_of_us(run):
    """GIVEN `gpumem-otel run` WHEN the job imports torch THEN its recorder and queue are hooked."""
    out, _ = run(
        """
        import sys, threading
        assert "torch" not in sys.modules
        import torch
        ours = [call for call, _ in torch.cuda._queued_calls
                if str(call.__module__).startswith("gpumem")]
        print(len(ours), torch._C._cuda_record_memory_history.__module__,
              threading.active_count(), torch.cuda.is_initialized())
        """,
        command=(
            sys.executable, "-m", "gpumem_otel.cli.main", "run", "--serve", "--port", "0", "--",
            sys.executable,
        ),
    )  # fmt: skip
    count, module, threads, initialised = out.split()
    assert (count, threads, initialised) == ("1", "1", "False")
    # a wrapper that says what it wraps
    assert (
        module
        == run("import torch; print(torch._C._cuda_record_memory_history.__module__)")[0].strip()
    )


def test_a_deprecated_name_of_torch_is_reported_where_the_job_used_it(run):
    """GIVEN the guard on torch's names WHEN torch warns THEN of the job's line, not of ours."""
    out, _ = run(
        """
        import warnings
        import torch
        import gpumem_otel
        gpumem_otel.install()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert isinstance(torch.has_mps, bool)
        print([(w.filename, w.lineno) for w in caught])
        try:
            torch.no_such_name
        except AttributeError as error:
            print(error)
        """
    )
    shown, error = out.splitlines()
    assert shown == "[('<string>', 8)]"
    assert error == "module 'torch' has no attribute 'no_such_name'"


INDUCTOR = """
import json, os, sys
import torch
from torch._dynamo.utils import counters

def compiled(x):
    return torch.nn.functional.gelu(x @ x).softmax(-1) * 2

if __name__ == "__main__":
    try:
        from torch._inductor.async_compile import AsyncCompile
    except ImportError:  # where torch 2.3 has it
        from torch._inductor.codecache import AsyncCompile
    pool = AsyncCompile.process_pool()
    children = []
    future = pool.submit(os.getpid)
    children.append(future.result(timeout=120))
    result = torch.compile(compiled)(torch.eye(16))
    print(json.dumps({
        "sum": round(float(result.sum()), 4),
        "graphs": counters["stats"]["unique_graphs"],
        "worker": children[0] != os.getpid(),
        "files": os.path.exists(os.environ["GPUMEM_OTEL_RUN_DIR"]),
    }))
"""


@CUDA_BUILD
def test_compile_workers_of_inductor_are_not_disturbed(run, environ):
    """GIVEN `gpumem-otel run` WHEN inductor starts its workers THEN they work and show nothing."""
    more = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    without, quiet = run(INDUCTOR, **more)
    hooked, err = run(
        INDUCTOR,
        **more,
        PYTHONPATH=os.pathsep.join((site_hook_folder(), str(TESTS))),
        GPUMEM_OTEL_SERVE="1",
        GPUMEM_OTEL_PORT="0",
    )
    assert json.loads(hooked) == json.loads(without)
    found = json.loads(hooked)
    assert found["sum"] == 32.0
    assert found["worker"]
    assert not found["files"]
    # the same warnings (torch's own, of its deprecated names), and nothing else
    assert re.findall("Warning: .*", err) == re.findall("Warning: .*", quiet)
    assert len(err.splitlines()) == len(quiet.splitlines())


@CUDA_BUILD
def test_a_child_forked_from_an_armed_parent_has_no_hook_of_ours(run):
    out, err = run(
        PRETEND
        + """
import os, sys
import gpumem_otel
gpumem_otel.install()
torch.cuda._lazy_init()
model = torch.nn.Linear(2, 2)
gpumem_otel.watch(model)

def hooks():
    optimizer = sys.modules["torch.optim.optimizer"]
    module = sys.modules["torch.nn.modules.module"]
    return [
        len(kept)
        for kept in (
            optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks,
            module._global_parameter_registration_hooks, module._global_buffer_registration_hooks,
            model._forward_pre_hooks, model._forward_hooks,
        )
    ]

child = os.fork()
if child == 0:
    print(hooks(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(hooks(), flush=True)
"""
    )
    assert out.splitlines() == ["[0, 0, 0, 0, 0, 0]", "[1, 1, 1, 1, 1, 1]"], err
