"""A recording played as a job of its own."""

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
"""Speed that makes a recording stand at its end from the beginning."""


@contextmanager
def replayed(path: Path, *, speed: float = 1.0, **environ: str):
    """It as a process; gives `host:port`. Ctrl-C ends it with 0 and without a word."""
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
