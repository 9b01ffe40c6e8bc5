"""What a window of events costs a job: read-out, play-through, and steps while it is open.

    python benchmarks/windows.py --out benchmarks/results/windows-h200.json

Three jobs, from GPU-bound to one that does nothing but allocate. Per window: its events and whole
steps, how long the interpreter lock was held for it (the copy of the events, and our slices), and
how often windows come by themselves at the default `max_stall_ratio`. Step times are medians of
steps while a window is open and of those just before it, in pairs; the copy of the events falls
into the step after it, which is reported separately as `step_of_read_out_ms`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from overhead import Job

import gpumem_otel
from gpumem_otel._version import __version__
from gpumem_otel.api import lifecycle
from gpumem_otel.base.profile import ProfileKind

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = {
    "peak": (ProfileKind.PEAK,),
    "allocated": (ProfileKind.ALLOCATED,),
    "both": (ProfileKind.PEAK, ProfileKind.ALLOCATED),
}
INTERVAL_SECONDS = 60.0
RATIO = 0.001
LIMIT_SECONDS = 30.0


class Small:
    """Steps of 2,000 allocations and frees and hardly any work: the most events per second."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(16, device="cuda"))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)

    def step(self) -> None:
        """One step."""
        for _ in range(2000):
            torch.empty(1024, device="cuda")
        self.optimizer.step()


JOBS: dict[str, Callable[[], Any]] = {
    "GPU-bound": lambda: Job(1024, 12, 16, 512),
    "CPU-bound": lambda: Job(256, 12, 2, 64),
    "allocating": Small,
}


def measured(job: Any, kinds: tuple[ProfileKind, ...], windows: int) -> dict[str, Any]:
    """Medians over so many windows."""
    agent = lifecycle.current()
    assert agent is not None
    assert agent.reader is not None
    reader = agent.reader.windows
    rows: list[dict[str, float]] = []
    for _ in range(windows):
        before = steps(job, 10)
        taken: list[float] = []
        seen: dict[str, float] = {}

        def tap(reading: Any, seconds: float, seen: dict[str, float] = seen) -> None:
            seen["events"] = sum(len(reading.snapshot.raw_events(d)) for d in (0,))
            seen["window_ms"] = seconds * 1e3
            seen["copy_ms"] = reading.stall_seconds * 1e3

        reader.tap.append(tap)
        thread = threading.Thread(
            target=lambda: reader.pushed(kinds, LIMIT_SECONDS, threading.Event())
        )
        thread.start()
        while thread.is_alive():
            taken.append(step(job))
        thread.join()
        reader.tap.remove(tap)
        rows.append(
            {
                **seen,
                "held_ms": agent.reader.last_stall_seconds * 1e3,
                "steps": len(taken),
                "step_before_ms": statistics.median(before) * 1e3,
                "step_open_ms": statistics.median(taken[:-1] or taken) * 1e3,
                "step_of_read_out_ms": max(taken) * 1e3,
            }
        )
    found: dict[str, Any] = {k: statistics.median(row[k] for row in rows) for k in rows[0]}
    found["open_over_before"] = statistics.median(
        row["step_open_ms"] / row["step_before_ms"] for row in rows
    )
    found["one_per_seconds"] = max(found["held_ms"] / 1e3 / RATIO, INTERVAL_SECONDS)
    found["share_held"] = found["held_ms"] / 1e3 / found["one_per_seconds"]
    found["windows"] = rows
    return found


def step(job: Any) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    job.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def steps(job: Any, number: int) -> list[float]:
    """Seconds of each of so many steps."""
    return [step(job) for _ in range(number)]


def main() -> None:
    """Print a table and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--windows", type=int, default=10, help="of each kind and job")
    arguments = parser.parse_args()
    gpumem_otel.install(
        interval_seconds=3600, profiles=("live", "peak", "allocated"), run_dir="/tmp/gpumem-bench"
    )
    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpumem_otel": __version__,
        "date": time.strftime("%Y-%m-%d"),
        "jobs": {},
    }
    print(
        f"{results['machine']}, torch {results['torch']}, Python {results['python']}, "
        f"{results['date']}"
    )
    columns = ("events", "copy_ms", "held_ms", "step_before_ms", "step_open_ms",
               "open_over_before", "step_of_read_out_ms", "one_per_seconds")  # fmt: skip
    print(f"{'job':<12}{'kinds':<11}" + "".join(f"{name:>21}" for name in columns))
    for name, make in JOBS.items():
        job = make()
        steps(job, 20)
        results["jobs"][name] = {}
        for kind, kinds in KINDS.items():
            found = measured(job, kinds, arguments.windows)
            results["jobs"][name][kind] = found
            print(f"{name:<12}{kind:<11}" + "".join(f"{found[one]:>21.4g}" for one in columns))
        del job
        torch.cuda.empty_cache()
    gpumem_otel.uninstall()
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
