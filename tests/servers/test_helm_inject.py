"""The chart's admission policy in a real Kubernetes API server: what it makes of pods.

Nothing of a pod's own may change: every case compares what the server made of a pod with the label
with what it makes of the same pod without.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import urllib.error
import venv
from pathlib import Path

import pytest
import yaml
from support.cli_process import clean_environ
from support.controlling import controlling
from support.kubernetes import ControlPlane, helm
from support.pods import LABEL, both, container, differences, env, gpus, pod, ports, variables
from support.said import said
from support.servers import until
from support.yield_double import YieldDouble

pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "gpumem-otel"
IMAGE = "registry.example.com/gpumem-otel-inject:0.1.0"
OUR_VARIABLES = [
    "POD_NAME",
    "POD_NAMESPACE",
    "NODE_NAME",
    "POD_IP",
    "GPUMEM_OTEL_SERVE",
    "GPUMEM_OTEL_HOST",
    "GPUMEM_OTEL_PORT",
    "GPUMEM_OTEL_METRICS_LEVEL",
    "PYROSCOPE_SERVER_ADDRESS",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_SERVICE_NAME",
    "PYTHONPATH",
]

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ControlPlane(tmp_path_factory.mktemp("cluster")) as running:
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        for name, given in (("monitoring", {}), ("training", {}), ("restricted", labels)):
            meta = {"name": name, "labels": given}
            running.create({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
        install(running, "inject-values", "--set", "inject.namespaceSelector=null")
        yield running


def install(cluster, values: str, *more: str) -> None:
    """Install or upgrade the chart, and wait until the server heeds its policy, by the image."""
    file = str(CHART / "ci" / f"{values}.yaml")
    helm(cluster, "upgrade", "--install", "g", str(CHART), "-n", "monitoring", "-f", file, *more)
    policy = "monitoring-g-gpumem-otel"
    rules = cluster.get("admissionregistration.k8s.io/v1", "MutatingAdmissionPolicy", policy)
    selector = rules["spec"]["matchConstraints"]["objectSelector"]
    labels = dict(selector.get("matchLabels", {}))
    for one in selector["matchExpressions"]:
        if one["operator"] == "Exists":
            labels[one["key"]] = "x"
    image = rules["spec"]["mutations"][0]["jsonPatch"]["expression"]
    image = image.partition('image: "')[2].partition('"')[0]

    def heeded() -> bool:
        made = cluster.create(pod(labels=labels), dry_run=True)
        return [one["image"] for one in made["spec"].get("initContainers", [])] == [image]

    until(heeded, "the policy to be heeded")


def test_a_pod_gets_what_the_exporter_needs(cluster):
    plain, made = both(cluster, pod(gpus(2), labels={"app.kubernetes.io/name": "llm-train"}))

    assert list(differences(plain["spec"], made["spec"])) == []
    assert list(variables(made)) == OUR_VARIABLES
    assert variables(made) == {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "NODE_NAME": "spec.nodeName",
        "POD_IP": "status.podIP",
        "GPUMEM_OTEL_SERVE": "1",
        "GPUMEM_OTEL_HOST": "$(POD_IP)",
        "GPUMEM_OTEL_PORT": "9464",
        "GPUMEM_OTEL_METRICS_LEVEL": "full",
        "PYROSCOPE_SERVER_ADDRESS": "http://pyroscope.monitoring:4040",
        "OTEL_RESOURCE_ATTRIBUTES": "k8s.namespace.name=$(POD_NAMESPACE),k8s.pod.name=$(POD_NAME),"
        "k8s.node.name=$(NODE_NAME),k8s.container.name=c0",
        "OTEL_SERVICE_NAME": "llm-train",
        "PYTHONPATH": "/gpumem-otel/hook",
    }
    assert ports(made) == {9464: "gpumem-0", 9465: "gpumem-1"}
    assert container(made)["volumeMounts"] == [
        {"name": "gpumem-otel", "mountPath": "/gpumem-otel", "readOnly": True}
    ]
    assert made["spec"]["volumes"] == [{"name": "gpumem-otel", "emptyDir": {}}]
    (init,) = made["spec"]["initContainers"]
    assert init["image"] == IMAGE
    assert init["volumeMounts"] == [{"name": "gpumem-otel", "mountPath": "/gpumem-otel"}]
    asked = "a pod with the label, through the MutatingAdmissionPolicy"
    said("kube-apiserver", asked, "our lines are added, nothing of the pod's own is changed")


FULL = pod(
    {"image": "sidecar", **env(A="1")},
    {
        "env": [
            {"name": "PYTHONPATH", "value": "/app:/lib"},
            {"name": "NODE_NAME", "value": "mine"},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
            {"name": "GPUMEM_OTEL_METRICS_LEVEL", "value": "minimal"},
            {"name": "GPUMEM_OTEL_HOST", "value": "127.0.0.1"},
            {"name": "OTEL_RESOURCE_ATTRIBUTES", "value": "service.name=theirs,a=b"},
            {"name": "LAST", "value": "$(NODE_NAME)"},
        ],
        "envFrom": [{"configMapRef": {"name": "more"}}],
        "command": ["torchrun", "train.py"],
        "ports": [
            {"name": "http", "containerPort": 9465},
            {"name": "gpumem-2", "containerPort": 7000},
        ],
        "resources": {
            "limits": {"nvidia.com/gpu": "4", "cpu": "8", "memory": "64Gi"},
            "requests": {"cpu": "8", "memory": "64Gi"},
        },
        "securityContext": {"runAsUser": 1000, "capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    },
    {"image": "another", **gpus(1)},
    labels={"batch.kubernetes.io/job-name": "nightly", "team": "vision"},
    annotations={"note": "kept"},
    initContainers=[{"name": "first", "image": "setup", "volumeMounts": []}],
    volumes=[{"name": "data", "emptyDir": {"medium": "Memory"}}],
    nodeSelector={"gpu": "h200"},
    tolerations=[{"key": "gpu", "operator": "Exists"}],
    securityContext={"fsGroup": 2000},
)


def test_what_a_pod_has_of_its_own_stays(cluster):
    plain, made = both(cluster, copy.deepcopy(FULL))

    path = "spec.containers[c1].env[PYTHONPATH].value"
    assert list(differences(plain["spec"], made["spec"])) == [
        f"{path} was '/app:/lib' and is '/gpumem-otel/hook:/app:/lib'"
    ]
    assert made["metadata"]["annotations"] == plain["metadata"]["annotations"]
    assert [one for one in made["spec"]["containers"] if one["name"] != "c1"] == [
        one for one in plain["spec"]["containers"] if one["name"] != "c1"
    ]
    assert [one["name"] for one in made["spec"]["initContainers"]] == ["first", "gpumem-otel"]
    assert variables(made, "c1") == {
        **variables(plain, "c1"),
        "PYTHONPATH": "/gpumem-otel/hook:/app:/lib",
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "GPUMEM_OTEL_SERVE": "1",
        "GPUMEM_OTEL_PORT": "9464",
        "PYROSCOPE_SERVER_ADDRESS": "http://pyroscope.monitoring:4040",
    }
    assert ports(made, "c1") == {
        9465: "http", 7000: "gpumem-2", 9464: "gpumem-0", 9467: "gpumem-3"
    }  # fmt: skip


def test_the_init_container_asks_for_nothing_more(cluster):
    """As much as the job's container, which runs after it: the class of service stays."""
    sized = {"cpu": "8", "memory": "64Gi"}
    resources = {"limits": {**sized, "nvidia.com/gpu": "8"}, "requests": dict(sized)}
    plain, made = both(cluster, pod({"resources": resources}))

    (init,) = made["spec"]["initContainers"]
    assert init["resources"] == {"limits": sized, "requests": sized}
    assert plain["status"]["qosClass"] == made["status"]["qosClass"] == "Guaranteed"

    plain, made = both(cluster, pod())
    assert made["spec"]["initContainers"][0]["resources"] == {}
    assert plain["status"]["qosClass"] == made["status"]["qosClass"] == "BestEffort"


