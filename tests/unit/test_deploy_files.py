"""deploy/ against what it names: settings, metrics, ports, files, images; without a server."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from support.deploy_files import (
    ALLOY,
    DEPLOY,
    DOCKERFILE,
    EXAMPLES,
    FILES,
    IDENTITY,
    KNOWN,
    MANIFESTS,
    OF_THE_PLATFORM,
    OURS,
    ROOT,
    SCRIPTS,
    SECRET,
    STANDARD,
    named,
    text_of,
    variables,
)

from gpumem_otel._version import __version__
from gpumem_otel.base.profile import Identity
from gpumem_otel.metrics.table import METRICS
from gpumem_otel.serve import discovery
from gpumem_otel.settings.options import resolve

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_file_parses(path):
    text = text_of(path)
    if path.suffix in {".yaml", ".yml"}:
        assert list(yaml.safe_load_all(text))
    elif path.suffix == ".json":
        json.loads(text)
    elif path.suffix == ".py":
        compile(text, str(path), "exec")
    elif path.suffix in {".sh", ".sbatch"}:
        assert path in SCRIPTS
    else:
        assert path.suffix in {".alloy", ".dockerignore"} or path.name == "Dockerfile"


@pytest.mark.parametrize("path", OURS, ids=named)
def test_every_variable_is_a_setting_or_one_of_the_platform(path):
    assert variables(text_of(path)) <= KNOWN | STANDARD | IDENTITY | OF_THE_PLATFORM


def test_variables_are_found_and_misspelt_ones_too():
    found = variables((EXAMPLES / "kubernetes.yaml").read_text())
    assert {"OTEL_SERVICE_NAME", "GPUMEM_OTEL_HOST", "POD_NAMESPACE"} <= found
    assert "GPUMEM_OTEL_SERVE" in variables("export GPUMEM_OTEL_SERVE=1")
    assert variables('x = sys.env("A_B")\n  C_D: 1\n- {name: E_F, value: 1}\n"G_H": 1,\n') == {
        "A_B", "C_D", "E_F", "G_H",
    }  # fmt: skip


@pytest.mark.parametrize("path", OURS, ids=named)
def test_every_metric_and_label_is_one_of_the_table(path):
    text = text_of(path)
    names = {metric.prometheus for metric in METRICS}
    # a name ends where no letter follows: a program, an image or a package is no metric
    found = set(re.findall(r"\b(?:gpumem|hw_gpu)_[a-z0-9_]+", text)) - {"gpumem_otel"}
    assert found <= names
    entry = discovery.entry_for(
        Identity(service_name="s", namespace="n", run_id="r", node="m"), ("127.0.0.1", 9464)
    )
    (group,) = json.loads(discovery.as_file_sd([entry]))
    assert set(re.findall(r"__meta_gpumem_\w+", text)) <= set(group["labels"])


def literals(value: object, key: str = "") -> list[tuple[str, str]]:
    """(key, text) of every value in a document."""
    if isinstance(value, dict):
        return [pair for name, one in value.items() for pair in literals(one, str(name))]
    if isinstance(value, list):
        return [pair for one in value for pair in literals(one, key)]
    return [(key, str(value))]


def is_a_secret(key: str, value: str) -> bool:
    """Whether a value could be a credential itself: neither a variable, nor a file, nor a flag."""
    if not SECRET.search(key) or key.endswith(("_file", "Token")):
        return False
    return not value.startswith("${") and value not in {"", "False", "True", "false", "true"}


@pytest.mark.parametrize("path", OURS, ids=named)
def test_no_file_holds_a_credential(path):
    text = text_of(path)
    if path.suffix in {".yaml", ".yml"}:
        for document in yaml.safe_load_all(text):
            assert [pair for pair in literals(document) if is_a_secret(*pair)] == []
    for line in text.splitlines():
        code = re.split(r"(?:^|\s)(?://|#)", line)[0]
        if re.match(r" *(?:username|password|bearer_token) += ", code):
            assert re.search(r' = sys\.env\("\w+"\)$', code), line
        assert not re.search(r"://[^/\s\"']+:[^/\s\"']+@", code), line


def test_a_credential_would_be_found():
    assert is_a_secret("GF_SECURITY_ADMIN_PASSWORD", "admin")
    assert is_a_secret("api_key", "abc")
    assert not is_a_secret("url_file", "/run/secrets/x")
    assert not is_a_secret("automountServiceAccountToken", "False")
    assert not is_a_secret("PYROSCOPE_BASIC_AUTH_PASSWORD", "${PYROSCOPE_BASIC_AUTH_PASSWORD:-}")


def images() -> dict[str, str]:
    """Where -> image."""
    found = {f"service {name}": service["image"] for name, service in SERVICES.items()}
    built = [(named(DEPLOY / "Dockerfile"), DOCKERFILE)]
    built += [
        (f"service {name}", service["build"]["dockerfile_inline"])
        for name, service in SERVICES.items()
        if "dockerfile_inline" in service.get("build", {})
    ]
    for where, text in built:
        stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))
        for number, image in enumerate(re.findall(r"^FROM (\S+)", text, re.MULTILINE)):
            if image not in stages:
                found[f"{where} FROM {number}"] = image
    for path in MANIFESTS:
        for one in re.findall(r"^ *image: (\S+)$", text_of(path), re.MULTILINE):
            found[named(path)] = one
    return found


@pytest.mark.parametrize(("where", "image"), images().items(), ids=images())
def test_every_image_is_pinned(where, image):
    """By a tag that is a whole version, from nobody's own registry."""
    name, _, tag = image.partition(":")
    assert re.fullmatch(r"v?\d+\.\d+\.\d+([-.][a-z0-9.-]+)?", tag), where
    assert name.count("/") <= 1
    assert "." not in name.split("/")[0]
    if name == "gpumem-otel-demo":
        assert tag == __version__


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_checked_contained_and_reachable_from_this_host_alone(name):
    service = SERVICES[name]
    if service.get("build", {}).get("dockerfile") == "deploy/Dockerfile":
        assert "\nHEALTHCHECK " in DOCKERFILE
        assert "healthcheck" not in service
    else:
        check = service["healthcheck"]
        assert check["test"][0] == "CMD"
        assert {"interval", "timeout", "retries", "start_period"} <= set(check)
        assert any("127.0.0.1" in str(part) for part in check["test"])
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)
    assert set(service["networks"]) <= set(COMPOSE["networks"])
    for volume in service.get("volumes", []):
        source, target, *mode = volume.split(":")
        assert target.startswith("/")
        if source.startswith("."):
            assert mode == ["ro"]
            assert (DEPLOY / source).exists(), source
        else:
            assert source in COMPOSE["volumes"]


