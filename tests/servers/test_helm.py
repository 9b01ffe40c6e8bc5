"""The chart through helm against a real Kubernetes API server: rendered, installed, removed."""

from __future__ import annotations

import copy
import re
import subprocess
import urllib.error
from pathlib import Path

import pytest
import yaml
from support import alert_rules
from support.kubernetes import ControlPlane, helm, rendered
from support.said import said
from support.servers import program as server_program

pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "gpumem-otel"
CI = sorted((CHART / "ci").glob("*-values.yaml"))
NAMESPACES = ("monitoring", "training", "research")
EVERYTHING = ("-f", str(CHART / "ci" / "everything-values.yaml"))
COMING_AND_GOING = ("/apis/apiregistration.k8s.io/", "/apis/flowcontrol.apiserver.k8s.io/")
"""Kinds whose objects the server makes itself, some time after its start."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ControlPlane(tmp_path_factory.mktemp("cluster")) as running:
        running.install_crds("podmonitors", "prometheusrules")
        for name in NAMESPACES:
            running.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        yield running


def template(*values: str, chart: Path = CHART) -> list:
    return rendered(helm(None, "template", "gpumem", str(chart), "-n", "monitoring", *values))


def there(cluster) -> set[str]:
    """Paths of all objects but those of the server's own."""
    return {path for path in cluster.objects() if not path.startswith(COMING_AND_GOING)}


@pytest.mark.parametrize("values", CI, ids=lambda path: path.stem)
def test_lint_has_nothing_to_say(values):
    output = helm(None, "lint", "--strict", str(CHART), "-f", str(values))

    answer = "1 chart(s) linted, 0 chart(s) failed"
    assert answer in output
    assert "[WARNING]" not in output
    assert "[ERROR]" not in output
    said("Helm", f"`lint --strict` with each of {len(CI)} files in `ci/`", f"`{answer}`")


@pytest.mark.parametrize("values", CI, ids=lambda path: path.stem)
def test_the_server_knows_every_field(cluster, values):
    """Helm lets a misspelt field through, and the server drops it then."""
    objects = template("-f", str(values))

    assert bool(objects) == (values.stem != "all-off-values")
    for one in objects:
        made = cluster.create(one, dry_run=True)
        assert made["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    asked = f"every object of the chart with each of {len(CI)} files in `ci/`, fields strict"
    said("kube-apiserver", asked, "created (dry run)")


def test_strict_validation_does_refuse_a_misspelt_field(cluster):
    (monitor,) = template("--set", "podMonitor.enabled=true")
    endpoint = monitor["spec"]["podMetricsEndpoints"][0]
    endpoint["honourLabels"] = endpoint.pop("honorLabels")

    with pytest.raises(urllib.error.HTTPError, match="honourLabels"):
        cluster.create(monitor, dry_run=True)
    said("kube-apiserver", "a misspelt field (`honourLabels`)", "`unknown field`, refused")


def test_the_rules_are_the_shipped_ones():
    (rule,) = template("--set", "prometheusRule.enabled=true")

    assert rule["spec"] == yaml.safe_load(alert_rules.RULES.read_text())


def test_the_rules_with_everything_changed_are_rules(tmp_path):
    values = CHART / "ci" / "prometheus-rule-values.yaml"
    (rule,) = template("-f", str(values))
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(rule["spec"]))

    done = subprocess.run(
        [server_program("promtool"), "check", "rules", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    alerts = [one for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one]
    shipped = {one["alert"] for one in alert_rules.alerts()}
    assert {one["alert"] for one in alerts} == shipped - {"GpumemPushSilent"}
    for one in alerts:
        url = one["annotations"]["runbook_url"]
        assert url.startswith("https://runbooks.example.com/gpumem/gpumem-")
        assert "cluster, namespace, job, team" in one["expr"]
    assert {group["interval"] for group in rule["spec"]["groups"]} == {"2m"}


def test_the_dashboards_are_the_shipped_ones():
    made = {}
    for one in template("-f", str(CHART / "ci" / "dashboards-values.yaml")):
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"] == {"grafana_folder": "GPU memory"}
        made.update(one["data"])

    shipped = (ROOT / "grafana" / "dashboards").glob("*.json")
    assert made == {path.name: path.read_text() for path in shipped}


def test_a_package_has_all_that_the_checkout_has(tmp_path):
    """Rules and dashboards are links there, and files in the package."""
    helm(None, "package", str(CHART), "-d", str(tmp_path))
    (package,) = tmp_path.iterdir()

    values = (*EVERYTHING, "--set", "token.existingSecret=readers,control.existingSecret=bosses")
    assert template(*values, chart=package) == template(*values)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("podMonitor.enable=true", "enable"),
        ("inject.enabled=true", "repository"),
        ("networkPolicy.enabled=true", "from"),
        ("token.token=secret", "token"),
        ("inject.env[0].name=PYROSCOPE_AUTH_TOKEN,inject.env[0].value=x", "not"),
        ("inject.env[0].name=LD_PRELOAD,inject.env[0].value=x", "pattern"),
        ("inject.env[0].name=GPUMEM_OTEL_PORT,inject.env[0].value=x", "not"),
        ("port=70000", "port"),
        ("alloy.enabled=true", "url"),
        ("alloy.pyroscope.url=https://user:password@host", "url"),
        ("alloy.pyroscope.password=secret", "password"),
        ("control.token=secret", "token"),
        ("control.roles={write}", "roles"),
        ("control.key=token-read", "key"),
        ("control.port=65530", "port"),
        ("control.allowFrom[0].podSelectors.matchLabels.a=b", "podSelectors"),
        ("control.tls.clientRoles={write}", "clientRoles"),
        ("inject.env[0].name=GPUMEM_OTEL_CONTROL_INSECURE,inject.env[0].value=1", "not"),
    ],
)
def test_values_that_can_not_be_meant_are_refused(given, reason):
    said = helm(None, "template", "gpumem", str(CHART), "--set", given, fails=True)

    assert "values don't meet the specifications of the schema" in said
    assert reason in said


