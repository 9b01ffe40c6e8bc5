"""The tables of panels in docs/internals/panels.md, out of the dashboards' JSON."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["table", "with_tables"]


def table(board: dict[str, Any]) -> str:
    """One row per panel, under the title of its row."""
    lines = ["| panel | what it means, and what to do |", "| --- | --- |"]
    for outer in board["panels"]:
        if outer["type"] == "row":
            folded = " (folded)" if outer.get("collapsed") else ""
            lines.append(f"| **{outer['title'].replace('$', '')}**{folded} | |")
        else:
            lines.append(_row(outer))
        lines += [_row(panel) for panel in outer.get("panels", ())]
    return "\n".join(lines)


def _row(panel: dict[str, Any]) -> str:
    return f"| {panel['title']} | {panel['description']} |".replace("\n", " ")


def with_tables(text: str, boards: Sequence[dict[str, Any]]) -> str:
    """The page with its tables written anew, between `<!-- panels: UID -->` and `<!-- end -->`.

    Raises:
        ValueError: a dashboard that the page does not have.
    """
    for board in boards:
        start = f"<!-- panels: {board['uid']} -->"
        body = f"{start}\n\n{table(board)}\n\n<!-- end -->"
        place = re.search(rf"{re.escape(start)}.*?<!-- end -->", text, re.DOTALL)
        if place is None:
            raise ValueError(
                f"docs/internals/panels.md has no place for the dashboard {board['uid']}"
            )
        text = text[: place.start()] + body + text[place.end() :]
    return text
