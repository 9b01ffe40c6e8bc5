"""A dashboard: rows of panels, put into Grafana's grid, as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grafana_foundation_sdk.builders import dashboard as d
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as dm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from boards.parts import Panel
    from boards.variables import Variable

__all__ = ["Board"]

SCHEMA_VERSION = 41
"""The last but one of its kind: Grafana 11 and 12 read it as it is, newer ones migrate it."""

TAG = "gpumem"
WIDTH = 24
"""Columns of Grafana's grid."""


@dataclass
class Board:
    """A dashboard on its way to JSON."""

    uid: str
    title: str
    description: str
    variables: Sequence[Variable]
    annotations: Sequence[dict[str, Any]] = ()
    refresh: str = "1m"
    since: str = "now-3h"
    rows: list[tuple[str, bool, Sequence[Panel | tuple[Panel, ...]]]] = field(default_factory=list)

    def row(
        self, title: str, panels: Sequence[Panel | tuple[Panel, ...]], *, folded: bool = False
    ) -> None:
        """Add a row at the bottom; a tuple of panels stands on top of each other."""
        self.rows.append((title, folded, panels))

    def json(self) -> dict[str, Any]:
        """The dashboard as Grafana takes it; panels are numbered from 1 in their order."""
        link = d.DashboardLink("GPU memory").type(dm.DashboardLinkType.DASHBOARDS).tags([TAG])
        built = (
            d.Dashboard(self.title)
            .uid(self.uid)
            .description(self.description)
            .tags([TAG, "gpu", "pytorch"])
            .editable()
            .tooltip(dm.DashboardCursorSync.CROSSHAIR)
            .refresh(self.refresh)
            .time(self.since, "now")
            .timezone("browser")
            .variables(list(self.variables))
            .link(link.include_vars(True).keep_time(True).as_dropdown(False).icon("external link"))
        )
        written = _plain(built.build())
        written["schemaVersion"] = SCHEMA_VERSION
        written["annotations"] = {"list": list(self.annotations)}
        written["panels"] = self._panels()
        return written

    def _panels(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        top, number_of = 0, 0
        for title, folded, panels in self.rows:
            row = _plain(d.Row(title).collapsed(folded).build())
            row["gridPos"] = {"x": 0, "y": top, "w": WIDTH, "h": 1}
            placed, top = _placed(panels, top + 1)
            for panel in (row, *placed):
                number_of += 1
                panel["id"] = number_of
            if folded:
                row["panels"] = placed
                top = row["gridPos"]["y"] + 1
            found += [row] if folded else [row, *placed]
        return found


def _placed(
    panels: Sequence[Panel | tuple[Panel, ...]], top: int
) -> tuple[list[dict[str, Any]], int]:
    """Panels from left to right, line by line from `top`; and where the next line begins."""
    found = []
    left, bottom = 0, top
    for item in panels:
        column = [_plain(panel.build()) for panel in (item if isinstance(item, tuple) else (item,))]
        width = column[0]["gridPos"]["w"]
        if left + width > WIDTH:
            left, top = 0, bottom
        below = top
        for panel in column:
            panel["gridPos"] |= {"x": left, "y": below}
            below += panel["gridPos"]["h"]
        left, bottom = left + width, max(bottom, below)
        found += column
    return found, bottom


def _plain(built: object) -> dict[str, Any]:
    """What the SDK built, as JSON has it."""
    written: dict[str, Any] = json.loads(json.dumps(built, cls=JSONEncoder))
    return written
