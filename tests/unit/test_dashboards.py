"""The dashboards in grafana/: current, whole, and true to the metrics, rules and profiles.

The JSON is judged as Grafana gets it; only the first test needs the SDK that writes it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from support import pprof_proto
from support.dashboards import (
    BOARDS,
    PROMETHEUS,
    PYROSCOPE,
    Asked,
    board_ids,
    panels,
    queries,
)

from gpumem_otel.base.profile import HeapProfile, Identity, ProfileKind
from gpumem_otel.metrics.table import METRICS, Level
from gpumem_otel.metrics.values import OVERDUE
from gpumem_otel.profiles.pprof import encode
from gpumem_otel.push.pyroscope import PROFILE_NAME, series_labels
from gpumem_otel.yielding.values import YieldState

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules"

OF_THE_SCRAPER = {"job", "instance", "cluster", "namespace", "pod"}
"""Labels that are not ours, but that the docs tell scrapers to add."""

OF_PROMETHEUS = {"up", "scrape_duration_seconds", "scrape_samples_scraped"}
"""What Prometheus itself says about a target."""

WORDS = {
    *("and", "or", "on", "ignoring", "by", "end", "bool", "group_left", "label_replace"),
    *("sum", "count", "max", "min", "avg", "topk", "bottomk", "round", "scalar", "vector"),
    *("rate", "increase", "deriv", "max_over_time", "min_over_time", "time"),
}
GRAFANA = {"__range", "__interval", "__rate_interval", "__from", "__to", "__url_time_range"}

METRIC_LABELS = {
    metric.prometheus: {
        "rank",
        "device",
        *(name.replace(".", "_") for name in metric.attributes),
        *OF_THE_SCRAPER,
    }
    for metric in METRICS
}
FULL_ONLY = {metric.prometheus for metric in METRICS if metric.level is Level.FULL}

board = pytest.mark.parametrize("board", BOARDS, ids=board_ids)


def recordings() -> dict[str, set[str]]:
    """Recorded name -> labels, which its prefix names: `job_cause:...` has `cause` besides."""
    text = "\n".join(path.read_text() for path in sorted(RULES.glob("*.yaml")))
    names = re.findall(r"^\s*- record: (\S+)", text, re.MULTILINE)
    found = {}
    for name in names:
        prefix = name.split(":")[0].split("_")
        found[name] = {*prefix, "cluster", "namespace", "job"}
    return found


KNOWN = {**METRIC_LABELS, **recordings(), **dict.fromkeys(OF_PROMETHEUS, OF_THE_SCRAPER)}

SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{((?:[^{}\"]|\"[^\"]*\")*)\}")
MATCHER = re.compile(r'([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*"([^"]*)"')


def selectors(expression: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """(metric, [(label, operator, value)]) of each selector; every one has braces here."""
    return [(name, MATCHER.findall(inside)) for name, inside in SELECTOR.findall(expression)]


def words(expression: str) -> set[str]:
    """Names outside of selectors, ranges and texts: functions, keywords and labels to group by."""
    rest = re.sub(r'"[^"]*"', "", SELECTOR.sub("", expression))
    return set(re.findall(r"[a-zA-Z_]\w*", re.sub(r"\[[^\]]*\]|\d+", "", rest)))


def grouped(expression: str) -> set[str]:
    lists = re.findall(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)", expression)
    return {label.strip() for inside in lists for label in inside.split(",")} - {""}


def test_json_and_docs_are_what_the_generator_writes():
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        pytest.skip("no grafana-foundation-sdk (extra `dashboards`, Python 3.11 or newer)")
    done = subprocess.run(
        [sys.executable, str(ROOT / "grafana" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_there_are_the_three_and_their_uids_differ():
    assert sorted(one["uid"] for one in BOARDS) == ["gpumem-exporter", "gpumem-fleet", "gpumem-job"]
    assert len({one["title"] for one in BOARDS}) == len(BOARDS)


@board
def test_a_dashboard_is_importable_anywhere(board):
    assert board["schemaVersion"] in (39, 40, 41)
    assert "id" not in board
    assert board["editable"] is True
    assert "gpumem" in board["tags"]
    (link,) = board["links"]
    assert (link["type"], link["tags"]) == ("dashboards", ["gpumem"])


@board
def test_data_sources_come_first_and_none_is_fixed(board):
    variables = board["templating"]["list"]
    assert [(one["name"], one["type"], one["query"]) for one in variables[:2]] == [
        ("ds_prometheus", "datasource", PROMETHEUS),
        ("ds_pyroscope", "datasource", PYROSCOPE),
    ]
    assert [one["name"] for one in variables[2:5]] == ["cluster", "namespace", "job"]

    def sources(value):
        if isinstance(value, dict):
            if "datasource" in value:
                yield value["datasource"]
            for inner in value.values():
                yield from sources(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from sources(inner)

    allowed = [
        {"type": PROMETHEUS, "uid": "${ds_prometheus}"},
        {"type": PYROSCOPE, "uid": "${ds_pyroscope}"},
    ]
    assert all(one in allowed for one in sources(board)), list(sources(board))


@board
def test_variables_of_several_values_stand_for_series_without_the_label_too(board):
    for one in board["templating"]["list"]:
        if one["type"] == "query" and one["multi"]:
            assert (one["includeAll"], one["allValue"]) == (True, ".*"), one["name"]
            assert one["current"]["value"] == "$__all", one["name"]


@board
def test_panels_are_told_apart_and_do_not_overlap(board):
    ids = [panel["id"] for panel in panels(board, rows=True)]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in panels(board)]
    assert len(titles) == len(set(titles))
    folded = [row["panels"] for row in board["panels"] if row.get("panels")]
    for group in (board["panels"], *folded):
        for one, other in itertools.combinations([panel["gridPos"] for panel in group], 2):
            beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
            assert beside or above, (one, other)
        assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in group)


@board
def test_every_panel_says_what_it_means_with_a_unit_and_a_source(board):
    for panel in panels(board):
        assert len(panel["description"]) > 20, panel["title"]
        if panel["type"] == "text":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] in ("${ds_prometheus}", "${ds_pyroscope}")
        assert panel["targets"], panel["title"]
        if panel["type"] == "timeseries":
            legend = panel["options"]["legend"]
            assert (legend["displayMode"], legend["calcs"]) == ("table", ["lastNotNull", "max"])


@board
def test_bytes_are_shown_as_bytes_and_ratios_from_nothing_to_all(board):
    for panel in panels(board):
        shown = " ".join(target.get("expr", "") for target in panel.get("targets", ()))
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit")
        if re.search(r"_bytes\{", shown) and not re.search(r" / |deriv\(", shown):
            assert unit == "bytes", panel["title"]
        assert unit not in ("decbytes", "percent"), panel["title"]


@pytest.mark.parametrize("asked", queries(PROMETHEUS), ids=str)
def test_queries_name_what_exists(asked: Asked):
    found = selectors(asked.expr)
    assert found, asked.expr
    for name, matchers in found:
        assert name in KNOWN, name
        assert {label for label, _, _ in matchers} <= KNOWN[name], asked.expr
    labels = set.union(*(KNOWN[name] for name, _ in found))
    assert grouped(asked.expr) <= labels, asked.expr
    assert words(asked.expr) <= WORDS | grouped(asked.expr), asked.expr
    legend = set(re.findall(r"\{\{(\w+)\}\}", asked.legend))
    assert legend <= labels, asked.legend


@pytest.mark.parametrize("asked", queries(PROMETHEUS), ids=str)
def test_what_only_level_full_has_says_so(asked: Asked):
    """A panel without data at the default level must not look broken."""
    names = {name for name, _ in selectors(asked.expr)}
    if asked.panel is not None and names & FULL_ONLY:
        assert "level full only" in asked.panel["description"]


@pytest.mark.parametrize("asked", queries(PROMETHEUS), ids=str)
def test_a_variable_of_several_values_is_matched_as_a_pattern(asked: Asked):
    several = {one["name"]: one["multi"] for one in asked.board["templating"]["list"]}
    for _, matchers in selectors(asked.expr):
        for label, operator, value in matchers:
            if value.startswith("$") and value[1:] in several:
                pattern = several[value[1:]] or value == "$profile_rank"
                assert operator == ("=~" if pattern else "="), (label, value)


@board
def test_every_variable_that_is_used_exists(board):
    names = {one["name"] for one in board["templating"]["list"]}
    text = json.dumps([board["panels"], board["templating"], board["annotations"]])
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__field", "__value", "__data", "__all"}
    assert used - names <= GRAFANA


def test_the_fleet_reads_recorded_series_of_jobs_alone():
    names = {
        name
        for asked in queries(PROMETHEUS)
        if asked.board["uid"] == "gpumem-fleet"
        for name, _ in selectors(asked.expr)
    }
    assert names
    assert names <= set(recordings())
    assert all(name.startswith(("job:", "job_cause:", "job_state:")) for name in names)


def test_the_band_of_a_rank_tells_every_state_by_the_number_that_the_query_gives():
    (job,) = [one for one in BOARDS if one["uid"] == "gpumem-job"]
    (panel,) = [panel for panel in panels(job) if panel["type"] == "state-timeline"]
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    named = {number: one["text"] for number, one in mapping["options"].items()}
    (target,) = panel["targets"]
    asked = re.findall(r'(\d+) \* gpumem_yield_state\{[^}]*state="(\w+)"\}', target["expr"])
    assert dict(asked) == named
    assert set(named.values()) == {*(state.value for state in YieldState), OVERDUE}
    assert len({one["color"] for one in mapping["options"].values()}) == len(named)


def profile_types(name: str, kinds) -> set[str]:
    """Types of the profiles as the encoder writes them, named as Pyroscope does."""
    found = set()
    for kind in kinds:
        profile = pprof_proto.parse(encode([HeapProfile(kind, 0, ())], kind=kind))
        text = profile.string_table
        period = f"{text[profile.period_type.type]}:{text[profile.period_type.unit]}"
        found |= {f"{name}:{text[t.type]}:{text[t.unit]}:{period}" for t in profile.sample_type}
    return found


def test_profile_types_and_labels_are_those_that_are_pushed():
    pushed = profile_types(PROFILE_NAME, ProfileKind)
    pushed |= profile_types(f"{PROFILE_NAME}_oom", [ProfileKind.LIVE])
    who = Identity(service_name="s", namespace="n", run_id="r", rank=0)
    labels = {name for name, _ in series_labels(who, device=0)} | {"oom_id"}
    asked = queries(PYROSCOPE)
    assert len(asked) > 5
    for one in asked:
        assert one.profile_type in pushed
        assert {label for label, _, _ in MATCHER.findall(one.expr)} <= labels, one.expr
        if "oom_id" in one.expr:
            assert one.profile_type.startswith(f"{PROFILE_NAME}_oom:")


def test_flame_graphs_of_live_memory_stand_beside_the_number_of_their_profiles():
    (job,) = [one for one in BOARDS if one["uid"] == "gpumem-job"]
    live = next(panel for panel in panels(job) if panel["title"].startswith("Live"))
    count = next(panel for panel in panels(job) if panel["title"] == "Snapshots in it")
    assert "sum of the profiles" in live["title"]
    for key in ("timeFrom", "timeShift"):
        assert live[key] == count[key] == "$push_interval"
    of_live, of_count = live["targets"][0], count["targets"][0]
    assert of_live["labelSelector"] == of_count["labelSelector"]
    assert of_count["profileTypeId"] == of_live["profileTypeId"].replace(
        "inuse_space:bytes:", "snapshots:count:"
    )
    assert count["gridPos"]["x"] == live["gridPos"]["x"] + live["gridPos"]["w"]
    assert count["gridPos"]["y"] == live["gridPos"]["y"]


def data_links(board):
    for panel in panels(board):
        for link in panel.get("fieldConfig", {}).get("defaults", {}).get("links", ()):
            yield panel, link["url"]


@board
def test_data_links_lead_somewhere(board):
    variables = {
        one["uid"]: {variable["name"] for variable in one["templating"]["list"]} for one in BOARDS
    }
    found = list(data_links(board))
    assert found
    for panel, url in found:
        parts = urlsplit(url)
        if parts.path == "/explore":
            continue
        uid = parts.path.removeprefix("/d/")
        given = set(re.findall(r"var-(\w+)=", url)) | set(re.findall(r"\{(\w+):queryparam\}", url))
        assert given <= variables[uid], (panel["title"], given - variables[uid])


def test_the_link_to_explore_is_a_query_for_that_rank_and_device():
    (job,) = [one for one in BOARDS if one["uid"] == "gpumem-job"]
    urls = {url for _, url in data_links(job) if url.startswith("/explore")}
    (url,) = urls
    filled = {
        "${ds_pyroscope}": "uid-1",
        "${service:percentencode}": "llm%20train",
        "${__field.labels.rank}": "3",
        "${__field.labels.device}": "1",
        "${__from}": "1700000000000",
        "${__to}": "1700000060000",
    }
    for variable, value in filled.items():
        assert variable in url
        url = url.replace(variable, value)
    assert "$" not in url
    (panes,) = parse_qs(urlsplit(url).query)["panes"]
    (pane,) = json.loads(panes).values()
    (query,) = pane["queries"]
    assert (pane["datasource"], query["datasource"]) == (
        "uid-1",
        {"type": PYROSCOPE, "uid": "uid-1"},
    )
    assert query["labelSelector"] == '{service_name="llm train", rank="3", device="1"}'
    assert query["profileTypeId"] == f"{PROFILE_NAME}:inuse_space:bytes:space:bytes"
    assert pane["range"] == {"from": "1700000000000", "to": "1700000060000"}


def test_provisioning_holds_no_secret_and_the_types_of_the_variables():
    folder = ROOT / "grafana" / "provisioning"
    (data_sources,) = (folder / "datasources").iterdir()
    (providers,) = (folder / "dashboards").iterdir()
    sources = yaml.safe_load(data_sources.read_text())["datasources"]
    assert [(one["type"], one["url"]) for one in sources] == [
        (PROMETHEUS, "${PROMETHEUS_URL}"),
        (PYROSCOPE, "${PYROSCOPE_URL}"),
    ]
    allowed = {"name", "uid", "type", "access", "url", "jsonData"}
    assert all(set(one) <= allowed for one in sources), "credentials come from the environment"
    (provider,) = yaml.safe_load(providers.read_text())["providers"]
    assert (provider["type"], provider["options"]) == ("file", {"path": "${GPUMEM_DASHBOARDS}"})
