"""Processes that yield on a real GPU: what every one of them begins with, and how it is run.

A scenario trains a small model whose losses are the same bit for bit each time, so that `as_never`
can tell whether whatever happened to it changed anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

__all__ = ["HEAD", "Jobs", "environ_of"]

ROOT = Path(__file__).parents[2]

HEAD = """
import json, os, signal, subprocess, sys, threading, time
import gpumem_otel
from gpumem_otel.api import lifecycle
from gpumem_otel.yielding.values import (
    OperationState,
    RestoreRequest,
    YieldLevel,
    YieldRequest,
    YieldState,
)
from gpumem_otel.errors import YieldFailedError, YieldRefusedError
RUN_DIR = os.environ["RUN_DIR"]
OPTIONS = json.loads(os.environ.get("OPTIONS", "{}"))
gpumem_otel.install(
    interval_seconds=3600, profiles=("live",), run_dir=RUN_DIR, port=0, **OPTIONS)
import torch
GIB = 1 << 30
DONE, REFUSED = OperationState.DONE, OperationState.REFUSED
TENSORS, PROCESS, AUTO = YieldLevel.TENSORS, YieldLevel.PROCESS, YieldLevel.AUTO

def tell(**facts):
    os.write(1, (json.dumps(facts) + "\\n").encode())

def hear():
    return sys.stdin.readline().strip()

class Training:
    "A small model; `extra` bytes that take part in nothing."
    def __init__(self, width=1024, layers=4, extra=0):
        torch.manual_seed(0)
        self.width, self.layers = width, layers
        shapes = [torch.nn.Linear(width, width) for _ in range(layers)]
        self.model = torch.nn.Sequential(*shapes).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.x = torch.randn(64, width).cuda()
        self.extra = torch.arange(extra // 8, device="cuda") if extra else None
        self.losses = []

    def step(self):
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def steps(self, number):
        for _ in range(number):
            self.step()

    def as_never(self):
        "Trains on, and whether all of it is what a job computes that never yields."
        self.steps(3)
        twin = Training(self.width, self.layers)
        twin.steps(len(self.losses))
        right = self.losses == twin.losses and len(set(self.losses)) > 1
        pairs = zip(self.model.parameters(), twin.model.parameters())
        right = right and all(torch.equal(a, b) for a, b in pairs)
        if self.extra is not None:
            whole = torch.arange(self.extra.numel(), device="cuda")
            right = right and torch.equal(self.extra, whole)
        return right

def engine():
    from gpumem_otel.api.yields import engine_of
    return engine_of(lifecycle.current())

def ended(operation):
    "The operation once it has ended."
    version = -1
    while operation.state is OperationState.RUNNING:
        version = engine().wait(version, 10.0).version
        operation = engine().operation(operation.id)
    return operation

def command(request):
    "What became of a command, from whichever thread."
    return ended(engine().submit(request, "test"))

def beside(step, action):
    "Runs `action` in a thread and `step` here until it has ended; what it gave."
    made, errors = [], []
    def run():
        try:
            made.append(action())
        except BaseException as error:
            errors.append(error)
    thread = threading.Thread(target=run, name="beside")
    thread.start()
    while thread.is_alive():
        step()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]

def refused(call, *arguments, **options):
    "The one line of the refusal; fails where it was none."
    try:
        call(*arguments, **options)
    except YieldRefusedError as error:
        assert "\\n" not in str(error)
        return str(error)
    raise AssertionError("not refused")

def hold_all_host_memory():
    "As a yield of another process does that takes all there is; `close()` gives it up."
    from gpumem_otel.yielding.copy.limits import HostRoom
    from gpumem_otel.yielding.copy.reservations import HostReservations
    other = HostReservations(f"{RUN_DIR}/yield", lambda: HostRoom(1 << 60, "the test"))
    other.reserve(1 << 50)
    return other

def held_by_all():
    "Bytes of host memory in the reservations of this run directory, by whoever lives."
    import fcntl, pathlib
    held = 0
    for path in pathlib.Path(RUN_DIR, "yield").glob("host-*"):
        try:
            with path.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held += int(file.read(100).split()[0])
        except FileNotFoundError:
            pass
    return held

def children(having=""):
    "Processes whose parent is this one; only those with this in their command line."
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{name}/cmdline") as file:
                line = file.read()
        except OSError:
            continue
        if parent == os.getpid() and having in line:
            found.append(int(name))
    return found

GUEST = '''
import sys, torch
torch.cuda.init()
torch.zeros(1, device="cuda")
print("up", flush=True)
sys.stdin.readline()
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(free - int(sys.argv[1]), 1), dtype=torch.uint8, device="cuda")
print("here", flush=True)
sys.stdin.read()
'''

class Guest:
    "Another process that, once it comes, leaves so many bytes of the device free."
    def __init__(self, leaves):
        self.process = subprocess.Popen([sys.executable, "-c", GUEST, str(leaves)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline().strip() == "up"
    def come(self):
        self.process.stdin.write("\\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "here"
    def leave(self):
        self.process.stdin.close()
        assert self.process.wait(60) == 0

def state():
    return engine().status.state.value
"""


def environ_of(folder: Path, **environ: str) -> dict[str, str]:
    """Of a scenario."""
    known = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{known}" if known else str(ROOT),
        "RUN_DIR": str(folder),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **environ,
    }


class Jobs:
    """Starts scenarios, and ends what is left of them.

    Args:
        folder: their run directory; one for all, so that they share the reservations.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, script: str, **environ: str) -> subprocess.Popen[str]:
        """Begin one; its `tell` lines come on standard output."""
        job = subprocess.Popen(
            [sys.executable, "-c", HEAD + textwrap.dedent(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ_of(self.folder, **environ),
        )
        self.started.append(job)
        return job

    def run(self, script: str, *, timeout: float = 150.0, **environ: str) -> dict[str, object]:
        """Run one to its end; what it told last."""
        return self.end(self.start(script, **environ), timeout=timeout)

    def end(self, job: subprocess.Popen[str], *, timeout: float = 150.0) -> dict[str, object]:
        """Wait for the end of one; what it told last."""
        try:
            out, errors = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            job.kill()
            out, errors = job.communicate()
            raise AssertionError(f"it hangs\n{out[-1000:]}\n{errors[-3000:]}") from None
        assert job.returncode == 0, f"{job.returncode}\n{out[-1000:]}\n{errors[-4000:]}"
        told: dict[str, object] = json.loads(out.splitlines()[-1])
        return told

    def hear(self, job: subprocess.Popen[str]) -> dict[str, object]:
        """The next line that it tells."""
        assert job.stdout is not None
        line = job.stdout.readline()
        if not line:
            _, errors = job.communicate(timeout=30)
            raise AssertionError(errors[-4000:])
        told: dict[str, object] = json.loads(line)
        return told

    def close(self) -> None:
        """End those that are still there."""
        for job in self.started:
            with contextlib.suppress(OSError):
                job.kill()
            job.communicate()
