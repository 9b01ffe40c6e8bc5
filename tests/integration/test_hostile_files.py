"""Hostile files in a process of little memory: refused for what they are, not for want of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.hostile import FILES, HARMLESS, MARK

MEMORY_BYTES = 200 << 20
CPU_SECONDS = 60  # of a machine that is busy; all files together take three

READER = """
import resource, sys
from pathlib import Path
from gpumem_otel.core.snapshot import load_snapshot
from gpumem_otel.errors import SnapshotError
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]),) * 2)
for name in sys.argv[3:]:
    try:
        snapshot = load_snapshot(name)
        for device in snapshot.devices():
            snapshot.books(device), snapshot.live_groups(device), snapshot.event_groups(device)
        print("read", len(snapshot.warnings), flush=True)
    except SnapshotError as error:
        print(error.reason, flush=True)
print(*(name for name in ("torch", "opentelemetry.sdk", "urllib3") if name in sys.modules))
"""


@pytest.fixture
def files(tmp_path):
    made = {}
    for number, (name, make) in enumerate({**FILES, **HARMLESS}.items()):
        made[name] = tmp_path / f"{number}.pickle"
        made[name].write_bytes(make())
    return made


def test_hostile_files_take_little_memory_and_run_nothing(files):
    done = subprocess.run(
        [sys.executable, "-c", READER, str(MEMORY_BYTES), str(CPU_SECONDS), *files.values()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *lines, imported = done.stdout.split("\n")[:-1]
    said = dict(zip(files, lines, strict=True))
    assert [name for name in FILES if said[name].startswith("read")] == []
    assert [name for name in files if "memory" in said[name].replace("memory snapshot", "")] == [
        "two million empty dicts"  # "it would take far more memory than its size"
    ]
    assert [name for name in HARMLESS if not said[name].startswith("read")] == []
    assert imported == ""
    assert not Path(MARK).exists()
