"""The committed dashboards, and every query in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMETHEUS, PYROSCOPE = "prometheus", "grafana-pyroscope-datasource"

FOLDER = Path(__file__).parents[2] / "grafana" / "dashboards"
BOARDS: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(FOLDER.iterdir())]


def board_ids(board: dict[str, Any]) -> str:
    return board["uid"]


def panels(board: dict[str, Any], *, rows: bool = False) -> Iterator[dict[str, Any]]:
    """All panels, those of folded rows too; the rows themselves on request."""
    for outer in board["panels"]:
        if rows or outer["type"] != "row":
            yield outer
        yield from outer.get("panels", ())


@dataclass(frozen=True)
class Asked:
    """One query.

    Attributes:
        where: title of the panel and the query's letter, or what else asks.
        panel: None for variables and annotations.
        expr: PromQL, or the label selector of a profile query.
        instant: asked for one moment, not for a range.
        profile_type: "" unless it asks for profiles.
    """

    board: dict[str, Any]
    where: str
    panel: dict[str, Any] | None
    expr: str
    legend: str = ""
    instant: bool = False
    profile_type: str = ""

    def __str__(self) -> str:
        return f"{self.board['uid'].removeprefix('gpumem-')}: {self.where}"


def queries(kind: str) -> list[Asked]:
    """Every query of all dashboards to one kind of data source, variables and marks included."""
    return [
        asked
        for board in BOARDS
        for asked in _of(board)
        if bool(asked.profile_type) == (kind == PYROSCOPE)
    ]


def _of(board: dict[str, Any]) -> Iterator[Asked]:
    for variable in board["templating"]["list"]:
        if variable["type"] != "query":
            continue
        query, where = variable["query"], f"variable {variable['name']}"
        if "profileTypeId" in query:
            yield Asked(board, where, None, "{}", profile_type=query["profileTypeId"])
        else:
            # label_values(SELECTOR, LABEL) asks for the series that the selector finds
            selector, label = query["query"].removeprefix("label_values(")[:-1].rsplit(", ", 1)
            named = selector if "{" in selector else selector + "{}"
            yield Asked(board, where, None, named, legend=f"{{{{{label}}}}}", instant=True)
    for mark in board["annotations"]["list"]:
        yield Asked(board, f"mark {mark['name']}", None, mark["expr"], legend=mark["textFormat"])
    for panel in panels(board):
        for target in panel.get("targets", ()):
            where = f"{panel['title']} {target['refId']}"
            if "expr" in target:
                yield Asked(
                    board,
                    where,
                    panel,
                    target["expr"],
                    legend=target["legendFormat"],
                    instant=target.get("instant", False),
                )
            else:
                yield Asked(
                    board,
                    where,
                    panel,
                    target["labelSelector"],
                    profile_type=target["profileTypeId"],
                )