def test_jobs_reach_alloy_and_the_collector_and_nothing_behind_them():
    assert SERVICES["demo"]["networks"] == SERVICES["demo-otlp"]["networks"] == ["jobs"]
    both = {name for name, one in SERVICES.items() if set(one["networks"]) == {"jobs", "backend"}}
    assert both == {"alloy", "collector", "prometheus"}
    for name in ("demo", "demo-otlp"):
        assert not any(SECRET.search(key) for key in SERVICES[name]["environment"])


def test_grafana_has_no_default_password_and_no_anonymous_viewer():
    given = SERVICES["grafana"]["environment"]
    wanted = re.fullmatch(
        r"\$\{GRAFANA_ADMIN_PASSWORD:\?(.+)\}", given["GF_SECURITY_ADMIN_PASSWORD"]
    )
    assert "GRAFANA_ADMIN_PASSWORD" in wanted[1]
    assert "\n" not in wanted[1]
    assert given["GF_AUTH_ANONYMOUS_ENABLED"] == given["GF_USERS_ALLOW_SIGN_UP"] == "false"


def test_what_grafana_is_provisioned_with_is_what_is_mounted():
    given = SERVICES["grafana"]["environment"]
    mounts = {v.split(":")[1]: v.split(":")[0] for v in SERVICES["grafana"]["volumes"]}
    for name in ("GPUMEM_DASHBOARDS", "GF_PATHS_PROVISIONING"):
        assert given[name] in mounts
    text = "".join(path.read_text() for path in (ROOT / "grafana" / "provisioning").rglob("*.yaml"))
    assert set(re.findall(r"\$\{(\w+)\}", text)) <= set(given)
    for name in ("prometheus", "pyroscope"):
        url = given[f"{name.upper()}_URL"]
        (port,) = SERVICES[name]["ports"]
        assert url == f"http://{name}:{port.split(':')[2]}"


