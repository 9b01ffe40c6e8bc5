"""The chart as files: closed schema, one source for rules and dashboards, no secrets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from support import alert_rules

from gpumem_otel._version import __version__
from gpumem_otel.settings.options import OPTIONS
from gpumem_otel.yielding.control.roles import Role, parse_tokens

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "gpumem-otel"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
META = yaml.safe_load((CHART / "Chart.yaml").read_text())
CI = sorted((CHART / "ci").glob("*-values.yaml"))
TEMPLATES = sorted((CHART / "templates").iterdir())
FEATURES = (
    "podMonitor",
    "prometheusRule",
    "dashboards",
    "inject",
    "token",
    "control",
    "networkPolicy",
    "alloy",
)
VARIABLES = {name for option in OPTIONS for name in option.environ}
OF_THE_POD = {"POD_NAME", "POD_NAMESPACE", "NODE_NAME", "POD_IP"}
OF_PYTHON = {"PYTHONPATH"}
OF_OPENTELEMETRY = {"OTEL_RESOURCE_ATTRIBUTES"}
TYPES = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}


def resolved(schema):
    """A schema, or the definition that it points to."""
    if "$ref" in schema:
        return SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    return schema


def objects(schema, path="values"):
    """Every schema of an object below this one, with its path."""
    schema = resolved(schema)
    if schema.get("type") == "object":
        yield path, schema
    for name, one in schema.get("properties", {}).items():
        yield from objects(one, f"{path}.{name}")
    if "items" in schema:
        yield from objects(schema["items"], f"{path}[]")


def scalars(value):
    """Everything in a value that is no list and no mapping, keys included."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from scalars(one)
    elif isinstance(value, list):
        for one in value:
            yield from scalars(one)
    else:
        yield value


def compared(value, schema, path):
    """Paths at which the defaults and the schema differ."""
    schema = resolved(schema)
    wanted = schema.get("type", TYPES[type(schema["enum"][0])] if "enum" in schema else None)
    if TYPES[type(value)] != wanted:
        yield f"{path}: {TYPES[type(value)]} and {wanted}"
    if isinstance(value, dict) and "properties" in schema and value:
        for name in value.keys() ^ schema["properties"].keys():
            yield f"{path}.{name}: only in one of both"
        for name in value.keys() & schema["properties"].keys():
            yield from compared(value[name], schema["properties"][name], f"{path}.{name}")


def test_the_schema_is_closed():
    """A misspelt value is an error, not a feature that stays off."""
    free = {"values.global", "values.networkPolicy.from[]"}  # helm's own, and a Kubernetes type
    open_ones = [
        path
        for path, schema in objects(SCHEMA)
        if path not in free and schema.get("additionalProperties", True) is True
    ]
    assert open_ones == []


def test_the_defaults_and_the_schema_name_the_same_values():
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"]}}
    schema["properties"].pop("global")
    assert list(compared(VALUES, schema, "values")) == []


def test_everything_is_off_by_default():
    assert {name: VALUES[name]["enabled"] for name in FEATURES} == dict.fromkeys(FEATURES, False)
    assert VALUES["inject"]["resources"] == {}
    assert VALUES["inject"]["image"]["tag"] == ""


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_has_a_file_of_values(feature):
    on = [
        path.name
        for path in CI
        if (yaml.safe_load(path.read_text()) or {}).get(feature, {}).get("enabled")
    ]
    assert len(on) >= 2, f"{feature} is on in {on} only"


@pytest.mark.parametrize("path", CI, ids=lambda path: path.stem)
def test_files_of_values_use_values_that_there_are(path):
    """Helm holds them against the whole schema in tests/servers; here without helm."""

    def unknown(value, schema, place):
        schema = resolved(schema)
        if isinstance(value, dict) and "properties" in schema:
            for name, one in value.items():
                if name not in schema["properties"]:
                    yield f"{place}.{name}"
                else:
                    yield from unknown(one, schema["properties"][name], f"{place}.{name}")
        if isinstance(value, list) and "items" in schema:
            for one in value:
                yield from unknown(one, schema["items"], f"{place}[]")

    assert list(unknown(yaml.safe_load(path.read_text()), SCHEMA, "values")) == []


def test_rules_and_dashboards_have_one_source():
    """Links inside the repository: nothing can be out of date. One for each file, as an sdist
    leaves out links to folders."""
    dashboards = (ROOT / "grafana" / "dashboards").glob("*.json")
    wanted = {f"dashboards/{path.name}": path for path in dashboards}
    wanted["rules.yaml"] = alert_rules.RULES
    wanted["push.alloy"] = ROOT / "deploy" / "alloy" / "push.alloy"
    files = CHART / "files"

    found = {str(path.relative_to(files)): path for path in files.rglob("*") if not path.is_dir()}

    assert {name: path.resolve() for name, path in found.items()} == wanted
    assert all(path.is_symlink() and not path.readlink().is_absolute() for path in found.values())


