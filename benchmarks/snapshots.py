"""Snapshot files: time and memory of our verbs and of PyTorch's `_memory_viz.py`, same files.

    python benchmarks/snapshots.py --torch-python PATH [--out FILE.json] [FOLDER]

On the generated snapshot of `large_snapshot.py` and on the six largest files of FOLDER (by default
of GPUMEM_SNAPSHOTS). Every command is a process of its own; the commands of a question run in turn,
`--repeats` times, so that a busy moment affects both. Reported are the least and the median of the
wall clock, the least CPU time (other work on the machine shows in the first two), and the largest
resident memory, of the whole process including the interpreter's start.

`_memory_viz.py` is run as a file, which spares it the import of torch, and is given plain pickles,
since it reads no gzip. Its `memory` downloads a Perl script to draw an SVG; here a script in its
place returns its input, so that the drawing costs nothing and no network is needed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import large_snapshot

from gpumem_otel._version import __version__

OURS = [sys.executable, "-m", "gpumem_otel.cli.main"]
_TAIL = 300
_WHICH = """
import json, platform, torch
import torch.cuda._memory_viz as viz
print(json.dumps([viz.__file__, torch.__version__, platform.python_version()]))
"""
_WATCHED = """
import json, os, resource, sys, time
most = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_CPU, (most, most))
began = time.perf_counter()
child = os.posix_spawn(sys.argv[3], sys.argv[3:], os.environ)
_, status, usage = os.wait4(child, 0)
took = [time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024]
with open(sys.argv[1], "w") as file:
    json.dump(took, file)
if os.waitstatus_to_exitcode(status) < 0:
    sys.exit(f"not done after {most} s of CPU time")
