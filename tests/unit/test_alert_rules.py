"""The shipped rules against METRICS, their runbooks, their own tests and the docs."""

from __future__ import annotations

import re

import pytest
import yaml
from support import alert_rules

from gpumem_otel.metrics.table import METRICS, Level
from gpumem_otel.metrics.values import OVERDUE
from gpumem_otel.yielding.values import YieldState

ROWS = {metric.prometheus: metric for metric in METRICS}
RECORDS = alert_rules.records()
ALERTS = alert_rules.alerts()
EXPRESSIONS = {
    **RECORDS,
    **{f"{one['alert']}-{one['labels']['severity']}": one["expr"] for one in ALERTS},
    **{
        f"{one['alert']} text {n}": q
        for one in ALERTS
        for n, q in enumerate(alert_rules.queries(one))
    },
}
JOB = {"cluster", "namespace", "job"}
OF_THE_SCRAPER = JOB | {"instance", "stage"}

WITHOUT_THEM_TOO = {
    "gpumem_allocated_peak_bytes",
    "gpumem_allocations_total",
    "gpumem_yield_lease_expiry_timestamp_seconds",
}
"""Metrics that make an alert better where they are exported, and not possible."""

DOCS = alert_rules.ROOT / "docs" / "alerts.md"
PAGES = sorted(alert_rules.RUNBOOKS.glob("*.md"))


