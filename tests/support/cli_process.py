"""The command line as a process, with an environment without our variables."""

from __future__ import annotations

import os
import subprocess
import sys

WAIT = 60
"""Bound of every wait: reached only where a test fails."""


def clean_environ(**more: str) -> dict[str, str]:
    prefixes = ("GPUMEM_OTEL_", "OTEL_", "PYROSCOPE_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return {**kept, **more}


def cli(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    given = {"env": clean_environ(), "capture_output": True, "text": True, "timeout": WAIT}
    command = [sys.executable, "-m", "gpumem_otel.cli.main", *arguments]
    return subprocess.run(command, check=False, **{**given, **options})


def only_line(text: str) -> str:
    assert text.startswith("gpumem-otel: error: "), text
    assert text.count("\n") == 1, text
    return text
