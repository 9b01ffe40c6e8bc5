"""What tests of one subject in this folder share."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture
def nothing_left_of_other_tests():
    gc.collect()


@pytest.fixture
def make(tmp_path):
    """Makes the parts of an offload in host memory (`support.offload_parts`), and ends them."""
    from support.offload_parts import making  # noqa: PLC0415 - wants torch

    with making(tmp_path) as parts:
        yield parts


@pytest.fixture
def child(tmp_path):
    """Runs a script in a process of its own; the JSON lines that it printed.

    Args (of what it gives):
        script: for `python -c`, with the folder of all tests on its path.
        flags: of Python.
        more: of its environment, in which is nothing else.
    """

    def start(script: str, *flags: str, **more: str) -> list[dict]:
        environ = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(TESTS),
            "OMP_NUM_THREADS": "1",
            "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run"),
            **more,
        }
        done = subprocess.run(
            [sys.executable, *flags, "-c", script],
            capture_output=True, text=True, timeout=280, env=environ,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return start
