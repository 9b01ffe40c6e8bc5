"""Windows of events on a real GPU: peaks, deltas, regions, phases, and graphs left alone.

Every scenario is a process of its own that prints `ok` at its end. The job runs in the main thread,
windows are recorded by another, as in life.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]

PRELUDE = """
import os, sys, threading, time
import gpumem_otel
from gpumem_otel.api import lifecycle
from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.errors import BusyError
OPTIONS = dict(interval_seconds=3600, class_as="off", run_dir=os.environ["RUN_DIR"])
PEAK, ALLOCATED = ProfileKind.PEAK, ProfileKind.ALLOCATED

def installed(**options):
    gpumem_otel.install(**{**OPTIONS, **options})
    import torch
    torch.ones(1, device="cuda")
    agent = lifecycle.current()
    assert agent.reader is not None, agent.listen_error
    return torch, agent

def beside(job, record):
    "Runs `record` in a thread and `job()` here until it has ended; what it gave."
    made, errors = [], []
    def run():
        try:
            made.append(record())
        except BaseException as error:
            errors.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        job()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]

def by_root(profile):
    found = {}
    for sample in profile.samples:
        name = sample.frames[-1].name
        found[name] = found.get(name, 0) + sample.size_bytes
    return found

def names(profile):
    return {frame.name for sample in profile.samples for frame in sample.frames}

def training(torch, width=256, layers=4):
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 64, width, device="cuda")
    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return model, optimizer, step

def done(agent):
    assert agent.counters.get("exporter_errors", stage="window") == 0
    assert agent.counters.get("readouts_breached") == 0
    gpumem_otel.uninstall()
    import torch
    assert not torch._C._cuda_isHistoryEnabled()
    sys.stdout.flush()
    print("ok")
"""


@pytest.fixture
def run(devices, tmp_path):
    """Run a scenario; it has to end with `ok`."""

    def call(script, **environ):
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=280,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path)),
                "RUN_DIR": str(tmp_path),
                **environ,
            },
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert done.stdout.splitlines()[-1] == "ok"
        return done.stdout.splitlines()[:-1]

    return call


def test_the_peak_of_a_training_step_is_the_allocators_own(run):
    """GIVEN steps that are all alike WHEN a window holds two of them THEN its highest moment is
    the allocator's own peak of requested bytes, and below that of its blocks."""
    run("""
        torch, agent = installed(profiles=("live", "peak"))
        model, optimizer, step = training(torch)
        torch.cuda.reset_peak_memory_stats()
        windows = agent.reader.windows
        made = beside(step, lambda: windows.pushed([PEAK], 30.0, threading.Event()))
        (profile,) = made[PEAK]
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        assert any(c.endswith("whole steps") for c in profile.comments), profile.comments
        assert profile.total_bytes == stats["requested_bytes.all.peak"], (
            profile.total_bytes, profile.comments)
        assert profile.total_bytes <= torch.cuda.max_memory_allocated()
        assert "[peak not recorded]" not in names(profile)
        assert "[allocated before install]" not in names(profile)
        parameters = sum(4 * p.numel() for p in model.parameters())
        assert profile.total_bytes > 4 * parameters  # gradients and two states of the optimizer
        pulled = beside(step, lambda: windows.peak(0.3, threading.Event()))[0]
        assert pulled.total_bytes == profile.total_bytes
        done(agent)
        """)


def test_what_was_higher_outside_of_a_window_is_named(run):
    run("""
        torch, agent = installed(profiles=("live", "peak"))
        keep = torch.ones(1000, device="cuda")
        windows = agent.reader.windows
        windows.pushed([PEAK], 0.2, threading.Event())
        before = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        big = torch.ones(1 << 26, device="cuda"); del big
        (profile,) = windows.pushed([PEAK], 0.2, threading.Event())[PEAK]
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        assert peak > before
        assert profile.total_bytes == peak <= torch.cuda.max_memory_allocated()
        assert by_root(profile)["[peak not recorded]"] == 4 << 26
        (again,) = windows.pushed([PEAK], 0.2, threading.Event())[PEAK]
        assert "[peak not recorded]" not in names(again)
        torch.cuda.reset_peak_memory_stats()
        small = torch.ones(1 << 20, device="cuda"); del small
        (reset,) = windows.pushed([PEAK], 0.2, threading.Event())[PEAK]
        assert by_root(reset)["[peak not recorded]"] == 4 << 20
        done(agent)
        """)


