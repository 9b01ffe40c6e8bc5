"""deploy/examples/ and the demo's image: sound scripts, known fields, arguments that are taken."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import shlex
import shutil
import subprocess

import pytest
import yaml
from support.deploy_files import (
    DEPLOY,
    DOCKERFILE,
    EXAMPLES,
    ROOT,
    SCRIPTS,
    SECRET,
    named,
    text_of,
    variables,
)

from gpumem_otel.cli.demo.command import command as demo_command
from gpumem_otel.settings.options import resolve


@pytest.mark.parametrize("path", SCRIPTS, ids=named)
def test_scripts_are_sound(path):
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run([shellcheck, path], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")
    assert "set -euo pipefail" in text_of(path)


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch", "ray_job.py", "kubernetes.yaml"])
def test_an_example_has_the_lines_that_matter(name):
    """A name, metrics by one of two ways, profiles to the node's Alloy, and who installs."""
    text = text_of(EXAMPLES / name)
    found = variables(text)
    assert {"OTEL_SERVICE_NAME", "PYROSCOPE_SERVER_ADDRESS"} <= found
    assert len(found & {"GPUMEM_OTEL_SERVE", "OTEL_EXPORTER_OTLP_ENDPOINT"}) == 1
    assert not any(SECRET.search(one) for one in found)
    assert re.search(r"gpumem-otel run -- torchrun|gpumem_otel\.install\(\)|\[gpumem-otel\]", text)
    assert "pyroscope:4040" not in text
    for script in re.findall(r"\b(\w+\.py)\b", text):
        assert (EXAMPLES / script).is_file()


def test_ray_is_told_what_it_does_not_say():
    tree = ast.parse(text_of(EXAMPLES / "ray_job.py"))
    keys = {
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    assert {"RANK", "WORLD_SIZE", "GPUMEM_OTEL_PORT"} <= keys


FIELDS = {
    "": "apiVersion kind metadata spec",
    "metadata": "name labels",
    "spec": "backoffLimit template",
    "spec.template": "metadata spec",
    "spec.template.metadata": "labels",
    "spec.template.spec": "restartPolicy automountServiceAccountToken enableServiceLinks "
    "securityContext containers volumes",
    "spec.template.spec.securityContext": "runAsNonRoot runAsUser runAsGroup fsGroup "
    "seccompProfile",
    "spec.template.spec.securityContext.seccompProfile": "type",
    "spec.template.spec.containers": "name image imagePullPolicy command args env ports "
    "securityContext resources volumeMounts",
    "spec.template.spec.containers.env": "name value valueFrom",
    "spec.template.spec.containers.env.valueFrom": "fieldRef",
    "spec.template.spec.containers.env.valueFrom.fieldRef": "fieldPath",
    "spec.template.spec.containers.ports": "name containerPort",
    "spec.template.spec.containers.securityContext": "allowPrivilegeEscalation "
    "readOnlyRootFilesystem capabilities",
    "spec.template.spec.containers.securityContext.capabilities": "drop",
    "spec.template.spec.containers.resources": "requests limits",
    "spec.template.spec.containers.resources.requests": "cpu memory",
    "spec.template.spec.containers.resources.limits": "memory",
    "spec.template.spec.containers.volumeMounts": "name mountPath",
    "spec.template.spec.volumes": "name emptyDir",
    "spec.template.spec.volumes.emptyDir": "sizeLimit",
}
"""Fields of batch/v1 Job as far as the example uses them: a misspelt one is pruned in silence."""


def unknown_fields(value: object, path: str = "") -> list[str]:
    if isinstance(value, list):
        return [name for one in value for name in unknown_fields(one, path)]
    if not isinstance(value, dict) or path.endswith("labels"):
        return []
    found = [f"{path}.{key}" for key in value if key not in FIELDS.get(path, "").split()]
    for key, one in value.items():
        found += unknown_fields(one, f"{path}.{key}".lstrip("."))
    return found


def test_the_kubernetes_manifest_has_known_fields_and_is_contained():
    (job,) = yaml.safe_load_all(text_of(EXAMPLES / "kubernetes.yaml"))
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert unknown_fields(job) == []
    assert unknown_fields({"spec": {"backofLimit": 0}}) == ["spec.backofLimit"]
    pod = job["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["restartPolicy"] in {"Never", "OnFailure"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    base = resolve({}).serve.port
    assert container["ports"] == [
        {"name": f"gpumem-{n}", "containerPort": base + n} for n in range(8)
    ]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    paths = {
        one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in container["env"]
        if "valueFrom" in one
    }
    assert paths == {
        "GPUMEM_OTEL_HOST": "status.podIP",
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "NODE_NAME": "spec.nodeName",
    }
    before: set[str] = set()
    for one in container["env"]:  # $(X) is X only below X
        assert set(re.findall(r"\$\((\w+)\)", one.get("value", ""))) <= before
        before.add(one["name"])
    labels = job["spec"]["template"]["metadata"]["labels"]
    given = {one["name"]: one.get("value") for one in container["env"]}
    assert labels["app.kubernetes.io/name"] == given["OTEL_SERVICE_NAME"]
    assert container["command"] == ["gpumem-otel"]
    accepted(container["args"])


def accepted(arguments: list[str]) -> None:
    """The demo takes these arguments."""
    verb, *options = arguments
    assert verb == "demo"
    context = demo_command.make_context("demo", list(options))
    assert context.params["gpu"] is False
    assert context.params["out"].startswith("/tmp/")


def test_the_image_is_small_not_root_and_starts_the_demo():
    stages = DOCKERFILE.split("\nFROM ")
    assert len(stages) == 3
    last = stages[-1]
    assert re.search(r"^USER [1-9]\d+:[1-9]\d+$", last, re.MULTILINE)
    assert "[torch]" not in DOCKERFILE
    assert "RUN" not in last
    command = json.loads(re.search(r"^CMD (\[.*\])$", last, re.MULTILINE)[1])
    assert json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", last, re.MULTILINE)[1]) == ["gpumem-otel"]
    accepted(command)
    assert f"EXPOSE {resolve({}).serve.port}\n" in last
    probe = json.loads(re.search(r"^HEALTHCHECK .*\\\n +(\[.*\])$", last, re.MULTILINE)[1])
    compile(probe[2], "probe", "exec")
    assert f"127.0.0.1:{resolve({}).serve.port}/healthz" in probe[2]


def test_what_the_image_is_built_from_is_there_and_not_ignored():
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    assert ignore[1] == "*"
    copied = [
        name
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for name in shlex.split(line)[:-1]
    ]
    assert set(copied) == allowed
    for name in copied:
        assert (ROOT / name).exists()
    later = [line for line in ignore[ignore.index("!gpumem_otel") + 1 :] if line]
    assert not any(fnmatch.fnmatch("gpumem_otel/data/demo-recording.gpumem", one) for one in later)
