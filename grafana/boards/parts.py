"""Panels in one style, with the Grafana Foundation SDK.

Everything that must hold for each panel is an argument without a default here: a title, a
description, a unit. The SDK writes the JSON of Grafana 11.6; what it has no builder for is
said where it is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from grafana_foundation_sdk.builders import common as c
from grafana_foundation_sdk.builders import dashboard as d
from grafana_foundation_sdk.builders import grafanapyroscope, prometheus, stat, table, text
from grafana_foundation_sdk.builders import statetimeline as st
from grafana_foundation_sdk.builders import timeseries as ts
from grafana_foundation_sdk.models import common as cm
from grafana_foundation_sdk.models import dashboard as dm
from grafana_foundation_sdk.models import prometheus as pm
from grafana_foundation_sdk.models import text as tm

from boards import queries as q

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grafana_foundation_sdk.cog.builder import Builder
    from grafana_foundation_sdk.cog.variants import Dataquery

__all__ = [
    "BYTES",
    "COUNT",
    "RATIO",
    "SECONDS",
    "Panel",
    "Query",
    "bars",
    "flame_graph",
    "lines",
    "number",
    "pushed_number",
    "ranking",
    "stack",
    "timeline",
    "words",
]

BYTES, RATIO, SECONDS, COUNT = "bytes", "percentunit", "s", "short"
"""Grafana's units: `bytes` is IEC (KiB, MiB, GiB), `percentunit` takes 0 to 1."""

Steps = tuple[tuple[float, str], ...]
Panel = ts.Panel | st.Panel | stat.Panel | table.Panel | text.Panel | d.Panel

_METRICS = dm.DataSourceRef(type_val=q.PROMETHEUS_TYPE, uid=q.PROMETHEUS)
_PROFILES = dm.DataSourceRef(type_val=q.PYROSCOPE_TYPE, uid=q.PYROSCOPE)


@dataclass(frozen=True)
class Query:
    """One query to Prometheus.

    Attributes:
        expr: PromQL.
        legend: what its series are called; `{{label}}` is filled in.
        line: drawn as a dashed line of this colour over a stack instead of in it.
    """

    expr: str
    legend: str = ""
    line: str = ""


# queries -------------------------------------------------------------------------------------


def _target(query: Query, place: int = 0) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .datasource(_METRICS)
        .expr(query.expr)
        .legend_format(query.legend or "__auto")
        .ref_id(chr(ord("A") + place))
    )


def _targets(queries: Sequence[Query]) -> list[Builder[Dataquery]]:
    return [_target(query, place).range() for place, query in enumerate(queries)]


def _profile(profile_type: str, selector: str, query_type: str) -> grafanapyroscope.Dataquery:
    return (
        grafanapyroscope.Dataquery()
        .datasource(_PROFILES)
        .profile_type_id(profile_type)
        .label_selector(selector)
        .query_type(query_type)
        .group_by([])
        .span_selector([])
        .ref_id("A")
    )


# panels --------------------------------------------------------------------------------------


def _limits(steps: Steps) -> d.ThresholdsConfig:
    colours = [dm.Threshold(value=None, color="green")]
    colours += [dm.Threshold(value=value, color=colour) for value, colour in steps]
    return d.ThresholdsConfig().mode(dm.ThresholdsMode.ABSOLUTE).steps(colours)


def _links(urls: Sequence[tuple[str, str]]) -> list[Builder[dm.DashboardLink]]:
    return [d.DashboardLink(title).url(url).target_blank(False) for title, url in urls]


