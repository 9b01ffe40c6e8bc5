"""The driver's checkpoint on a GPU: to 0 MiB and back, and everything that goes wrong meanwhile.

Every scenario is a process of its own. What the device holds is asked of nvidia-smi.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
NOISE_MIB = 8

JOB = """
import json, os, signal, subprocess, sys, threading, time
import torch
from gpumem_otel.yielding.driver.checkpoint import DriverCheckpoint

def smi():
    # MiB that are used on the first device that is visible, and the processes there
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    ask = ["nvidia-smi", f"--id={first}", "--format=csv,noheader,nounits"]
    used = subprocess.run([*ask, "--query-gpu=memory.used"], capture_output=True, text=True)
    apps = subprocess.run([*ask, "--query-compute-apps=pid"], capture_output=True, text=True)
    return int(used.stdout.split()[0]), sorted(apps.stdout.split())

def tell(**facts):
    os.write(1, (json.dumps(facts) + "\\n").encode())

class Beats:
    # the longest time for which no Python ran in this process
    def __init__(self):
        self.times, self.over = [time.monotonic()], False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
    def run(self):
        while not self.over:
            time.sleep(0.02)
            self.times.append(time.monotonic())
    def longest(self, since):
        times = [t for t in self.times if t >= since] + [time.monotonic()]
        return max((b - a for a, b in zip(times, times[1:])), default=0.0)

class Allocating:
    # a thread that is nearly always within cudaMalloc or cudaFree
    def __init__(self):
        self.over, self.count = False, 0
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
    def run(self):
        while not self.over:
            block = torch.empty(200 << 20, device="cuda", dtype=torch.uint8)
            del block
            torch.cuda.empty_cache()
            self.count += 1
"""


@pytest.fixture
def start(devices, tmp_path):
    """Start a job; ended at the latest with the test."""
    started = []

    def call(script, **environ):
        path = tmp_path / f"job{len(started)}.py"
        path.write_text(JOB + textwrap.dedent(script))
        known = os.environ.get("PYTHONPATH", "")
        job = subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{known}" if known else str(ROOT),
                "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run"),
                **environ,
            },
        )
        started.append(job)
        return job

    yield call
    for job in started:
        with contextlib.suppress(OSError):
            job.kill()
        job.communicate()


@pytest.fixture
def run(start):
    """Run a job to its end; what it reported."""

    def call(script, timeout=170, **environ):
        job = start(script, **environ)
        try:
            out, errors = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            job.kill()
            out, errors = job.communicate()
            pytest.fail(f"it hangs\n{out[-1000:]}\n{errors[-3000:]}")
        assert job.returncode == 0, errors[-4000:]
        return json.loads(out.splitlines()[-1])

    return call


def used():
    """(MiB used, pids) of the first device that is visible."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    ask = ["nvidia-smi", f"--id={first}", "--format=csv,noheader,nounits"]
    mib = subprocess.run([*ask, "--query-gpu=memory.used"], capture_output=True, text=True)
    apps = subprocess.run([*ask, "--query-compute-apps=pid"], capture_output=True, text=True)
    return int(mib.stdout.split()[0]), sorted(apps.stdout.split())


def is_persistent():
    """Whether the driver keeps devices initialized that no process has open."""
    ask = ["nvidia-smi", "--format=csv,noheader", "--query-gpu=persistence_mode"]
    done = subprocess.run(ask, capture_output=True, text=True)
    return set(done.stdout.split()) == {"Enabled"}