def slug(alert: str) -> str:
    """GpumemFullSoon -> gpumem-full-soon."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", alert).lower()


def sources(name: str) -> set[str]:
    """The metrics that a recorded or exported series comes from."""
    if name not in RECORDS:
        return {name}
    found, _ = alert_rules.names_and_labels(RECORDS[name])
    return set().union(*(sources(one) for one in found))


def labels_of(name: str) -> set[str]:
    """Labels that a series of this name can have."""
    if name in ROWS:
        own = {attribute.replace(".", "_") for attribute in ROWS[name].attributes}
        return OF_THE_SCRAPER | {"rank", "device"} | own
    if name == "up":
        return OF_THE_SCRAPER
    return set().union(*(labels_of(one) for one in sources(name)))


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_every_name_and_label_is_one_of_the_table(expression):
    names, labels = alert_rules.names_and_labels(expression)
    assert names
    assert names <= set(ROWS) | set(RECORDS) | {"up"}
    assert labels <= set().union(*(labels_of(name) for name in names))


def test_the_names_of_an_expression_are_found():
    names, labels = alert_rules.names_and_labels(
        'sum by (job, rank) (rate(gpumem_steps_total{kind="a}b", x!~"y"}[5m] offset 1h)) '
        "/ on (job) group_left (node) gpunem_oops or up == 0"
    )
    assert names == {"gpumem_steps_total", "gpunem_oops", "up"}
    assert labels == {"job", "rank", "kind", "x", "node"}


def test_names_follow_level_metric_operations():
    for name in RECORDS:
        level, metric, operation = name.split(":")
        assert level in {"job", "job_cause", "job_state", "rank"}
        assert operation
        stem = metric.removeprefix("gpumem_")
        assert any(stem.split("_per_")[0] in known for known in (*ROWS, "gpumem_unsupported"))


def test_the_states_that_rules_ask_for_are_those_there_are():
    states = {*(state.value for state in YieldState), OVERDUE}
    asked = re.findall(r'\bstate(?:=|!=)"([^"]*)"', " ".join(EXPRESSIONS.values()))
    assert set(asked) <= states
    assert {"overdue", "failed", "running"} <= set(asked)


def test_every_alert_is_one_per_job():
    for one in ALERTS:
        aggregation = re.match(r"(?:max|min|sum|count) by \(([^()]*)\) ", one["expr"])
        assert set(aggregation[1].split(", ")) == JOB, one["alert"]
        assert set(one["labels"]) == {"severity"}


def test_every_grouping_holds_the_text_that_users_replace():
    """`cluster, namespace, job` stands whole, so that one sed adds a label everywhere."""
    for expression in EXPRESSIONS.values():
        _, labels = alert_rules.names_and_labels(expression)
        if labels & JOB:
            lists = re.findall(r"(?:by|on|without|ignoring) \(([^()]*)\)", expression)
            assert lists
            assert all(one.startswith("cluster, namespace, job") for one in lists)


def test_leak_full_and_skew_look_at_the_step_floor_and_never_at_reserved():
    for alert in ("GpumemLeak", "GpumemFullSoon", "GpumemRankSkew"):
        for one in ALERTS:
            if one["alert"] == alert:
                names, _ = alert_rules.names_and_labels(one["expr"])
                found = set().union(*(sources(name) for name in names))
                assert "gpumem_step_floor_bytes" in found
                assert found <= {
                    "gpumem_step_floor_bytes", "gpumem_limit_bytes", "gpumem_allocated_peak_bytes",
                }  # fmt: skip


@pytest.mark.parametrize(
    "alert", ALERTS, ids=lambda one: f"{one['alert']}-{one['labels']['severity']}"
)
def test_every_alert_says_what_where_and_what_to_do(alert):
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert "$labels.job" in alert["annotations"]["summary"]
    assert alert["annotations"]["runbook_url"] == f"docs/runbooks/{slug(alert['alert'])}.md"
    # the worst three: of the series that the alert counts, with labels that these have
    (recorded,) = alert_rules.names_and_labels(alert["expr"])[0]
    assert all(recorded in query for query in alert_rules.queries(alert))
    text = alert["annotations"]["description"]
    assert re.search(r"(topk|bottomk)\(3,|lt \$i 3", text)
    by = set(re.search(r"by \(([^()]*)\)", RECORDS[recorded])[1].split(", "))
    assert set(re.findall(r"\.Labels\.(\w+)", text)) <= by


def test_each_alert_has_its_runbook_and_each_runbook_its_alert():
    assert {page.stem for page in PAGES} == {slug(one["alert"]) for one in ALERTS}
    names = {slug(one["alert"]): one["alert"] for one in ALERTS}
    for page in PAGES:
        text = page.read_text()
        assert text.startswith(f"# {names[page.stem]}\n")
        parts = re.findall(r"^\*\*(Means|Check|First|Is not)\b", text, re.MULTILINE)
        assert parts == ["Means", "Check", "First", "Is not"], page.name


@pytest.mark.parametrize("page", [*PAGES, DOCS], ids=lambda page: page.stem)
def test_pages_name_only_series_that_exist(page):
    known = set(ROWS) | set(RECORDS)
    pattern = r"(?:rank:|job:|job_cause:|job_state:|\b)gpumem_[a-z0-9_:]+"
    for name in re.findall(pattern, page.read_text()):
        assert name in known or name.startswith("gpumem_otel"), name


def test_the_table_of_the_docs_is_the_file():
    rows = re.findall(
        r"^\| \[(\w+)\]\(([^)]+)\) \| (\w+) \| (\w+) \| (\w+) \| .+ \|$",
        DOCS.read_text(),
        re.MULTILINE,
    )
    assert [row[:4] for row in rows] == [
        (
            one["alert"],
            one["annotations"]["runbook_url"].removeprefix("docs/"),
            one["labels"]["severity"],
            one.get("for", "0s"),
        )
        for one in ALERTS
    ]
    for (name, _, _, _, needs), one in zip(rows, ALERTS, strict=True):
        found, _ = alert_rules.names_and_labels(one["expr"])
        metrics = set().union(*(sources(each) for each in found)) - {"up"}
        levels = [ROWS[each].level for each in metrics - WITHOUT_THEM_TOO]
        assert needs == max(levels, key=list(Level).index).value, name


def rule_tests():
    """(file, test) of every promtool test."""
    for path in alert_rules.RULE_TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            yield path, test


def minutes(duration: str) -> int:
    return int(duration.removesuffix("m"))


@pytest.mark.parametrize(
    "alert", ALERTS, ids=lambda one: f"{one['alert']}-{one['labels']['severity']}"
)
def test_every_alert_is_tested_firing_silent_and_over(alert):
    severity = alert["labels"]["severity"]
    silent = over = False
    texts = []
    for _, test in rule_tests():
        fired_at = None
        for case in test.get("alert_rule_test", ()):
            if case["alertname"] != alert["alert"]:
                continue
            now = minutes(case["eval_time"])
            firing = [e for e in case["exp_alerts"] if e["exp_labels"]["severity"] == severity]
            texts += [one["exp_annotations"] for one in firing]
            silent |= not firing and fired_at is None
            over |= not firing and fired_at is not None and now > fired_at
            if firing:
                fired_at = now
    assert silent
    assert texts
    assert over
    for text in texts:
        assert set(text) == {"summary", "description", "runbook_url"}
        assert "rank " in text["description"]


def test_there_is_a_text_with_just_the_worst_three():
    for alert in ("GpumemLeak", "GpumemOom", "GpumemExporterSilent"):
        texts = [
            expected["exp_annotations"]["description"]
            for _, test in rule_tests()
            for case in test.get("alert_rule_test", ())
            if case["alertname"] == alert
            for expected in case["exp_alerts"]
        ]
        assert max(text.count("rank ") for text in texts) == 3, alert
