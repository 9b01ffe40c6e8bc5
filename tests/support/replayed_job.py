"""A recording played as a separate job."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from support.cli_process import WAIT, clean_environ

JOBS = Path(__file__).parents[1] / "data" / "jobs"
CHILD = Path(__file__).with_name("replay_child.py")
AT_ITS_END = 1e6
"""Speed at which a recording is at its end from the start."""


@contextmanager
def replayed(path: Path, *, speed: float = 1.0, **environ: str):
    """The job as a process; yields `host:port`. Ctrl-C ends it with 0 and no output."""
    with subprocess.Popen(
        [sys.executable, "-u", str(CHILD), str(path), str(speed)],
        env=clean_environ(**environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            target = process.stdout.readline().strip()
            assert target, process.stderr.read()
            yield target
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=WAIT)
            assert (process.returncode, err) == (0, ""), f"{process.returncode}: {err}"
        finally:
            process.kill()
