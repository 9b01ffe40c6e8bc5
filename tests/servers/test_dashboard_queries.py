"""Every query of the dashboards, with its variables filled in, against a real Prometheus.

It scrapes the replayed H200 job at level full and runs the shipped recording rules. What a
recording cannot know (the device itself: its limit, what lies outside; yields) comes from a
second, made up job beside it. Profiles of the replayed job are asked of the stand-in for Pyroscope,
or of the real one at `PYROSCOPE_URL`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.cli_process import clean_environ
from support.dashboards import BOARDS, PROMETHEUS, PYROSCOPE, panels, queries
from support.pushes import unique
from support.pyroscope_query import ask
from support.said import said
from support.servers import Prometheus, until
from test_demo_end_to_end import url_of

from gpumem_otel.metrics.table import METRICS

if TYPE_CHECKING:
    from support.dashboards import Asked

pytestmark = pytest.mark.servers

HERE = Path(__file__).parent
RULES = HERE.parents[1] / "deploy" / "prometheus" / "rules"

REPLAYED, MADE_UP = "replayed", "made-up"
VARIABLES = {
    "cluster": ".*",
    "namespace": ".*",
    "rank": ".*",
    "device": ".*",
    "profile_rank": ".*",
    "__rate_interval": "10s",
    "__interval": "1s",
    "__range": "60s",
}

NOT_RECORDED = ("limit", "outside", "host_pinned", "hw_gpu", "gpumem_yield")
"""In the names of what a file cannot know; `ratio_max` of the rules is over the limit too."""

NO_LABEL = {"cluster", "namespace"}
"""Labels that these targets do not have: All stands for series without them."""

NO_OOM = "OOM profiles are sent by a job that runs out of memory; this one does not"


class WithRules(Prometheus):
    """Prometheus with the shipped rules, evaluated every second instead of every minute."""

    def command(self) -> list[str]:
        command = super().command()
        config = self._folder / "prometheus.yml"
        rules = self._folder / "rules"
        rules.mkdir(exist_ok=True)
        for path in RULES.glob("*.yaml"):
            text = path.read_text().replace("interval: 1m", "interval: 1s")
            (rules / path.name).write_text(text)
        settings = json.loads(config.read_text())
        config.write_text(json.dumps({**settings, "rule_files": [str(rules / "*.yaml")]}))
        return command


@contextmanager
def process(*arguments: str, **environ: str):
    """A Python process, killed at the end.

    What lives as long as this module's fixture must not open sockets in the tests' own process:
    each test looks for what it left behind.
    """
    path = os.pathsep.join((str(HERE), str(HERE.parent)))
    with subprocess.Popen(
        [sys.executable, "-u", *arguments],
        env=clean_environ(PYTHONPATH=path, **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


SERVE_ALL = """
import threading
from test_metric_paths import served

with served() as target:
    print(target, flush=True)
    threading.Event().wait()
"""

STORE = """
import threading
from support.fake_pyroscope import FakePyroscope

with FakePyroscope() as store:
    print(store.url, flush=True)
    threading.Event().wait()
"""


@dataclass(frozen=True)
class Servers:
    """What the dashboards' data sources would be."""

    prometheus: Prometheus
    pyroscope_url: str
    service: str


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """A Prometheus that knows all that is exported and recorded, and the profiles of the job."""
    folder = tmp_path_factory.mktemp("dashboards")
    service = unique("dashboards")
    wanted = {metric.prometheus for metric in METRICS}
    wanted |= set(re.findall(r"job\w*:\w+:\w+", json.dumps(BOARDS)))
    with ExitStack() as stack:
        url = os.environ.get("PYROSCOPE_URL")
        if not url:
            url = stack.enter_context(process("-c", STORE)).stdout.readline().strip()
        job = stack.enter_context(
            process(
                *("-m", "gpumem_otel.cli.main", "demo", "--replay"),
                *("--port", "0", "--duration", "600"),
                GPUMEM_OTEL_RUN_DIR=str(folder / "run"),
                GPUMEM_OTEL_METRICS_LEVEL="full",
                GPUMEM_OTEL_INTERVAL="1",
                GPUMEM_OTEL_PROFILES="live,allocated",
                OTEL_SERVICE_NAME=service,
                PYROSCOPE_SERVER_ADDRESS=url,
            )
        )
        everything = stack.enter_context(process("-c", SERVE_ALL)).stdout.readline().strip()
        targets = {REPLAYED: [url_of(job).removeprefix("http://")], MADE_UP: [everything]}
        prometheus = stack.enter_context(WithRules(folder / "prometheus", scrape=targets))

        def all_there() -> bool:
            return wanted <= {name for name, _ in prometheus.series('{__name__=~".+"}')}

        until(all_there, "all metrics and recorded series")
        yield Servers(prometheus, url, service)


