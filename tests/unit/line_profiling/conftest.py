"""A torch and a job for the line profiler to follow."""

from __future__ import annotations

import sys
import threading

import pytest
from support.line_memory import Memory
from support.profiled import MONITORING, Job

from gpumem_otel.api import line_profiler
from gpumem_otel.line_profiling import profiler


@pytest.fixture
def memory():
    return Memory(devices=2)


@pytest.fixture
def job(memory):
    return Job(memory)


@pytest.fixture(autouse=True)
def torch(memory, monkeypatch):
    """A torch over the memory, a profiling state of the test's own, and nothing left behind."""
    fake = memory.torch()
    before = dict(vars(fake._C))
    state = line_profiler._State()
    monkeypatch.setattr(line_profiler, "_STATE", state)
    monkeypatch.setattr(profiler, "_PUBLISHED", [])
    monkeypatch.setattr(line_profiler.atexit, "register", lambda function: None)
    monkeypatch.setitem(sys.modules, "torch", fake)
    trace = sys.gettrace()
    yield fake
    for lines in state.profilers.values():
        lines.disable()
    assert sys.gettrace() is trace
    assert threading.gettrace() is None
    if MONITORING:
        assert "gpumem_otel" not in [sys.monitoring.get_tool(tool) for tool in range(6)]
    fake._C._cuda_resetPeakMemoryStats(0), fake._C._cuda_resetPeakMemoryStats(1)
    assert vars(fake._C) == before
