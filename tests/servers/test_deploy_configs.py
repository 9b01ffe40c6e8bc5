"""deploy/ in the real servers: each file as shipped, but for addresses, paths and waiting times."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support import alert_rules
from support.cli_process import WAIT, clean_environ
from support.deployed import (
    DEPLOY,
    Alertmanager,
    ShippedCollector,
    ShippedPrometheus,
    Webhook,
    loaded,
)
from support.said import said
from support.servers import program, until
from test_demo_end_to_end import COUNTERS, Demo, batches, demo, observation_number
from test_metric_paths import push

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers


def sd(run_dir: Path, output: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpumem_otel.cli.main", "sd", "-o", str(output)],
        env=clean_environ(GPUMEM_OTEL_RUN_DIR=str(run_dir)),
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def without(labels: frozenset[tuple[str, str]], *names: str) -> frozenset[tuple[str, str]]:
    return frozenset(pair for pair in labels if pair[0] not in names)


def wait_until_it_is_as_said(prometheus: ShippedPrometheus, running: Demo) -> set[str]:
    """Three batches are what the process said itself; the names in them."""

    def enough():
        found = {}
        for batch in batches(prometheus):
            said = running.said.get(observation_number(batch))
            if said is not None:
                plain = {(n, without(labels, "namespace")): v for (n, labels), v in batch.items()}
                assert plain == said
                found[observation_number(batch)] = {name for name, _ in plain}
        return list(found.values()) if len(found) >= 3 else None

    return set().union(*until(enough, "three observations to arrive"))


def labels_of(prometheus: ShippedPrometheus, query: str) -> dict[str, str]:
    ((_, labels),) = prometheus.series(query)
    return dict(labels)


def test_promtool_accepts_the_configuration_and_finds_its_rules():
    done = subprocess.run(
        [program("promtool"), "check", "config", DEPLOY / "prometheus" / "prometheus.yml"],
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    count = sum(len(group["rules"]) for group in alert_rules.groups())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {count} rules found" in done.stdout
    assert "is valid prometheus config file syntax" in done.stdout
    assert "WARN" not in done.stdout.upper().replace("WARNING", "WARN")
    asked = "`check config` of `deploy/prometheus/prometheus.yml`"
    said("promtool", asked, "`is valid prometheus config file syntax`, no warning")


def test_a_job_that_sd_lists_is_scraped_under_its_own_name(tmp_path):
    """With the shipped rules, evaluated each second instead of each minute."""
    rules = loaded("prometheus/rules/gpumem.yaml")
    run_dir = tmp_path / "run"
    with (
        demo(
            tmp_path / "demo",
            GPUMEM_OTEL_RUN_DIR=str(run_dir),
            OTEL_SERVICE_NAME="llm-train",
            POD_NAMESPACE="team-a",
        ) as running,
        ShippedPrometheus(
            tmp_path / "prometheus",
            rules={"groups": [{**group, "interval": "1s"} for group in rules["groups"]]},
        ) as prometheus,
    ):
        sd(run_dir, prometheus.targets / "jobs.json")
        until(lambda: prometheus.api("targets", state="active")["activeTargets"], "a target")
        (up,) = prometheus.wait_for_targets_up()
        assert up["labels"] == {
            "job": "llm-train", "namespace": "team-a", "instance": running.target,
        }  # fmt: skip
        assert up["scrapePool"] == "gpumem"
        names = wait_until_it_is_as_said(prometheus, running)
        assert "gpumem_allocated_bytes" in names
        asked = "`deploy/prometheus/prometheus.yml`, a job that `gpumem-otel sd` lists"
        said("Prometheus", asked, "target up under its own `job`; every value as the job said it")

        def evaluated():
            known = [r for g in prometheus.api("rules")["groups"] for r in g["rules"]]
            return known if all(rule["health"] != "unknown" for rule in known) else None

        known = until(evaluated, "all rules to be evaluated")
        assert len(known) == sum(len(group["rules"]) for group in rules["groups"])
        assert {rule["health"] for rule in known} == {"ok"}
        assert {a["labels"]["alertname"] for a in prometheus.api("alerts")["alerts"]} == set()


def test_a_process_without_a_service_name_keeps_the_scrape_jobs(tmp_path):
    with ShippedPrometheus(tmp_path) as prometheus:
        target = [{"targets": ["127.0.0.1:1"], "labels": {"__meta_gpumem_rank": "0"}}]
        (prometheus.targets / "jobs.json").write_text(json.dumps(target))
        found = until(
            lambda: prometheus.api("targets", state="active")["activeTargets"], "a target"
        )
        assert [one["labels"] for one in found] == [
            {"job": "gpumem", "instance": "127.0.0.1:1"},
        ]


def test_the_collector_gives_the_same_names_and_values(tmp_path):
    with (
        ShippedPrometheus(tmp_path / "prometheus") as prometheus,
        ShippedCollector(tmp_path / "collector", prometheus.url) as collector,
        demo(
            tmp_path / "demo",
            OTEL_SERVICE_NAME="llm-train",
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.otlp_url,
        ) as running,
    ):
        names = wait_until_it_is_as_said(prometheus, running)
        assert names >= COUNTERS & {"gpumem_steps_total", "gpumem_ooms_total"}
        found = labels_of(prometheus, "gpumem_allocated_bytes")
        assert found.pop("instance").endswith(f"-0-{running.process.pid}")
        assert found == {"job": "llm-train", "rank": "0", "device": "0"}
        for level in ("warn", "error"):
            assert f"\t{level}\t" not in collector.log(), collector.log()
        asked = "`deploy/otel/collector.yaml`, a job that sends OTLP"
        said(
            "OpenTelemetry Collector",
            asked,
            "no warning; in Prometheus every value as the job said it",
        )


def test_resource_attributes_become_cluster_and_namespace_and_ranks_stay_apart(tmp_path):
    """`job` is the service's name alone, whatever else the resource says."""
    attributes = "k8s.cluster.name=eu-1,k8s.namespace.name=team-a,service.namespace=other"
    with (
        ShippedPrometheus(tmp_path / "prometheus") as prometheus,
        ShippedCollector(tmp_path / "collector", prometheus.url) as collector,
    ):
        for rank in (0, 1):
            push(
                {
                    "OTEL_EXPORTER_OTLP_ENDPOINT": collector.otlp_url,
                    "OTEL_SERVICE_NAME": "llm-train",
                    "OTEL_RESOURCE_ATTRIBUTES": f"{attributes},service.instance.id=pod-1",
                },
                rank,
            )
        found = prometheus.wait_for_series('gpumem_steps_total{rank=~"0|1"}', 2)
        instances = set()
        for _, labels in found:
            named = dict(labels)
            instances.add(named["instance"])
            assert named["instance"].startswith(f"pod-1-{named['rank']}-")
            assert (named["cluster"], named["namespace"]) == ("eu-1", "team-a")
            # what identify() makes of the resource's own service.name
            assert "/" not in named["job"]
        assert len(instances) == 2


