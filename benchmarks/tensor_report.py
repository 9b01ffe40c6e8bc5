"""Compares the tensor report with that of pytorch_memlab on its README, and measures its cost.

    python benchmarks/tensor_report.py --out benchmarks/results/tensor-report-h200.json

Every line that pytorch_memlab 0.3.2 prints must be matched by one of ours: the same shape and size,
under the same name where there is a name. With torch 2 it multiplies the bytes of a storage by the
size of an element, so its sizes are compared in that form. Without pytorch_memlab only our own part
runs; without a GPU (`--device cpu`) there is no allocator to compare.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import gpumem_otel
from gpumem_otel._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.tensors.report import TensorInfo

try:
    from pytorch_memlab import MemReporter
except ImportError:
    MemReporter = None

ROUND = 512
Made = tuple[Any, Any, list[Any]]
"""Model, optimizer, and other objects that have to stay alive."""


def minimal(device: str) -> Made:
    linear = torch.nn.Linear(1024, 1024).to(device)
    return None, None, [linear]


def before_backward(device: str) -> Made:
    linear = torch.nn.Linear(1024, 1024).to(device)
    inp = torch.Tensor(512, 1024).to(device)
    out = linear(inp).mean()
    return linear, None, [inp, out]


def after_backward(device: str) -> Made:
    linear, _, (inp, out) = before_backward(device)
    out.backward()
    return linear, None, [inp, out]


def shared_weights(device: str) -> Made:
    linear = torch.nn.Linear(1024, 1024).to(device)
    linear2 = torch.nn.Linear(1024, 1024).to(device)
    linear2.weight = linear.weight
    container = torch.nn.Sequential(linear, linear2)
    inp = torch.Tensor(512, 1024).to(device)
    out = container(inp).mean()
    out.backward()
    return container, None, [inp, out]


def lstm(device: str) -> Made:
    model = torch.nn.LSTM(1024, 1024).to(device)
    inp = torch.Tensor(10, 10, 1024).to(device)
    out, state = model(inp)
    out.mean().backward()
    return model, None, [inp, out, state]


def optimizer(device: str) -> Made:
    linear = torch.nn.Linear(1024, 1024).to(device)
    adam = torch.optim.Adam(linear.parameters())
    linear(torch.rand(512, 1024, device=device)).mean().backward()
    adam.step()
    return linear, adam, []


def failed_example(device: str) -> Made:
    """Its README misses 2 MB here: only autograd holds the result of `inp * (inp + 2)`."""
    linear = torch.nn.Linear(1024, 1024).to(device)
    inp = torch.Tensor(512, 1024).to(device)
    out = linear(inp * (inp + 2)).mean()
    return linear, None, [inp, out]


EXAMPLES = (
    minimal, before_backward, after_backward, shared_weights, lstm, optimizer, failed_example,
)  # fmt: skip


def itemsize(dtype: str) -> int:
    return torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def unmatched(theirs: Any, ours: gpumem_otel.Report) -> list[str]:
    """Rows of theirs that none of ours matches."""
    rows = [row for device in ours.devices for row in (*device.rows, *device.saved)]
    missing = []
    for stats in theirs.device_tensor_stat.values():
        for name, shape, elements, size in stats:
            plain, _, of = name.partition("(->")
            automatic = (
                plain.rstrip("0123456789") in ("Tensor", "Parameter") and plain[-1].isdigit()
            )
            is_matched = any(
                (row.shape or (1,)) == shape
                and row.elements == elements
                and (automatic or row.name == plain)
                # the two may have chosen different tensors as the first of a storage
                and (of or row.shares or size == in_their_form(row))
                for row in rows
            )
            if not is_matched:
                missing.append(f"{name} {shape}")
    return missing


def in_their_form(row: TensorInfo) -> int:
    return math.ceil(row.used_bytes * itemsize(row.dtype) / ROUND) * ROUND


def example(make: Callable[[str], Made], device: str) -> dict[str, Any]:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    model, adam, kept = make(device)
    ours = gpumem_otel.report(model, adam)
    print(f"======== {make.__name__}\n{ours}")
    result: dict[str, Any] = {"example": make.__name__, "rows": len(ours.tensors)}
    for report in (entry for entry in ours.devices if entry.device.startswith(device)):
        result["used_bytes"] = report.used_bytes
        result["allocated_bytes"] = report.allocated_bytes
        result["parts"] = {part.name: part.size_bytes for part in report.parts}
        if report.allocated_bytes is not None:
            assert report.allocated_bytes == torch.cuda.memory_allocated()
            assert sum(part.size_bytes for part in report.parts) == report.allocated_bytes
    if MemReporter is not None:
        theirs = MemReporter(model)
        if adam is not None:
            theirs.add_optimizer(adam)
        theirs.report(verbose=True)
        result["unmatched"] = unmatched(theirs, ours)
        print(f"lines of pytorch_memlab without one of ours: {result['unmatched'] or 'none'}\n")
    del kept
    return result


def cost(tensors: int, device: str) -> dict[str, Any]:
    """Seconds of a report with so many tensors in a model."""
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, device=device) for _ in range(tensors // 2))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        report = gpumem_otel.report(layers)
        seconds.append(time.perf_counter() - started)
    return {"tensors": len(report.tensors), "seconds": statistics.median(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="leave out the costs")
    options = parser.parse_args()
    gpu = options.device != "cpu"
    gpumem_otel.install(service_name="tensor-report")
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpumem_otel": __version__,
        "pytorch_memlab": MemReporter is not None,
        "examples": [example(make, options.device) for make in EXAMPLES],
        "cost": []
        if options.quick
        else [cost(number, options.device) for number in (1_000, 10_000, 100_000)],
    }
    for row in results["cost"]:
        print(f"{row['tensors']:>8} tensors: {row['seconds'] * 1e3:8.1f} ms")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
