"""Real servers for tests, on loopback: Prometheus and an OpenTelemetry Collector.

Programs are looked for in the folder that GPUMEM_SERVERS_BIN names (`make check-servers` builds
them). A missing one skips the test and says what is missing; with GPUMEM_REQUIRE_SERVERS=1, as in
CI, it fails. Each server gets a folder for its data and its log, and is killed at the end.

    with Prometheus(folder, scrape={"gpumem": ["127.0.0.1:9464"]}) as prometheus:
        prometheus.wait_for_targets_up()
        prometheus.series("gpumem_allocated_bytes")
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")

START_SECONDS = 60.0
"""For a server to become ready, on a machine that is busy with other things."""

PROGRAMS = ("prometheus", "promtool", "otelcol", "alertmanager")


def program(name: str) -> str:
    """Path of a server's program; skips or fails where it is missing."""
    folder = os.environ.get("GPUMEM_SERVERS_BIN", "")
    found = Path(folder) / name
    if folder and os.access(found, os.X_OK):
        return str(found)
    lack = f"no {name} in GPUMEM_SERVERS_BIN={folder or '(not set)'}: run `make check-servers`"
    if os.environ.get("GPUMEM_REQUIRE_SERVERS") == "1":
        pytest.fail(lack)
    pytest.skip(lack)


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def until(ask: Callable[[], T | None], what: str, seconds: float = START_SECONDS) -> T:
    """Ask again and again until the answer is neither None nor empty, at most so long."""
    deadline = time.monotonic() + seconds
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain for {what}"
        time.sleep(0.05)


class Server:
    """A program in a process of its own, from `__enter__` to `__exit__`."""

    name = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """Arguments of the program; writes its configuration."""
        raise NotImplementedError

    def ready_url(self) -> str:
        """Answers 200 once the server is ready."""
        raise NotImplementedError

    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text(errors="replace")

    def __enter__(self) -> Any:
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self._folder
            )
        try:
            until(self._is_ready, f"{self.name} to be ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} ended:\n{self.log()}"
        try:
            with urllib.request.urlopen(self.ready_url(), timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class Prometheus(Server):
    """Prometheus, scraping every second and with its OTLP receiver on.

    Args:
        scrape: job name -> targets (`host:port`).
        job_options: lines added to every scrape job, for instance `{"honor_labels": True}`.
        rule_files: rules that it evaluates.
    """

    name = "prometheus"

    def __init__(
        self,
        folder: Path,
        *,
        scrape: Mapping[str, Sequence[str]] | None = None,
        job_options: Mapping[str, object] | None = None,
        rule_files: Sequence[Path] = (),
    ) -> None:
        super().__init__(folder)
        self._scrape = scrape or {}
        self._job_options = job_options or {}
        self._rule_files = [str(path) for path in rule_files]
        self.port = free_port()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def otlp_metrics_url(self) -> str:
        """Full URL for OTEL_EXPORTER_OTLP_METRICS_ENDPOINT."""
        return f"{self.url}/api/v1/otlp/v1/metrics"

    def command(self) -> list[str]:
        binary = program("prometheus")
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "rule_files": self._rule_files,
            "scrape_configs": [
                {
                    "job_name": job,
                    "static_configs": [{"targets": list(targets)}],
                    **self._job_options,
                }
                for job, targets in self._scrape.items()
            ],
        }
        path = self._folder / "prometheus.yml"
        path.write_text(json.dumps(config))  # JSON is YAML
        return [
            binary,
            f"--config.file={path}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--web.enable-otlp-receiver",
        ]

    def ready_url(self) -> str:
        return f"{self.url}/-/ready"

    def api(self, path: str, **query: str) -> Any:
        """`data` of an answer of the HTTP API."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def series(self, query: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """(name, other labels) -> value of an instant query."""
        found = {}
        for one in self.api("query", query=query)["result"]:
            labels = dict(one["metric"])
            name = labels.pop("__name__", "")
            found[name, frozenset(labels.items())] = float(one["value"][1])
        return found

    def wait_for_targets_up(self) -> list[dict[str, Any]]:
        """The active targets, once all of them were scraped without an error."""

        def ask() -> list[dict[str, Any]] | None:
            targets: list[dict[str, Any]] = self.api("targets", state="active")["activeTargets"]
            return targets if all(target["health"] == "up" for target in targets) else None

        return until(ask, "all targets to be up")

    def wait_for_series(self, query: str, count: int = 1) -> dict[Any, float]:
        """The series of a query, once there are so many."""

        def ask() -> dict[Any, float] | None:
            found = self.series(query)
            return found if len(found) >= count else None

        return until(ask, f"{count} series of {query}")


class Collector(Server):
    """An OpenTelemetry Collector: OTLP over HTTP in, Prometheus out."""

    name = "otelcol"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.otlp_port = free_port()
        self.prometheus_port = free_port()

    @property
    def otlp_url(self) -> str:
        """For OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self.otlp_port}"

    @property
    def target(self) -> str:
        """What a Prometheus scrapes."""
        return f"127.0.0.1:{self.prometheus_port}"

    def command(self) -> list[str]:
        binary = program("otelcol")
        config = {
            "receivers": {
                "otlp": {"protocols": {"http": {"endpoint": f"127.0.0.1:{self.otlp_port}"}}}
            },
            "exporters": {
                "prometheus": {"endpoint": self.target, "without_scope_info": True},
            },
            "service": {
                # its own metrics would be served on a fixed port
                "telemetry": {"metrics": {"level": "none"}},
                "pipelines": {"metrics": {"receivers": ["otlp"], "exporters": ["prometheus"]}},
            },
        }
        path = self._folder / "otelcol.yaml"
        path.write_text(json.dumps(config))
        return [binary, f"--config=file:{path}"]

    def ready_url(self) -> str:
        return f"http://{self.target}/metrics"

    def _is_ready(self) -> bool:
        if not super()._is_ready():
            return False
        try:
            request = urllib.request.Request(f"{self.otlp_url}/v1/metrics", method="GET")
            urllib.request.urlopen(request, timeout=5).close()
        except urllib.error.HTTPError:
            return True  # it listens, and takes only POST
        except OSError:
            return False
        return True