def test_intervals_agree():
    """Grafana's timeInterval is the scrape interval, its minStep the interval of profiles."""
    sources = yaml.safe_load(
        (ROOT / "grafana" / "provisioning" / "datasources" / "gpumem.yaml").read_text()
    )["datasources"]
    settings = {source["name"]: source["jsonData"] for source in sources}
    scrape = PROMETHEUS["global"]["scrape_interval"]
    assert settings["Prometheus"]["timeInterval"] == scrape
    profiles = f"{resolve({}).profiles.interval_seconds:g}s"
    assert settings["Pyroscope"]["minStep"] == profiles
    for path in ALLOY:
        found = dict(
            re.findall(
                r'^(pyroscope|prometheus)\.scrape .*?scrape_interval = "(\w+)"',
                text_of(path),
                re.MULTILINE | re.DOTALL,
            )
        )
        assert found.items() <= {"pyroscope": profiles, "prometheus": scrape}.items()
    (parca,) = yaml.safe_load(text_of(DEPLOY / "parca" / "parca.yaml"))["scrape_configs"]
    assert parca["scrape_interval"] == profiles
    assert "scrape_timeout" not in parca  # Parca wants it longer than the interval
    exported = int(SERVICES["demo-otlp"]["environment"]["OTEL_METRIC_EXPORT_INTERVAL"])
    assert f"{exported // 1000}s" == scrape


def test_the_demos_target_is_what_sd_would_write():
    (group,) = json.loads(text_of(DEPLOY / "prometheus" / "targets" / "demo.json"))
    given = SERVICES["demo"]["environment"]
    assert group["labels"] == {
        "__meta_gpumem_service_name": given["OTEL_SERVICE_NAME"],
        "__meta_gpumem_namespace": given["POD_NAMESPACE"],
    }
    # the listener answers to the name of its own machine
    assert group["targets"] == [f"{SERVICES['demo']['hostname']}:{resolve({}).serve.port}"]
    assert SERVICES["demo"]["hostname"] == "demo"


def test_prometheus_gives_each_job_its_own_name():
    (job,) = PROMETHEUS["scrape_configs"]
    rules = {rule["target_label"]: rule for rule in job["relabel_configs"]}
    assert rules["job"]["source_labels"] == ["__meta_gpumem_service_name"]
    assert rules["namespace"]["source_labels"] == ["__meta_gpumem_namespace"]
    assert job["honor_labels"] is False
    assert PROMETHEUS["otlp"] == {"promote_resource_attributes": ["cluster", "namespace"]}
    collector = yaml.safe_load(text_of(DEPLOY / "otel" / "collector.yaml"))
    made = {one["key"] for one in collector["processors"]["resource"]["attributes"]}
    assert made == {"cluster", "namespace", "service.namespace"}
    (pipeline,) = collector["service"]["pipelines"].values()
    assert pipeline["processors"] == ["memory_limiter", "resource", "batch"]
    for part in ("receivers", "processors", "exporters"):
        assert set(pipeline[part]) == set(collector[part])


def test_alertmanager_groups_by_job_and_silences_as_the_docs_say():
    manager = yaml.safe_load(text_of(DEPLOY / "alertmanager" / "alertmanager.yml"))
    assert manager["route"]["group_by"] == ["cluster", "namespace", "job"]
    assert manager["receivers"] == [{"name": manager["route"]["receiver"]}]
    said = (ROOT / "docs" / "alerts.md").read_text()
    block = re.search(r"^    inhibit_rules:\n(?:     .*\n)+", said, re.MULTILINE)
    assert yaml.safe_load(block[0]) == {"inhibit_rules": manager["inhibit_rules"]}


