"""Record the jobs that the alerts are tried on: healthy, a leak, an out-of-memory error, a server.

    python tools/record_jobs.py                 all, into tests/data/jobs; needs a CUDA device
    python tools/record_jobs.py --jobs leak

Each is an ordinary program that really does what it is named after, under `gpumem-otel record`;
tests/servers/test_real_alerts.py replays the files. A job runs for a minute and needs an empty
device: the server takes 90 % of it. A recording knows the allocator and not the device, so the job
says what the device has and what it may take of it, and that is added to every reading.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpumem_otel.recording.reader import load_recording
from gpumem_otel.recording.writer import RecordingWriter
from gpumem_otel.snapshot.stacks import identity_namer

OUT = Path(__file__).parents[1] / "tests" / "data" / "jobs"
SECONDS = 60.0
REST_SECONDS = 0.05
WIDTH = 2048
KEPT_ROWS = 128
"""About 10 MB a step with all that the graph holds."""
OOM_FRACTION = 0.05
"""Of the device, so that the job runs out of it soon; gpumem_limit_bytes follows."""


def healthy(torch: Any, deadline: float) -> None:
    """Trains on batches of changing size, and evaluates now and then."""
    model = _model(torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    steps = 0
    while time.monotonic() < deadline:
        _step(torch, model, optimizer, (1024, 4096, 2048)[steps % 3])
        steps += 1
        if steps % 50 == 0:
            with torch.no_grad():
                model(torch.randn(8192, WIDTH, device="cuda")).square().mean().item()
        time.sleep(REST_SECONDS)


def leak(torch: Any, deadline: float) -> None:
    """Keeps the loss of each evaluation with its graph, as a list of losses for a plot does."""
    model, losses = _model(torch), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    while time.monotonic() < deadline:
        _step(torch, model, optimizer, 1024)
        loss = model(torch.randn(KEPT_ROWS, WIDTH, device="cuda")).square().mean()
        losses.append(loss)  # the leak: loss.item() was meant
        time.sleep(REST_SECONDS)


def oom(torch: Any, deadline: float) -> None:
    """Doubles its batch until it does not fit, catches that once, and goes on with less."""
    torch.cuda.set_per_process_memory_fraction(OOM_FRACTION)
    model = _model(torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows, found = 1024, False
    quiet_until = time.monotonic() + (deadline - time.monotonic()) / 4
    while time.monotonic() < deadline:
        try:
            _step(torch, model, optimizer, rows)
            if not found and time.monotonic() > quiet_until:
                rows *= 2
        except torch.cuda.OutOfMemoryError:
            optimizer.zero_grad(set_to_none=True)
            rows, found = rows // 4, True
        time.sleep(REST_SECONDS)
    if not found:
        raise SystemExit("it never ran out of memory")


def server(torch: Any, deadline: float) -> None:
    """Takes 90 % of the device at its start, then answers requests; no optimizer, no steps."""
    model = _model(torch).eval()
    free, total = torch.cuda.mem_get_info()
    cache = torch.empty(int(0.9 * total - (total - free)) // 2, dtype=torch.float16, device="cuda")
    requests = 0
    with torch.no_grad():
        while time.monotonic() < deadline:
            answer = model(torch.randn(256 + requests % 7 * 128, WIDTH, device="cuda"))
            cache[requests % 4096] = answer.mean().half()
            requests += 1
            time.sleep(REST_SECONDS)


JOBS = {"healthy": healthy, "leak": leak, "oom": oom, "server": server}
FRACTIONS = {"oom": OOM_FRACTION}


def _model(torch: Any) -> Any:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    return torch.nn.Sequential(*layers).cuda()


def _step(torch: Any, model: Any, optimizer: Any, rows: int) -> None:
    loss = model(torch.randn(rows, WIDTH, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def run(name: str, seconds: float, said: Path) -> None:
    """Be the job; says what the device has, and what the job may take of it."""
    torch = importlib.import_module("torch")
    _, total = torch.cuda.mem_get_info()
    limit = int(total * FRACTIONS.get(name, 1.0))
    said.write_text(json.dumps({"limit_bytes": limit, "device_total_bytes": total}))
    JOBS[name](torch, time.monotonic() + seconds)


def record(name: str, out: Path, seconds: float) -> None:
    """One job in a process of its own, under our own verb."""
    target = out / f"{name}.gpumem"
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "device.json"
        job = [sys.executable, __file__, "--run", name, "--seconds", f"{seconds:g}"]
        verb = [sys.executable, "-m", "gpumem_otel.cli.main", "record", str(target)]
        command = [*verb, "--interval", "0.5", "--", *job, "--device-file", str(said)]
        # the folders of this machine are nobody's concern
        environ = {**os.environ, "GPUMEM_OTEL_REDACT_PATHS": "1"}
        subprocess.run(command, check=True, env=environ)  # noqa: S603 - our own
        with_device(target, json.loads(said.read_text()))
    sys.stdout.write(f"{target}: {target.stat().st_size:,} bytes\n")


def with_device(path: Path, device: dict[str, int]) -> None:
    """Write a recording anew, with what was said of the device in every reading."""
    recording = load_recording(path)
    with path.open("wb") as file:
        writer = RecordingWriter(
            file,
            identity=recording.identity,
            created_ns=recording.header.created_ns,
            facts=recording.header.facts,
            namer=identity_namer,
        )
        for recorded in recording.readings:
            reading = recorded.reading()
            before, after = (
                tuple(replace(stats, **device) for stats in state)
                for state in (reading.before, reading.after)
            )
            writer.add(replace(reading, before=before, after=after), recorded.steps)
        writer.close()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the recordings")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--run", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--device-file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(options.run, options.seconds, options.device_file)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.jobs:
        record(name, options.out, options.seconds)


if __name__ == "__main__":
    main()
