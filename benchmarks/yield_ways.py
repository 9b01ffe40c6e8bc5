"""What one process of `yields.py` measures: a job of a size, and each way to give its memory back.

Every way moves the same job there and back, and a row is on the disk as soon as it is known: what
ends the process leaves what was measured before. `gpumem_otel` is to be on the path.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


GIB = 1 << 30
WIDTH, HEADS = 2048, 16
BYTES_PER_LAYER = 16 * 12 * WIDTH * WIDTH
"""Parameter, gradient and two states of 4 bytes each."""

LATER = 3
LINK_BYTES = 2 * GIB
SETTLE_SECONDS = 1.0
COURTESY = "pytorch_memlab Courtesy"
SAVER = "torch_memory_saver"
DRIVER = "driver alone"
WIDE = "link, as much host memory"


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
        self.add(tool, what, seconds=seconds, **left, **reported(report))
        began = time.perf_counter()
        report = take()
        seconds = time.perf_counter() - began
        rss = round(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / GIB, 2)
        kind = what.replace("yield", "restore")
        self.add(tool, kind, seconds=seconds, equal=self.same(), rss_gib=rss, **reported(report))


def reported(report: Any) -> dict[str, Any]:
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
    from gpumem_otel.yielding.copy.devices import CudaDevices
    from gpumem_otel.yielding.copy.host_memory import HostPool

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
