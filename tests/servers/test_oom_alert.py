"""A process that is killed half a second after an out-of-memory, and an alert that fires all the
same: scraped through the supervisor, and over OTLP through a Collector.

Prometheus scrapes every two seconds here; `GPUMEM_ALERT_SCRAPE=15` is the usual cadence.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.cli_process import clean_environ
from support.servers import Collector, Prometheus, free_port, until

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]

TESTS = Path(__file__).parents[1]
SCRAPE_SECONDS = int(os.environ.get("GPUMEM_ALERT_SCRAPE", "2"))
FIRES_WITHIN_SECONDS = 60.0
RULES = {
    "groups": [
        {
            "name": "oom",
            "interval": f"{SCRAPE_SECONDS}s",
            "rules": [{"alert": "RanOutOfMemory", "expr": "increase(gpumem_ooms_total[5m]) > 0"}],
        }
    ]
}
JOB = """
import os, signal, threading, time
from support.oom_job import arm, say, torch
torch.allocators[0].ooms = 0
agent = arm()
say("armed")
input()
try:
    torch.fail(1 << 30)
except torch.OutOfMemoryError:
    say("out of memory")
time.sleep(0.5)  # what is not told by now is lost
os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def job(tmp_path, *command, **environ):
    """A job that fails once it is told to, and is killed half a second later."""
    path = tmp_path / "job.py"
    path.write_text(JOB)
    settings = {
        "PYTHONPATH": str(TESTS),
        "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run"),
        "OTEL_SERVICE_NAME": "job",
        **environ,
    }
    process = subprocess.Popen(
        [*command, sys.executable, str(path)], env=clean_environ(**settings), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "armed\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def seen_before(prometheus):
    """The counter was scraped as 0: without that no increase is to be seen, by anybody."""
    until(
        lambda: 0.0 in prometheus.series("gpumem_ooms_total").values(),
        "the first scrape", 6 * SCRAPE_SECONDS + 30,
    )  # fmt: skip


def fire(process, prometheus):
    """Let the job fail; seconds until the alert fires."""
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "out of memory\n"
    failed = time.monotonic()

    def firing():
        alerts = prometheus.api("alerts")["alerts"]
        return [alert for alert in alerts if alert["state"] == "firing"]

    (alert,) = until(firing, "the alert", FIRES_WITHIN_SECONDS)
    assert alert["labels"]["alertname"] == "RanOutOfMemory"
    assert (alert["labels"]["rank"], alert["labels"]["device"]) == ("0", "0")
    return time.monotonic() - failed


def prometheus_of(tmp_path, target):
    rules = tmp_path / "rules.yml"
    rules.write_text(json.dumps(RULES))
    return Prometheus(
        tmp_path / "prometheus",
        scrape={"gpumem": [target]},
        job_options={"scrape_interval": f"{SCRAPE_SECONDS}s", "honor_labels": True},
        rule_files=[rules],
    )


def test_scraped_from_the_supervisor(tmp_path, record_property):
    port = free_port()
    command = (
        sys.executable, "-m", "gpumem_otel.cli.main", "run", "--supervise", "--serve",
        "--port", str(port), "--linger", str(2 * SCRAPE_SECONDS), "--",
    )  # fmt: skip
    with (
        prometheus_of(tmp_path, f"127.0.0.1:{port}") as prometheus,
        job(tmp_path, *command) as process,
    ):
        seen_before(prometheus)
        record_property("seconds", fire(process, prometheus))
        assert process.wait(60) == -signal.SIGKILL


def test_over_otlp_through_a_collector(tmp_path, record_property):
    with (
        Collector(tmp_path / "collector") as collector,
        prometheus_of(tmp_path, collector.target) as prometheus,
        job(
            tmp_path,
            sys.executable, "-m", "gpumem_otel.cli.main", "run", "--",
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.otlp_url,
            OTEL_METRIC_EXPORT_INTERVAL=str(4000 * SCRAPE_SECONDS),
        ) as process,
    ):  # fmt: skip
        seen_before(prometheus)
        record_property("seconds", fire(process, prometheus))
        assert process.wait(60) == -signal.SIGKILL


def test_without_the_supervisor_the_count_is_lost(tmp_path):
    """What it is there for: scraped every 15 s, the job alone is never seen as failed."""
    if SCRAPE_SECONDS < 5:
        pytest.skip("half a second is long beside two")
    port = free_port()
    with (
        prometheus_of(tmp_path, f"127.0.0.1:{port}") as prometheus,
        job(
            tmp_path,
            sys.executable, "-m", "gpumem_otel.cli.main", "run", "--serve", "--port", str(port),
            "--",
        ) as process,
    ):  # fmt: skip
        seen_before(prometheus)
        with pytest.raises(AssertionError, match="waited 60 s in vain for the alert"):
            fire(process, prometheus)
