"""The line profiler on a real GPU, and beside pytorch_memlab where that is installed.

Every scenario is a process of its own that prints one JSON line at its end. Peaks are compared
with torch's own counter, reset by hand before each statement in another process.
"""

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

NEEDS_MEMLAB = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_memlab") is None, reason="pytorch_memlab is not installed"
)

README = """
import torch
torch.cuda.init()

def inner():
    torch.nn.Linear(100, 100).cuda()

def outer():
    linear = torch.nn.Linear(100, 100).cuda()
    linear2 = torch.nn.Linear(100, 100).cuda()
    inner()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(3))

    def forward(self, inp):
        for layer in self.layers:
            inp = layer(inp).relu()
        return inp

def train(net, optimizer, inp):
    out = net(inp)
    loss = out.mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del out, loss

def switches():
    net1 = torch.nn.Linear(1024, 1024).cuda(0)
    set_target_gpu(1)
    net2 = torch.nn.Linear(1024, 1024).cuda(1)
    set_target_gpu(0)
    net3 = torch.nn.Linear(1024, 1024).cuda(0)

def prepare():
    "What cuBLAS allocates once is there before anything is measured."
    torch.manual_seed(0)
    net = Net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    inp = torch.rand(512, 1024, device="cuda")
    for _ in range(2):
        train(net, optimizer, inp)
    return net, optimizer, inp
"""

OURS = """
import gpumem_otel
from gpumem_otel import set_target_gpu
from gpumem_otel import LineProfiler

COLUMNS = ("active_bytes.all.peak", "reserved_bytes.all.peak")
FIRST = []

def show(lines):
    print(lines.display())
    assert lines.recorder.failure == "", lines.recorder.failure
    rows = {}
    for function in lines.display().to_dict()["functions"]:
        FIRST.append(f"{function['name']}:{function['first_line']}")
        for line in function["lines"]:
            used = line["devices"].get("0", {"columns": dict.fromkeys(COLUMNS, 0)})
            key = f"{function['name']}:{line['line']}"
            rows[key] = [used["columns"][name] for name in COLUMNS]
    return rows
"""

THEIRS = """
from pytorch_memlab import LineProfiler, set_target_gpu

COLUMNS = ("active_bytes.all.peak", "reserved_bytes.all.peak")
FIRST = []

def show(lines):
    shown = lines.display()
    print(shown)
    frame = shown._line_records
    return {
        f"{name}:{line}": [int(frame.loc[(name, line)][tuple(c.split("."))]) for c in COLUMNS]
        for name, line in frame.index
    }
"""


@pytest.fixture
def run(devices, tmp_path):
    """Run scripts as one file; the JSON of their last line, and all that was printed."""

    def call(*parts, **environ):
        file = tmp_path / "job.py"
        file.write_text("\n".join(textwrap.dedent(part) for part in parts))
        done = subprocess.run(
            [sys.executable, str(file)],
            capture_output=True,
            text=True,
            timeout=280,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path)), **environ},
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        found = [line for line in done.stdout.splitlines() if line.startswith("JSON ")]
        return json.loads(found[-1][5:]), done.stdout

    return call


SIDE_BY_SIDE = """
import json
with LineProfiler(outer, inner) as lines:
    outer()
rows = show(lines)
state = prepare()
torch.cuda.empty_cache()  # pytorch_memlab empties it when it is switched on
with LineProfiler(train, Net.forward) as lines:
    train(*state)
    train(*state)
rows.update(show(lines))
print("JSON", json.dumps([rows, FIRST]))
"""


@NEEDS_MEMLAB
def test_every_line_that_pytorch_memlab_prints_with_the_same_numbers(run):
    pad = "#\n" * (OURS.count("\n") - THEIRS.count("\n"))  # the same line numbers in both
    (ours, first), text = run(OURS, README, SIDE_BY_SIDE)
    (theirs, _), _ = run(THEIRS + pad, README, SIDE_BY_SIDE)
    assert set(theirs) <= set(ours)
    # In the row of `def` it counts what was held when the call before ended, and is gone.
    for key in first:
        assert ours[key] <= theirs.pop(key), key
    assert {name.split(":")[0] for name in theirs} == {"outer", "inner", "train", "Net.forward"}
    differing = {key: (ours[key], theirs[key]) for key in theirs if ours[key] != theirs[key]}
    assert differing == {}
    for name in ("outer", "inner", "train", "Net.forward"):
        assert f".{name} (job.py:" in text


