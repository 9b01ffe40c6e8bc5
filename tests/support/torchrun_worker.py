"""One rank of a torchrun job, as a script: it plays a recording through the real agent.

Rank 0 looks at what the others show and writes what it saw as JSON to `$OUT/look-<restart>.json`;
every rank writes the moments at which it was read to `$OUT/reads-<rank>.json`. `$FAIL` names the
rank that fails in the first incarnation.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from pathlib import Path

import torch.distributed as dist

import gpumem_otel
from gpumem_otel.api import lifecycle
from gpumem_otel.base.clock import SystemClock
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.recording.source import ReplaySource
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.serve import discovery
from gpumem_otel.settings.options import resolve

READS = 3


def listening_ports(pid: int) -> list[int]:
    """Ports that a process listens on, over IPv4 and IPv6."""
    ours = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            ours.add(str(entry.readlink()))
        except OSError:  # noqa: PERF203 - closed meanwhile
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in ours:
                found.append(int(fields[1].rpartition(":")[2], 16))
    return sorted(found)


def metrics(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return answer.read().decode().splitlines()


class Reads:
    """The moments of the live read-outs of this rank."""

    def __init__(self) -> None:
        self._moments: list[int] = []
        self._changed = threading.Condition()

    def __call__(self, kind, profiles) -> None:
        with self._changed:
            self._moments.append(profiles[0].time_ns)
            self._changed.notify_all()

    def next(self, count: int) -> list[int]:
        with self._changed:
            first = len(self._moments)
            assert self._changed.wait_for(lambda: len(self._moments) >= first + count, 60)
            return self._moments[first : first + count]


def look(run_dir: str, out: Path, restart: str) -> None:
    """What a scraper on this machine sees, and what the launcher shows (it should be nothing)."""
    launcher = os.getppid()
    entries = discovery.targets(run_dir)
    seen = {
        "file_sd": json.loads(discovery.as_file_sd(discovery.targets(run_dir))),
        "files": sorted(path.name for path in Path(run_dir).iterdir()),
        "pids": [entry.pid for entry in entries],
        "ports": [entry.port for entry in entries],
        "local_ranks": [entry.local_rank for entry in entries],
        "metrics": [metrics(entry.port) for entry in entries],
        "launcher": launcher,
        "launcher_ports": listening_ports(launcher),
    }
    (out / f"look-{restart}.json").write_text(json.dumps(seen))


def main() -> None:
    environ = os.environ
    out, restart = Path(environ["OUT"]), environ["TORCHELASTIC_RESTART_COUNT"]
    rank = int(environ["RANK"])
    # the launcher was started by `gpumem-otel run`, and so was this: without a GPU it never arms
    assert lifecycle.current() is not None
    gpumem_otel.uninstall()
    recording = load_recording(environ["RECORDING"], name="test")
    reads = Reads()
    agent = Agent(
        resolve(environ), source=ReplaySource(recording, SystemClock()), on_profiles=reads
    )
    lifecycle.adopt(agent)
    # a store of its own for each incarnation: in the launcher's, gloo of some versions of torch
    # meets the addresses of the dead
    world_size = int(environ["WORLD_SIZE"])
    store = dist.FileStore(str(out / f"store-{restart}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    assert agent.wait_listening(60)
    dist.barrier()
    if rank == 0:
        look(environ["GPUMEM_OTEL_RUN_DIR"], out, restart)
    dist.barrier()
    if restart == "0" and environ.get("FAIL") == str(rank):
        raise SystemExit("this rank fails once")
    (out / f"reads-{rank}.json").write_text(json.dumps(reads.next(READS)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
