"""Asks a Pyroscope, a real one or the fake, what it has stored."""

from __future__ import annotations

import json
import time
import urllib.request

INUSE_SPACE = "gpu_memory:inuse_space:bytes:space:bytes"
SNAPSHOTS = "gpu_memory:snapshots:count:space:bytes"


def ask(url: str, method: str, **body) -> dict:
    request = urllib.request.Request(
        f"{url}/querier.v1.QuerierService/{method}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def total(url: str, service: str, profile_type: str = INUSE_SPACE, selector: str = "") -> int:
    """Sum over all profiles of the last hour; 0 where there is none."""
    now = int(time.time() * 1000)
    answer = ask(
        url,
        "SelectMergeStacktraces",
        profileTypeID=profile_type,
        labelSelector=f'{{service_name="{service}"{selector}}}',
        start=now - 3_600_000,
        end=now + 60_000,
    )
    return int(answer.get("flamegraph", {}).get("total") or 0)