def test_peaks_are_those_of_torchs_own_counter(run):
    """Each statement of a training step, backward on autograd's own thread included."""
    ours, _ = run(
        OURS,
        README,
        """
        import json
        state = prepare()
        with LineProfiler(train) as lines:
            train(*state)
        rows = show(lines)
        (function,) = lines.display().functions
        found = [[r.devices[0].after_bytes, r.devices[0].peak_bytes,
                  r.devices[0].allocation_bytes] for r in function.rows[1:]]
        print("JSON", json.dumps(found))
        """,
    )
    torchs, _ = run(
        README,
        """
        import json
        net, optimizer, inp = prepare()
        found, names = [], {"net": net, "optimizer": optimizer, "inp": inp}
        for line in ("out = net(inp)", "loss = out.mean()", "loss.backward()",
                     "optimizer.step()", "optimizer.zero_grad()", "del out, loss"):
            before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
            torch.cuda.reset_peak_memory_stats()
            exec(line, names)
            stats = torch.cuda.memory_stats()
            found.append([torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(),
                          stats["allocated_bytes.all.allocated"] - before])
        print("JSON", json.dumps(found))
        """,
    )
    assert ours == torchs


def test_a_job_is_the_same_with_and_without_us(run):
    """Its weights, its own peaks and every other counter of the allocator."""
    script = """
        import json
        net, optimizer, inp = prepare()
        big = torch.empty(64 << 20, device="cuda")
        del big
        FOLLOW
        for _ in range(5):
            train(net, optimizer, inp)
        middle = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            train(net, optimizer, inp)
        after = torch.cuda.memory_stats()
        END
        assert torch.cuda.memory_stats() == after
        weights = [float(p.detach().double().sum()) for p in net.parameters()]
        print("JSON", json.dumps([middle, sorted(after.items()), weights]))
    """
    follow = "lines = LineProfiler(train, Net.forward); lines.enable()"
    plain, _ = run(README, script.replace("FOLLOW", "").replace("END", ""))
    beside, _ = run(
        OURS,
        README,
        script.replace("FOLLOW", follow).replace("END", "lines.disable()"),
    )
    assert beside == plain


def test_torchs_functions_are_back_afterwards(run):
    found, _ = run(
        OURS,
        README,
        """
        import json
        state = prepare()
        read, reset = torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats
        with LineProfiler(train) as lines:
            train(*state)
            assert torch._C._cuda_memoryStats is not read
        torch.cuda.reset_peak_memory_stats()
        same = [torch._C._cuda_memoryStats is read, torch._C._cuda_resetPeakMemoryStats is reset]
        print("JSON", json.dumps(same))
        """,
    )
    assert found == [True, True]


def test_the_decorators_of_the_readme(run):
    _, text = run(
        "import gpumem_otel, json",
        README,
        """
        outer = gpumem_otel.profile(outer)
        inner = gpumem_otel.profile(inner)
        Net.forward = gpumem_otel.profile_every(2)(Net.forward)
        outer()
        net, optimizer, inp = prepare()
        print("JSON", json.dumps([]))
        """,
    )
    assert text.count("Net.forward (job.py:") == 1
    outer = text[text.index("## __main__.outer") :]
    cells = next(line for line in outer.splitlines() if "linear2 = " in line).split()
    # gpu, hits, after, net, ...: 40,000 bytes of weight and 400 of bias, in blocks of 512
    assert cells[:6] == ["0", "1", "80.0", "KiB", "+40.0", "KiB"]


def test_two_devices_at_once_and_the_one_to_show(run, devices):
    if devices < 2:
        pytest.skip("one GPU here")
    found, text = run(
        OURS,
        README,
        """
        import json
        set_target_gpu(0)
        with LineProfiler(switches) as lines:
            switches()
        print(lines.display())
        rows = lines.display().to_dict()["functions"][0]["lines"]
        sums = {r["code"].strip(): {d: u["net_bytes"] for d, u in r["devices"].items()}
                for r in rows}
        print("JSON", json.dumps(sums))
        """,
    )
    size = 1024 * 1024 * 4 + 4096
    assert found["net1 = torch.nn.Linear(1024, 1024).cuda(0)"]["0"] == size
    assert found["net2 = torch.nn.Linear(1024, 1024).cuda(1)"]["1"] == size
    assert found["net3 = torch.nn.Linear(1024, 1024).cuda(0)"]["0"] == size
    table, _, _ = text.partition("JSON ")
    lines = [line for line in table.splitlines() if "torch.nn.Linear" in line]
    shown = {line.split("net")[1][0]: line.split()[0] for line in lines}
    assert shown == {"1": "0", "2": "1", "3": "0"}