def until(what, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.1)
    return False


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_everything_goes_and_comes_back_bit_for_bit(run):
    reported = run("""
        base = smi()
        x = torch.randn(64 << 20, device="cuda")
        other = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda")
        weight = torch.randn(1024, 1024, device="cuda")
        static = torch.randn(1024, 1024, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                result = static @ weight + 1
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = static @ weight + 1
        graph.replay()
        torch.cuda.synchronize()
        expected = [t.cpu() for t in (x, other, weight, result)]
        addresses = [t.data_ptr() for t in (x, other, weight, result)]
        before = smi()
        driver = DriverCheckpoint()
        refusal = driver.refusal()
        driver.prepare()
        went = driver.lock_and_checkpoint(20.0, None)
        end = time.monotonic() + 10
        gone = smi()
        while gone[0] > base[0] and time.monotonic() < end:  # the helper lets go of the driver
            gone = smi()
        again = driver.lock_and_checkpoint(20.0, None)
        state = driver.state
        back = driver.restore(30.0)
        torch.cuda.synchronize()
        equal = [torch.equal(t.cpu(), e) for t, e in zip((x, other, weight, result), expected)]
        static.zero_()
        graph.replay()
        torch.cuda.synchronize()
        replayed = bool((result == 1).all())
        static.add_(weight)
        graph.replay()
        close = torch.allclose(result, weight @ weight + 1, rtol=1e-2, atol=1e-2)
        torch.cuda.synchronize()
        again_back = driver.restore(1.0)
        tell(base=base, before=before, gone=gone, after=smi(), refusal=refusal, equal=equal,
             replayed=replayed, close=bool(close), state=state, ended=driver.state,
             same=addresses == [t.data_ptr() for t in (x, other, weight, result)],
             seconds=[went.seconds, back.seconds], again=[again.seconds, again_back.seconds],
             size_mib=went.size_bytes >> 20)
    """)
    assert reported["refusal"] == ""
    assert reported["before"][0] > reported["base"][0] + 1200
    assert reported["gone"][0] <= reported["base"][0] + (0 if is_persistent() else NOISE_MIB)
    assert reported["gone"][1] == reported["base"][1], "the driver still knows the process"
    assert (reported["state"], reported["ended"]) == ("checkpointed", "running")
    assert reported["equal"] == [True] * 4
    assert reported["replayed"]
    assert reported["close"]
    assert reported["same"]
    assert reported["again"] == [0.0, 0.0]
    assert abs(reported["after"][0] - reported["before"][0]) < 64
    if importlib.util.find_spec("pynvml"):
        given = reported["before"][0] - reported["base"][0]
        assert abs(reported["size_mib"] - given) < 64


def test_python_goes_on_and_scrapes_are_answered_while_the_driver_holds_us(run):
    """Without the gate one scrape stops all Python until the lock is gone."""
    reported = run(
        """
        import urllib.request
        import gpumem_otel
        from gpumem_otel.api import lifecycle
        gpumem_otel.install(serve=True)
        torch.zeros(1, device="cuda")
        agent = lifecycle.current()
        assert agent.wait_listening(20)
        url = f"http://127.0.0.1:{agent.address[1]}"
        scrapes = []
        def get(path):
            return urllib.request.urlopen(url + path, timeout=20).read()
        get("/metrics"), get("/debug/pprof/gpumem")
        over = False
        def scrape():
            while not over:
                began = time.monotonic()
                body = get("/metrics") + get("/healthz")
                scrapes.append((began, time.monotonic() - began, b"gpumem_allocated" in body))
                time.sleep(max(0.1 - (time.monotonic() - began), 0))
        threading.Thread(target=scrape, daemon=True).start()
        beats, job = Beats(), Allocating()
        driver = DriverCheckpoint()
        held, counts, asked = [], [], []
        for _ in range(3):
            time.sleep(1.0)
            closed = agent.gate.close(10.0)
            driver.prepare()
            began = time.monotonic()
            driver.lock_and_checkpoint(20.0, 60.0)
            count = job.count
            profile = get("/debug/pprof/gpumem")
            time.sleep(2.0)
            stood = job.count - count
            driver.restore(30.0)
            agent.gate.open()
            ended = time.monotonic()
            held.append(beats.longest(began))
            within = [s for s in scrapes if began <= s[0] < ended]
            asked.append([len(within), max(s[1] for s in within), all(s[2] for s in within)])
            counts.append([closed, stood, len(profile) > 100])
        time.sleep(0.5)
        went_on = job.count
        time.sleep(0.5)
        went_on = job.count - went_on
        over = job.over = True
        job.thread.join(20)
        tell(held=held, counts=counts, asked=asked, went_on=went_on,
             errors=agent.counters.get("exporter_errors", stage="read"))
        """,
        GPUMEM_OTEL_PORT="0",
    )
    assert max(reported["held"]) < 0.5, reported
    for closed, stood, profile in reported["counts"]:
        assert closed
        assert stood <= 1  # it was between two calls of CUDA
        assert profile
    for number, slowest, full in reported["asked"]:
        assert number >= 15
        assert slowest < 0.5
        assert full
    assert reported["went_on"] > 0
    assert reported["errors"] == 0


