"""From `helm install` to a series and an alert, without a kubelet.

A real API server holds the chart's objects and a pod of eight ranks, whose status the test
writes; a real Prometheus operator makes the scrape configuration; a real Prometheus finds the ranks
with it.
"""

from __future__ import annotations

import base64
import json
import socket
import threading
import urllib.error
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from support import observations as obs
from support.kubernetes import TOKEN, ControlPlane, Operator, helm
from support.said import said
from support.servers import Prometheus, free_port, program, until

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.base.counters import Counters
from gpumem_otel.metrics.prometheus import Exposition
from gpumem_otel.metrics.table import Level, shown

pytestmark = pytest.mark.servers

CHART = Path(__file__).parents[2] / "helm" / "gpumem-otel"
RANKS = range(8)
OPERATED = (
    "podmonitors",
    "probes",
    "prometheuses",
    "prometheusrules",
    "scrapeconfigs",
    "servicemonitors",
)
"""Kinds that the operator needs for a Prometheus."""

FOREIGN = b'python_info{version="3"} 1\ngpumem_supported{job="another",rank="0"} 1\n'


def free_ports(number: int) -> int:
    """The first of so many loopback ports in a row that nobody listens on."""
    while True:
        base = free_port()
        try:
            with ExitStack() as stack:
                for port in range(base, base + number):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except (OSError, OverflowError):
            continue
        return base


