"""What the dashboards ask: selectors, profile types, and the links from a series to a profile.

No dependencies, so that the tests and the docs can read it without the SDK.
"""

from __future__ import annotations

import json
import re
from urllib.parse import quote

__all__ = [
    "ALL",
    "ALLOCATED_SPACE",
    "JOB_UID",
    "LIVE_SNAPSHOTS",
    "LIVE_SPACE",
    "OOM_SPACE",
    "PROMETHEUS",
    "PROMETHEUS_TYPE",
    "PYROSCOPE",
    "PYROSCOPE_TYPE",
    "SEVERAL_JOBS",
    "WHERE",
    "explore_link",
    "job_link",
    "moment_link",
    "of_job",
    "of_jobs",
    "profile_type",
    "recorded",
    "worst",
]

PROMETHEUS_TYPE, PYROSCOPE_TYPE = "prometheus", "grafana-pyroscope-datasource"
PROMETHEUS, PYROSCOPE = "${ds_prometheus}", "${ds_pyroscope}"
"""Data sources are variables: no dashboard knows the uid of anybody's server."""

ALL = ".*"
"""What All stands for: matches series without the label too (no `cluster` on one machine)."""

JOB_UID = "gpumem-job"

WHERE = 'cluster=~"$cluster", namespace=~"$namespace"'
SEVERAL_JOBS = f'{WHERE}, job=~"$job"'


def profile_type(sample: str, unit: str, name: str = "gpu_memory") -> str:
    """A profile type as Pyroscope names it: all our profiles have the period type space/bytes."""
    return f"{name}:{sample}:{unit}:space:bytes"


LIVE_SPACE = profile_type("inuse_space", "bytes")
LIVE_SNAPSHOTS = profile_type("snapshots", "count")
ALLOCATED_SPACE = profile_type("alloc_space", "bytes")
OOM_SPACE = profile_type("inuse_space", "bytes", "gpu_memory_oom")


def of_job(metric: str, *matchers: str) -> str:
    """A metric of the ranks and devices chosen, of the one job chosen."""
    labels = [WHERE, 'job="$job"', 'rank=~"$rank"', 'device=~"$device"', *matchers]
    return f"{metric}{{{', '.join(labels)}}}"


def of_jobs(metric: str, *matchers: str) -> str:
    """The same of all jobs chosen."""
    return of_job(metric, *matchers).replace('job="$job"', 'job=~"$job"')


def recorded(rule: str, *matchers: str) -> str:
    """A series of the recording rules, which hold one per job."""
    return f"{rule}{{{', '.join((SEVERAL_JOBS, *matchers))}}}"


def worst(expression: str, lowest: bool = False, count: int = 10) -> str:
    """The whole lines of the few series that reach highest (lowest) within the range.

    A plain `topk` chooses anew at every step and leaves a thousand ranks in pieces. The choice is
    made once for all steps, and over the range: a job that has ended is still to be looked at.
    """
    pick, over = ("bottomk", "min_over_time") if lowest else ("topk", "max_over_time")
    chosen = f"{pick}({count}, {over}(({expression})[$__range:$__interval] @ end()))"
    return f"({expression}) and {chosen}"


def _panes(selector: str) -> str:
    query = {
        "refId": "A",
        "queryType": "profile",
        "profileTypeId": LIVE_SPACE,
        "labelSelector": selector,
        "groupBy": [],
    }
    panes = {
        "gpumem": {
            "datasource": PYROSCOPE,
            "queries": [{**query, "datasource": {"type": PYROSCOPE_TYPE, "uid": PYROSCOPE}}],
            "range": {"from": "${__from}", "to": "${__to}"},
        }
    }
    written = json.dumps(panes, separators=(",", ":"))
    # variables are put in before the browser decodes the address, so they stay as they are
    return "".join(
        part if part.startswith("${") else quote(part, safe="")
        for part in re.split(r"(\$\{[^}]*\})", written)
    )


def explore_link() -> str:
    """Explore, with the flame graph of a series' rank and device over the dashboard's range."""
    selector = (
        '{service_name="${service:percentencode}", rank="${__field.labels.rank}", '
        'device="${__field.labels.device}"}'
    )
    return f"/explore?schemaVersion=1&panes={_panes(selector)}"


def moment_link(window_ms: int = 120_000) -> str:
    """The job's dashboard around the moment clicked at, its flame graphs those of this device.

    A data link cannot calculate: `time` and `time.window` are Grafana's way to say "around". The
    range is absolute then, and no panel has one of its own.
    """
    kept = ("ds_prometheus", "ds_pyroscope", "cluster", "namespace", "job", "service")
    chosen = "var-rank=${__field.labels.rank}&var-device=${__field.labels.device}"
    return (
        f"/d/{JOB_UID}?{'&'.join(f'${{{name}:queryparam}}' for name in kept)}&{chosen}"
        "&var-profile_rank=${__field.labels.rank}"
        f"&time=${{__value.time}}&time.window={window_ms}"
    )


def job_link(in_a_table: bool = False) -> str:
    """The dashboard of the job that a series, or a row of a table, is about."""
    job = "${__data.fields.job}" if in_a_table else "${__field.labels.job}"
    kept = ("ds_prometheus", "ds_pyroscope", "cluster", "namespace")
    named = "&".join(f"${{{name}:queryparam}}" for name in kept)
    return f"/d/{JOB_UID}?{named}&var-job={job}&${{__url_time_range}}"