def test_a_variable_that_is_given_twice_is_refused():
    """The policy would fail at every pod, and let it through as it is."""
    said = helm(
        None,
        *("template", "gpumem", str(CHART), "-f", str(CHART / "ci" / "inject-values.yaml")),
        *("--set", "inject.env[0].name=OTEL_LOG_LEVEL,inject.env[0].value=a"),
        *("--set", "inject.env[1].name=OTEL_LOG_LEVEL,inject.env[1].value=b"),
        fails=True,
    )

    assert "inject.env has OTEL_LOG_LEVEL twice" in said


def test_older_clusters_are_told_what_to_do():
    said = helm(
        None,
        *("template", "gpumem", str(CHART), "--kube-version", "1.33.0"),
        *("-f", str(CHART / "ci" / "inject-values.yaml")),
        fails=True,
    )

    assert "inject needs Kubernetes 1.36, this is v1.33.0" in said
    beta = "admissionregistration.k8s.io/v1beta1"
    values = ("-f", str(CHART / "ci" / "inject-values.yaml"), "--kube-version", "1.35.0")
    made = template(*values, "--api-versions", f"{beta}/MutatingAdmissionPolicy")
    assert [one["apiVersion"] for one in made] == [beta, beta]


def test_install_upgrade_rollback_and_uninstall_that_leaves_nothing(cluster):
    def release(verb: str, *arguments: str) -> str:
        return helm(cluster, verb, "gpumem", *arguments, "-n", "monitoring")

    def found(version: str, kind: str, name: str):
        return cluster.get(version, kind, name, "monitoring")

    def image() -> str:
        policy = found(
            "admissionregistration.k8s.io/v1",
            "MutatingAdmissionPolicy",
            "monitoring-gpumem-memory",
        )
        patch = policy["spec"]["mutations"][0]["jsonPatch"]["expression"]
        return patch.partition('image: "')[2].partition('"')[0]

    def tokens() -> set[str]:
        return {
            cluster.get("v1", "Secret", "gpumem-memory-token", one)["data"]["token"]
            for one in ("monitoring", "training")
        }

    before = there(cluster)
    given = (*EVERYTHING, "--set", "token.namespaces={training}")

    notes = release("install", str(CHART), *given)
    installed = there(cluster)
    token = tokens()
    parts = "podMonitor, prometheusRule, dashboards, inject, token, control, networkPolicy, alloy"
    assert f"On: {parts}." in notes
    # the release's own Secret, what everything makes, and the server's note of a Service's address
    assert len(installed - before) == 17
    assert image() == "registry.example.com/gpumem-otel-inject:nightly"
    assert len(token) == 1

    release("upgrade", str(CHART), *given, "--set", "inject.image.tag=v2,podMonitor.interval=5s")
    monitor = found("monitoring.coreos.com/v1", "PodMonitor", "gpumem-memory")
    assert monitor["spec"]["podMetricsEndpoints"][0]["interval"] == "5s"
    assert image() == "registry.example.com/gpumem-otel-inject:v2"
    assert tokens() == token

    off = "networkPolicy.enabled=false,control.enabled=false"
    release("upgrade", str(CHART), *given, "--set", off)
    assert len(there(cluster) - installed) == 2  # releases 2 and 3
    assert len(installed - there(cluster)) == 2

    release("rollback", "1")
    monitor = found("monitoring.coreos.com/v1", "PodMonitor", "gpumem-memory")
    assert "interval" not in monitor["spec"]["podMetricsEndpoints"][0]
    assert image() == "registry.example.com/gpumem-otel-inject:nightly"
    assert installed <= there(cluster)
    assert tokens() == token

    history = release("history")
    assert [line.split("\t")[0].strip() for line in history.splitlines()[1:]] == list("1234")

    release("uninstall")
    assert there(cluster) == before
    said(
        "Helm",
        "`install`, `upgrade` twice, `rollback`, `uninstall`",
        "done; then no object is left",
    )


