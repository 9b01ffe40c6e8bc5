"""What all tests on a GPU share."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def devices():
    """Number of GPUs that torch sees; asked in a process of its own."""
    ask = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=200)
    count = int(done.stdout.strip() or 0) if done.returncode == 0 else 0
    if not count:
        pytest.skip("no CUDA device here")
    return count
