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
import contextlib
import importlib.util
import json
import mmap
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

GIB = 1 << 30
MIB = 1 << 20
WIDTH, HEADS = 2048, 16
BYTES_PER_LAYER = 16 * 12 * WIDTH * WIDTH
"""Parameter, gradient and two states of 4 bytes each."""

LATER = 3
FILLERS = 8
LINK_BYTES = 2 * GIB
SETTLE_SECONDS = 1.0
COURTESY = "pytorch_memlab Courtesy"
SAVER = "torch_memory_saver"
DRIVER = "driver alone"
WIDE = "link, as much host memory"

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


# -- the parent ------------------------------------------------------------------------------------


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
    return f"torch can not be imported: {said[0]}"


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
    """What a file of runs holds; one line where it can not be read."""
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


# -- a child ---------------------------------------------------------------------------------------


class Job:
    """The transformer, its optimizer, and a batch whose loss tells whether all is as it was."""

    def __init__(self, gib: int, *, region: Callable[[], Any] = contextlib.nullcontext) -> None:
        import torch as torch_
        from torch import nn

        torch_.manual_seed(0)
        self.torch = torch_
        layers = max(round(gib * GIB / BYTES_PER_LAYER), 1)
        with region(), torch_.device("cuda"):
            self.model = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
                for _ in range(layers)
            )
            for parameter in self.model.parameters():
                parameter.grad = torch_.zeros_like(parameter)
            self.optimizer = torch_.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
            self.optimizer.step()
            self.batch = torch_.randn(2, 64, WIDTH)
        for _ in range(2):
            self.optimizer.zero_grad(set_to_none=False)
            self.loss().backward()
            self.optimizer.step()
        torch_.cuda.synchronize()
        torch_.cuda.empty_cache()
        self.size_bytes = torch_.cuda.memory_allocated()
        self.expected = self.fingerprint()
        torch_.cuda.empty_cache()

    def loss(self) -> torch.Tensor:
        """Of the batch."""
        x = self.batch
        for layer in self.model:
            x = layer(x)
        return x.square().mean()

    def fingerprint(self) -> tuple[str, ...]:
        """Of the parameters through the loss, of gradients and state by their sums."""
        with self.torch.no_grad():
            loss = self.loss().item().hex()
            sums = self.torch.zeros(2, dtype=self.torch.float64, device="cuda")
            for parameter in self.model.parameters():
                sums[0] += parameter.grad.sum()
                sums[1] += self.optimizer.state[parameter]["exp_avg_sq"].sum()
            return (loss, *(one.hex() for one in sums.tolist()))


class Rows:
    """What was measured, on the disk after each row."""

    def __init__(self, gib: int, path: Path, job: Job) -> None:
        import torch as torch_

        self.gib, self.path, self.job = gib, path, job
        self.rows: list[dict[str, Any]] = []
        self.machine = {
            "device": torch_.cuda.get_device_name(),
            "driver": smi("driver_version"),
            "torch": torch_.__version__,
            "python": platform.python_version(),
            "gpumem_otel": package_version(),
        }

    def add(self, tool: str, what: str, **facts: Any) -> None:
        """One row; `seconds` and bytes give the speed."""
        if "seconds" in facts:
            size = facts.pop("size_bytes", self.job.size_bytes)
            facts["gib_per_second"] = round(size / GIB / facts["seconds"], 2)
            facts["seconds"] = round(facts["seconds"], 3)
            facts["moved_gib"] = round(size / GIB, 2)
        self.rows.append({"gib": self.gib, "tool": tool, "what": what, **facts})
        self.path.write_text(json.dumps({"machine": self.machine, "rows": self.rows}))

    def same(self) -> bool:
        """Whether the job is as it was when it was built."""
        equal = self.job.fingerprint() == self.job.expected
        self.job.torch.cuda.empty_cache()
        return equal

    def cycle(self, tool: str, what: str, give: Callable[[], Any], take: Callable[[], Any]) -> None:
        """One yield and one restore."""
        began = time.perf_counter()
        report = give()
        seconds = time.perf_counter() - began
        left = {"left_mib": used_mib()}
        if left["left_mib"] and tool.startswith("level") and tool != "level tensors":
            time.sleep(SETTLE_SECONDS)  # until the process beside us has let go of the driver
            left["left_later_mib"] = used_mib()
        self.add(tool, what, seconds=seconds, **left, **told(report))
        began = time.perf_counter()
        report = take()
        seconds = time.perf_counter() - began
        rss = round(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / GIB, 2)
        kind = what.replace("yield", "restore")
        self.add(tool, kind, seconds=seconds, equal=self.same(), rss_gib=rss, **told(report))


