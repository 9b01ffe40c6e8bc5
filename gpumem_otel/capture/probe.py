"""Prints what torch can do here as one line of JSON; a separate process for `doctor`.

Importing torch takes seconds and a broken driver can hang it, so this never runs inside the command
line or a job, but as `python -m gpumem_otel.capture.probe` with a time limit.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def probe() -> dict[str, object]:
    """Facts about torch and its devices; missing keys were not reached.

    Keys: `torch` (version), `cuda_build` (version, or None for a CPU build), `hip_build`,
    `cuda_available`, `devices` (names and total bytes), `backend`, `caching`, `recording`
    (known signature of the recorder), `lazy_call` (can be armed without polling), and `errors`.
    """
    facts: dict[str, object] = {"errors": []}
    try:
        import torch  # noqa: PLC0415 - the point of this process
    except Exception as error:
        facts["errors"] = [f"import torch: {type(error).__name__}: {error}"]
        return facts
    facts["torch"] = str(torch.__version__)
    for name, ask in (
        ("cuda_build", lambda: torch.version.cuda),
        ("hip_build", lambda: getattr(torch.version, "hip", None)),
        ("cuda_available", torch.cuda.is_available),
        ("devices", lambda: _devices(torch)),
        ("backend", torch.cuda.get_allocator_backend),
        ("recording", lambda: callable(_recorder(torch))),
        ("lazy_call", lambda: callable(getattr(torch.cuda, "_lazy_call", None))),
    ):
        try:
            facts[name] = ask()
        except Exception as error:  # noqa: PERF203 - each on its own
            facts["errors"] = [*_errors(facts), f"{name}: {type(error).__name__}: {error}"]
    return facts


def _errors(facts: dict[str, object]) -> list[object]:
    errors = facts.get("errors")
    return errors if isinstance(errors, list) else []


def _recorder(torch: Any) -> object:
    return getattr(torch._C, "_cuda_record_memory_history", None)  # noqa: SLF001 - seen, not called


def _devices(torch: Any) -> list[dict[str, object]]:
    if not torch.cuda.is_available():
        return []
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [{"name": one.name, "total_bytes": int(one.total_memory)} for one in devices]


def main() -> None:
    """Print the facts on the real stdout, whatever torch and the driver print meanwhile."""
    real = os.dup(1)
    os.dup2(2, 1)
    facts = probe()
    with os.fdopen(real, "w") as out:
        out.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