@contextmanager
def ranks(base: int, token: str):
    """Eight ranks, each with our exposition on its port; rank 5 ran out of memory twice."""

    def source(rank: int) -> Exposition:
        def observe():
            who = obs.identity(rank=rank, local_rank=rank, device_uuids={0: obs.UUID})
            stats = obs.stats(0, ooms=2 if rank == 5 else 0, allocated_bytes=1000 + rank)
            return obs.full((0,), identity=who, devices=(stats,))

        return Exposition(observe, Level.FULL, clock=SystemClock(), counters=Counters())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.headers.get("Authorization") != f"Bearer {token}":
                self.send_error(401)
                return
            exposition = sources[self.server.server_address[1] - base]
            content_type, body = exposition.render(self.headers.get("Accept", ""))
            body = body.removesuffix(b"# EOF\n") + FOREIGN + b"# EOF\n"
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    sources = [source(rank) for rank in RANKS]
    servers = [ThreadingHTTPServer(("127.0.0.1", base + rank), Handler) for rank in RANKS]
    threads = [threading.Thread(target=one.serve_forever, args=(0.05,)) for one in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join(10)


class OperatedPrometheus(Prometheus):
    """Prometheus with the configuration that the operator made."""

    def __init__(self, folder: Path, cluster: ControlPlane, configuration: dict) -> None:
        super().__init__(folder)
        text = json.dumps(configuration)
        # what the operator's sidecar fills in
        text = text.replace("$(POD_NAME)", "prometheus-0").replace("$(SHARD)", "0")
        made = json.loads(text)
        rules = cluster.get("v1", "ConfigMap", "prometheus-p-rulefiles-0", "monitoring")
        made["rule_files"] = []
        for name, content in rules["data"].items():
            (folder / name).write_text(content)
            made["rule_files"].append(str(folder / name))
        self._made = made

    def command(self) -> list[str]:
        path = self._folder / "prometheus.yml"
        path.write_text(json.dumps(self._made))
        return [
            program("prometheus"),
            f"--config.file={path}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]


def prometheus_object(cluster: ControlPlane) -> dict:
    everything = {"matchLabels": {}}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "Prometheus",
        "metadata": {"name": "p", "namespace": "monitoring"},
        "spec": {
            "podMonitorSelector": {"matchLabels": {"release": "tests"}},
            "podMonitorNamespaceSelector": everything,
            "ruleSelector": {"matchLabels": {"release": "tests"}},
            "ruleNamespaceSelector": everything,
            "scrapeInterval": "1s",
            "evaluationInterval": "1s",
            "apiserverConfig": {
                "host": cluster.url,
                "bearerToken": TOKEN,
                "tlsConfig": {"caFile": str(cluster.authority.cert_file)},
            },
        },
    }


def run_pod(cluster: ControlPlane, name: str, labels: dict, phase: str = "Running", **more) -> dict:
    """A pod, and the status that a kubelet would write."""
    made = cluster.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "training", "labels": labels},
            "spec": {
                "nodeName": "node-7",
                "containers": [
                    {
                        "name": "train",
                        "image": "train",
                        "resources": {"limits": {"nvidia.com/gpu": "8"}},
                        **more,
                    }
                ],
            },
        }
    )
    status = {"phase": phase, "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
    cluster.ask(
        "PATCH",
        f"/api/v1/namespaces/training/pods/{name}/status",
        {"status": status},
        kind="merge-patch+json",
    )
    return made


class Scraped(NamedTuple):
    """What there is at the end of the way.

    Attributes:
        base: port of rank 0.
        made: the operator's configuration.
        before: paths of all objects before `helm install`.
    """

    prometheus: Prometheus
    base: int
    made: dict
    cluster: ControlPlane
    operator: Operator
    before: set[str]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """The whole way."""
    folder = tmp_path_factory.mktemp("scrape")
    program("prometheus")
    base = free_ports(2 * len(RANKS))
    with ExitStack() as stack:
        cluster = stack.enter_context(ControlPlane(folder / "cluster"))
        cluster.install_crds(*OPERATED)
        for name in ("monitoring", "training"):
            cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        values = folder / "values.yaml"
        values.write_text(yaml.safe_dump(chart_values(base)))
        before = set(cluster.objects())
        helm(cluster, "install", "g", str(CHART), "-n", "monitoring", "-f", str(values))
        secret = cluster.get("v1", "Secret", "g-gpumem-otel-token", "monitoring")
        stack.enter_context(ranks(base, base64.b64decode(secret["data"]["token"]).decode()))

        ours = {"gpumem-otel/inject": "true", "app.kubernetes.io/name": "llm-train"}
        until(lambda: taken_in(cluster, ours), "the policy to be heeded")
        run_pod(cluster, "train-0", ours)
        run_pod(cluster, "done-0", ours, phase="Succeeded")
        # one that has the ports itself, and no label with a name
        run_pod(cluster, "by-hand", {}, ports=[{"name": "gpumem-3", "containerPort": base + 3}])
        run_pod(cluster, "other", {}, ports=[{"name": "http", "containerPort": base}])

        operator = stack.enter_context(Operator(folder / "operator", cluster))
        cluster.create(prometheus_object(cluster))
        made = until(
            lambda: complete(cluster, operator.configuration("p", "monitoring")),
            "the operator to make a configuration",
        )
        prometheus = OperatedPrometheus(folder / "prometheus", cluster, made)
        yield Scraped(stack.enter_context(prometheus), base, made, cluster, operator, before)


def chart_values(base: int) -> dict:
    labels = {"release": "tests"}
    return {
        "port": base,
        "podMonitor": {"enabled": True, "labels": labels, "drop": ["gpumem_segments"]},
        "prometheusRule": {"enabled": True, "labels": labels, "interval": "1s"},
        "token": {"enabled": True, "namespaces": ["training"]},
        "inject": {"enabled": True, "image": {"repository": "registry.example.com/inject"}},
    }


def taken_in(cluster: ControlPlane, labels: dict) -> bool:
    one = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "namespace": "training", "labels": labels},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    return "initContainers" in cluster.create(one, dry_run=True)["spec"]


def complete(cluster: ControlPlane, made: dict | None) -> dict | None:
    """The operator's configuration, once the PodMonitor is in it and the rules beside it."""
    if not made or not made.get("scrape_configs"):
        return None
    try:
        rules = cluster.get("v1", "ConfigMap", "prometheus-p-rulefiles-0", "monitoring")
    except urllib.error.HTTPError:
        return None
    return made if rules.get("data") else None


