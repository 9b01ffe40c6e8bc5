"""Recorded jobs, replayed into the shipped configuration: a leak, an OOM, a server, a healthy one.

tests/data/jobs has what programs of tools/record_jobs.py really did.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from support.deployed import (
    Alertmanager,
    ShippedCollector,
    ShippedPrometheus,
    Webhook,
    loaded,
    shortened,
)
from support.replayed_job import AT_ITS_END, JOBS, replayed
from support.said import said
from support.servers import until

from gpumem_otel.metrics.table import Level, shown
from gpumem_otel.recording.reader import load_recording

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

DIVIDED_BY = 200.0
"""How much shorter the windows of the rules are here: an hour is 18 s."""

OF_NOW = ("gpumem_exporter_", "gpumem_last_", "gpumem_values_timestamp_seconds")
"""Beginnings of names whose values are of the exporter's own run, or times of now."""


def file_of(name: str) -> Path:
    return JOBS / f"{name}.gpumem"


@pytest.mark.parametrize("name", ["healthy", "leak", "oom", "server"])
def test_a_recording_is_of_what_it_is_named_after(name):
    # without a device: before its first allocation
    readings = [one for one in load_recording(file_of(name)).readings if one.after]
    first, last = (reading.after[0] for reading in (readings[0], readings[-1]))
    seconds = (readings[-1].time_ns - readings[0].time_ns) / 1e9
    floor = [reading.steps.floor_bytes.get(0, 0) for reading in readings]
    assert seconds > 40
    assert all(reading.after[0].limit_bytes for reading in readings)
    if name == "healthy":
        assert readings[-1].steps.steps > readings[0].steps.steps + 100
        settled = floor[len(floor) // 4 :]
        assert max(settled) - min(settled) < 0.001 * last.limit_bytes
        assert last.ooms == 0
    elif name == "leak":
        assert readings[-1].steps.steps > readings[0].steps.steps + 100
        quarter = len(floor) // 4
        assert floor[quarter] < floor[2 * quarter] < floor[3 * quarter] < floor[-1]
        assert last.ooms == 0
    elif name == "oom":
        assert first.ooms == 0
        assert last.ooms >= 1
        assert readings[-1].steps.steps > readings[0].steps.steps + 100
    else:
        assert readings[-1].steps.steps == 0
        # the last one is of its end, when all has been freed
        taken = [reading.after[0].allocated_bytes for reading in readings[2:-1]]
        assert min(taken) > 0.85 * last.limit_bytes
        assert last.ooms == 0


def at_the_end(prometheus: ShippedPrometheus, job: str) -> dict:
    """What the job's series say, once all that may be absent at first is there."""
    names = {metric.prometheus for metric in shown(Level.FULL)}

    def ask():
        found = {}
        for (name, labels), value in prometheus.series(f'{{job="{job}"}}').items():
            if name in names:
                kept = {pair for pair in labels if pair[0] not in {"job", "instance"}}
                found[name, frozenset(kept)] = value
        whole = {"gpumem_blocks", "gpumem_last_step_timestamp_seconds"}
        return found if whole <= {name for name, _ in found} else None

    return until(ask, f"all series of {job}")


def test_scraped_and_through_the_collector_it_is_the_same_job(tmp_path):
    """Two runs of one recording, standing at its end: the same names, and the same values."""
    given = {
        "GPUMEM_OTEL_METRICS_LEVEL": "full",
        "GPUMEM_OTEL_RUN_ID": "one",
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    with ShippedPrometheus(tmp_path / "prometheus") as prometheus:
        scraped = {**given, "OTEL_SERVICE_NAME": "scraped", "GPUMEM_OTEL_RUN_DIR": str(tmp_path)}
        with replayed(file_of("oom"), speed=AT_ITS_END, **scraped) as target:
            one = [{"targets": [target], "labels": {"__meta_gpumem_service_name": "scraped"}}]
            (prometheus.targets / "jobs.json").write_text(json.dumps(one))
            first = at_the_end(prometheus, "scraped")
        with (
            ShippedCollector(tmp_path / "collector", prometheus.url) as collector,
            replayed(
                file_of("oom"),
                speed=AT_ITS_END,
                **{**scraped, "OTEL_SERVICE_NAME": "sent"},
                OTEL_EXPORTER_OTLP_ENDPOINT=collector.otlp_url,
            ),
        ):
            second = at_the_end(prometheus, "sent")
    assert set(first) == set(second)
    assert len(first) > 40
    of_the_job = {key: v for key, v in first.items() if not key[0].startswith(OF_NOW)}
    assert of_the_job == {key: v for key, v in second.items() if not key[0].startswith(OF_NOW)}
    assert of_the_job["gpumem_ooms_total", frozenset({("rank", "0"), ("device", "0")})] >= 1
    asked = "one recording, scraped and then through the Collector"
    said("Prometheus", asked, "the same names and the same values")


def firing(notifications: list[dict], job: str) -> list[dict]:
    return [
        one
        for one in notifications
        if one["groupLabels"].get("job") == job and one["status"] == "firing"
    ]


@pytest.mark.timeout(300)
def test_a_real_leak_and_a_real_oom_reach_the_receiver_and_the_healthy_fire_nothing(tmp_path):
    """Rules with an hour of 18 s, from scraped series through Alertmanager to a webhook.

    The leak runs on two ranks. The OOM happens in the middle of its recording, while it is watched.
    """
    watched = [("leak", 0), ("leak", 1), ("oom", 0), ("healthy", 0), ("server", 0)]
    with ExitStack() as stack:
        webhook = stack.enter_context(Webhook())
        manager = stack.enter_context(Alertmanager(tmp_path / "am", webhook=webhook.url))
        prometheus = stack.enter_context(
            ShippedPrometheus(
                tmp_path / "prometheus",
                alertmanager=manager.target,
                rules=shortened(loaded("prometheus/rules/gpumem.yaml"), DIVIDED_BY),
            )
        )
        targets = []
        for job, rank in watched:
            environ = {
                "OTEL_SERVICE_NAME": job,
                "RANK": str(rank),
                "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run"),
            }
            target = stack.enter_context(replayed(file_of(job), **environ))
            targets.append({"targets": [target], "labels": {"__meta_gpumem_service_name": job}})
        (prometheus.targets / "jobs.json").write_text(json.dumps(targets))
        prometheus.wait_for_series("gpumem_target_info", len(watched))
        webhook.wait(lambda all_: bool(firing(all_, "oom")), "the OOM to be received")
        webhook.wait(lambda all_: bool(firing(all_, "leak")), "the leak to be received")
        (oom,) = firing(webhook.received(), "oom")
        assert oom["receiver"] == "on-call"
        assert [one["labels"] for one in oom["alerts"]] == [
            {"alertname": "GpumemOom", "job": "oom", "severity": "warning"}
        ]
        (annotated,) = [one["annotations"] for one in oom["alerts"]]
        assert annotated["summary"] == "Job oom ran out of GPU memory"
        assert "Devices: 1. Times: rank 0 device 0: 1." in annotated["description"]
        (leak,) = firing(webhook.received(), "leak")
        assert [one["labels"] for one in leak["alerts"]] == [
            {"alertname": "GpumemLeak", "job": "leak", "severity": "warning"}
        ]
        (annotated,) = [one["annotations"] for one in leak["alerts"]]
        assert "Devices: 2. Worst: rank " in annotated["description"]
        assert {one["groupLabels"]["job"] for one in webhook.received()} == {"oom", "leak"}
        # all jobs were watched all the time, and nothing else is even pending
        counts = prometheus.series("count by (job) (gpumem_target_info)")
        assert {dict(labels)["job"]: int(count) for (_, labels), count in counts.items()} == {
            "leak": 2, "oom": 1, "healthy": 1, "server": 1,
        }  # fmt: skip
        seen = prometheus.series("last_over_time(ALERTS[10m])")
        assert {dict(labels)["job"] for _, labels in seen} == {"oom", "leak"}
        for job, words in (("leak", "GpumemLeak, once for two ranks"), ("oom", "GpumemOom, once")):
            said("Alertmanager", f"a replayed job: {job}", f"the webhook received {words}")
        for job in ("healthy", "server"):
            said("Prometheus", f"a replayed job: {job}", "no alert, not even pending")