def told(report: Any) -> dict[str, Any]:
    """What a report of ours says."""
    if report is None or not hasattr(report, "phases"):
        return {}
    return {
        "level": report.level.value,
        "phases": {one.phase.value: round(one.seconds, 3) for one in report.phases},
        "moved_bytes": dict(report.moved_bytes),
        "residual_bytes": dict(report.residual_bytes),
        "host_gib": round(report.host_bytes / GIB, 2),
        "notes": list(report.notes),
    }


def smi(query: str) -> str:
    """One field of `nvidia-smi`, of the first device; "" where it is not there."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        environ = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""
    return ""


def used_mib() -> int | None:
    """What `nvidia-smi` shows as used."""
    value = smi("memory.used")
    return int(value) if value.isdigit() else None


def package_version() -> str:
    """Of `gpumem_otel`."""
    from gpumem_otel._version import __version__

    return __version__


def measure_link(rows: Rows) -> None:
    """Copies of pinned memory by torch alone, both ways, the median of five."""
    torch_ = rows.job.torch
    host = torch_.empty(LINK_BYTES, dtype=torch_.uint8, pin_memory=True)
    device = torch_.empty(LINK_BYTES, dtype=torch_.uint8, device="cuda")
    for what, to, source in (("yield", host, device), ("restore", device, host)):
        took = []
        for _ in range(6):
            torch_.cuda.synchronize()
            began = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch_.cuda.synchronize()
            took.append(time.perf_counter() - began)
        rows.add("link", what, seconds=sorted(took[1:])[2], size_bytes=LINK_BYTES)
    del host, device
    torch_.cuda.empty_cache()
    empty = getattr(torch_._C, "_host_emptyCache", None)  # noqa: SLF001 - no public way
    if empty is not None:
        empty()


def measure_wide_link(rows: Rows) -> None:
    """The same copies over as much pinned host memory as the job moves, once each way.

    After all else: a first yield is of a process that has pinned nothing yet.
    """
    from gpumem_otel.yielding.devices import CudaDevices
    from gpumem_otel.yielding.hostmem import HostPool

    torch_ = rows.job.torch
    synchronize = torch_.cuda.synchronize
    device = torch_.empty(LINK_BYTES, dtype=torch_.uint8, device="cuda")
    pool = HostPool(CudaDevices(torch_))
    pool.grow_to(rows.job.size_bytes, 0)
    pieces = []
    while sum(piece.size_bytes for piece in pieces) < pool.capacity_bytes:
        pieces.append(pool.piece_at(sum(piece.size_bytes for piece in pieces)))
        pool.wait_for(pieces[-1])
    for what in ("yield", "restore"):
        synchronize()
        began = time.perf_counter()
        for number, piece in enumerate(pieces):
            there = device[(number % 4) * piece.size_bytes :][: piece.size_bytes]
            to, source = (piece.bytes, there) if what == "yield" else (there, piece.bytes)
            to.copy_(source, non_blocking=True)
        synchronize()
        rows.add(WIDE, what, seconds=time.perf_counter() - began, size_bytes=pool.capacity_bytes)
    del pieces, piece, to, source, there, device
    pool.give_back()
    torch_.cuda.empty_cache()


def measure_levels(rows: Rows, parts: tuple[str, ...]) -> None:
    """Ours. Host memory is pinned by the first yield and returned after the last."""
    import gpumem_otel

    first = True
    for level, times in (("tensors", LATER), ("auto", 2), ("process", 1)):
        if level not in parts:
            continue
        for turn in range(times):
            last = turn == times - 1 and level != "tensors"
            options = {"release_host": True} if last and level == "auto" else {}
            what = "first yield" if first else "later yield"
            if level == "process":
                what = "yield"
            first = False
            rows.cycle(
                f"level {level}",
                what,
                lambda level=level, options=options: gpumem_otel.yield_memory(
                    level=level, **options
                ),
                gpumem_otel.restore,
            )


def measure_driver(rows: Rows) -> None:
    """The driver's calls on the process itself, nothing else."""
    from cuda.bindings import driver

    pid = os.getpid()

    def call(name: str, kind: str) -> None:
        (error, *_) = getattr(driver, f"cuCheckpointProcess{name}")(pid, getattr(driver, kind)())
        if int(error):
            raise RuntimeError(f"{name}: {error!r}")

    def give() -> None:
        call("Lock", "CUcheckpointLockArgs")
        call("Checkpoint", "CUcheckpointCheckpointArgs")

    def take() -> None:
        call("Restore", "CUcheckpointRestoreArgs")
        call("Unlock", "CUcheckpointUnlockArgs")

    rows.job.torch.cuda.synchronize()
    rows.cycle(DRIVER, "yield", give, take)


