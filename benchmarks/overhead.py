"""What gpumem_otel costs a training job, on one GPU: with, without, and PyTorch's own part.

    python benchmarks/overhead.py --out benchmarks/results/overhead-h200.json

Three states are compared in one process, in turn, so that clocks, caches and neighbours hit all
of them alike: `off`; `recorder`, PyTorch's own recording of stacks alone
(`torch.cuda.memory._record_memory_history("state", "state", "python")`); and `ours`, the whole
agent: recording, read-outs every 5 s (a twelfth of the default interval, so twelve times its
load), pushes to a server on loopback, /metrics served and scraped every second.

The time of a state is wall time over steps of a whole segment, stalls included. Ratios are of
segments that followed one another; the median of the pairs is quoted, all pairs are kept.

A shared machine's cores run at speeds that differ by more than what is measured here. So the
CPU-bound job and our threads share one core, which is the worst case; after every two steps the
same core times a loop that has nothing to do with torch (`control`), and the ratio is that of step
time per control time; the plain ratio is kept beside it. `cpu_share_at_rest` is the CPU time of all
threads while the job holds its memory and rests: what it must lose to us on that core.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import sidecar
import torch
from torch import nn

import gpumem_otel
from gpumem_otel._version import __version__
from gpumem_otel.api import lifecycle
from gpumem_otel.profiles.pprof import gzip_bytes

INTERVAL_SECONDS = 5.0
SETTLE_SECONDS = 0.5
STEPS_PER_ROUND = 2


class Block(nn.Module):
    """A plain pre-norm transformer block out of many small kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.reshape(shape).transpose(1, 2) for t in (q, k, v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Token model: embedding, blocks, head."""

    def __init__(self, width: int, layers: int, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Job:
    """One training job; a segment is a number of steps with a device synchronization at its end."""

    def __init__(self, width: int, layers: int, batch: int, length: int) -> None:
        torch.manual_seed(0)
        self.model = Model(width, layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.tokens = torch.randint(0, 1000, (batch, length), device="cuda")

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = self.model(self.tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.tokens.flatten()).backward()
        self.optimizer.step()

    def segment(self, seconds: float) -> dict[str, float]:
        """Mean seconds per step, and per control loop, over at least so long."""
        torch.cuda.synchronize()
        total = controls = 0.0
        rounds = 0
        while total < seconds:
            start = time.perf_counter()
            for _ in range(STEPS_PER_ROUND):
                self.step()
            torch.cuda.synchronize()
            total += time.perf_counter() - start
            controls += control()
            rounds += 1
        return {"step": total / rounds / STEPS_PER_ROUND, "control": controls / rounds}


def control() -> float:
    """Seconds of a loop of pure Python: how fast this core is just now."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        sum(i * i for i in range(3000))
        best = min(best, time.perf_counter() - start)
    return best


@contextlib.contextmanager
def state(name: str, url: str) -> Any:
    """Switch one of the three states on for a segment."""
    record = torch.cuda.memory._record_memory_history  # noqa: SLF001 - the baseline itself
    if name == "off":
        yield None
        return
    if name == "recorder":
        record("state", context="state", stacks="python")
        try:
            yield None
        finally:
            record(None)
        return
    gpumem_otel.install(
        service_name="overhead",
        pyroscope_url=url,
        interval_seconds=INTERVAL_SECONDS,
        serve=True,
        port=0,
        run_dir="/tmp/gpumem-otel-bench",
    )
    agent = lifecycle.current()
    assert agent is not None
    assert agent.wait_listening(10)
    sidecar.scrape(url, agent.address[1])
    try:
        yield None
    finally:
        sidecar.scrape(url, 0)
        gpumem_otel.uninstall()


@contextlib.contextmanager
def one_core() -> Any:
    """Keep this thread, and those that it starts, on one core, so that one speed holds for all."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield None
    finally:
        os.sched_setaffinity(0, cores)


def compare(job: Job, url: str, pairs: int, seconds: float, *, per_control: bool) -> dict[str, Any]:
    """Segments of the three states in turn, order rotated, `pairs` times."""
    job.segment(seconds)
    for warm in ("recorder", "ours"):
        with state(warm, url):
            job.segment(seconds / 2)
    rows: list[dict[str, dict[str, float]]] = []
    order = ["off", "recorder", "ours"]
    for _ in range(pairs):
        row = {}
        for name in order:
            with state(name, url):
                job.segment(SETTLE_SECONDS)
                row[name] = job.segment(seconds)
        rows.append(row)
        order = order[1:] + order[:1]

    def ratio(a: str, b: str) -> dict[str, Any]:
        plain = [row[a]["step"] / row[b]["step"] for row in rows]
        even = [
            p * row[b]["control"] / row[a]["control"] for p, row in zip(plain, rows, strict=True)
        ]
        quoted = even if per_control else plain
        return {
            "median": statistics.median(quoted),
            "min": min(quoted),
            "max": max(quoted),
            "median_plain": statistics.median(plain),
        }

    return {
        "step_ms": {n: statistics.median(r[n]["step"] for r in rows) * 1e3 for n in order},
        "ours_over_off": ratio("ours", "off"),
        "recorder_over_off": ratio("recorder", "off"),
        "ours_over_recorder": ratio("ours", "recorder"),
        "pairs": rows,
    }


def at_rest(url: str, seconds: float) -> dict[str, float]:
    """CPU time of all threads per second, the job's memory held and the job itself at rest.

    Without the noise of a running job: what our threads take from it where they share one core.
    """
    shares = {}
    for name in ("off", "recorder", "ours"):
        with state(name, url):
            time.sleep(SETTLE_SECONDS)
            started, cpu = time.perf_counter(), time.process_time()
            time.sleep(seconds)
            shares[name] = (time.process_time() - cpu) / (time.perf_counter() - started)
    return shares


def per_allocation(url: str, pairs: int, count: int = 5_000) -> dict[str, Any]:
    """Microseconds per `torch.empty(1024)` and its free, by state, at stack depth 30.

    The least of eight loops, and of all rows: what the code costs, not what a neighbour on the
    machine does. A row begins and ends without recording (`off`, `uninstalled`).
    """

    def at_depth(depth: int) -> float:
        if depth:
            return at_depth(depth - 1)
        best = float("inf")
        for _ in range(8):
            start = time.perf_counter()
            for _ in range(count):
                torch.empty(1024, device="cuda")
            best = min(best, time.perf_counter() - start)
        return best / count * 1e6

    rows = []
    at_depth(30)
    for _ in range(pairs):
        row = {}
        for name in ("off", "recorder", "ours"):
            with state(name, url):
                row[name] = at_depth(30)
        row["uninstalled"] = at_depth(30)
        rows.append(row)
    return {
        name: {
            "least_us": min(r[name] for r in rows),
            "all_us": [round(r[name], 3) for r in rows],
        }
        for name in rows[0]
    }


def read_outs(url: str, counts: tuple[int, ...]) -> dict[str, Any]:
    """Cost of one read-out with so many live blocks of 200 distinct stacks of about 30 frames."""
    results = {}
    for count in counts:
        gpumem_otel.install(service_name="blocks", pyroscope_url=url, interval_seconds=3600)
        rss_before = resident_bytes()
        keep = [allocate(30, i % 200) for i in range(count)]
        torch.cuda.synchronize()
        agent = lifecycle.current()
        assert agent is not None
        measure(agent)  # the first one names the frames
        rows = [measure(agent) for _ in range(5)]
        raw = [timed(torch.cuda.memory._snapshot) for _ in range(5)]  # noqa: SLF001
        results[str(count)] = {
            **{key: statistics.median(row[key] for row in rows) for key in rows[0]},
            "raw_snapshot_ms": statistics.median(raw) * 1e3,
            "host_bytes_per_block": (resident_bytes() - rss_before) / count,
        }
        result = results[str(count)]
        result["total_over_raw"] = result["work_ms"] / result["raw_snapshot_ms"]
        del keep
        gpumem_otel.uninstall()
        gc.collect()
        torch.cuda.empty_cache()
    return results


def measure(agent: Any) -> dict[str, float]:
    """One read-out, encoding and compression, as the background thread does them.

    `work_ms` is CPU time of this thread: the rests between slices cost the job nothing.
    """
    readings: list[float] = []

    def note(reading: Any) -> None:
        readings.append(reading.stall_seconds)

    agent.reader.tap.append(note)
    started = time.thread_time()
    profiles = agent.reader.live_now()
    data = [agent.queries.encode(profile) for profile in profiles]
    zipped = [gzip_bytes(one) for one in data]
    work = time.thread_time() - started
    agent.reader.tap.remove(note)
    return {
        "work_ms": work * 1e3,
        "stall_ms": readings[-1] * 1e3,
        "held_ms": agent.reader.last_stall_seconds * 1e3,
        "profile_bytes": sum(map(len, data)),
        "gzip_bytes": sum(map(len, zipped)),
    }


def allocate(depth: int, site: int) -> torch.Tensor:
    """One block from one of 200 call sites."""
    if depth:
        return allocate(depth - 1, site)
    return SITES[site]()


def make_sites(count: int) -> list[Any]:
    source = "\n".join(
        f"def site{i}():\n    return torch.empty(512, device='cuda', dtype=torch.uint8)"
        for i in range(count)
    )
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(source, "sites.py", "exec"), scope)
    return [scope[f"site{i}"] for i in range(count)]


SITES = make_sites(200)


def timed(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pairs", type=int, default=10, help="of the CPU-bound job")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of one segment")
    options = parser.parse_args()
    with sidecar.running() as url:
        results: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "gpumem_otel": __version__,
            "cores": os.cpu_count(),
            "interval_seconds": INTERVAL_SECONDS,
            "segment_seconds": options.seconds,
        }
        with one_core():
            job = Job(width=256, layers=12, batch=2, length=32)
            results["cpu_bound"] = compare(
                job, url, options.pairs, options.seconds, per_control=True
            )
            results["cpu_share_at_rest"] = at_rest(url, 2 * INTERVAL_SECONDS)
            del job
        write(results, options.out)
        torch.cuda.empty_cache()
        job = Job(width=2048, layers=12, batch=16, length=1024)
        results["gpu_bound"] = compare(job, url, 5, options.seconds / 2, per_control=False)
        write(results, options.out)
        del job
        gc.collect()
        torch.cuda.empty_cache()
        results["per_allocation"] = per_allocation(url, 10)
        write(results, options.out)
        results["read_out"] = read_outs(url, (1_000, 10_000, 100_000))
    write(results, options.out)


def write(results: dict[str, Any], out: Path | None) -> None:
    """Print results, and keep them where they are quoted from; after each part, lest one fail."""
    text = json.dumps(results, indent=1)
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