def blocks(text: str) -> dict[str, str]:
    """Alloy: `component.label` -> body of every top-level block."""
    found = re.findall(r'^([a-z_.]+) "(\w+)" \{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL)
    return {f"{component}.{label}": body for component, label, body in found}


@pytest.mark.parametrize("path", ALLOY, ids=named)
def test_alloys_blocks_are_whole_and_lead_somewhere(path):
    text = text_of(path)
    found = blocks(text)
    assert len(found) == len(re.findall(r"^\S.* \{$", text, re.MULTILINE))
    used = set()
    for body in found.values():
        for reference in re.findall(
            r"\b([a-z_]+\.[a-z_]+\.\w+)\.(?:receiver|targets|output)", body
        ):
            assert reference in found
            used.add(reference)
        code = re.sub(r'//.*|"[^"]*"', "", body)
        for left, right in ("{}", "[]", "()"):
            assert code.count(left) == code.count(right)
    ends = {name for name in found if ".scrape." in name or ".receive_http." in name}
    assert set(found) == used | ends


@pytest.mark.parametrize("path", ALLOY, ids=named)
def test_alloy_pulls_our_profile_and_none_of_gos(path):
    for name, body in blocks(text_of(path)).items():
        if not name.startswith("pyroscope.scrape."):
            continue
        profiles = dict(re.findall(r"profile\.(\w+)[^{]*\{\s+enabled = (\w+)", body))
        assert profiles == {
            "custom": "true", "memory": "false", "process_cpu": "false",
            "goroutine": "false", "block": "false", "mutex": "false",
        }  # fmt: skip
        assert re.search(
            r'profile\.custom "gpu_memory" \{\s+enabled = true\s+path    = "/debug/pprof/gpumem"',
            body,
        )


def test_parca_pulls_our_profile_and_none_of_gos():
    (scrape,) = yaml.safe_load(text_of(DEPLOY / "parca" / "parca.yaml"))["scrape_configs"]
    profiles = scrape["profiling_config"]["pprof_config"]
    assert profiles.pop("gpumem") == {
        "enabled": True, "path": "/debug/pprof/gpumem", "delta": False,
    }  # fmt: skip
    assert profiles == {
        name: {"enabled": False}
        for name in ("memory", "block", "goroutine", "mutex", "process_cpu")
    }


def test_tenant_and_namespace_are_alloys_own():
    """From its environment and nowhere else; what a job says under the same names is replaced."""
    checked = 0
    for path in ALLOY:
        for name, body in blocks(text_of(path)).items():
            if not name.startswith("pyroscope.write."):
                continue
            checked += 1
            assert 'headers = {"X-Scope-OrgID" = sys.env("POD_NAMESPACE")}' in body
            labels = re.search(r"external_labels = \{(.*?)\}", body, re.DOTALL)[1]
            assert dict(re.findall(r"(\w+) += (.+),", labels)) == {
                "namespace": 'sys.env("POD_NAMESPACE")', "cluster": 'sys.env("CLUSTER")',
            }  # fmt: skip
    assert checked == 3


def test_alloy_answers_before_the_job_gives_up():
    """Where nothing answers at all; a server that is slow has one try."""
    body = blocks(text_of(DEPLOY / "alloy" / "push.alloy"))["pyroscope.write.pyroscope"]
    found = dict(re.findall(r'(\w+) += "?([\d.]+)(?:s|ms)?"?$', body, re.MULTILINE))
    deadline = resolve({}).pyroscope.timeout_seconds
    assert float(found["remote_timeout"]) < deadline
    assert int(found["max_backoff_retries"]) * float(found["max_backoff_period"]) < deadline / 2


def test_the_docs_name_every_file():
    said = (ROOT / "docs" / "deploy.md").read_text()
    for path in OURS:
        if path.name != "Dockerfile.dockerignore":
            assert path.relative_to(ROOT).as_posix() in said, path