def filled(text: str, **more: str) -> str:
    """The text with its variables put in, as Grafana does."""
    values = {**VARIABLES, **more}
    return re.sub(r"\$\{?(\w+)(?::\w+)?\}?", lambda found: values[found[1]], text)


def answered(prometheus: Prometheus, asked: Asked, expression: str) -> list[dict]:
    """The series that come of it; of a filter (`> 0`) that lets nothing through, of its inside."""
    now = time.time()
    if asked.instant:
        found = prometheus.api("query", query=expression, time=str(now))["result"]
    else:
        span = {"start": str(now - 30), "end": str(now), "step": "1"}
        found = prometheus.api("query_range", query=expression, **span)["result"]
    if not found and " > 0" in expression:
        return answered(prometheus, asked, expression.replace(" > 0", ""))
    return found


@pytest.mark.parametrize("asked", queries(PROMETHEUS), ids=str)
def test_a_query_has_data(servers, asked: Asked):
    beyond = re.search("|".join(NOT_RECORDED) + "|per_limit", asked.expr)
    expression = filled(asked.expr, job=MADE_UP if beyond else REPLAYED)
    # a rate needs its second scrape
    found = until(lambda: answered(servers.prometheus, asked, expression), expression, 20)
    for label in set(re.findall(r"\{\{(\w+)\}\}", asked.legend)) - NO_LABEL:
        assert all(label in one["metric"] for one in found), label
    board = asked.board["title"]
    count = sum(one.board["title"] == board for one in queries(PROMETHEUS))
    said("Prometheus", f"all {count} queries of the dashboard *{board}*", "each has data")


def test_the_band_of_a_yielded_rank_says_yielded(servers):
    """The panel's number for a state, put through its own mapping."""
    (job,) = [one for one in BOARDS if one["uid"] == "gpumem-job"]
    panel = next(panel for panel in panels(job) if panel["type"] == "state-timeline")
    (target,) = panel["targets"]
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    now = str(time.time())
    query = {"query": filled(target["expr"], job=MADE_UP), "time": now}
    (found,) = servers.prometheus.api("query", **query)["result"]
    assert found["metric"] == {"rank": "3"}
    assert mapping["options"][found["value"][1]]["text"] == "yielded"


def test_the_stack_adds_up_to_what_the_device_says_is_used(servers):
    (job,) = [one for one in BOARDS if one["uid"] == "gpumem-job"]
    used = next(panel for panel in panels(job) if panel["title"].startswith("Used against limit"))
    stacked = [
        target["expr"]
        for target in used["targets"]
        if not target["legendFormat"].startswith(("limit", "peak"))
    ]
    says = servers.prometheus.series(f'hw_gpu_memory_usage_bytes{{job="{MADE_UP}"}}')
    (((_, labels), used_bytes),) = says.items()
    device = dict(labels)["device"]
    total = sum(
        sum(servers.prometheus.series(filled(one, job=MADE_UP, device=device)).values())
        for one in stacked
    )
    assert len(stacked) == 3
    assert total == pytest.approx(used_bytes)


@pytest.mark.parametrize("asked", queries(PYROSCOPE), ids=str)
def test_a_profile_query_has_data(servers, asked: Asked):
    now = int(time.time() * 1000)
    span = {"start": now - 600_000, "end": now + 60_000}
    selector = filled(asked.expr, service=servers.service, oom_id="none")
    said = ask(
        servers.pyroscope_url,
        "SelectMergeStacktraces",
        profileTypeID=asked.profile_type,
        labelSelector=selector,
        **span,
    )
    total = int(said.get("flamegraph", {}).get("total") or 0)
    if "gpu_memory_oom:" in asked.profile_type:
        assert total == 0, f"take this case out: {NO_OOM}"
    else:
        assert total > 0, selector


def test_dividing_by_the_snapshots_gives_the_bytes_of_a_moment(servers):
    """What the text on the dashboard says, and the number beside the flame graph is for."""
    (job,) = [one for one in BOARDS if one["uid"] == "gpumem-job"]
    titles = ("Live, latest interval: sum of the profiles in it", "Snapshots in it")
    now = int(time.time() * 1000)
    totals = []
    for title in titles:
        (target,) = next(panel for panel in panels(job) if panel["title"] == title)["targets"]
        said = ask(
            servers.pyroscope_url,
            "SelectMergeStacktraces",
            profileTypeID=target["profileTypeId"],
            labelSelector=filled(target["labelSelector"], service=servers.service),
            start=now - 600_000,
            end=now,
        )
        totals.append(int(said["flamegraph"]["total"]))
    held, snapshots = totals
    assert snapshots >= 1
    peak = servers.prometheus.series(f'gpumem_allocated_peak_bytes{{job="{REPLAYED}"}}')
    assert 0 < held / snapshots <= max(peak.values())
