"""Capture on a real GPU. Every scenario is a process of its own, that prints `ok` at its end.

A scenario imports torch itself, after `arming.start()` or before, whichever it is about. Nothing
here measures time; the benchmarks do.
"""

from __future__ import annotations

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
import json, os, sys, threading, time
from gpumem_otel.capture.arming import Arming
from gpumem_otel.capture.frame_names import QualifiedNamer
from gpumem_otel.capture.gil_pacing import Pacer
from gpumem_otel.capture.profile_reader import LiveProfileReader
from gpumem_otel.capture.source import TorchSource
from gpumem_otel.settings.config import ProfileConfig
from gpumem_otel.base.counters import Counters
from gpumem_otel.errors import CaptureError

class Clock:
    time_ns = staticmethod(time.time_ns)
    monotonic = staticmethod(time.monotonic)
    @staticmethod
    def wait(event, seconds):
        return event.wait(seconds)

counters, pacer = Counters(), Pacer()
source = TorchSource(counters=counters,
                     environ=dict(os.environ), max_window_events=100_000)
reader = LiveProfileReader(source, namer=QualifiedNamer(pacer.pause), clock=Clock(),
                           counters=counters,
                config=ProfileConfig(class_as="off"), pacer=pacer, share_seconds=0)
arming = Arming(source.start, on_import=source.prepare)

class Background:
    "Reads as fast as it can, beside the job."
    def __enter__(self):
        self.stop, self.errors, self.reads = threading.Event(), [], 0
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        return self
    def run(self):
        while not self.stop.is_set():
            try:
                profiles = reader.live()
                source.stats()
                source.status()
                for profile in profiles:
                    held = reader.totals()[profile.device].allocated_bytes
                    assert profile.total_bytes == held, (profile.total_bytes, held)
                self.reads += 1
            except Exception as error:
                self.errors.append(repr(error))
    def __exit__(self, *error):
        self.stop.set()
        self.thread.join()
        if error[0] is None:
            assert self.errors == [], self.errors[:3]
            assert self.reads > 0
            assert counters.get("readouts_breached") == 0, counters.snapshot()

def by_root(profile):
    found = {}
    for sample in profile.samples:
        name = sample.frames[-1].name
        found[name] = found.get(name, 0) + sample.size_bytes
    return found

def names(profile):
    return {frame.name for sample in profile.samples for frame in sample.frames}

def net(torch, width=256, layers=4):
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers).cuda()

def done():
    arming.stop()
    source.stop()
    sys.stdout.flush()
    print("ok")