def test_a_namespace_that_is_restricted_lets_the_pod_in(cluster):
    """Pod security is checked after the policy: the init container must pass as well."""
    one = pod({"securityContext": RESTRICTED, **gpus(1)}, namespace="restricted")
    plain, made = both(cluster, one)

    assert list(differences(plain["spec"], made["spec"])) == []
    (init,) = made["spec"]["initContainers"]
    assert init["securityContext"] == {**RESTRICTED, "readOnlyRootFilesystem": True}
    del one["spec"]["containers"][0]["securityContext"]
    with pytest.raises(urllib.error.HTTPError, match="violates PodSecurity"):
        cluster.create(one, dry_run=True)


@pytest.mark.parametrize(
    ("containers", "annotations", "target"),
    [
        (({}, {}), {}, "c0"),
        (({}, gpus(1)), {}, "c1"),
        ((gpus(1), gpus(1)), {}, "c0"),
        ((gpus(1), {}), {"gpumem-otel/container": "c1"}, "c1"),
        (({}, gpus(1)), {"gpumem-otel/container": "no-such"}, "c1"),
        (({}, {"resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}), {}, "c1"),
        (({}, {"resources": {"limits": {"amd.com/gpu": "1"}}}), {}, "c1"),
        (({}, {"resources": {"limits": {"example.com/fpga": "1"}}}), {}, "c0"),
    ],
)
def test_the_container_that_is_taken(cluster, containers, annotations, target):
    plain, made = both(cluster, pod(*containers, annotations=annotations))

    assert list(differences(plain["spec"], made["spec"])) == []
    names = [one["name"] for one in made["spec"]["containers"] if "env" in one]
    assert names == [target]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (gpus(1), {9464: "gpumem-0"}),
        (gpus(8), {9464 + i: f"gpumem-{i}" for i in range(8)}),
        (gpus(16), {9464 + i: f"gpumem-{i}" for i in range(8)}),
        (gpus(1000), {9464 + i: f"gpumem-{i}" for i in range(8)}),
        ({}, {9464 + i: f"gpumem-{i}" for i in range(8)}),
        ({**gpus(2), **env(GPUMEM_OTEL_PORT="7000")}, {7000: "gpumem-0", 7001: "gpumem-1"}),
        ({**gpus(1), **env(GPUMEM_OTEL_PORT="any")}, {9464: "gpumem-0"}),
    ],
)
def test_one_port_for_each_gpu(cluster, given, names):
    _, made = both(cluster, pod(given))

    assert ports(made) == names


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({}, "/gpumem-otel/hook"),
        (env(PYTHONPATH="/app"), "/gpumem-otel/hook:/app"),
        (env(PYTHONPATH=""), "/gpumem-otel/hook"),
        (env(PYTHONPATH='it\'s \\ "quoted"'), '/gpumem-otel/hook:it\'s \\ "quoted"'),
        (
            {"envFrom": [{"configMapRef": {"name": "settings"}}]},
            "/gpumem-otel/hook:$(PYTHONPATH)",
        ),
        (
            {"envFrom": [{"configMapRef": {"name": "settings"}}], **env(PYTHONPATH="/app")},
            "/gpumem-otel/hook:/app",
        ),
    ],
)
def test_a_python_path_of_the_pod_is_kept_behind_ours(cluster, given, path):
    _, made = both(cluster, pod(given))

    assert variables(made)["PYTHONPATH"] == path