def test_versions_are_the_packages():
    assert META["appVersion"] == __version__
    assert META["version"] == __version__


def test_environment_variables_are_settings_of_the_package():
    text = "".join(path.read_text() for path in (*TEMPLATES, *CI))
    named = set(re.findall(r"\b(?:GPUMEM_OTEL|PYROSCOPE|OTEL|POD|NODE)_[A-Z_]+\b", text))
    assert {"GPUMEM_OTEL_HOST", "GPUMEM_OTEL_SERVE", "POD_IP"} <= named
    assert named <= VARIABLES | OF_THE_POD | OF_OPENTELEMETRY


def test_secrets_can_not_be_values():
    pattern = SCHEMA["properties"]["inject"]["properties"]["env"]["items"]["properties"]["name"]
    secrets = {
        name for option in OPTIONS for name in option.environ if "secret" in option.parse.__name__
    }
    assert {"PYROSCOPE_AUTH_TOKEN", "GPUMEM_OTEL_TOKEN", "PYROSCOPE_HTTP_HEADERS"} <= secrets
    assert [name for name in secrets if not re.search(pattern["not"]["pattern"], name)] == []
    assert re.search(pattern["pattern"], "PYROSCOPE_AUTH_TOKEN_FILE")
    assert not re.search(pattern["not"]["pattern"], "PYROSCOPE_AUTH_TOKEN_FILE")


def test_the_tokens_secret_is_made_or_named_never_given():
    assert set(VALUES["token"]) == {"enabled", "existingSecret", "key", "namespaces"}
    text = (CHART / "templates" / "token-secret.yaml").read_text()
    assert "randAlphaNum" in text
    assert "lookup" in text


def test_no_value_holds_a_token_of_control():
    given = {"enabled", "namespaces", "port", "roles", "existingSecret", "key", "allowFrom", "tls"}
    assert set(VALUES["control"]) == given | {"insecure"}
    tls = {"existingSecret", "certKey", "keyKey", "clientCaKey", "clientRoles"}
    assert set(VALUES["control"]["tls"]) == tls
    text = (CHART / "templates" / "control-secret.yaml").read_text()
    assert "randAlphaNum" in text
    assert "lookup" in text


def test_the_roles_of_tokens_are_the_packages():
    """Reading is in each of the others, so these are all that differ."""
    roles = SCHEMA["properties"]["control"]["properties"]["roles"]["items"]["enum"]
    told = {
        frozenset(principal.roles)
        for one in roles
        for _, principal in parse_tokens(f"{one} {one:x<16}".encode())
    }
    assert told == {
        frozenset({Role.READ}),
        frozenset({Role.YIELD}),
        frozenset({Role.RESTORE}),
        frozenset({Role.YIELD, Role.RESTORE}),
    }
    assert set(VALUES["control"]["roles"]) <= set(roles)


def test_what_decides_about_an_open_port_is_no_free_setting():
    """A variable of inject.env would pass by what the chart asks for and closes."""
    name = SCHEMA["properties"]["inject"]["properties"]["env"]["items"]["properties"]["name"]
    ours = {one for one in VARIABLES if one.startswith("GPUMEM_OTEL_CONTROL")}
    free = {one for one in ours if not re.search(name["not"]["pattern"], one)}
    assert free == {"GPUMEM_OTEL_CONTROL_ALLOWED_HOSTS", "GPUMEM_OTEL_CONTROL_DISK_DIRS"}
    assert len(ours) > len(free)


def test_the_charts_version_is_in_no_selector():
    """A selector with it would lose its pods at the next upgrade."""
    for path in TEMPLATES:
        text = path.read_text()
        for block in re.findall(r"[sS]elector:\n((?:\s+.*\n)+?)(?=\s*\w+:\n|\Z)", text):
            assert "helm.sh/chart" not in block
            assert 'include "gpumem-otel.labels"' not in block


@pytest.mark.parametrize("path", [CHART / "README.md", ROOT / "docs" / "kubernetes.md"])
def test_what_the_docs_show_is_a_value(path):
    """Every `--set` and every dotted value in backticks is one of the chart."""
    text = path.read_text()
    named = set(re.findall(r"--set(?:-string)? ([\w.]+?)(?:\[\d\]|=)", text))
    named |= {
        one for one in re.findall(r"`([a-zA-Z]+\.[a-zA-Z.]+)`", text) if one.split(".")[0] in VALUES
    }
    assert named
    for one in named:
        value = VALUES
        for part in one.split("."):
            assert value == {} or part in value, f"{one} is no value"
            value = value.get(part, {})


def test_the_readmes_table_has_every_value_and_its_default():
    rows = dict(
        re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|", (CHART / "README.md").read_text(), re.MULTILINE)
    )

    def leaves(value, path=""):
        for name, one in value.items():
            if isinstance(one, dict) and one:
                yield from leaves(one, f"{path}{name}.")
            else:
                yield f"{path}{name}", json.dumps(one)

    assert rows == dict(leaves(VALUES))
