"""What giving a training job's GPU memory back costs, and taking it again, beside the other ways.

    python benchmarks/yields.py --out benchmarks/results/yields-h200.json --seconds 560

Jobs of 20 and 80 GiB: a transformer with its gradients and AdamW's state, trained for a few steps.
In one process per size, in turn: the plain copy of pinned memory (the speed of the link); level
`tensors`, first yield and later ones; level `auto` (tensors, then the driver for what is left);
level `process`; the plain copy over as much host memory as the job took; the driver's checkpoint by
itself, without us; pytorch_memlab's Courtesy. In one more process: torch_memory_saver, which needs
its library preloaded and the job built in its region.
After each yield `nvidia-smi` says what is left on the device, and after each restore the loss of
one batch is compared bit for bit with that of before.

`pip install pytorch-memlab torch-memory-saver` for the other tools: a row says where one is
missing or does not run. What does not fit into `--seconds` is left out and named; `--only` runs
parts alone. The file takes one more run each time; `--table FILE` prints what it holds, without
torch too. Host memory as large as the largest job and 8 GiB is used once before, since virtual
machines may be given it only then.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from yield_ways import GIB, SAVER, SETTLE_SECONDS, run_child

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

FILLERS = 8

PLAN = (
    # GiB, what is measured in one process
    (20, ("link", "tensors", "auto", "process", "driver", "courtesy")),
    (80, ("link", "tensors", "auto", "driver")),
    (20, ("saver",)),
    (80, ("saver",)),
    (80, ("courtesy",)),
)
SECONDS = {
    20: {"start": 15, "link": 6, "tensors": 8, "auto": 10, "process": 20, "driver": 18,
         "courtesy": 25, "saver": 15},
    80: {"start": 25, "link": 15, "tensors": 25, "auto": 25, "driver": 60, "courtesy": 70,
         "saver": 45},
}  # fmt: skip
"""Of each part on an H200, to say what fits into the time."""


def run_all(arguments: argparse.Namespace) -> int:
    """Every part that fits into the time, one process after the other."""
    began = time.monotonic()
    why_not = why_no_device()
    if why_not:
        raise SystemExit(f"yields.py: {why_not}; nothing was measured")
    wanted = set(arguments.only.split(",")) if arguments.only else None
    sizes = {int(one) for one in arguments.gib.split(",")}
    rows: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    largest = max(sizes) * GIB
    grown = grow_host_memory(largest + 8 * GIB)
    for gib, planned in PLAN:
        parts = tuple(one for one in planned if wanted is None or one in wanted)
        if gib not in sizes or not parts:
            continue
        estimate = sum(SECONDS[gib][one] for one in ("start", *parts))
        left = arguments.seconds - (time.monotonic() - began)
        if left < estimate:
            why = f"left out: {left:.0f} s were left, it takes about {estimate} s"
            rows += [{"gib": gib, "tool": one, "what": "-", "note": why} for one in parts]
            continue
        found = child(gib, parts, min(left, 2.0 * estimate))
        rows += found.get("rows", [])
        machine = machine or found.get("machine", {})
        print(f"{gib} GiB {', '.join(parts)}: {time.monotonic() - began:.0f} s", flush=True)
    run = {
        **machine,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - began, 1),
        "host_memory_grown_seconds": grown,
        "rows": rows,
    }
    if arguments.out is not None:
        held = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"runs": []}
        held["runs"].append(run)
        arguments.out.write_text(json.dumps(held, indent=1) + "\n")
    print(table(run))
    return 0


def why_no_device() -> str:
    """Why nothing can be measured here, "" where it can; asked in another process."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    look = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", look], capture_output=True, text=True, check=False
    )
    if done.returncode in {0, 3}:
        return "torch finds no CUDA device" if done.returncode else ""
    said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return f"torch cannot be imported: {said[0]}"


def child(gib: int, parts: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Run some parts in a process of their own; what it had measured when it ended."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        environ = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if parts == ("saver",):
            environ |= saver_environ()
        command = [sys.executable, str(HERE), "--child", ",".join(parts)]
        command += ["--gib", str(gib), "--out", str(result)]
        try:
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=seconds, check=False
            )
            said = done.stderr.strip().splitlines()[-1:] if done.returncode else []
            why = f"exit code {done.returncode}: {' '.join(said)}" if done.returncode else ""
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
        except subprocess.TimeoutExpired:
            why = f"ended after {seconds:.0f} s"
        found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {"rows": []}
        if why:
            found["rows"].append({"gib": gib, "tool": ", ".join(parts), "what": "-", "note": why})
        return found