def test_deltas_add_up_to_the_counters_exactly(run):
    run("""
        torch, agent = installed(profiles=("allocated",))
        model, optimizer, step = training(torch)
        windows = agent.reader.windows
        def counted():
            stats = torch.cuda.memory_stats()
            return stats["requested_bytes.all.allocated"], stats["allocation.all.allocated"]
        windows.pushed([ALLOCATED], 0.1, threading.Event())  # from here on
        first = counted()
        size = objects = 0
        for _ in range(3):
            for _ in range(5):
                step()
            made = beside(step, lambda: windows.pushed([ALLOCATED], 30.0, threading.Event()))
            (profile,) = made[ALLOCATED]
            size += profile.total_bytes
            objects += profile.total_objects
            assert any("whole step" in c for c in profile.comments), profile.comments
            assert "[not recorded]" not in names(profile)
        rest = windows.pushed([ALLOCATED], 0.1, threading.Event())[ALLOCATED]
        size += sum(p.total_bytes for p in rest)
        objects += sum(p.total_objects for p in rest)
        last = counted()
        assert (size, objects) == (last[0] - first[0], last[1] - first[1])
        done(agent)
        """)


def test_every_step_has_the_same_share_in_whole_windows(run):
    """The stacks of two whole steps, scaled, are those of all steps where all are alike."""
    run("""
        torch, agent = installed(profiles=("allocated",))
        sizes = (1000, 3000, 500)
        parameter = torch.nn.Parameter(torch.ones(1000, device="cuda"))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        def first(): torch.empty(sizes[0], device="cuda", dtype=torch.uint8)
        def second(): torch.empty(sizes[1], device="cuda", dtype=torch.uint8)
        def third(): torch.empty(sizes[2], device="cuda", dtype=torch.uint8)
        def step():
            first(); second(); third()
            optimizer.step()
            time.sleep(0.001)
        step()
        windows = agent.reader.windows
        windows.pushed([ALLOCATED], 0.05, threading.Event())
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        made = beside(step, lambda: windows.pushed([ALLOCATED], 30.0, threading.Event()))
        (profile,) = made[ALLOCATED]
        found = {}
        for sample in profile.samples:
            found[sample.frames[0].name] = (sample.objects, sample.size_bytes)
        a, b, c = (found[f"__main__.{n}"] for n in ("first", "second", "third"))
        assert max(a[0], b[0], c[0]) - min(a[0], b[0], c[0]) <= 1, found
        assert abs(b[1] / a[1] - 3) < 0.01 and abs(a[1] / c[1] - 2) < 0.01, found
        done(agent)
        """)


def test_classes_of_the_peak(run):
    run("""
        torch, agent = installed(profiles=("live", "peak"), class_as="root")
        model, optimizer, step = training(torch)
        made = beside(step, lambda: agent.reader.windows.pushed([PEAK], 30.0, threading.Event()))
        (profile,) = made[PEAK]
        found = by_root(profile)
        parameters = sum(4 * p.numel() for p in model.parameters())
        assert found["parameter"] == parameters, found
        states = sum(4 * s.numel() for state in optimizer.state.values()
                     for s in state.values() if torch.is_tensor(s) and s.is_cuda)
        assert found["optimizer_state"] >= states, found
        assert found["activation"] > 0 and found["gradient"] > 0, found
        done(agent)
        """)


def test_regions_and_the_jobs_own_metadata(run):
    run("""
        torch, agent = installed(profiles=("live", "allocated"))
        if not hasattr(torch._C, "_cuda_setMemoryMetadata"):
            assert agent.marks is None or not agent.marks.supported
            with gpumem_otel.region("loss"):
                torch.empty(10, device="cuda")
            done(agent)
            sys.exit()
        torch._C._cuda_setMemoryMetadata("the job's")

        @gpumem_otel.region("in a frame")
        def framed():
            return torch.empty(700, device="cuda", dtype=torch.uint8)

        def job():
            with gpumem_otel.region("loss"):
                torch.empty(500, device="cuda", dtype=torch.uint8)
            torch.empty(300, device="cuda", dtype=torch.uint8)
            framed()
            assert torch._C._cuda_getMemoryMetadata() == "the job's"

        windows = agent.reader.windows
        (profile,) = beside(job, lambda: windows.allocated(0.3, threading.Event()))
        sizes = {}
        for sample in profile.samples:
            label = dict(sample.labels).get("region", "")
            sizes.setdefault(label, set()).add(round(sample.size_bytes / sample.objects, -1))
        assert sizes == {"loss": {500}, "": {300}, "in a frame": {700}}, sizes
        assert "gpumem_otel.region:in a frame" in names(profile)
        kept = framed()
        (live,) = agent.reader.live_now()
        assert "gpumem_otel.region:in a frame" in names(live), sorted(names(live))
        torch._C._cuda_setMemoryMetadata("")
        done(agent)
        """)


