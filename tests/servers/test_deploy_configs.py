"""deploy/ in the real servers: each file as shipped, but for addresses, paths and waiting times."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    shortened,
)
from support.servers import program, until
from test_demo_end_to_end import COUNTERS, Demo, batches, demo, observation_number
from test_metric_paths import push

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

DIVIDED_BY = 200.0
"""How much shorter the windows of the rules are here: an hour is 18 s."""


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


class MadeUpJobs:
    """The /metrics of jobs that no recording has, by path; four ranks each."""

    GIB = 2**30
    LIMIT = 80 * GIB

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.ooms = 0

    def text(self, job: str) -> str:
        age = time.monotonic() - self.started
        held = int({"leak": 0.3 + 0.001 * age, "server": 0.9}.get(job, 0.3) * self.LIMIT)
        lines = []
        for rank in range(4):
            of = f'{{rank="{rank}",device="0"}}'
            # between steps a job takes and gives back; a server does so for each request
            now = held + int((1 + math.sin(age + rank)) * 0.01 * self.LIMIT)
            lines += [
                f"gpumem_target_info{of} 1",
                f"gpumem_limit_bytes{of} {self.LIMIT}",
                f"gpumem_allocated_bytes{of} {now}",
                f"gpumem_reserved_bytes{of} {held + 0.02 * self.LIMIT}",
                f"gpumem_allocated_peak_bytes{of} {held + 0.02 * self.LIMIT}",
                f"gpumem_alloc_retries_total{of} 0",
                f"gpumem_ooms_total{of} {self.ooms if job == 'oom' and rank == 2 else 0}",
            ]
            if job != "server":
                lines += [
                    f"gpumem_steps_total{of} {int(age * 2)}",
                    f"gpumem_step_floor_bytes{of} {held}",
                ]
        return "\n".join(sorted(lines)) + "\n"


@contextmanager
def served(jobs: MadeUpJobs):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = jobs.text(self.path.removeprefix("/")).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def firing(notifications, job: str) -> list[dict]:
    return [
        one
        for one in notifications
        if one["groupLabels"].get("job") == job and one["status"] == "firing"
    ]


@pytest.mark.timeout(240)
def test_an_oom_and_a_leak_reach_the_receiver_once_and_the_healthy_fire_nothing(tmp_path):
    """Rules with an hour of 18 s, from scraped series through Alertmanager to a webhook."""
    jobs = MadeUpJobs()
    with ExitStack() as stack:
        webhook = stack.enter_context(Webhook())
        target = stack.enter_context(served(jobs))
        run_dir = tmp_path / "run"
        running = stack.enter_context(
            demo(
                tmp_path / "demo",
                GPUMEM_OTEL_RUN_DIR=str(run_dir),
                OTEL_SERVICE_NAME="replayed",
            )
        )
        manager = stack.enter_context(Alertmanager(tmp_path / "am", webhook=webhook.url))
        prometheus = stack.enter_context(
            ShippedPrometheus(
                tmp_path / "prometheus",
                alertmanager=manager.target,
                rules=shortened(loaded("prometheus/rules/gpumem.yaml"), DIVIDED_BY),
            )
        )
        sd(run_dir, prometheus.targets / "replayed.json")
        (prometheus.targets / "made-up.json").write_text(
            json.dumps(
                [
                    {
                        "targets": [target],
                        "labels": {
                            "__metrics_path__": f"/{job}",
                            "__meta_gpumem_service_name": job,
                        },
                    }
                    for job in ("oom", "leak", "healthy", "server")
                ]
            )
        )
        prometheus.wait_for_series("gpumem_target_info", 17)
        jobs.ooms = 1
        webhook.wait(lambda all_: bool(firing(all_, "oom")), "the OOM to be received")
        webhook.wait(lambda all_: bool(firing(all_, "leak")), "the leak to be received")
        (oom,) = firing(webhook.received(), "oom")
        assert oom["receiver"] == "on-call"
        assert [one["labels"] for one in oom["alerts"]] == [
            {"alertname": "GpumemOom", "job": "oom", "severity": "warning"}
        ]
        (annotated,) = [one["annotations"] for one in oom["alerts"]]
        assert annotated["summary"] == "Job oom ran out of GPU memory"
        assert "Devices: 1. Times: rank 2 device 0: 1." in annotated["description"]
        (leak,) = firing(webhook.received(), "leak")
        assert [one["labels"] for one in leak["alerts"]] == [
            {"alertname": "GpumemLeak", "job": "leak", "severity": "warning"}
        ]
        assert {one["groupLabels"]["job"] for one in webhook.received()} == {"oom", "leak"}
        # all jobs were watched all the time, and nothing else is even pending
        watched = prometheus.series("count by (job) (gpumem_target_info)")
        assert {dict(labels)["job"]: int(count) for (_, labels), count in watched.items()} == {
            "oom": 4, "leak": 4, "healthy": 4, "server": 4, "replayed": 1,
        }  # fmt: skip
        pending = prometheus.series("ALERTS")
        assert {dict(labels)["job"] for _, labels in pending} <= {"oom", "leak"}
        assert running.process.poll() is None


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


def test_alertmanager_takes_the_file_as_it_is_shipped(tmp_path):
    """Its receiver is a placeholder that sends nothing."""
    with Alertmanager(tmp_path) as manager:
        assert manager.alerts() == []
        assert "level=ERROR" not in manager.log()
        assert "level=WARN" not in manager.log()
