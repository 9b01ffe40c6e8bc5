"""What making the address table costs the job's own thread, by the number of tensors.

    python benchmarks/class_table.py [--out FILE.json]

A model with so many parameters, their gradients and AdamW's state, on the first CUDA device or,
without one, in host memory: reading an address is the same work. `first` makes the weak
references, `later` finds those of the last table again; `alive` is the pass of our own thread.
Least of several runs.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gpumem_otel.capture.tensor_table import TensorTable

COUNTS = (1_000, 10_000, 100_000)
_PER_LAYER = 8  # weight and bias, each with gradient and two moments
_REPEATS = 5


def measure(count: int, device: str) -> dict[str, float]:
    """Milliseconds for about so many tensors."""
    layers = [torch.nn.Linear(2, 2, device=device) for _ in range(count // _PER_LAYER)]
    model = torch.nn.ModuleList(layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    first, later, alive, tensors = [], [], [], 0
    for _ in range(_REPEATS):
        table = TensorTable(monotonic=time.perf_counter, host_too=True)
        table.start()
        table.watch("", model)
        for took in (first, later):
            table._allowed_from = table._wanted_from = float("-inf")  # noqa: SLF001
            # the one pass over Python's objects is not the table's
            table._searched = True  # noqa: SLF001
            gc.collect()
            table.stepped(optimizer)
            took.append(table.last_seconds)
        tensors = table.tensors
        started = time.perf_counter()
        TensorTable.alive(table.snapshot(), lambda: None)
        alive.append(time.perf_counter() - started)
        table.stop()
    return {
        "tensors": tensors,
        "first_ms": min(first) * 1000,
        "later_ms": min(later) * 1000,
        "alive_ms": min(alive) * 1000,
    }


def main() -> int:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [measure(count, device) for count in COUNTS]
    for row in rows:
        print("  ".join(f"{name} {value:,.1f}" for name, value in row.items()), flush=True)
    found: dict[str, Any] = {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "host memory",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
