"""The servers of tests/support/servers.py, started with the configuration in deploy/.

What a file names for a real installation is replaced: addresses, paths and, where a test would
wait for minutes, durations. Everything else is as shipped.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import yaml
from support.deploy_files import DEPLOY
from support.servers import Collector, Prometheus, Server, free_port, program, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_DURATION = re.compile(r"(?<=[\[\s])(\d+)([smhd])(?=[\]\s)]|$)")
_IN_SECONDS = re.compile(r"\b(?:1800|3600|86400)\b")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def loaded(path: str) -> Any:
    """A YAML file of deploy/ as values."""
    return yaml.safe_load((DEPLOY / path).read_text())


def in_milliseconds(duration: str, divided_by: float) -> str:
    """`20m` -> `12000ms`, divided by 100."""
    number, unit = re.fullmatch(r"(\d+)([smhd])", duration).groups()  # type: ignore[union-attr]
    return f"{int(int(number) * _SECONDS[unit] * 1000 / divided_by)}ms"


def shortened(rules: dict[str, Any], divided_by: float) -> dict[str, Any]:
    """The rules with every span of time divided (windows, `for`, seconds), each second."""

    def short(match: re.Match[str]) -> str:
        return in_milliseconds(match.group(), divided_by)

    def rule(one: dict[str, Any]) -> dict[str, Any]:
        expression = _DURATION.sub(short, one["expr"])
        expression = _IN_SECONDS.sub(lambda m: f"{int(m.group()) / divided_by:g}", expression)
        changed = {**one, "expr": expression}
        if "for" in one:
            changed["for"] = in_milliseconds(one["for"], divided_by)
        return changed

    groups = [
        {**group, "interval": "1s", "rules": [rule(one) for one in group["rules"]]}
        for group in rules["groups"]
    ]
    return {"groups": groups}


class ShippedPrometheus(Prometheus):
    """Prometheus with deploy/prometheus/prometheus.yml.

    Args:
        alertmanager: `host:port` in place of the shipped one.
        rules: in place of the shipped ones.
        scrape_interval: in place of the shipped one.

    Attributes:
        targets: folder that is watched for files of `gpumem-otel sd`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        alertmanager: str = "127.0.0.1:1",
        rules: dict[str, Any] | None = None,
        scrape_interval: str = "1s",
    ) -> None:
        super().__init__(folder)
        self.targets = folder / "targets"
        self.targets.mkdir()
        self._alertmanager = alertmanager
        self._rules = rules
        self._interval = scrape_interval

    def command(self) -> list[str]:
        program("prometheus")
        shipped = loaded("prometheus/prometheus.yml")
        shipped["global"].update(scrape_interval=self._interval, scrape_timeout=self._interval)
        (manager,) = shipped["alerting"]["alertmanagers"]
        manager["static_configs"] = [{"targets": [self._alertmanager]}]
        (job,) = shipped["scrape_configs"]
        (files,) = job["file_sd_configs"]
        files["refresh_interval"] = "1s"
        if self._rules is None:
            shutil.copytree(DEPLOY / "prometheus" / "rules", self._folder / "rules")
        else:
            (self._folder / "rules").mkdir()
            (self._folder / "rules" / "gpumem.yaml").write_text(json.dumps(self._rules))
        command = super().command()
        # relative paths in it are relative to it, as shipped
        (self._folder / "prometheus.yml").write_text(json.dumps(shipped))
        return command


class Alertmanager(Server):
    """Alertmanager with deploy/alertmanager/alertmanager.yml; its receiver calls a webhook."""

    name = "alertmanager"

    def __init__(self, folder: Path, *, webhook: str = "", group_wait: str = "1s") -> None:
        super().__init__(folder)
        self.port = free_port()
        self._webhook = webhook
        self._group_wait = group_wait

    @property
    def target(self) -> str:
        """What a Prometheus sends alerts to."""
        return f"127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        binary = program("alertmanager")
        shipped = loaded("alertmanager/alertmanager.yml")
        if self._webhook:
            shipped["route"]["group_wait"] = self._group_wait
            (receiver,) = shipped["receivers"]
            receiver["webhook_configs"] = [{"url": self._webhook}]
        path = self._folder / "alertmanager.yml"
        path.write_text(json.dumps(shipped))
        return [
            binary,
            f"--config.file={path}",
            f"--storage.path={self._folder / 'data'}",
            f"--web.listen-address={self.target}",
            "--cluster.listen-address=",
        ]

    def ready_url(self) -> str:
        return f"http://{self.target}/-/ready"

    def post(self, alerts: list[dict[str, Any]]) -> None:
        """Give it alerts, as a Prometheus does."""
        request = urllib.request.Request(
            f"http://{self.target}/api/v2/alerts",
            data=json.dumps(alerts).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=30).close()

    def alerts(self) -> list[dict[str, Any]]:
        """What it knows, inhibited ones too."""
        with urllib.request.urlopen(f"http://{self.target}/api/v2/alerts", timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)
            return found


class ShippedCollector(Collector):
    """The Collector with deploy/otel/collector.yaml, sending to a Prometheus."""

    def __init__(self, folder: Path, prometheus_url: str) -> None:
        super().__init__(folder)
        self._prometheus_url = prometheus_url
        self._health_port = free_port()

    def command(self) -> list[str]:
        binary = program("otelcol")
        text = (DEPLOY / "otel" / "collector.yaml").read_text()
        for shipped, ours in {
            "127.0.0.1:13133": f"127.0.0.1:{self._health_port}",
            "${env:COLLECTOR_HOST:-127.0.0.1}:4318": f"127.0.0.1:{self.otlp_port}",
            "${env:COLLECTOR_HOST:-127.0.0.1}:4317": f"127.0.0.1:{free_port()}",
            "${env:PROMETHEUS_URL:-http://127.0.0.1:9090}": self._prometheus_url,
        }.items():
            assert text.count(shipped) == 1, shipped
            text = text.replace(shipped, ours)
        config = yaml.safe_load(text)
        # its own metrics would be served on a fixed port
        config["service"]["telemetry"] = {"metrics": {"level": "none"}}
        path = self._folder / "collector.yaml"
        path.write_text(json.dumps(config))
        return [binary, f"--config=file:{path}"]

    def ready_url(self) -> str:
        return f"http://127.0.0.1:{self._health_port}/"


class Webhook:
    """Takes what Alertmanager sends; use as a context manager."""

    def __init__(self) -> None:
        self._received: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 30

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer._received.append(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        """Where to send to."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def received(self) -> list[dict[str, Any]]:
        """All notifications so far."""
        with self._lock:
            return list(self._received)

    def wait(self, enough: Callable[[list[dict[str, Any]]], bool], what: str) -> None:
        """Until what was received is enough."""
        until(lambda: enough(self.received()), what)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