sys.exit(os.waitstatus_to_exitcode(status))
"""

# question -> name -> arguments; IN and OUT are the files
QUESTIONS: dict[str, dict[str, list[str]]] = {
    "what holds the memory now": {
        "gpumem-otel convert": ["convert", "IN", "-o", "OUT"],
        "gpumem-otel stats": ["stats", "IN"],
        "gpumem-otel top": ["top", "IN"],
        "_memory_viz memory": ["memory", "IN", "-o", "OUT"],
    },
    "what held it at the peak": {
        "gpumem-otel convert --kind peak": ["convert", "IN", "-o", "OUT", "--kind", "peak"],
    },
    "the events as text": {
        "gpumem-otel trace": ["trace", "IN"],
        "_memory_viz trace": ["trace", "IN"],
    },
    "memory over time, as a page": {
        "gpumem-otel timeline": ["timeline", "IN", "-o", "OUT"],
        "gpumem-otel flamegraph": ["flamegraph", "IN", "-o", "OUT"],
        "_memory_viz trace_plot": ["trace_plot", "IN", "-o", "OUT"],
    },
}


class Tool:
    """The two programs, and where they work."""

    def __init__(self, torch_python: str, folder: Path, most_seconds: int) -> None:
        self.folder = folder
        self._most_seconds = most_seconds
        described = subprocess.run(
            [torch_python, "-c", _WHICH], capture_output=True, text=True, check=True
        )
        file, self.torch, self.python = json.loads(described.stdout)
        self._viz = [torch_python, file]
        script = folder / ".cache" / "flamegraph.pl"
        script.parent.mkdir()
        script.write_text(
            f"#!{sys.executable}\nimport sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())\n"
        )
        script.chmod(0o755)

    def run(self, name: str, arguments: list[str], file: Path) -> dict[str, Any]:
        """One process: its time and memory and, where it failed, the end of its error output."""
        out = self.folder / "out"
        out.unlink(missing_ok=True)
        filled = [{"IN": str(file), "OUT": str(out)}.get(word, word) for word in arguments]
        command = [*(OURS if name.startswith("gpumem-otel") else self._viz), *filled]
        shown = self.folder / "stdout"
        # started by a small process: a child counts the memory of what it was forked from
        with shown.open("wb") as stdout, (self.folder / "stderr").open("w+b") as stderr:
            watched = subprocess.run(
                [
                    *(sys.executable, "-S", "-c", _WATCHED),
                    *(str(self.folder / "usage"), str(self._most_seconds), *command),
                ],
                check=False,
                stdout=stdout,
                stderr=stderr,
                cwd=self.folder,
                env={**os.environ, "HOME": str(self.folder)},
            )
            stderr.seek(0)
            errors = stderr.read().decode(errors="replace").strip()
        seconds, cpu_seconds, memory_bytes = json.loads((self.folder / "usage").read_text())
        usage: dict[str, Any] = {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "memory_bytes": memory_bytes,
            "out_bytes": out.stat().st_size if out.exists() else shown.stat().st_size,
        }
        if watched.returncode:
            usage["error"] = errors.splitlines()[-1][-_TAIL:] if errors else "no error output"
        return usage


def measure(tool: Tool, file: Path, repeats: int) -> dict[str, Any]:
    """All questions on one file, the commands of each in turn."""
    answers: dict[str, Any] = {}
    for question, commands in QUESTIONS.items():
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
        for _ in range(repeats):
            for name, arguments in commands.items():
                if not any("error" in run for run in runs[name]):
                    runs[name].append(tool.run(name, arguments, file))
        answers[question] = {name: _summary(some) for name, some in runs.items()}
        for name, row in answers[question].items():
            print(f"  {name:34} {_text(row)}", flush=True)
    return answers


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [run["seconds"] for run in runs]
    row = {
        "least_seconds": min(seconds),
        "median_seconds": statistics.median(seconds),
        "cpu_seconds": min(run["cpu_seconds"] for run in runs),
        "memory_bytes": max(run["memory_bytes"] for run in runs),
        "out_bytes": runs[-1]["out_bytes"],
    }
    errors = [run["error"] for run in runs if "error" in run]
    return {**row, "error": errors[0]} if errors else row


def _text(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    return (
        f"{row['least_seconds']:8.2f} s  cpu {row['cpu_seconds']:7.2f} s  "
        f"{row['memory_bytes'] / 1e6:8.0f} MB  wrote {row['out_bytes']:,}"
    )


def _unpacked(path: Path, folder: Path) -> Path:
    data = path.read_bytes()
    plain = folder / path.name.removesuffix(".gz")
    plain.write_bytes(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    return plain


def _events(file: Path) -> int:
    raw = pickle.loads(file.read_bytes())  # files of ours, or that the user names
    return sum(map(len, raw.get("device_traces", ()))) if isinstance(raw, dict) else 0


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=os.environ.get("GPUMEM_SNAPSHOTS"))
    parser.add_argument("--torch-python", required=True, help="a Python that has torch")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-seconds", type=int, default=300, help="of CPU, per command")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--live", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tool = Tool(options.torch_python, folder, options.most_seconds)
        generated = folder / f"generated, {options.events:,} events.pickle"
        generated.write_bytes(
            pickle.dumps(large_snapshot.make(options.events, options.live), protocol=4)
        )
        files = [generated]
        if options.folder:
            packed = [path for path in options.folder.iterdir() if ".pickle" in path.name]
            plain = [_unpacked(path, folder) for path in packed]
            files += sorted(plain, key=lambda path: -path.stat().st_size)[:6]
        results: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{_processor()}, {os.cpu_count()} cores",
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "python": platform.python_version(),
            "gpumem_otel": __version__,
            "torch": tool.torch,
            "torch_python": tool.python,
            "repeats": options.repeats,
            "load_before": os.getloadavg()[0],
            "files": {},
        }
        for file in files:
            size, events = file.stat().st_size, _events(file)
            print(f"{file.name}: {size:,} bytes, {events:,} events", flush=True)
            results["files"][file.name.removesuffix(".pickle")] = {
                "size_bytes": size,
                "events": events,
                "questions": measure(tool, file, options.repeats),
            }
        results["load_after"] = os.getloadavg()[0]
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
