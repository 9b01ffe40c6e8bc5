"""What an out-of-memory costs a job, and whether it ends as it would have without us.

    python benchmarks/out_of_memory.py --out benchmarks/results/out-of-memory-h200.json

Each job runs in a process of its own: without us, with us and a server that takes the profile,
and with us and a server that hangs. Told are the exit code, the seconds from just before the
allocations that fail to the end of the process, the bytes of the profile and where it ended up;
then what 1,000 survived failures take.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from support.fake_pyroscope import FakePyroscope
from support.oom_gpu import HEAD, JOBS, LOOP
from support.pyroscope_query import total

from gpumem_otel._version import __version__

ROOT = Path(__file__).parents[1]
OOM = "gpu_memory_oom:inuse_space:bytes:space:bytes"
INSTALL = "import gpumem_otel; gpumem_otel.install()\n"
MARK = "\ntorch.cuda.synchronize(); tell(at=time.time())\n"
WAYS = ("without us", "with us", "with us, server hangs")


def run(script: str, folder: Path, *, with_us: bool, url: str = "") -> dict[str, Any]:
    """What became of a job."""
    path = folder / "job.py"
    path.write_text((INSTALL if with_us else "") + script)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path)),
        "GPUMEM_OTEL_RUN_DIR": str(folder / "run"),
        "OTEL_SERVICE_NAME": "oom",
        "PYROSCOPE_TIMEOUT": "60",
    }
    if url:
        environ["PYROSCOPE_SERVER_ADDRESS"] = url
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, env=environ, check=False
    )
    ended = time.time()
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    starts = [one["at"] for one in told if "at" in one]
    spool = folder / "run" / "spool"
    return {
        "exit_code": done.returncode,
        "error": next(
            (line.partition(":")[0] for line in reversed(done.stderr.splitlines())
             if "Error:" in line), "",
        ),
        "seconds": ended - starts[0] if starts else None,
        "told": told,
        "lines": [json.loads(x) for x in done.stderr.splitlines() if x.startswith('{"event"')],
        "spooled": len(list(spool.iterdir())) if spool.exists() else 0,
    }  # fmt: skip


def places() -> list[dict[str, Any]]:
    """Each job in each way."""
    rows = []
    for name, job in JOBS.items():
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder, FakePyroscope() as server:
                server.fault = "hang" if way.endswith("hangs") else ""
                script = HEAD + MARK + job
                url = server.url if way != WAYS[0] else ""
                found = run(script, Path(folder), with_us=way != WAYS[0], url=url)
                stored = 0 if server.fault else total(server.url, "oom", OOM)
            row = {
                "place": name, "way": way, "exit_code": found["exit_code"],
                "error": found["error"], "seconds": found["seconds"],
                "held_bytes": sum(line["allocated_bytes"] or 0 for line in found["lines"]),
                "stored_bytes": stored, "spooled": found["spooled"],
            }  # fmt: skip
            rows.append(row)
            print(
                f"{name:10} {way:22} exit {row['exit_code']} {row['error']:24} "
                f"{row['seconds'] or 0:6.2f} s  stored {row['stored_bytes']:>13,} of "
                f"{row['held_bytes']:>13,}  spooled {row['spooled']}",
                flush=True,
            )
    return rows


def survived() -> dict[str, Any]:
    """1,000 failures that the job survives, without us and with us."""
    found = {}
    for way in WAYS[:2]:
        with tempfile.TemporaryDirectory() as folder, FakePyroscope() as server:
            url = server.url if way != WAYS[0] else ""
            done = run(HEAD + LOOP, Path(folder), with_us=way != WAYS[0], url=url)
        found[way] = next(one for one in done["told"] if "seconds" in one)
        print(f"1,000 survived failures {way}: {found[way]['seconds']:.3f} s", flush=True)
    found["ratio"] = found["with us"]["seconds"] / found["without us"]["seconds"]
    print(f"ratio {found['ratio']:.3f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpumem_otel": __version__,
    }
    print(*(f"{name} {value}" for name, value in results.items()), sep=", ")
    results["places"] = places()
    results["survived"] = survived()
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