def _axes(
    title: str,
    description: str,
    queries: Sequence[Query],
    unit: str,
    *,
    width: int,
    height: int,
    lowest: float | None = 0,
    top: float | None = None,
    links: Sequence[tuple[str, str]] = (),
) -> ts.Panel:
    legend = (
        c.VizLegendOptions()
        .show_legend(True)
        .display_mode(cm.LegendDisplayMode.TABLE)
        .placement(cm.LegendPlacement.BOTTOM)
        .calcs(["lastNotNull", "max"])
        .sort_by("Last *")
        .sort_desc(True)
    )
    tooltip = c.VizTooltipOptions().mode(cm.TooltipDisplayMode.MULTI).sort(cm.SortOrder.DESCENDING)
    panel = (
        ts.Panel()
        .title(title)
        .description(description)
        .datasource(_METRICS)
        .targets(_targets(queries))
        .unit(unit)
        .span(width)
        .height(height)
        .legend(legend)
        .tooltip(tooltip)
        .line_width(1)
        .show_points(cm.VisibilityMode.NEVER)
        .data_links(_links(links))
    )
    if lowest is not None:
        panel = panel.min(lowest)
    return panel if top is None else panel.max(top)


def lines(
    title: str,
    description: str,
    queries: Sequence[Query],
    unit: str,
    *,
    width: int = 12,
    height: int = 9,
    top: float | None = None,
    lowest: float | None = 0,
    steps: Steps = (),
    links: Sequence[tuple[str, str]] = (),
) -> ts.Panel:
    """One line a series, with its last and highest value in the legend."""
    panel = _axes(
        title,
        description,
        queries,
        unit,
        width=width,
        height=height,
        lowest=lowest,
        top=top,
        links=links,
    ).fill_opacity(0)
    if steps:
        style = c.GraphThresholdsStyleConfig().mode(cm.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds(_limits(steps)).thresholds_style(style)
    return panel


def stack(
    title: str, description: str, queries: Sequence[Query], unit: str, *, width: int, height: int
) -> ts.Panel:
    """Areas on top of each other; queries with a `line` are drawn over them instead."""
    panel = _axes(title, description, queries, unit, width=width, height=height)
    panel = panel.stacking(c.StackingConfig().mode(cm.StackingMode.NORMAL).group("A"))
    panel = panel.fill_opacity(60)
    for place, query in enumerate(queries):
        if query.line:
            panel = panel.override_by_query(
                chr(ord("A") + place),
                [
                    dm.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"}),
                    dm.DynamicConfigValue("custom.fillOpacity", 0),
                    dm.DynamicConfigValue("custom.lineWidth", 2),
                    dm.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]}),
                    dm.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": query.line}),
                ],
            )
    return panel


def bars(
    title: str,
    description: str,
    queries: Sequence[Query],
    unit: str,
    *,
    width: int = 12,
    height: int = 8,
    links: Sequence[tuple[str, str]] = (),
) -> ts.Panel:
    """Events: a bar for each interval in which some happened."""
    panel = _axes(title, description, queries, unit, width=width, height=height, links=links)
    style = panel.draw_style(cm.GraphDrawStyle.BARS).fill_opacity(80)
    return style.stacking(c.StackingConfig().mode(cm.StackingMode.NORMAL).group("A"))


def timeline(
    title: str,
    description: str,
    queries: Sequence[Query],
    states: Sequence[tuple[str, str]],
    *,
    nothing: str,
    width: int = 24,
    height: int = 8,
) -> st.Panel:
    """One band a series, coloured by its state.

    Args:
        title: as everywhere.
        description: as everywhere.
        queries: numbers from 0, by their place in `states`.
        states: what each number is called, and its colour.
        nothing: what is said where there are no series.
        width: of 24 columns.
        height: in rows of the grid.
    """
    named = {
        str(place): dm.ValueMappingResult(text=text_shown, color=colour, index=place)
        for place, (text_shown, colour) in enumerate(states)
    }
    legend = c.VizLegendOptions().show_legend(True).display_mode(cm.LegendDisplayMode.LIST)
    return (
        st.Panel()
        .title(title)
        .description(description)
        .datasource(_METRICS)
        .targets(_targets(queries))
        .unit(COUNT)
        .mappings([dm.ValueMap(options=named)])
        .no_value(nothing)
        .merge_values(True)
        .show_value(cm.VisibilityMode.AUTO)
        .legend(legend.placement(cm.LegendPlacement.BOTTOM))
        .span(width)
        .height(height)
    )


