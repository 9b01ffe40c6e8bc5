"""Measures the line profiler per line, and prints its table of the first pytorch_memlab example.

    python benchmarks/lines.py --out benchmarks/results/lines-h200.json

The same function of nine cheap lines (eight of them without torch) runs plain, decorated and
switched off, decorated and on, and under pytorch_memlab's profiler where that is installed. Results
are medians of `--repeats` runs; per line: the difference to plain, divided by the lines that ran.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import types
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

import gpumem_otel
from gpumem_otel._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

try:
    from pytorch_memlab import LineProfiler as TheirProfiler
except ImportError:
    TheirProfiler = None

LINES = 9
CALLS = 200
Work: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


def work(x: torch.Tensor) -> torch.Tensor:
    a = 1
    b = a + 1
    c = b + 1
    d = c + 1
    e = d + 1
    f = e + 1
    g = f + 1
    h = g + 1
    return x + h


def inner() -> None:
    torch.nn.Linear(100, 100).cuda()


def outer() -> None:
    linear = torch.nn.Linear(100, 100).cuda()  # noqa: F841
    linear2 = torch.nn.Linear(100, 100).cuda()  # noqa: F841
    inner()


def seconds_of(function: Work, x: torch.Tensor) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        function(x)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def per_line_us(function: Work, x: torch.Tensor, plain: Work, repeats: int) -> float:
    """Median of the paired differences."""
    pairs = [(seconds_of(function, x), seconds_of(plain, x)) for _ in range(repeats)]
    return 1e6 * statistics.median(a - b for a, b in pairs) / (CALLS * LINES)


def fresh() -> Work:
    """A function with the same lines and a code object of its own, so that events do not spread."""
    return types.FunctionType(work.__code__.replace(), globals(), "work")


def measured(repeats: int) -> dict[str, float]:
    x = torch.ones(64, device="cuda")
    plain = fresh()
    rows = {"plain_us_per_call": 1e6 * statistics.median(
        seconds_of(plain, x) / CALLS for _ in range(repeats))}  # fmt: skip
    decorated = gpumem_otel.profile(show=False)(fresh())
    profiler = gpumem_otel.line_profiler()
    rows["on_us_per_line"] = per_line_us(decorated, x, plain, repeats)
    profiler.disable()
    rows["off_us_per_line"] = per_line_us(decorated, x, plain, repeats)
    rows["other_code_while_on_us_per_line"] = other_code(x, plain, repeats)
    if TheirProfiler is not None:
        theirs = fresh()
        with TheirProfiler(theirs):
            # few calls, since it keeps a row for every line that ran
            begin = time.perf_counter()
            for _ in range(CALLS):
                theirs(x)
            taken = time.perf_counter() - begin
        plain_seconds = seconds_of(plain, x)
        rows["pytorch_memlab_us_per_line"] = 1e6 * (taken - plain_seconds) / (CALLS * LINES)
    return rows


def other_code(x: torch.Tensor, plain: Work, repeats: int) -> float:
    """The cost of code that is not profiled while other code is."""
    other = fresh()
    with gpumem_otel.LineProfiler(inner):
        during = [seconds_of(other, x) for _ in range(repeats)]
    after = [seconds_of(plain, x) for _ in range(repeats)]
    return 1e6 * (statistics.median(during) - statistics.median(after)) / (CALLS * LINES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.cuda.init()
    with gpumem_otel.LineProfiler(outer, inner) as lines:
        outer()
    table = str(lines.display())
    results = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpumem_otel": __version__,
        "events": "sys.monitoring" if hasattr(sys, "monitoring") else "sys.settrace",
        "repeats": options.repeats,
        **{name: round(value, 3) for name, value in measured(options.repeats).items()},
        "readme_example": table.splitlines(),
    }
    print(table)
    for name, value in results.items():
        if name != "readme_example":
            print(f"{name:36} {value}")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