def test_two_releases_of_one_name_in_two_namespaces_do_not_meet(cluster):
    first = template(*EVERYTHING)
    other = rendered(helm(None, "template", "gpumem", str(CHART), "-n", "research", *EVERYTHING))

    def names(objects):
        return {
            (one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"])
            for one in objects
        }

    assert len(names(first)) == len(first)
    assert names(first).isdisjoint(names(other))


def test_an_existing_secret_is_named_and_none_is_made():
    (monitor,) = template("-f", str(CHART / "ci" / "token-existing-values.yaml"))

    endpoint = copy.deepcopy(monitor["spec"]["podMetricsEndpoints"][0])
    assert endpoint["authorization"] == {
        "type": "Bearer",
        "credentials": {"name": "readers-of-gpumem", "key": "bearer"},
    }


def test_the_network_policy_leaves_every_other_port_open():
    """It selects the job's pods, and what it does not open is closed to them."""
    values = CHART / "ci" / "network-policy-values.yaml"
    (policy,) = template("-f", str(values), "--set", "port=2000")

    ours, others = policy["spec"]["ingress"]
    assert ours["ports"] == [{"protocol": "TCP", "port": 2000, "endPort": 2007}]
    assert "from" not in others
    opened = {
        kind: [(one["port"], one["endPort"]) for one in others["ports"] if one["protocol"] == kind]
        for kind in ("TCP", "UDP", "SCTP")
    }
    assert opened == {
        "TCP": [(1, 1999), (2008, 65535)],
        "UDP": [(1, 65535)],
        "SCTP": [(1, 65535)],
    }
    denied = template("-f", str(CHART / "ci" / "network-policy-denied-values.yaml"))
    assert [one["metadata"]["namespace"] for one in denied] == ["training", "research"]
    assert [len(one["spec"]["ingress"]) for one in denied] == [1, 1]


def test_each_namespace_has_an_alloy_of_its_own():
    """It says whose the profiles are, so its namespace is its own word and its port its own."""
    objects = template("-f", str(CHART / "ci" / "alloy-values.yaml"))

    kinds = {(one["kind"], one["metadata"]["namespace"]) for one in objects}
    assert kinds == {
        (kind, namespace)
        for kind in ("ConfigMap", "Service", "NetworkPolicy", "DaemonSet")
        for namespace in ("training", "research")
    }
    by_kind = {one["kind"]: one for one in objects}
    shipped = (ROOT / "deploy" / "alloy" / "push.alloy").read_text()
    assert by_kind["ConfigMap"]["data"] == {"push.alloy": shipped}
    pod = by_kind["DaemonSet"]["spec"]["template"]
    selected = by_kind["DaemonSet"]["spec"]["selector"]["matchLabels"]
    assert selected.items() <= pod["metadata"]["labels"].items()
    assert by_kind["Service"]["spec"]["selector"] == selected
    assert by_kind["Service"]["spec"]["internalTrafficPolicy"] == "Local"
    assert by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == selected
    (ingress,) = by_kind["NetworkPolicy"]["spec"]["ingress"]
    assert ingress["from"] == [{"podSelector": {}}]
    (container,) = pod["spec"]["containers"]
    given = {one["name"]: one for one in container["env"]}
    used = set(re.findall(r'sys\.env\("(\w+)"\)', shipped))
    assert used == set(given)
    assert given["POD_NAMESPACE"]["valueFrom"]["fieldRef"] == {"fieldPath": "metadata.namespace"}
    assert given["PYROSCOPE_BASIC_AUTH_PASSWORD"]["valueFrom"] == {
        "secretKeyRef": {"name": "pyroscope-writers", "key": "secret"}
    }
    assert pod["spec"]["automountServiceAccountToken"] is False