def test_a_lease_ends_while_a_thread_of_the_job_stops_all_python(run):
    """The job asks for counters itself: no Python runs, and the helper needs none."""
    reported = run("""
        torch.zeros(1, device="cuda")
        beats, job = Beats(), Allocating()
        driver = DriverCheckpoint()
        back = threading.Event()
        driver.on_restored = lambda phase: back.set()
        time.sleep(1.0)
        driver.prepare()
        began = time.monotonic()
        driver.lock_and_checkpoint(20.0, 3.0)
        while not back.is_set() and time.monotonic() < began + 60:
            torch.cuda.memory_stats()
        took = time.monotonic() - began
        stood = beats.longest(began)
        back.wait(5)
        job.over = True
        job.thread.join(20)
        tell(took=took, stood=stood, back=back.is_set(), state=driver.state,
             ended=not job.thread.is_alive())
    """)
    assert reported["back"]
    assert reported["state"] == "running"
    assert reported["ended"]
    assert reported["took"] < 30


@pytest.mark.parametrize("lease", [3.0, None])
def test_a_helper_that_is_killed_is_replaced(run, lease):
    reported = run(f"""
        lease = {lease!r}
        x = torch.arange(16 << 20, device="cuda")
        total = int(x.sum())
        driver = DriverCheckpoint()
        back = threading.Event()
        driver.on_restored = lambda phase: back.set()
        driver.lock_and_checkpoint(20.0, lease)
        first = driver.helper_pid
        os.kill(first, signal.SIGKILL)
        if lease is None:
            driver.restore(30.0)
        else:
            assert back.wait(30)
        tell(state=driver.state, equal=int(x.sum()) == total)
    """)
    assert reported == {"state": "running", "equal": True}


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "exit"])
def test_a_parent_that_ends_leaves_no_helper_and_no_memory(start, how):
    base = used()
    job = start(f"""
        x = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        driver = DriverCheckpoint()
        driver.lock_and_checkpoint(20.0, None)
        tell(helper=driver.helper_pid)
        if {how!r} == "exit":
            os._exit(0)
        time.sleep(300)
    """)
    helper = json.loads(job.stdout.readline())["helper"]
    assert is_alive(helper) or how == "exit"
    if how != "exit":
        job.send_signal(getattr(signal, how))
    job.wait(30)
    assert until(lambda: not is_alive(helper)), "the helper is still there"
    assert until(lambda: used()[0] <= base[0] + NOISE_MIB)
    assert used()[1] == base[1]


def test_sigterm_to_the_helper_brings_the_job_back(run):
    reported = run("""
        x = torch.arange(1 << 20, device="cuda")
        driver = DriverCheckpoint()
        back = threading.Event()
        driver.on_restored = lambda phase: back.set()
        driver.lock_and_checkpoint(20.0, None)
        os.kill(driver.helper_pid, signal.SIGTERM)
        tell(back=back.wait(30), state=driver.state, last=int(x[-1]))
    """)
    assert reported == {"back": True, "state": "running", "last": (1 << 20) - 1}


@pytest.mark.skipif(not importlib.util.find_spec("pynvml"), reason="NVML's package is not there")
def test_a_device_that_is_taken_is_waited_for(run):
    reported = run("""
        guest = "; ".join([
            "import sys, torch",
            "free, _ = torch.cuda.mem_get_info()",
            "x = torch.empty(free - (1 << 30), dtype=torch.uint8, device='cuda')",
            "print('here', flush=True)",
            "sys.stdin.read()",
        ])
        x = torch.arange(512 << 20, device="cuda", dtype=torch.int64)
        last = int(x[-1])
        driver = DriverCheckpoint()
        waits, back = [], threading.Event()
        driver.on_waiting, driver.on_restored = waits.append, lambda phase: back.set()
        driver.lock_and_checkpoint(20.0, None)
        other = subprocess.Popen([sys.executable, "-c", guest], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, text=True)
        other.stdout.readline()
        try:
            driver.restore(1.0)
            said = ""
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        state = driver.state
        driver.renew(0.1)
        end = time.monotonic() + 20
        while not waits and time.monotonic() < end:
            time.sleep(0.1)
        other.stdin.close()
        other.wait()
        tell(said=said, state=state, waits=waits, back=back.wait(30), ended=driver.state,
             equal=int(x[-1]) == last)
    """)
    assert reported["said"].startswith("YieldRefusedError: restore: ")
    assert "MiB more must become free" in reported["said"]
    assert reported["state"] == "checkpointed"
    assert "MiB more must become free" in reported["waits"][0]
    assert reported["back"]
    assert (reported["ended"], reported["equal"]) == ("running", True)