def measure_courtesy(rows: Rows) -> None:
    """pytorch_memlab's, from its one file, which needs nothing but torch."""
    spec = importlib.util.find_spec("pytorch_memlab")
    if spec is None or spec.origin is None:
        rows.add(COURTESY, "-", note="not installed")
        return
    path = Path(spec.origin).with_name("courtesy.py")
    loaded = importlib.util.spec_from_file_location("courtesy", path)
    assert loaded is not None
    assert loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    courtesy = module.Courtesy()
    synchronize = rows.job.torch.cuda.synchronize

    def take() -> None:
        courtesy.restore()
        synchronize()

    rows.cycle(COURTESY, "yield", courtesy.yield_memory, take)


def measure_saver(gib: int, path: Path) -> None:
    """torch_memory_saver: a job that was built in its region, pinned copies on the host."""
    import torch_memory_saver as package

    saver = package.torch_memory_saver

    @contextlib.contextmanager
    def region() -> Iterator[None]:
        with saver.region(tag="job", enable_cpu_backup=True):
            yield

    rows = Rows(gib, path, Job(gib, region=region))
    torch_ = rows.job.torch

    def give() -> None:
        saver.pause("job")
        torch_.cuda.empty_cache()
        torch_.cuda.synchronize()

    def take() -> None:
        saver.resume("job")
        torch_.cuda.synchronize()

    for what in ("first yield", "later yield"):
        rows.cycle(SAVER, what, give, take)


def run_child(parts: tuple[str, ...], gib: int, path: Path) -> None:
    """One process."""
    if parts == ("saver",):
        if importlib.util.find_spec(SAVER) is None:
            note = {"gib": gib, "tool": SAVER, "what": "-", "note": "not installed"}
            path.write_text(json.dumps({"rows": [note]}))
            return
        measure_saver(gib, path)
        return
    levels = {"tensors", "auto", "process"} & set(parts)
    if levels:
        import gpumem_otel

        gpumem_otel.install(
            interval_seconds=3600, profiles=("live",), run_dir=str(path.parent), port=0
        )
    rows = Rows(gib, path, Job(gib))
    measures: dict[str, Callable[[], None]] = {
        "link": lambda: measure_link(rows),
        "levels": lambda: measure_levels(rows, parts),
        "wide": lambda: measure_wide_link(rows),
        "driver": lambda: measure_driver(rows),
        "courtesy": lambda: measure_courtesy(rows),
    }
    wanted = {*parts, "levels", *(["wide"] if "link" in parts else [])}
    for name, measure in measures.items():
        if name not in wanted:
            continue
        try:
            measure()
        except Exception as error:
            rows.add(name, "-", note=f"{type(error).__name__}: {error}")
            if name == "driver":
                raise  # the process may be lost
        if name == "levels" and levels:
            gpumem_otel.uninstall()


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
