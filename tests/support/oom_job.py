"""The head of a job in a process of its own, over the stand-in for torch.

`arm()` is what the job's first use of CUDA does; `torch.fail(size)` is an allocation that finds no
room; `say(...)` tells the test something in a line of its own.
"""

from __future__ import annotations

import os
import sys

from support import fake_torch

torch = fake_torch.make("2.11")
sys.modules["torch"] = torch


def arm(**options):
    """Install, where that was not done, and bring CUDA up; the agent."""
    import gpumem_otel  # noqa: PLC0415 - jobs without us do without
    from gpumem_otel.api import lifecycle  # noqa: PLC0415

    if options or lifecycle.current() is None:
        gpumem_otel.install(**options)
    agent = lifecycle.current()
    agent._arm()
    for _ in range(3):
        torch.allocators[0].alloc(100)
    return agent


def say(text):
    os.write(1, f"{text}\n".encode())
