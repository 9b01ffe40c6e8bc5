"""A dashboard of grafana/ drawn with the data of a Prometheus, as an HTML page.

    python boards.py URL gpumem-job --var job=llm-train --seconds 300 > page.html

Its own layout, titles, units, queries and legends; drawn by this script, since Grafana is not
there. Panels of profiles are left empty, folded rows are left out.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

BOARDS = Path(__file__).parents[2] / "grafana" / "dashboards"
COLUMN, ROW, GAP = 54, 34, 6
POINTS = 150
COLOURS = (
    *("#73bf69", "#5794f2", "#f2cc0c", "#b877d9", "#ff9830"),
    *("#37872d", "#8ab8ff", "#e0b400", "#ca95e5", "#8f3bb8"),
)
KIB = 1024.0
MINUTES_FROM_SECONDS = 120
TALL = 350
STYLE = """
body{margin:0;background:#111217;color:#ccccdc;font:12px 'DejaVu Sans',sans-serif}
.p{position:absolute;background:#181b1f;border:1px solid #24272e;border-radius:3px;overflow:hidden}
.p h3{font-size:12px;margin:6px 9px;font-weight:600;white-space:nowrap}
.row{position:absolute;font-size:14px;font-weight:600;padding:9px 4px}
.stat{font-size:27px;text-align:center;margin-top:14px}
table{width:calc(100% - 18px);margin:0 9px;border-collapse:collapse;font-size:11px}
td,th{text-align:left;padding:1px 6px 1px 0;border-bottom:1px solid #24272e;font-weight:400}
td:last-child,th:last-child,.n{text-align:right}.no{color:#7b7f8a;text-align:center;margin-top:24px}
i{display:inline-block;width:12px;height:3px;margin:0 5px 3px 0}
"""


class Source:
    """A Prometheus, and what the variables of the dashboard stand for."""

    def __init__(self, url: str, seconds: int, given: dict[str, str]) -> None:
        self._url = url.rstrip("/")
        self.end = time.time()
        self.seconds = seconds
        self._values = {
            "__rate_interval": "20s",
            "__interval": f"{max(seconds // POINTS, 1)}s",
            "__range": f"{seconds}s",
            **given,
        }

    def ask(self, target: dict[str, Any]) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """The series of a query: labels, and values by time; one value where it is instant."""
        text = re.sub(
            r"\$\{?(\w+)(?::\w+)?\}?", lambda m: self._values.get(m[1], ".*"), target["expr"]
        )
        query = {"query": text}
        if target.get("instant"):
            path, query["time"] = "query", str(self.end)
        else:
            path, step = "query_range", max(self.seconds / POINTS, 1)
            query |= {
                "start": str(self.end - self.seconds),
                "end": str(self.end),
                "step": str(step),
            }
        address = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310 - given by us
            found = json.load(answer)["data"]["result"]
        return [
            (
                one["metric"],
                [
                    (float(at), float(value))
                    for at, value in one.get("values", [one.get("value")])
                    if value not in {"NaN", "+Inf", "-Inf"}
                ],
            )
            for one in found
        ]


def shown(value: float, unit: str) -> str:
    """A number as Grafana writes it in that unit."""
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit in {"bytes", "binBps"}:
        size, names = abs(value), ["B", "KiB", "MiB", "GiB", "TiB"]
        while size >= KIB and len(names) > 1:
            size, names = size / KIB, names[1:]
        sign = "-" if value < 0 else ""
        return f"{sign}{size:.3g} {names[0]}{'/s' if unit == 'binBps' else ''}"
    if unit == "s":
        return f"{value:.3g} s" if value < MINUTES_FROM_SECONDS else f"{value / 60:.3g} min"
    return f"{value:,.3g}"


def legend(target: dict[str, Any], labels: dict[str, str]) -> str:
    """A series' name."""
    form = target.get("legendFormat", "")
    if form in {"", "__auto"}:
        return ", ".join(value for name, value in labels.items() if name != "__name__")
    return re.sub(r"\{\{(\w+)\}\}", lambda m: labels.get(m[1], ""), form)


def lines_of(panel: dict[str, Any]) -> dict[str, str]:
    """Queries that are drawn as a line of their own in a stack, and their colours."""
    found = {}
    for override in panel["fieldConfig"].get("overrides", []):
        given = {one["id"]: one["value"] for one in override["properties"]}
        if override["matcher"]["id"] == "byFrameRefID" and "custom.stacking" in given:
            found[override["matcher"]["options"]] = given["color"]["fixedColor"]
    return found


def curves(panel: dict[str, Any], source: Source, width: int, height: int) -> str:
    """A time series panel: the curves, and the table of its legend."""
    defaults = panel["fieldConfig"]["defaults"]
    unit, lines = defaults.get("unit", ""), lines_of(panel)
    series = [
        (legend(target, labels), lines.get(target["refId"]), values)
        for target in panel["targets"]
        for labels, values in source.ask(target)
        if values
    ]
    if not series:
        return '<div class="no">No data</div>'
    stacking = defaults.get("custom", {}).get("stacking", {}).get("mode", "none") != "none"
    rows = min(len(series), 10 if height > TALL else 4)
    tall = height - 50 - 17 * (rows + 1)
    base: dict[float, float] = {}
    drawn = []
    for _, own, values in series:
        low = {at: base.get(at, 0.0) if stacking and not own else 0.0 for at, _ in values}
        over = [(at, low[at], low[at] + value) for at, value in values]
        if stacking and not own:
            base.update({at: high for at, _, high in over})
        drawn.append(over)
    top = max(high for over in drawn for _, _, high in over) or 1.0
    top = max(top * 1.04, defaults.get("max", top))
    start, wide = source.end - source.seconds, width - 86

    def at_x(at: float) -> float:
        return 72 + wide * (at - start) / source.seconds

    def at_y(value: float) -> float:
        return 6 + (tall - 6) * (1 - max(value, 0) / top)

    marks = []
    for part in range(5):
        value = top * part / 4
        marks.append(
            f'<line x1="72" x2="{72 + wide}" y1="{at_y(value):.1f}" y2="{at_y(value):.1f}" '
            'stroke="#24272e"/>'
            f'<text x="66" y="{at_y(value) + 4:.1f}" text-anchor="end" fill="#9a9dab" '
            f'font-size="10">{shown(value, unit)}</text>'
        )
    for number, over in reversed(list(enumerate(drawn))):
        own = series[number][1]
        colour = own or COLOURS[number % len(COLOURS)]
        upper = " ".join(f"{at_x(at):.1f},{at_y(high):.1f}" for at, _, high in over)
        if stacking and not own:
            lower = " ".join(f"{at_x(at):.1f},{at_y(low):.1f}" for at, low, _ in reversed(over))
            marks.append(f'<polygon points="{upper} {lower}" fill="{colour}" fill-opacity="0.55"/>')
        style = f'stroke="{colour}" stroke-width="1.5"' + (' stroke-dasharray="7"' if own else "")
        marks.append(f'<polyline points="{upper}" fill="none" {style}/>')
    told = "".join(
        f'<tr><td><i style="background:{own or COLOURS[n % len(COLOURS)]}"></i>'
        f'{html.escape(name)}</td><td class="n">{shown(values[-1][1], unit)}</td>'
        f'<td class="n">{shown(max(value for _, value in values), unit)}</td></tr>'
        for n, (name, own, values) in enumerate(series[:rows])
    )
    return (
        f'<svg width="{width}" height="{tall + 6}">{"".join(marks)}</svg><table>'
        f'<tr><th>Name</th><th class="n">Last</th><th>Max</th></tr>{told}</table>'
    )


def body(panel: dict[str, Any], source: Source, width: int, height: int) -> str:
    """What is in a panel."""
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
    kind, targets = panel["type"], panel.get("targets", [])
    if kind == "text":
        said = re.sub(r"[`*#]", "", panel["options"]["content"])
        return f'<div style="padding:0 9px;line-height:1.4">{html.escape(said[:900])}</div>'
    if any("expr" not in target for target in targets):
        return '<div class="no">profiles, from Pyroscope</div>'
    if kind == "timeseries":
        return curves(panel, source, width, height)
    found = [
        (legend(target, labels), labels, values[-1][1])
        for target in targets
        for labels, values in source.ask(target)
        if values
    ]
    if not found:
        return '<div class="no">No data</div>'
    if kind == "stat":
        return f'<div class="stat">{shown(found[0][2], unit)}</div>'
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{shown(value, unit)}</td></tr>"
        for name, _, value in sorted(found, key=lambda one: -one[2])[: height // 18 - 2]
    )
    return f"<table>{rows}</table>"


def page(board: dict[str, Any], source: Source, rows: int) -> str:
    """The whole page, down to so many rows of panels."""
    parts, bottom, seen = [], 0, 0
    for panel in board["panels"]:
        place = panel["gridPos"]
        left, over = place["x"] * COLUMN + GAP, place["y"] * ROW + 46
        wide, tall = place.get("w", 24) * COLUMN - GAP, place["h"] * ROW - GAP
        if panel["type"] == "row":
            seen += 1
            if panel["collapsed"] or seen > rows:
                break
            parts.append(
                f'<div class="row" style="left:{left}px;top:{over - 4}px">{panel["title"]}</div>'
            )
            continue
        bottom = max(bottom, over + tall)
        parts.append(
            f'<div class="p" style="left:{left}px;top:{over}px;width:{wide}px;height:{tall}px">'
            f"<h3>{html.escape(panel['title'])}</h3>{body(panel, source, wide, tall)}</div>"
        )
    size = f"width:{24 * COLUMN + GAP}px;height:{bottom + GAP}px"
    title = f'<div class="row" style="left:8px;top:4px;font-size:17px">{board["title"]}</div>'
    return (
        f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>"
        f'<body data-height="{bottom + GAP}" style="{size};position:relative">'
        f"{title}{''.join(parts)}\n"
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("board")
    parser.add_argument("--var", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--rows", type=int, default=99, help="rows of panels to draw")
    options = parser.parse_args()
    given = dict(one.split("=", 1) for one in options.var)
    board = json.loads((BOARDS / f"{options.board}.json").read_text(encoding="utf-8"))
    source = Source(options.url, options.seconds, given)
    sys.stdout.write(page(board, source, options.rows))


if __name__ == "__main__":
    main()
