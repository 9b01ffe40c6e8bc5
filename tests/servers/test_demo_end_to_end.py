"""`gpumem-otel demo` and a real Prometheus: scraped, over OTLP, through a Collector, found by sd.

What a server holds is compared with what the same process said on its own /metrics. Both are
answered from one observation, at most a second old, and every observation has its own number
(`exporter_runs` of stage `other` counts them): so whole batches are compared, value by value,
although the replayed memory moves.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest
from support import observations as obs
from support.cli_process import WAIT, clean_environ
from support.servers import Collector, Prometheus, program, until

from gpumem_otel.metrics.table import Level, shown

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

OURS = '{__name__=~"gpumem_.+|hw_gpu_.+"}'
OF_THE_SCRAPER = {"job", "instance", "exported_job", "exported_instance"}
COUNTERS = {metric.prometheus for metric in shown(Level.FULL) if metric.kind == "counter"}
LATE = {"gpumem_blocks", "gpumem_last_step_timestamp_seconds"}
"""What a job does not have from its first moment on."""

POLL_SECONDS = 0.1
"""Often enough that no observation, which holds for a second, is missed for long."""


class Demo:
    """A running `gpumem-otel demo --replay`, and all that its /metrics said meanwhile."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.said: dict[float, obs.Series] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    @property
    def target(self) -> str:
        return self.url.removeprefix("http://")

    def metrics(self) -> bytes:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=WAIT) as answer:
            body: bytes = answer.read()
            return body

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT)

    def _listen(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                series = obs.parsed(self.metrics())
            except OSError:
                return  # it was killed
            self.said.setdefault(observation_number(series), series)


@contextmanager
def demo(folder: Path, **environ: str):
    """The demo on a free port until the block ends; then Ctrl-C, exit 0 and nothing on stderr."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {
        "GPUMEM_OTEL_RUN_DIR": str(folder / "run"),
        "GPUMEM_OTEL_METRICS_LEVEL": "full",
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    verb = ["demo", "--replay", "--port", "0", "--duration", "600"]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "gpumem_otel.cli.main", *verb],
        env=clean_environ(**{**given, **environ}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    ) as process:
        try:
            running = Demo(process, url_of(process))
            try:
                yield running
            finally:
                running.close()
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                _, err = process.communicate(timeout=WAIT)
                assert (process.returncode, err.strip()) == (0, "")
        finally:
            process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    for line in process.stdout:
        if "curl http" in line:
            return line.split()[-1].removesuffix("/metrics")
    raise AssertionError(f"the demo does not say where it serves: {process.stderr.read()}")


def observation_number(series: obs.Series) -> float:
    """Which observation it is; 0 below level full."""
    numbers = (
        value
        for (name, labels), value in series.items()
        if name == "gpumem_exporter_runs_total" and ("stage", "other") in labels
    )
    return next(numbers, 0.0)


def batches(prometheus: Prometheus, selector: str = OURS) -> list[obs.Series]:
    """What arrived together (samples of one time stamp), oldest first, without scraper labels."""
    found: dict[float, obs.Series] = {}
    # the stamps of samples come only with a range
    for one in prometheus.api("query", query=f"{selector}[10m]")["result"]:
        labels = dict(one["metric"])
        name = labels.pop("__name__")
        kept = frozenset(pair for pair in labels.items() if pair[0] not in OF_THE_SCRAPER)
        for stamp, value in one["values"]:
            batch = found.setdefault(stamp, {})
            assert (name, kept) not in batch, f"two series are {name} {sorted(kept)}"
            batch[name, kept] = float(value)
    return [found[stamp] for stamp in sorted(found)]


def assert_the_same(prometheus: Prometheus, running: Demo, selector: str = OURS) -> set[str]:
    """Three batches or more are what the process said itself, and counters only grow.

    Returns the names that were seen.
    """

    def enough() -> list[obs.Series] | None:
        arrived = batches(prometheus, selector)
        known = [one for one in arrived if observation_number(one) in running.said]
        numbers = {observation_number(one) for one in known}
        whole = [one for one in known if {name for name, _ in one} >= LATE]
        return arrived if len(numbers) >= 3 and whole else None

    arrived = until(enough, "three observations to arrive")
    names = set()
    for batch in arrived:
        said = running.said.get(observation_number(batch))
        if said is not None:  # one of the time before we listened, or just after
            assert batch == said
            names |= {name for name, _ in batch}
    for before, after in itertools.pairwise(arrived):
        for key, value in before.items():
            if key[0] in COUNTERS:
                assert after[key] >= value, key
    errors = {key: v for key, v in arrived[-1].items() if key[0] == "gpumem_exporter_errors_total"}
    assert not any(errors.values()), errors
    return names


def test_three_ways_give_the_same_names_and_values(tmp_path):
    names = {}
    with (
        demo(tmp_path / "scraped") as running,
        Prometheus(tmp_path / "p1", scrape={"gpumem": [running.target]}) as prometheus,
    ):
        names["scraped"] = assert_the_same(prometheus, running)
        (up,) = prometheus.wait_for_targets_up()
        assert (up["health"], up["lastError"]) == ("up", "")
    with (
        Prometheus(tmp_path / "p2") as prometheus,
        demo(
            tmp_path / "sent", OTEL_EXPORTER_OTLP_ENDPOINT=f"{prometheus.url}/api/v1/otlp"
        ) as running,
    ):
        names["sent"] = assert_the_same(prometheus, running)
    with (
        Collector(tmp_path / "c3") as collector,
        demo(tmp_path / "collected", OTEL_EXPORTER_OTLP_ENDPOINT=collector.otlp_url) as running,
        Prometheus(
            tmp_path / "p3",
            scrape={"collector": [collector.target]},
            job_options={"honor_labels": True},
        ) as prometheus,
    ):
        names["collected"] = assert_the_same(prometheus, running)
    assert names["scraped"] == names["sent"] == names["collected"]


def test_promtool_has_nothing_to_say_about_the_demo(tmp_path):
    with ExitStack() as stack:
        for level in Level:
            running = stack.enter_context(
                demo(tmp_path / level, GPUMEM_OTEL_METRICS_LEVEL=level.value)
            )
            done = subprocess.run(
                [program("promtool"), "check", "metrics"],
                input=running.metrics(),
                capture_output=True,
                timeout=WAIT,
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), level


def test_sd_gives_the_living_to_prometheus(tmp_path):
    run_dir, targets = tmp_path / "run", tmp_path / "targets.json"
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(
                demo(tmp_path / name, OTEL_SERVICE_NAME=name, GPUMEM_OTEL_RUN_DIR=str(run_dir))
            )
            for name in ("one", "two")
        )
        sd(run_dir, targets)
        prometheus = stack.enter_context(
            Prometheus(
                tmp_path / "prometheus",
                scrape={"gpumem": []},
                job_options={
                    "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}],
                    "relabel_configs": [
                        {"source_labels": ["__meta_gpumem_service_name"], "target_label": "of"}
                    ],
                },
            )
        )
        assert wait_for_targets(prometheus, 2) == {"one": one.target, "two": two.target}
        two.process.kill()
        two.process.wait(WAIT)
        sd(run_dir, targets)
        assert wait_for_targets(prometheus, 1) == {"one": one.target}
        assert [group["targets"] for group in json.loads(targets.read_text())] == [[one.target]]


def sd(run_dir: Path, output: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpumem_otel.cli.main", "sd", "-o", str(output)],
        env=clean_environ(GPUMEM_OTEL_RUN_DIR=str(run_dir)),
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def wait_for_targets(prometheus: Prometheus, count: int) -> dict[str, str]:
    """`of` label -> address of the targets, once there are just so many and all are up."""

    def ask() -> dict[str, str] | None:
        active = prometheus.api("targets", state="active")["activeTargets"]
        up = [one["labels"] for one in active if one["health"] == "up"]
        if len(active) != count or len(up) != count:
            return None
        return {labels["of"]: labels["instance"] for labels in up}

    return until(ask, f"{count} targets to be up")


def test_four_ranks_over_otlp_overwrite_nothing(tmp_path):
    """Ranks of one pod have one preset instance id; each must arrive whole beside the others."""
    ranks = [str(rank) for rank in range(4)]
    with ExitStack() as stack:
        prometheus = stack.enter_context(Prometheus(tmp_path / "prometheus"))
        demos = {
            rank: stack.enter_context(
                demo(
                    tmp_path / rank,
                    RANK=rank,
                    LOCAL_RANK=rank,
                    WORLD_SIZE=str(len(ranks)),
                    TORCHELASTIC_RUN_ID="run-1",
                    OTEL_SERVICE_NAME="train",
                    OTEL_RESOURCE_ATTRIBUTES="service.instance.id=pod-1",
                    OTEL_EXPORTER_OTLP_ENDPOINT=f"{prometheus.url}/api/v1/otlp",
                )
            )
            for rank in ranks
        }
        for rank, running in demos.items():
            assert_the_same(prometheus, running, f'{OURS[:-1]}, rank="{rank}"}}')
        found = [dict(labels) for _, labels in prometheus.series("gpumem_allocated_bytes")]
        assert sorted(labels["rank"] for labels in found) == ranks
        assert {labels["job"] for labels in found} == {"train"}
        instances = {labels["rank"]: labels["instance"] for labels in found}
        pids = {rank: running.process.pid for rank, running in demos.items()}
        assert instances == {rank: f"pod-1-{rank}-{pid}" for rank, pid in pids.items()}
        assert "out of order" not in prometheus.log().lower()
        assert "duplicate" not in prometheus.log().lower()