"""


@pytest.fixture
def run(devices):
    """Run a scenario; returns what it printed before `ok`."""

    def call(script, *, prelude=PRELUDE, **environ):
        text = prelude + textwrap.dedent(script)
        done = subprocess.run(
            [sys.executable, "-c", text],
            capture_output=True,
            text=True,
            timeout=280,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        )
        lines = done.stdout.splitlines()
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert lines[-1:] == ["ok"], done.stdout[-2000:] + done.stderr[-4000:]
        return lines[:-1]

    return call


def test_every_read_that_was_not_raced_adds_up_while_training(run):
    run("""
        arming.start()
        import torch
        model = net(torch)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(8, 64, 256, device="cuda")
        with Background() as background:
            for _ in range(200):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            torch.cuda.synchronize()
        (profile,) = reader.live()
        assert profile.total_bytes == torch.cuda.memory_allocated()
        assert profile.comments[0].startswith("equal to"), profile.comments
        assert by_root(profile).get("[allocated before install]", 0) == 0, by_root(profile)
        assert by_root(profile)["[backward]"] > 0
        assert any(name.startswith("torch.nn.modules.") for name in names(profile))
        print(background.reads, counters.get("readouts_raced"))
        done()
        """)


@pytest.mark.parametrize("order", ["before torch", "after torch", "after CUDA"])
def test_a_model_built_after_install_has_no_bytes_before_install(run, order):
    run(f"""
        if {order != "before torch"}:
            import torch
        if {order == "after CUDA"}:
            torch.cuda.init()
        arming.start()
        import torch
        model = net(torch)
        (profile,) = reader.live()
        roots = by_root(profile)
        assert roots.get("[allocated before install]", 0) == 0, roots
        assert profile.total_bytes == torch.cuda.memory_allocated() > 0
        assert "__main__.net" in names(profile), sorted(names(profile))
        done()
        """)


def test_memory_older_than_install_is_named_so_until_it_is_gone(run):
    run("""
        import torch
        old = [torch.zeros(1 << 20, device="cuda") for _ in range(3)]
        arming.start()
        new = torch.zeros(1 << 18, device="cuda")
        (profile,) = reader.live()
        assert by_root(profile)["[allocated before install]"] == 3 << 22, by_root(profile)
        address = old[0].data_ptr()
        old[0] = None
        reader.live()
        weight = torch.zeros(1 << 20, device="cuda", requires_grad=True)
        weight.sum().backward()  # the gradient, or weight, takes the place of the old block
        (profile,) = reader.live()
        assert by_root(profile)["[allocated before install]"] == 2 << 22, by_root(profile)
        assert profile.total_bytes == torch.cuda.memory_allocated()
        done()
        """)


def test_two_streams_and_delayed_frees(run):
    run("""
        arming.start()
        import torch
        side = torch.cuda.Stream()
        x = torch.ones(1 << 20, device="cuda")
        with Background():
            for _ in range(200):
                y = x * 2
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    z = y + 1
                    torch.cuda._sleep(1_000_000)
                    y.record_stream(side)
                del y
                torch.cuda.current_stream().wait_stream(side)
                assert z.is_cuda
                del z
            torch.cuda.synchronize()
        (profile,) = reader.live()
        totals = reader.totals()[0]
        assert profile.total_bytes == torch.cuda.memory_allocated()
        assert totals.active_bytes == totals.allocated_bytes + totals.pending_free_bytes
        assert totals.reserved_bytes == torch.cuda.memory_reserved()
        assert float(x.sum()) == 1 << 20
        done()
        """)


def test_thirty_graphs_are_captured_and_replayed(run):
    run("""
        arming.start()
        import torch
        x = torch.ones(1024, 1024, device="cuda") / 1024
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                x @ x
        torch.cuda.synchronize()
        captured = 0
        with Background():
            for _ in range(30):
                graph = torch.cuda.CUDAGraph()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.graph(graph, stream=stream):
                    y = x
                    for _ in range(100):
                        y = y + x
                    y = y @ x
                graph.replay()
                torch.cuda.synchronize()
                assert abs(float(y[0, 0]) - 101 / 1024) < 1e-3
                captured += 1
        assert captured == 30
        reader.live()
        assert any(pool != (0, 0) for pool in reader.totals()[0].pool_reserved_bytes)
        done()
        """)


def test_out_of_memory_is_caught_and_counted(run):
    run("""
        arming.start()
        import torch
        keep = torch.ones(1 << 20, device="cuda")
        torch.cuda.set_per_process_memory_fraction(0.05)
        caught = 0
        with Background():
            for _ in range(50):
                held = []
                try:
                    while True:
                        held.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError as error:
                    assert "out of memory" in str(error)
                    caught += 1
                del held
        assert caught == 50
        (stats,) = source.stats()
        assert stats.ooms == 50
        assert float(keep.sum()) == 1 << 20
        total = torch.cuda.get_device_properties(0).total_memory
        assert stats.limit_bytes <= total
        done()
        """)


def test_empty_cache_beside_reads(run):
    run("""
        arming.start()
        import torch
        torch.cuda.init()
        with Background():
            for size in range(300):
                x = torch.ones((size % 17 + 1) << 18, device="cuda")
                del x
                torch.cuda.empty_cache()
        (profile,) = reader.live()
        assert profile.total_bytes == torch.cuda.memory_allocated() == 0
        assert reader.totals()[0].reserved_bytes == torch.cuda.memory_reserved() == 0
        done()
        """)


USER = """
import collections
import torch
use, when = os.environ["USE"], os.environ["WHEN"]
record = torch.cuda.memory._record_memory_history

def job_records():
    record(max_entries=1000, stacks="python")

def work():
    kept = [torch.ones(1000 * (i + 1), device="cuda") for i in range(5)]
    for _ in range(10):
        torch.ones(500, device="cuda")
    return kept

if when == "before":
    job_records()
