"""One table, three ways into a real Prometheus: scraped, over OTLP, through a Collector."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import observations as obs
from support.exposed import exposed
from support.said import said
from support.servers import Collector, Prometheus, program

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.base.counters import Counters
from gpumem_otel.metrics.prometheus import Exposition
from gpumem_otel.metrics.table import METRICS, Level

pytestmark = pytest.mark.servers

TESTS = Path(__file__).parents[1]
OURS = '{__name__=~"gpumem_.+|hw_gpu_.+"}'
OF_THE_SCRAPER = {"job", "instance", "exported_job", "exported_instance"}

EXPORT_ONCE = """
import os, sys
from support import observations as obs
from gpumem_otel.base.counters import Counters
from gpumem_otel.metrics.otlp import OtelMetrics

rank = int(sys.argv[1])
counters = Counters()
metrics = OtelMetrics(
    lambda: obs.full((0, 1), identity=obs.identity(rank=rank, device_uuids={0: obs.UUID})),
    "full",
    obs.identity(rank=rank, pid=os.getpid()),
    {k: v for k, v in os.environ.items() if k.startswith("OTEL_")},
    3600.0,
    counters,
)
metrics.start()
metrics.stop(30)
sys.exit(int(counters.get("exporter_errors", stage="push")))
"""


def observation():
    return obs.full((0, 1), identity=obs.identity(device_uuids={0: obs.UUID}))


def exposition(level: Level = Level.FULL) -> Exposition:
    return Exposition(observation, level, clock=SystemClock(), counters=Counters())


def served():
    """Our exposition on a loopback port; gives `host:port`."""
    source = exposition()
    return exposed(lambda _path, accept: source.render(accept))


def push(endpoint: dict[str, str], rank: int = 3) -> None:
    """One export from a process of its own; it failed if that process says so."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", EXPORT_ONCE, str(rank)],
        env={**clean, "PYTHONPATH": path, **endpoint},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def without_the_scrapers_labels(series):
    return {
        (name, frozenset(pair for pair in labels if pair[0] not in OF_THE_SCRAPER)): value
        for (name, labels), value in series.items()
    }


def expected():
    """What our exposition says; every metric of the table is in it."""
    found = obs.parsed(exposition().render()[1])
    assert {name for name, _ in found} == {metric.prometheus for metric in METRICS}
    return found


def test_promtool_has_nothing_to_say():
    for level in Level:
        done = subprocess.run(
            [program("promtool"), "check", "metrics"],
            input=exposition(level).render()[1],
            capture_output=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        said("promtool", f"`check metrics` of `/metrics`, level {level.value}", "nothing")


def test_scraped(tmp_path):
    wanted = expected()
    with served() as target, Prometheus(tmp_path, scrape={"gpumem": [target]}) as prometheus:
        prometheus.wait_for_series(OURS, len(wanted))
        (up,) = prometheus.wait_for_targets_up()
        assert up["lastError"] == ""
        assert without_the_scrapers_labels(prometheus.series(OURS)) == wanted
        assert prometheus.series("scrape_samples_scraped") == {
            ("scrape_samples_scraped", frozenset({("job", "gpumem"), ("instance", target)})): len(
                wanted
            )
        }
        metadata = prometheus.api("metadata")
        for metric in METRICS:
            name = metric.prometheus.removesuffix("_total")
            (said,) = metadata.get(metric.prometheus) or metadata[name]
            assert said["type"] == ("counter" if metric.kind == "counter" else "gauge")
            assert said["help"] == metric.help


def test_over_otlp(tmp_path):
    wanted = expected()
    with Prometheus(tmp_path) as prometheus:
        push({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": prometheus.otlp_metrics_url})
        prometheus.wait_for_series(OURS, len(wanted))
        assert without_the_scrapers_labels(prometheus.series(OURS)) == wanted
        (instance,) = prometheus.series("group by (instance) (gpumem_allocated_bytes)")
        ((_, name),) = instance[1]
        assert "-3-" in name


def test_through_a_collector(tmp_path):
    wanted = expected()
    with Collector(tmp_path / "collector") as collector:
        push({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.otlp_url})
        with Prometheus(
            tmp_path / "prometheus",
            scrape={"collector": [collector.target]},
            job_options={"honor_labels": True},
        ) as prometheus:
            prometheus.wait_for_series(OURS, len(wanted))
            assert without_the_scrapers_labels(prometheus.series(OURS)) == wanted


def test_ranks_with_one_preset_instance_do_not_overwrite_each_other(tmp_path):
    """A server takes the first of two processes with one instance id and refuses the other."""
    shared = {"OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=pod-1"}
    with Prometheus(tmp_path) as prometheus:
        for rank in (0, 1, 2, 3):
            push(
                {**shared, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": prometheus.otlp_metrics_url},
                rank,
            )
        prometheus.wait_for_series("gpumem_steps_total", 4)
        found = prometheus.series("gpumem_steps_total")
        ranks = {dict(labels)["rank"] for _, labels in found}
        instances = {dict(labels)["instance"] for _, labels in found}
        assert ranks == {"0", "1", "2", "3"}
        assert len(instances) == 4
        assert all(instance.startswith("pod-1-") for instance in instances)