def test_warnings_are_silent_where_critical_is_on(tmp_path):
    """Two alerts of one name and job, put in by hand: one notification, with the critical one."""
    with Webhook() as webhook, Alertmanager(tmp_path, webhook=webhook.url) as manager:
        alerts = [
            {
                "labels": {"alertname": "GpumemOom", "job": "train", "severity": severity},
                "annotations": {"summary": severity},
            }
            for severity in ("critical", "warning")
        ]
        manager.post(alerts)
        webhook.wait(bool, "a notification")
        (one,) = webhook.received()
        assert [alert["labels"]["severity"] for alert in one["alerts"]] == ["critical"]
        states = {a["labels"]["severity"]: a["status"]["state"] for a in manager.alerts()}
        assert states == {"critical": "active", "warning": "suppressed"}
        said("Alertmanager", "a warning and a critical alert of one name", "warning `suppressed`")


def test_alertmanager_takes_the_file_as_it_is_shipped(tmp_path):
    """Its receiver is a placeholder that sends nothing."""
    with Alertmanager(tmp_path) as manager:
        assert manager.alerts() == []
        assert "level=ERROR" not in manager.log()
        assert "level=WARN" not in manager.log()
        said("Alertmanager", "`deploy/alertmanager/alertmanager.yml`", "ready, no warning")