if use == "1":
    arming.start()
torch.cuda.init()
if when == "after":
    job_records()
kept = work()
if use == "1":
    for _ in range(5):
        reader.live()
    try:
        reader.allocated(0.01, threading.Event())
    except CaptureError as error:
        assert "the job records" in str(error), error
    else:
        raise AssertionError("a window was opened over the job's recording")
snapshot = torch.cuda.memory._snapshot()
trace = [e for t in snapshot["device_traces"] for e in t if e["action"] != "snapshot"]
print(json.dumps({
    "actions": collections.Counter(e["action"] for e in trace),
    "sizes": [e["size"] for e in trace],
    "leaves": [e["frames"][0]["name"] if e.get("frames") else "" for e in trace],
    "blocks": sorted(
        (b["size"], [f["name"] for f in b["frames"]])
        for s in snapshot["segments"] for b in s["blocks"] if b["state"] == "active_allocated"
    ),
}, sort_keys=True))
record(None)
after = torch.cuda.memory._snapshot()
print(json.dumps([max(len(t) for t in after["device_traces"]) <= 1]))
if use == "1":
    assert torch._C._cuda_isHistoryEnabled()
    stackful = torch.ones(100, device="cuda")
    (profile,) = reader.live()
    assert profile.total_bytes == torch.cuda.memory_allocated()
    profiles = reader.allocated(0.01, threading.Event())
    assert len(profiles) == 1
    done()
    assert not torch._C._cuda_isHistoryEnabled()
else:
    print("ok")
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_job_that_records_history_gets_the_same_with_and_without_us(run, when):
    with_us = run(USER, USE="1", WHEN=when)
    without = run(USER, USE="0", WHEN=when)
    assert [json.loads(line) for line in with_us] == [json.loads(line) for line in without]


def test_windows_are_exact_and_leave_nothing(run):
    run("""
        arming.start()
        import torch
        keep = torch.ones(1 << 20, device="cuda")
        go, stop = threading.Event(), threading.Event()

        def churn():
            go.set()
            while not stop.is_set():
                torch.ones(1000, device="cuda")

        thread = threading.Thread(target=churn)
        thread.start()
        go.wait()
        (profile,) = reader.allocated(0.5, threading.Event())
        stop.set()
        thread.join()
        assert profile.kind.value == "allocated"
        assert profile.total_objects > 100
        assert profile.total_bytes == 4000 * profile.total_objects, profile.comments
        assert "__main__.churn" in names(profile), sorted(names(profile))
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        assert len(trace) <= 1, len(trace)
        (live,) = reader.live()
        assert live.total_bytes == torch.cuda.memory_allocated() == 4 << 20
        assert by_root(live) == {"<string>:<module>": 4 << 20}, by_root(live)
        for _ in range(20):
            reader.allocated(0.001, threading.Event())
        assert len(torch.cuda.memory._snapshot()["device_traces"][0]) <= 1
        done()
        assert not torch._C._cuda_isHistoryEnabled()
        """)


def test_a_hundred_read_outs_import_nothing(run):
    run("""
        arming.start()
        import torch
        keep = [torch.ones(100, device="cuda") for _ in range(50)]
        loaded = set(sys.modules)
        for _ in range(100):
            reader.live()
        assert "torch._inductor" not in sys.modules
        new = {name for name in set(sys.modules) - loaded if not name.startswith("gpumem_otel")}
        assert new == set(), sorted(new)
        import torch._inductor
        assert torch._inductor is sys.modules["torch._inductor"]
        done()
        """)


def test_a_child_that_owns_the_gpu_arms_and_the_parent_too(run):
    run("""
        arming.start()
        import torch
        assert not torch.cuda.is_initialized()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            x = torch.ones(1000, device="cuda")
            (profile,) = reader.live()
            good = profile.total_bytes == torch.cuda.memory_allocated() == 4096
            good = good and by_root(profile) == {"<string>:<module>": 4096}
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert source.status().reason == "not_initialised"
        y = torch.ones(2000, device="cuda")
        (profile,) = reader.live()
        assert profile.total_bytes == torch.cuda.memory_allocated() == 8192
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            silent = source.status().reason == "forked" and source.stats() == ()
            try:
                torch.ones(1, device="cuda")
            except RuntimeError as error:
                silent = silent and "forked subprocess" in str(error)
            else:
                silent = False
            os._exit(0 if silent else 1)
        assert os.waitpid(child, 0)[1] == 0
        done()
        """)