def test_every_rank_is_a_target_with_its_pods_labels(scraped):
    prometheus, base = scraped.prometheus, scraped.base

    def ask():
        targets = prometheus.api("targets", state="active")["activeTargets"]
        return targets if targets and all(one["health"] == "up" for one in targets) else None

    targets = until(ask, "all targets to be up")
    ours = [one["labels"] for one in targets if one["labels"]["pod"] == "train-0"]
    assert sorted(ours, key=lambda one: one["instance"]) == [
        {
            "job": "llm-train",
            "namespace": "training",
            "pod": "train-0",
            "container": "train",
            "node": "node-7",
            "instance": f"127.0.0.1:{base + rank}",
        }
        for rank in RANKS
    ]
    others = [one["labels"] for one in targets if one["labels"]["pod"] != "train-0"]
    assert [(one["pod"], one["job"], one["instance"]) for one in others] == [
        ("by-hand", "monitoring/g-gpumem-otel", f"127.0.0.1:{base + 3}")
    ]
    asked = "the operator's configuration, a pod of eight ranks on one address"
    said("Prometheus", asked, "eight targets up, with the pod's labels")


def test_every_rank_is_a_series(scraped):
    prometheus = scraped.prometheus
    query = 'gpumem_allocated_bytes{job="llm-train"}'

    series = prometheus.wait_for_series(query, len(RANKS))

    found = {int(dict(labels)["rank"]): value for (_, labels), value in series.items()}
    assert found == {rank: 1000 + rank for rank in RANKS}
    assert {dict(labels)["node"] for _, labels in series} == {"node-7"}


def test_only_our_metrics_are_stored_and_without_those_that_were_dropped(scraped):
    prometheus = scraped.prometheus
    prometheus.wait_for_series('gpumem_allocated_bytes{job="llm-train"}', len(RANKS))

    series = prometheus.series('{job="llm-train", __name__!~"rank:.*|job.*|ALERTS.*"}')

    names = {name for name, _ in series} - {"up"}
    names = {name for name in names if not name.startswith("scrape_")}
    assert names == {metric.prometheus for metric in shown(Level.FULL)} - {"gpumem_segments"}
    said = [dict(labels) for _, labels in series if ("exported_job", "another") in labels]
    assert {one["job"] for one in said} == {"llm-train"}
    assert len(said) == len(RANKS)


def test_the_limits_are_in_the_configuration(scraped):
    (job,) = scraped.made["scrape_configs"]

    assert job["honor_labels"] is False
    assert job["sample_limit"] == 2000
    assert job["kubernetes_sd_configs"][0]["role"] == "pod"
    said("prometheus-operator", "the PodMonitor", "a scrape configuration with its limits")


def test_the_alert_of_a_rank_that_ran_out_of_memory_fires(scraped):
    prometheus = scraped.prometheus

    def ask():
        found = prometheus.api("alerts")["alerts"]
        return [one for one in found if one["labels"]["alertname"] == "GpumemOom"]

    (alert,) = until(ask, "GpumemOom to fire")
    assert alert["state"] == "firing"
    assert alert["labels"] == {
        "alertname": "GpumemOom",
        "severity": "warning",
        "namespace": "training",
        "job": "llm-train",
    }
    assert "rank 5 device 0: 2" in alert["annotations"]["description"]
    asked = "the PrometheusRule, as the operator wrote it; rank 5 of eight ran out of memory"
    said("Prometheus", asked, "GpumemOom firing, with that rank in its text")


def test_after_uninstall_nothing_of_it_is_left(scraped):
    """The last test of the way: neither an object, nor a target, nor a change to a new pod."""
    cluster, operator = scraped.cluster, scraped.operator

    helm(cluster, "uninstall", "g", "-n", "monitoring")

    def released() -> bool:
        made = operator.configuration("p", "monitoring")
        return made is not None and not made.get("scrape_configs")

    until(released, "the operator to take the targets out")
    left = {path for path in set(cluster.objects()) - scraped.before if "gpumem" in path}
    assert left == set()
    ours = {"gpumem-otel/inject": "true"}
    until(lambda: not taken_in(cluster, ours), "the policy to be forgotten")
    asked = "the same after `helm uninstall`"
    said("prometheus-operator", asked, "no target; no object is left, no pod is changed")
