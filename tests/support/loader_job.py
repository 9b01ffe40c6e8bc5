"""A job with eight persistent DataLoader workers, as a script: prints what the workers hold.

The job plays a recording; its workers were reached by `gpumem-otel run` (spawn) or inherited the
armed agent (fork).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from torch.utils.data import DataLoader, Dataset

import gpumem_otel
from gpumem_otel.api import lifecycle
from gpumem_otel.base.clock import SystemClock
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.recording.source import ReplaySource
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.settings.options import resolve

WORKERS = 8


def tcp_sockets() -> int:
    """TCP sockets that this process holds; torch itself passes tensors over Unix sockets."""
    ours = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            ours.add(str(entry.readlink()))
        except OSError:  # noqa: PERF203 - closed meanwhile
            continue
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    inodes = [line.split()[9] for table in tables for line in table.splitlines()[1:]]
    return sum(f"socket:[{inode}]" in ours for inode in inodes)


class Facts(Dataset):
    """Each item says what the process that made it holds of ours."""

    def __len__(self) -> int:
        return WORKERS * 2

    def __getitem__(self, index: int) -> tuple:
        agent = lifecycle.current()
        threads = [t.name for t in threading.enumerate() if t.name.startswith("gpumem")]
        observed = agent is not None and agent.observe() is not None
        listens = agent is not None and agent.address is not None
        return os.getpid(), len(threads), tcp_sockets(), observed, listens


def main(method: str) -> None:
    gpumem_otel.uninstall()
    recording = load_recording(os.environ["RECORDING"], name="test")
    agent = Agent(resolve(os.environ), source=ReplaySource(recording, SystemClock()))
    lifecycle.adopt(agent)
    assert agent.wait_listening(60)
    loader = DataLoader(
        Facts(),
        batch_size=None,
        num_workers=WORKERS,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    items = [tuple(item) for _ in range(2) for item in loader]
    threads = [t.name for t in threading.enumerate() if t.name.startswith("gpumem")]
    seen = {
        "workers": len({item[0] for item in items} - {os.getpid()}),
        "held": sorted({item[1:] for item in items}),
        "files": len(list(Path(os.environ["GPUMEM_OTEL_RUN_DIR"]).iterdir())),
        "own": [len(threads) > 0, tcp_sockets() > 0, agent.observe() is not None],
    }
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