def number(
    title: str,
    description: str,
    query: Query,
    unit: str,
    *,
    width: int = 4,
    height: int = 4,
    steps: Steps = (),
    highest: float | None = None,
) -> stat.Panel:
    """One number for the whole range, coloured by its thresholds."""
    panel = _stat(title, description, unit, width=width, height=height, steps=steps)
    panel = panel.datasource(_METRICS).with_target(_target(query).instant())
    return panel if highest is None else panel.min(0).max(highest)


def pushed_number(
    title: str, description: str, profile_type: str, selector: str, unit: str, *, height: int = 4
) -> stat.Panel:
    """The sum of one profile type over the range of the panel, from Pyroscope."""
    panel = _stat(title, description, unit, width=4, height=height, calc="sum")
    return panel.datasource(_PROFILES).with_target(_profile(profile_type, selector, "metrics"))


def _stat(
    title: str,
    description: str,
    unit: str,
    *,
    width: int,
    height: int,
    steps: Steps = (),
    calc: str = "lastNotNull",
) -> stat.Panel:
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .span(width)
        .height(height)
        .graph_mode(cm.BigValueGraphMode.NONE)
        .color_mode(cm.BigValueColorMode.VALUE if steps else cm.BigValueColorMode.NONE)
        .reduce_options(c.ReduceDataOptions().calcs([calc]).values(False))
        .thresholds(_limits(steps))
    )


def ranking(
    title: str,
    description: str,
    query: Query,
    unit: str,
    *,
    value: str,
    width: int = 12,
    height: int = 9,
    steps: Steps = (),
    links: Sequence[tuple[str, str]] = (),
    by: Sequence[str] = (),
) -> table.Panel:
    """A table of what is highest now, with a bar behind each value.

    The query is aggregated, so that its labels are the columns, those of the job and then
    `by`; `value` heads the last of them.
    """
    order = ("job", "namespace", "cluster", *by)
    organize = {
        "excludeByName": {"Time": True},
        "renameByName": {"Value": value},
        "indexByName": {label: place for place, label in enumerate(order)},
    }
    return (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(_METRICS)
        .with_target(_target(query).instant().format(pm.PromQueryFormat.TABLE))
        .with_transformation(dm.DataTransformerConfig(id_val="organize", options=organize))
        .unit(unit)
        .span(width)
        .height(height)
        .thresholds(_limits(steps))
        .sort_by([c.TableSortByFieldState().display_name(value).desc(True)])
        .data_links(_links(links))
        .override_by_name(
            value,
            [
                dm.DynamicConfigValue("custom.cellOptions", {"type": "gauge", "mode": "basic"}),
                dm.DynamicConfigValue("min", 0),
            ],
        )
    )


def flame_graph(
    title: str,
    description: str,
    profile_type: str,
    selector: str,
    *,
    width: int = 24,
    height: int = 16,
    window: str = "",
) -> d.Panel:
    """A flame graph from Pyroscope: the sum of all profiles in its range.

    With a `window` it has a range of its own, as long as that, which ends one such length ago:
    what was read last may not have been sent yet. Grafana uses the length only while the
    dashboard's range is relative.
    """
    panel = (
        d.Panel()
        .type("flamegraph")  # no builder in the SDK; it has no options either
        .title(title)
        .description(description)
        .datasource(_PROFILES)
        .with_target(_profile(profile_type, selector, "profile").max_nodes(16384))
        .unit(BYTES)
        .span(width)
        .height(height)
    )
    return panel.time_from(window).time_shift(window) if window else panel


def words(title: str, description: str, markdown: str, *, width: int, height: int) -> text.Panel:
    """A panel of text."""
    return (
        text.Panel()
        .title(title)
        .description(description)
        .mode(tm.TextMode.MARKDOWN)
        .content(markdown)
        .span(width)
        .height(height)
    )
