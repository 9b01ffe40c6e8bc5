"""Do the totals of every read-out of a training job agree? How many are raced?

    python benchmarks/closed_accounting.py --out benchmarks/results/closed-accounting-h200.json

Trains for a minute at full speed while the whole agent reads, pushes and serves every second. A
read-out is raced where the job allocated or freed between the counters and the snapshot, which
are two acquisitions of the allocator's lock; in all others the profile's total must be the
allocator's `allocated`, and a breach is a fault.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import overhead
import sidecar
import torch

import gpumem_otel
from gpumem_otel._version import __version__
from gpumem_otel.api import lifecycle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with sidecar.running() as url:
        gpumem_otel.install(
            service_name="closed-accounting",
            pyroscope_url=url,
            interval_seconds=1.0,
            max_stall_ratio=1.0,
            serve=True,
            port=0,
            run_dir="/tmp/gpumem-otel-bench",
        )
        job = overhead.Job(width=256, layers=12, batch=2, length=32)
        step_seconds = job.segment(options.seconds)["step"]
        agent = lifecycle.current()
        assert agent is not None
        observation = agent.observe()
        assert observation is not None
        results = {
            "date": time.strftime("%Y-%m-%d"),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "gpumem_otel": __version__,
            "seconds": options.seconds,
            "steps": observation.steps.steps,
            "step_ms": step_seconds * 1e3,
            "allocations": observation.devices[0].allocations,
            "read_outs": agent.counters.get("exporter_runs", stage="read"),
            "raced": agent.counters.get("readouts_raced"),
            "breached": agent.counters.get("readouts_breached"),
            "pushes": agent.counters.get("exporter_runs", stage="push"),
            "pushed_bytes": agent.counters.get("exporter_pushed_bytes"),
        }
        gpumem_otel.uninstall()
    overhead.write(results, options.out)


if __name__ == "__main__":
    main()