def saver_environ() -> dict[str, str]:
    """What torch_memory_saver wants of a process's environment; {} where it is not installed."""
    spec = importlib.util.find_spec(SAVER)
    if spec is None or spec.origin is None:
        return {}
    site = Path(spec.origin).parents[1]
    import torch as torch_

    major = (torch_.version.cuda or "0").split(".")[0]
    libraries = sorted(site.glob(f"{SAVER}_hook_mode_preload_cu{major}.*.so"))
    runtime = sorted(
        Path(folder)
        for top in (Path(torch_.__file__).parents[1] / "nvidia").glob("*")
        for folder in (top / "lib",)
        if list(folder.glob(f"libcudart.so.{major}"))
    )
    if not libraries:
        return {}
    paths = [str(one) for one in runtime]
    if os.environ.get("LD_LIBRARY_PATH"):
        paths.append(os.environ["LD_LIBRARY_PATH"])
    return {"LD_PRELOAD": str(libraries[0]), "LD_LIBRARY_PATH": ":".join(paths)}


def grow_host_memory(size_bytes: int) -> float:
    """Virtual machines get memory as they use it, and show it as free before: use it once.

    Else the first yield would measure the machine below: 80 GiB took 21 s.

    Returns:
        Seconds.
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(HERE), "--grow", str(size_bytes)], check=False, timeout=200
    )
    print(f"host memory used once: {done.returncode}, {available() / GIB:.0f} GiB are free now")
    return round(time.monotonic() - began, 1)


def available() -> int:
    """Bytes of host memory that can be taken (proc(5), MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def fill(size_bytes: int) -> None:
    """Touch so much memory, in a few processes: threads would wait for one another's lock."""
    memory = mmap.mmap(-1, size_bytes)  # shared: it stays until this process ends
    share = -(-size_bytes // FILLERS)
    children = []
    for first in range(0, size_bytes, share):
        pid = os.fork()
        if pid == 0:
            for at in range(first, min(first + share, size_bytes), mmap.PAGESIZE):
                memory[at] = 1
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


def held_in(path: Path) -> dict[str, Any]:
    """The contents of a file of runs; one line if it cannot be read."""
    try:
        held: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}; --out writes such a file") from error
    except ValueError as error:
        raise SystemExit(f"{path}: no JSON; --out writes such a file") from error
    return held


def table(run: dict[str, Any]) -> str:
    """Markdown. Left is what `nvidia-smi` shows; same: the job's loss, gradients and state."""
    facts = [
        f"{name} {run.get(name, '?')}" for name in ("driver", "torch", "python", "gpumem_otel")
    ]
    lines = [
        f"{run.get('device', '?')}, {', '.join(facts)}; {run['date']}",
        "",
        "| job | way | what | seconds | GiB/s | of the link | left | on the host | same | phases |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    link: dict[str, float] = {}
    for row in run["rows"]:
        job = f"{row['gib']} GiB"
        if "note" in row:
            lines.append(f"| {job} | {row['tool']} | {row['what']} | {row['note']} |||||||")
            continue
        speed = row["gib_per_second"]
        if row["tool"] == "link":
            link[row["what"]] = speed
        way = "yield" if "yield" in row["what"] else "restore"
        share = f"{speed / link[way]:.0%}" if link.get(way) and row["tool"] != "link" else "-"
        left = f"{row['left_mib']} MiB" if row.get("left_mib") is not None else "-"
        if row.get("left_later_mib") is not None:
            left += f", {row['left_later_mib']} after {SETTLE_SECONDS:.0f} s"
        host = f"{row['host_gib']:.1f} GiB" if row.get("host_gib") is not None else "-"
        same = {True: "yes", False: "**no**", None: "-"}[row.get("equal")]
        phases = ", ".join(f"{name} {took:.2f}" for name, took in row.get("phases", {}).items())
        lines.append(
            f"| {job} | {row['tool']} | {row['what']} | {row['seconds']:.2f} | {speed:.1f} | "
            f"{share} | {left} | {host} | {same} | {phases} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, or print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON; one more run in it each time")
    parser.add_argument(
        "--seconds", type=float, default=280.0, help="nothing begins that ends later"
    )
    parser.add_argument("--gib", default="20,80", help="sizes of jobs, of 20 and 80")
    parser.add_argument("--only", default="", help="of link, tensors, auto, process, driver, "
                        "courtesy, saver")  # fmt: skip
    parser.add_argument("--table", type=Path, help="print the runs of a file and end")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--grow", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table is not None:
        print("\n\n".join(table(run) for run in held_in(arguments.table)["runs"]))
        return 0
    if arguments.grow:
        fill(arguments.grow)
        return 0
    if arguments.child:
        run_child(tuple(arguments.child.split(",")), int(arguments.gib), arguments.out)
        return 0
    return run_all(arguments)


if __name__ == "__main__":
    sys.exit(main())