def test_stop_leaves_torch_as_it_was(run):
    run("""
        import torch
        record = torch._C._cuda_record_memory_history
        legacy = torch._C._cuda_record_memory_history_legacy
        lookup, path = torch.__dict__["__getattr__"], list(sys.meta_path)
        for _ in range(3):
            arming.start()
            x = torch.ones(1000, device="cuda")
            assert torch._C._cuda_isHistoryEnabled()
            reader.live()
            arming.stop()
            source.stop()
            assert not torch._C._cuda_isHistoryEnabled()
            assert torch._C._cuda_record_memory_history is record
            assert torch._C._cuda_record_memory_history_legacy is legacy
            assert torch.__dict__["__getattr__"] is lookup
            assert sys.meta_path == path
            queued = [call for call, _ in torch.cuda._queued_calls]
            assert not any("gpumem" in getattr(call, "__module__", "") for call in queued)
        done()
        """)


def test_reading_ends_with_the_process_whatever_it_is_doing(run):
    run("""
        arming.start()
        import torch
        keep = [torch.ones(100, device="cuda") for _ in range(2000)]

        def forever():
            while True:
                try:
                    reader.live()
                except Exception:
                    return

        threading.Thread(target=forever, daemon=True).start()
        while not counters.get("exporter_runs", stage="read"):
            time.sleep(0.001)
        print("ok")
        """)


def test_only_devices_that_the_job_uses_are_touched(run, devices):
    if devices < 2:
        pytest.skip("one device here")
    run("""
        arming.start()
        import torch
        torch.cuda.set_device(1)
        x = torch.ones(1000, device="cuda:1")
        with Background():
            for _ in range(100):
                torch.ones(1000, device="cuda:1")
        assert source.status().devices == (1,)
        assert [p.device for p in reader.live()] == [1]
        assert not torch._C._cuda_hasPrimaryContext(0)
        done()
        """)


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "allocator_backend"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "no_caching"),
    ],
)
def test_other_allocators_give_device_metrics_and_no_harm(run, variable, value, reason):
    script = f"""
        arming.start()
        import torch
        x = torch.ones(1 << 24, device="cuda")
        status = source.status()
        assert (status.armed, status.supported, status.reason) == (True, False, {reason!r}), status
        (stats,) = source.stats()
        assert stats.device_used_bytes >= 1 << 26
        assert source.allocated() == {{}}
        for ask in (reader.live, lambda: reader.allocated(0.01, threading.Event())):
            try:
                ask()
            except CaptureError as error:
                assert {reason!r} in str(error), error
            else:
                raise AssertionError("a profile of an allocator that keeps no stacks")
        assert float(x.sum()) == 1 << 24
        done()
        """
    run(script, **{variable: value})


def test_expandable_segments(run):
    script = """
        arming.start()
        import torch
        torch.cuda.init()
        with Background():
            for size in range(200):
                x = torch.ones((size % 13 + 1) << 18, device="cuda")
                y = torch.ones((size % 7 + 1) << 20, device="cuda")
        (profile,) = reader.live()
        totals = reader.totals()[0]
        assert profile.total_bytes == torch.cuda.memory_allocated()
        assert totals.reserved_bytes == torch.cuda.memory_reserved()
        done()
        """
    run(script, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")


def test_cpp_stacks_on_request(run):
    run("""
        from gpumem_otel.base.counters import Counters
        source = TorchSource(counters=counters, stacks="all")
        reader = LiveProfileReader(source, namer=QualifiedNamer(), clock=Clock(), counters=counters,
                        config=ProfileConfig(), share_seconds=0)
        arming = Arming(source.start, on_import=source.prepare)
        arming.start()
        import torch
        weight = torch.ones(1000, device="cuda", requires_grad=True)
        weight.square().sum().backward()
        (profile,) = reader.live()
        assert profile.total_bytes == torch.cuda.memory_allocated()
        assert any("::" in name for name in names(profile)), sorted(names(profile))
        done()
        """)