@pytest.mark.parametrize(
    ("labels", "given", "name"),
    [
        ({}, {}, None),
        ({"app.kubernetes.io/name": "app"}, {}, "app"),
        ({"app.kubernetes.io/name": "app", "gpumem-otel/job": "mine"}, {}, "mine"),
        ({"training.kubeflow.org/job-name": "pt", "batch.kubernetes.io/job-name": "b"}, {}, "pt"),
        ({"app.kubernetes.io/name": "app"}, env(OTEL_SERVICE_NAME="own"), "own"),
        ({"app.kubernetes.io/name": "app"}, env(OTEL_RESOURCE_ATTRIBUTES="a=b"), "app"),
        (
            {"app.kubernetes.io/name": "app"},
            env(OTEL_RESOURCE_ATTRIBUTES="a=b,service.name=own"),
            None,
        ),
    ],
)
def test_the_service_is_called_as_the_series_job(cluster, labels, given, name):
    _, made = both(cluster, pod(given, labels=labels))

    assert variables(made).get("OTEL_SERVICE_NAME") == name


@pytest.mark.parametrize(
    "one",
    [
        pod(env(A="1")),
        pod(labels={LABEL: "false"}),
        pod(labels={LABEL: "True"}),
        pod(labels={LABEL: "true"}, hostNetwork=True),
        pod(labels={LABEL: "true"}, os={"name": "windows"}),
        pod(labels={LABEL: "true"}, volumes=[{"name": "gpumem-otel", "emptyDir": {}}]),
        pod(
            {
                "env": [
                    {
                        "name": "PYTHONPATH",
                        "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "path"}},
                    }
                ]
            },
            labels={LABEL: "true"},
        ),
    ],
    ids=["unlabelled", "off", "no-value", "host-network", "windows", "taken-in", "unreadable"],
)
def test_pods_that_stay_as_they_are(cluster, one):
    made = cluster.create(one, dry_run=True)

    assert "initContainers" not in made["spec"]
    assert container(made).get("env") == one["spec"]["containers"][0].get("env")
    assert "ports" not in container(made)