def test_the_failed_example_of_the_readme_is_explained_by_name(run):
    """`linear(inp * (inp + 2))`: Python knows neither product nor sum; 2 MB are "lost" there."""
    found, _ = run(
        "import gpumem_otel\ngpumem_otel.install(serve=False)",
        """
        import json, torch
        from gpumem_otel.api import lifecycle

        def example(linear, inp):
            total = inp + 2
            product = inp * total
            del total
            out = linear(product).mean()
            del product
            return out

        linear = torch.nn.Linear(1024, 1024).cuda()
        inp = torch.rand(512, 1024, device="cuda")
        linear(inp)
        with gpumem_otel.LineProfiler(example) as lines:
            out = example(linear, inp)
        print(lines.display())
        (function,) = lines.display().functions
        net = {r.line - function.first_line: r.devices[0].net_bytes for r in function.rows}
        (profile,) = lifecycle.current().reader.live()
        held = {}
        for sample in profile.samples:
            for frame in sample.frames:
                if frame.name.endswith("example"):
                    held[frame.line - function.first_line] = sample.size_bytes
        saved = out.grad_fn.next_functions[0][0]
        print("JSON", json.dumps([net, held, saved.name(), saved._saved_mat1.nbytes]))
        """,
    )
    net, held, node, saved = found
    lost = 512 * 1024 * 4
    assert net["2"] == lost, "the product appears in its line"
    assert net["1"] + net["3"] == 0, "the sum comes and goes"
    assert net["5"] == 0, "del frees nothing: autograd holds it"
    assert (node, saved) == ("AddmmBackward0", lost)
    assert held["2"] == lost, "the live profile names the line that made it"


def test_a_graph_is_captured_in_a_profiled_function_and_replays(run):
    found, _ = run(
        OURS,
        README,
        """
        import json
        a = torch.ones(1024, device="cuda")
        graph = torch.cuda.CUDAGraph()

        def capture():
            global b
            with torch.cuda.graph(graph):
                b = a * 2
                b = b + 1

        with LineProfiler(capture) as lines:
            capture()
        a.fill_(5)
        graph.replay()
        torch.cuda.synchronize()
        show(lines)
        print("JSON", json.dumps([float(b.sum()), lines.recorder.failure]))
        """,
    )
    assert found == [1024 * 11, ""]


def test_a_compiled_function_gives_the_same_beside_us(run):
    found, _ = run(
        OURS,
        README,
        """
        import json
        def inner(x):
            y = x + 1
            return y * 2

        compiled = torch.compile(inner, backend="eager", fullgraph=True)
        x = torch.arange(1024.0, device="cuda")
        with LineProfiler(inner) as lines:
            first = compiled(x)
            eager = inner(x)
            again = compiled(x)
        show(lines)
        same = [bool(torch.equal(first, eager)), bool(torch.equal(again, eager))]
        print("JSON", json.dumps([same, lines.display().functions[0].calls >= 1]))
        """,
    )
    assert found == [[True, True], True]


def test_a_loop_of_survived_ooms_keeps_its_lines(run):
    found, _ = run(
        OURS,
        README,
        """
        import json
        def tries():
            try:
                torch.empty(1 << 45, device="cuda")
            except torch.cuda.OutOfMemoryError:
                return False
        torch.empty(1, device="cuda")
        with LineProfiler(tries) as lines:
            for _ in range(20):
                tries()
        show(lines)
        (function,) = lines.display().functions
        print("JSON", json.dumps([function.calls, [r.hits for r in function.rows]]))
        """,
    )
    assert found == [20, [20, 20, 20, 20, 20]]


@pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="IPython is not installed")
def test_the_magics_on_a_gpu(run):
    found, text = run(
        """
        import json
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config
        import gpumem_otel
        gpumem_otel.install(serve=False)
        shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
        shell.run_line_magic("load_ext", "gpumem_otel")
        cell = "import torch\\ndef func(n):\\n    return torch.nn.Linear(n, 1024).cuda(0)\\n"
        shell.run_cell_magic("gpumem", "-q", cell)
        report = shell.run_line_magic("gpumem", "-f func kept = func(2048)")
        print(report)
        print(shell.run_line_magic("gpumem", ""))
        (function,) = report.functions
        print("JSON", json.dumps(function.rows[-1].devices[0].net_bytes))
        """
    )
    assert found == 2048 * 1024 * 4 + 4096
    assert "func" in text
