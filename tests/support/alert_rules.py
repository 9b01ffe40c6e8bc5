"""The shipped rules as values, and the names in a PromQL expression, without a Prometheus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules" / "gpumem.yaml"
RULE_TESTS = sorted((ROOT / "deploy" / "prometheus" / "tests").glob("*.yaml"))
RUNBOOKS = ROOT / "docs" / "runbooks"

WORDS = frozenset(
    re.findall(
        r"\w+",
        """
    and or unless by without on ignoring group_left group_right offset bool
    abs avg_over_time bottomk changes count count_over_time deriv floor increase
    last_over_time max max_over_time min min_over_time quantile rate resets sort sort_desc sum time
    topk
        """,
    )
)
"""What PromQL means by a word, as far as the rules use it."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MATCHERS = re.compile(r"\{([^{}]*)\}")
_LABEL_LIST = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
_DURATION = re.compile(r"\b\d+[smhdw]\b")
_WORD = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_QUERY = re.compile(r'printf "([^"{]*)%s([^"]*)" \$of')


def groups() -> list[dict[str, Any]]:
    """The groups of the rule file."""
    loaded: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
    return loaded


def records() -> dict[str, str]:
    """Name -> expression of every recording rule."""
    return {r["record"]: r["expr"] for g in groups() for r in g["rules"] if "record" in r}


def alerts() -> list[dict[str, Any]]:
    """Every alert, in the order of the file."""
    return [rule for group in groups() for rule in group["rules"] if "alert" in rule]


def queries(alert: dict[str, Any]) -> list[str]:
    """The queries that the alert's texts run."""
    text = " ".join(alert["annotations"].values())
    found = [f"{head}{tail}" for head, tail in _QUERY.findall(text)]
    assert len(found) == text.count("| query")
    return found


def names_and_labels(expression: str) -> tuple[set[str], set[str]]:
    """Words that are neither functions nor keywords, and labels of matchers and label lists."""
    rest = _STRING.sub("", expression)
    labels: set[str] = set()
    for pattern in (_MATCHERS, _LABEL_LIST):
        for inner in pattern.findall(rest):
            labels |= set(_WORD.findall(inner))
        rest = pattern.sub(" ", rest)
    return set(_WORD.findall(_DURATION.sub("", rest))) - WORDS, labels