def test_a_pod_that_is_there_is_not_touched(cluster):
    """The policy is asked only when a pod is created."""
    one = pod()
    cluster.create(one)
    place = cluster.path(one) + "/one"
    cluster.ask("PATCH", place, {"metadata": {"labels": {LABEL: "true"}}}, kind="merge-patch+json")

    assert "initContainers" not in cluster.ask("GET", place)["spec"]
    cluster.ask("DELETE", f"{place}?gracePeriodSeconds=0")


def test_the_readmes_lines_do_the_same(cluster):
    """For clusters without the policy."""
    text = (CHART / "README.md").read_text()
    (block,) = re.findall(r"<!-- snippet -->\n```yaml\n(.*?)```", text, re.DOTALL)
    spec = yaml.safe_load(block)["spec"]
    spec["containers"][0] = {"image": "train", **spec["containers"][0], **gpus(2)}
    by_hand = pod(labels={"app.kubernetes.io/name": "llm-train"})
    by_hand["spec"] = spec

    named = copy.deepcopy(by_hand)
    named["spec"] = {"containers": [{"name": "train", "image": "train", **gpus(2)}]}
    _, made = both(cluster, named)
    hand_made = cluster.create(by_hand, dry_run=True)

    ours = container(made, "train")
    ours["env"] = [
        one
        for one in ours["env"]
        if one["name"] not in {"GPUMEM_OTEL_METRICS_LEVEL", "PYROSCOPE_SERVER_ADDRESS"}
    ]
    assert container(hand_made, "train") == ours
    assert hand_made["spec"]["volumes"] == made["spec"]["volumes"]
    assert list(differences(hand_made["spec"], made["spec"])) == []


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    """What the init container copies, and an interpreter that has no packages."""
    folder = tmp_path_factory.mktemp("pod")
    tool = ROOT / "helm" / "inject" / "lay_out.py"
    subprocess.run(
        [sys.executable, str(tool), str(folder / "gpumem-otel"), str(ROOT)], check=True, timeout=300
    )
    venv.create(folder / "bare", symlinks=True, with_pip=False)
    return folder


