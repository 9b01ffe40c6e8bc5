"""Tensor classes against an independent count of storages, job by job, on a GPU.

    python benchmarks/classes.py [--out FILE.json] [JOB ...]

Every job is a process of its own (two for `ddp` and `fsdp2`, which need two GPUs) that installs
first, trains some steps, and is read at two moments:

* after `optimizer.step()`: requested bytes of the blocks of each class, against the storages of
  `named_parameters`, `named_buffers`, their `.grad` and the optimizer's state, each storage once;
* at the end of forward: bytes of `activation`, against the storages that autograd saves, counted
  by `saved_tensors_hooks`, each once, without parameters, buffers and inputs.

Block bytes are larger than what was asked for by the allocator's rounding, which no class can
compute from outside; so requested bytes are compared. Printed too is the share of what is
allocated that stays unattributed at both moments.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import gc
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


STEPS = 4
NAMED = ("parameter", "buffer", "gradient", "optimizer_state")
_LIMIT_SECONDS = 300


def main(argv: list[str] | None = None) -> int:
    """Run the jobs and print their table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("jobs", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help="run this job in this process and print its numbers")
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(_measure(options.one)), flush=True)
        return 0
    rows = {}
    for job in options.jobs or _possible():
        rows[job] = _in_a_process(job)
        print(_line(job, rows[job]), flush=True)
        if options.out:  # each time, since a lent machine may be gone before the last one
            options.out.write_text(json.dumps({**_machine(), "jobs": rows}, indent=1) + "\n")
    return 0 if all("error" not in row for row in rows.values()) else 1


def _possible() -> list[str]:
    ask = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    alone = ["mlp", "transformer", "lstm", "tied", "amp", "checkpointing", "compiled"]
    return alone + (["ddp", "fsdp2"] if int(found.stdout) >= 2 else [])