def test_phases_of_a_step(run):
    run("""
        torch, agent = installed(profiles=("allocated",), phases=True)
        model, optimizer, step = training(torch)
        def job():
            with torch.profiler.record_function("evaluation 12"):
                torch.empty(9000, device="cuda", dtype=torch.uint8)
            step()
        (profile,) = beside(job, lambda: agent.reader.windows.allocated(0.4, threading.Event()))
        phases = {}
        for sample in profile.samples:
            phase = dict(sample.labels)["phase"]
            phases[phase] = phases.get(phase, 0) + sample.size_bytes
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        assert phases["forward"] > 0 and phases["backward"] > 0, phases
        if version >= (2, 8):
            # scaled by the counters, which hold what was allocated outside of the window too
            calls = phases["evaluation"] / 9000
            assert calls > 0.9 and abs(calls - round(calls)) < 0.01 * calls, phases
            assert phases["optimizer.step"] > 0, phases
        assert profile.total_bytes == sum(phases.values())
        done(agent)
        """)


def test_thirty_graphs_are_captured_while_windows_open_and_close(run):
    run("""
        torch, agent = installed(profiles=("live", "peak", "allocated"))
        windows, over, seen = agent.reader.windows, threading.Event(), []
        def record():
            while not over.is_set():
                made = windows.pushed([PEAK, ALLOCATED], 0.02, threading.Event())
                seen.append(len(made))
                windows.peak(0.001, threading.Event())
        thread = threading.Thread(target=record)
        x = torch.ones(1000, device="cuda")
        torch.cuda.synchronize()
        thread.start()
        number = -1
        while number < 29 or len(seen) <= 3:
            number += 1
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = (x * 2 + number).relu()
                z = torch.cat([y, y]).sum()
            x.fill_(number + 1)
            graph.replay()
            torch.cuda.synchronize()
            assert z.item() == 2000 * (2 * (number + 1) + number), (number, z.item())
        over.set()
        thread.join()
        done(agent)
        """)


def test_a_job_that_records_itself_keeps_its_events(run):
    run("""
        torch, agent = installed(profiles=("live", "peak"))
        torch.cuda.memory._record_memory_history(max_entries=1000)
        kept = [torch.ones(1000, device="cuda") for _ in range(50)]
        for _ in range(3):
            try:
                agent.reader.windows.pushed([PEAK], 0.05, threading.Event())
            except BusyError:
                pass
            else:
                raise AssertionError("a window was recorded over the job's")
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        assert sum(event["action"] == "alloc" for event in trace) == 50
        torch.cuda.memory._record_memory_history(enabled=None)
        agent.reader.live_now()
        (profile,) = agent.reader.windows.pushed([PEAK], 0.05, threading.Event())[PEAK]
        assert profile.total_bytes >= 50 * 4000
        done(agent)
        """)


def test_growth_and_pinned_memory(run):
    run("""
        torch, agent = installed(profiles=("live", "growth", "pinned"), growth_pushes=1)
        beside_live = agent.queries.derived
        beside_live.make(ProfileKind.GROWTH, agent.reader.live_now())
        def leak():
            return torch.ones(1 << 20, device="cuda")
        kept = leak()
        host = torch.ones(1 << 20, pin_memory=True)
        live = agent.reader.live_now()
        (growth,) = beside_live.make(ProfileKind.GROWTH, live)
        assert growth.total_bytes == 4 << 20, growth.comments
        assert "__main__.leak" in names(growth)
        try:
            (pinned,) = beside_live.make(ProfileKind.PINNED, live)
        except BusyError as error:
            print(error)
        else:
            assert pinned.total_bytes >= 4 << 20
            version = tuple(int(part) for part in torch.__version__.split(".")[:2])
            if version >= (2, 14):
                assert "__main__.<module>" in names(pinned), names(pinned)
        done(agent)
        """)


def test_all_kinds_by_the_pusher(run):
    """The background thread records windows of its own accord, and the job's numbers stay right."""
    run("""
        got = {}
        from gpumem_otel.runtime.agent import Agent
        from gpumem_otel.settings.options import resolve
        def take(kind, profiles):
            got.setdefault(kind.value, []).extend(profiles)
        options = {**OPTIONS, "interval_seconds": 0.5, "max_stall_ratio": 1,
                   "profiles": ("live", "peak", "allocated", "growth", "pinned"),
                   "growth_pushes": 1, "class_as": "root"}
        agent = Agent(resolve({}, **options), on_profiles=take, environ={})
        lifecycle.adopt(agent)
        import torch
        model, optimizer, step = training(torch)
        end = time.monotonic() + 6
        while time.monotonic() < end:
            step()
        torch.cuda.synchronize()
        highest = torch.cuda.max_memory_allocated()
        numbers = {kind: len(profiles) for kind, profiles in got.items()}
        assert numbers["peak"] >= 4 and numbers["allocated"] >= 4, numbers
        assert all(0 < profile.total_bytes <= highest for profile in got["peak"])
        assert {"live", "growth"} <= set(got)
        done(agent)
        """)