def test_the_environment_arms_a_python_that_has_nothing_of_ours(cluster, laid_out):
    """As the kubelet would start it, with the folder at another place."""
    _, made = both(cluster, pod(gpus(1), labels={"app.kubernetes.io/name": "llm-train"}))
    fields = {
        "metadata.name": "one",
        "metadata.namespace": "training",
        "spec.nodeName": "node-7",
        "status.podIP": "127.0.0.1",
    }
    given: dict[str, str] = {}
    for one in container(made)["env"]:
        text = one.get("value") or fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        given[one["name"]] = re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], text)
    given["PYTHONPATH"] = given["PYTHONPATH"].replace("/gpumem-otel", str(laid_out / "gpumem-otel"))

    code = """
import sys, gpumem_otel
from gpumem_otel.settings.options import resolve
from gpumem_otel.settings.config import process_environ
from gpumem_otel.settings.identity import identify
import opentelemetry.sdk.metrics, prometheus_client, uvicorn, starlette.applications
config = resolve(process_environ())
who = identify(process_environ(), service_name=config.service_name, namespace=config.namespace)
print(config.warnings, config.serve.enabled, config.serve.host, config.serve.port)
print(who.service_name, who.namespace, who.node)
print(gpumem_otel.__file__.startswith(sys.path[-1]), 'gpumem_otel.api.lifecycle' in sys.modules)
"""
    done = subprocess.run(
        [laid_out / "bare" / "bin" / "python", "-c", code],
        env={**clean_environ(), **given},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "() True 127.0.0.1 9464",
        "llm-train training node-7",
        "True True",
    ]


def test_who_executes_in_the_pod_reaches_the_socket_without_anything_else(laid_out, tmp_path):
    """As `kubectl exec POD -- python -m gpumem_otel ctl state` does, with the pod's environment."""
    with controlling(YieldDouble(), run_dir=tmp_path):
        done = subprocess.run(
            [
                *(laid_out / "bare" / "bin" / "python", "-m", "gpumem_otel"),
                *("ctl", "state", "--json"),
            ],
            env={
                **clean_environ(),
                "PYTHONPATH": str(laid_out / "gpumem-otel" / "hook"),
                "GPUMEM_OTEL_CONTROL": "1",
                "GPUMEM_OTEL_RUN_DIR": str(tmp_path),
            },
            capture_output=True,
            text=True,
            timeout=120,
        )

    assert (done.returncode, done.stderr) == (0, "")
    assert '"running"' in done.stdout


def test_with_a_token_the_pod_gets_the_file_and_can_start_without_it(cluster):
    install(cluster, "token-values", "--set", "podMonitor.enabled=false,inject.image.tag=other")
    plain, made = both(cluster, pod())

    assert list(differences(plain["spec"], made["spec"])) == []
    assert variables(made)["GPUMEM_OTEL_TOKEN_FILE"] == "/gpumem-otel-token/token"
    (secret,) = [one for one in made["spec"]["volumes"] if "secret" in one]
    assert secret["secret"] == {
        "secretName": "g-gpumem-otel-token",
        "optional": True,
        "defaultMode": 420,
    }
    assert {"name": secret["name"], "mountPath": "/gpumem-otel-token", "readOnly": True} in (
        container(made)["volumeMounts"]
    )


def test_with_a_selector_of_its_own_the_label_still_switches_off(cluster):
    install(cluster, "inject-selector-values")
    labels = {"training.kubeflow.org/job-name": "bert"}

    made = cluster.create(pod(labels=labels, hostNetwork=True), dry_run=True)
    assert ports(made) == {19464 + i: f"gpumem-{i}" for i in range(8)}
    (init,) = made["spec"]["initContainers"]
    assert init["image"] == f"{IMAGE.rpartition(':')[0]}@sha256:{64 * '0'}"
    assert init["resources"] == {
        "requests": {"cpu": "100m", "memory": "64Mi"},
        "limits": {"memory": "64Mi"},
    }
    for off in ({**labels, LABEL: "false"}, {LABEL: "true"}):
        made = cluster.create(pod(labels=off), dry_run=True)
        assert "initContainers" not in made["spec"]