def _in_a_process(job: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", job]
    if job in {"ddp", "fsdp2"}:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
        command = [sys.executable, *launch, __file__, "--one", job]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        return {"error": done.stderr.strip()[-2000:]}
    return min(rows, key=lambda row: row["rank"])


def _line(job: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{job}: failed: {row['error']}"
    parts = [
        f"{name} {row['classes'].get(name, 0):,}"
        + ("" if row["classes"].get(name, 0) == row["counted"][name] else
           f" (counted {row['counted'][name]:,})")
        for name in NAMED
    ]  # fmt: skip
    forward = row["forward"]
    return (
        f"{job}: {', '.join(parts)}; activation {forward['activation']:,} of "
        f"{forward['saved']:,} saved ({forward['activation'] / max(forward['saved'], 1):.4f}); "
        f"unattributed {row['unattributed_ratio']:.4f} / {forward['unattributed_ratio']:.4f}"
    )


def _machine() -> dict[str, str]:
    ask = "import json, torch; print(json.dumps([torch.__version__, torch.cuda.get_device_name()]))"
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    torch_version, device = json.loads(found.stdout)
    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "device": device,
        "torch": torch_version,
        "python": platform.python_version(),
    }


# one job -----------------------------------------------------------------------------------------


def _measure(name: str) -> dict[str, Any]:
    import gpumem_otel

    gpumem_otel.install(interval_seconds=3600, serve=False, otlp=False)
    import class_jobs
    import torch

    from gpumem_otel.api import lifecycle

    job = class_jobs.JOBS[name]()
    agent = lifecycle.current()
    assert agent is not None
    assert agent.tensors is not None
    for step in range(STEPS):
        loss = job.forward()
        _backward(job, loss)
        if step == STEPS - 1:
            torch.cuda.synchronize()
            agent.tensors.want(0)
            # it is made for at most 1/500 of the time
            time.sleep(0.2 + 500 * agent.tensors.last_seconds)
            agent.tensors.want(0)  # a reading of the agent's own has put it off
        _step(job)
        if step < STEPS - 1:
            job.optimizer.zero_grad()
        del loss
    gc.collect()
    torch.cuda.synchronize()
    sums = _by_class(agent)
    counted = _count(job)
    row = {
        "rank": int(os.environ.get("RANK", "0")),
        "classes": sums["requested"],
        "blocks": sums["blocks"],
        "counted": counted,
        "unattributed_ratio": sums["unattributed_ratio"],
    }
    job.optimizer.zero_grad()
    with _saved(job) as saved:
        loss = job.forward()
    torch.cuda.synchronize()
    after = _by_class(agent)
    row["forward"] = {
        "activation": after["requested"].get("activation", 0),
        "classes": after["requested"],
        "saved": sum(size for size, _ in saved.values()),
        "unattributed_ratio": after["unattributed_ratio"],
        "stacks": after["stacks"],
    }
    loss.backward()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gpumem_otel.uninstall()
    return row


def _backward(job: Any, loss: Any) -> None:
    (loss if job.scaler is None else job.scaler.scale(loss)).backward()


def _step(job: Any) -> None:
    if job.scaler is None:
        job.optimizer.step()
    else:
        job.scaler.step(job.optimizer)
        job.scaler.update()


def _by_class(agent: Any) -> dict[str, Any]:
    """Of a reading as every profile is made of: requested bytes and block bytes by class."""
    reading = agent.source.read()
    classifier = reading.classifier
    requested: dict[str, int] = {}
    blocks: dict[str, int] = {}
    stacks: dict[str, dict[str, int]] = {}
    for segment in reading.snapshot.raw_segments():
        for block in segment["blocks"]:
            if block["state"] != "active_allocated":
                continue
            found = classifier.of_block(block)
            if found is None:
                frames = block.get("frames") or ()
                root = "[backward]" if not frames else ""
                found = classifier.of_stack(frames or [{"name": root, "filename": ""}])
            requested[found.value] = requested.get(found.value, 0) + block["requested_size"]
            blocks[found.value] = blocks.get(found.value, 0) + block["size"]
            leaf = " < ".join(
                f"{f['name']} {Path(f['filename']).name}:{f['line']}"
                for f in (block.get("frames") or ())[:4]
            )
            of_class = stacks.setdefault(found.value, {})
            of_class[leaf] = of_class.get(leaf, 0) + block["size"]
    allocated = sum(blocks.values())
    return {
        "requested": requested,
        "blocks": blocks,
        "stacks": {
            name: dict(sorted(of_class.items(), key=lambda item: -item[1])[:5])
            for name, of_class in stacks.items()
        },
        "unattributed_ratio": blocks.get("unattributed", 0) / max(allocated, 1),
    }


def _count(job: Any) -> dict[str, int]:
    """Storages, each once and in the first of these that holds it; not with the code under test."""
    import torch

    seen: set[int] = set()

    def size(tensors: Iterable[Any]) -> int:
        total = 0
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if not local.is_cuda:
                continue
            storage = local.untyped_storage()
            if storage.data_ptr() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    parameters = [p for _, p in job.module.named_parameters()]
    return {
        "parameter": size(parameters),
        "buffer": size(b for _, b in job.module.named_buffers()),
        "gradient": size(p.grad for p in parameters if p.grad is not None),
        "optimizer_state": size(
            value
            for state in job.optimizer.state.values()
            for value in (*state.values(), *_of_scaler(job))
            if isinstance(value, torch.Tensor)
        ),
    }


def _of_scaler(job: Any) -> tuple[Any, ...]:
    """GradScaler's own two numbers on the device."""
    return () if job.scaler is None else (job.scaler._scale, job.scaler._growth_tracker)  # noqa: SLF001


@contextlib.contextmanager
def _saved(job: Any) -> Iterator[dict[int, tuple[int, Any]]]:
    """Storages that autograd saves meanwhile: address -> (bytes, a reference that keeps it)."""
    import torch

    def known() -> set[int]:
        # asked each time: during a forward FSDP puts the gathered parameters in place
        return {
            getattr(t, "_local_tensor", t).untyped_storage().data_ptr()
            for t in (*job.module.parameters(), *job.module.buffers(), *job.inputs, *job.keeps)
        }

    found: dict[int, tuple[int, Any]] = {}

    def pack(tensor: Any) -> Any:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.is_cuda:
            storage = local.untyped_storage()
            if storage.data_ptr() not in known():
                found[storage.data_ptr()] = (storage.nbytes(), None)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


if __name__ == "__main__":
    sys.exit(main())
