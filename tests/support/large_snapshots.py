"""The generator of benchmarks/large_snapshot.py, for small tests."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_FILE = Path(__file__).parents[2] / "benchmarks" / "large_snapshot.py"


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("large_snapshot", _FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(events: int, live: int, **more) -> dict:
    return generator().make(events, live, **more)
