"""Variables and annotations of the dashboards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grafana_foundation_sdk.builders import dashboard as d
from grafana_foundation_sdk.models import dashboard as dm

from boards import queries as q

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "JOB",
    "Variable",
    "annotation",
    "data_sources",
    "fixed",
    "from_prometheus",
    "from_pyroscope",
    "several_jobs",
    "where",
]

Variable = d.DatasourceVariable | d.QueryVariable | d.CustomVariable

CLUSTER = "Label that your Prometheus adds; All where it has none."
NAMESPACE = "Label of the scrape configuration; All where it has none."
JOB = "Label `job` of the series: the scrape job, or the service's name over OTLP."

_METRICS = dm.DataSourceRef(type_val=q.PROMETHEUS_TYPE, uid=q.PROMETHEUS)
_PROFILES = dm.DataSourceRef(type_val=q.PYROSCOPE_TYPE, uid=q.PYROSCOPE)


def data_sources() -> list[Variable]:
    """Which Prometheus and which Pyroscope: first, since the others ask them."""
    return [
        d.DatasourceVariable("ds_prometheus").label("Metrics").type(q.PROMETHEUS_TYPE),
        d.DatasourceVariable("ds_pyroscope").label("Profiles").type(q.PYROSCOPE_TYPE),
    ]


def where(series: str) -> list[Variable]:
    """Cluster and namespace, out of the labels of a series."""
    return [
        from_prometheus("cluster", CLUSTER, f"label_values({series}, cluster)"),
        from_prometheus(
            "namespace", NAMESPACE, f'label_values({series}{{cluster=~"$cluster"}}, namespace)'
        ),
    ]


def several_jobs(series: str) -> list[Variable]:
    """Data sources, cluster, namespace, and any number of jobs."""
    job = from_prometheus("job", JOB, f"label_values({series}{{{q.WHERE}}}, job)")
    return [*data_sources(), *where(series), job]


def _every() -> dm.VariableOption:
    return dm.VariableOption(selected=True, text="All", value="$__all")


def from_prometheus(
    name: str, description: str, query: str, *, multi: bool = True, numeric: bool = False
) -> d.QueryVariable:
    """A variable with the values of a label; of several with All, or of one."""
    order = dm.VariableSort.NUMERICAL_ASC if numeric else dm.VariableSort.ALPHABETICAL_ASC
    found = (
        d.QueryVariable(name)
        .label(name)
        .description(description)
        .datasource(_METRICS)
        .query({"query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"})
        .refresh(dm.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(order)
        .multi(multi)
        .include_all(multi)
    )
    return found.all_value(q.ALL).current(_every()) if multi else found


def from_pyroscope(
    name: str,
    label: str,
    description: str,
    profile_type: str,
    of: str,
    *,
    numeric: bool = False,
) -> d.QueryVariable:
    """A variable with the values of a label of the profiles of one type; the first is chosen."""
    order = dm.VariableSort.NUMERICAL_ASC if numeric else dm.VariableSort.ALPHABETICAL_ASC
    return (
        d.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(_PROFILES)
        .query(
            {"type": "labelValue", "profileTypeId": profile_type, "labelName": of, "refId": name}
        )
        .refresh(dm.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(order)
        .multi(False)
        .include_all(False)
    )


def fixed(name: str, label: str, description: str, values: Sequence[str]) -> d.CustomVariable:
    """A variable with values of ours; the first is chosen."""
    options = [
        dm.VariableOption(selected=not place, text=value, value=value)
        for place, value in enumerate(values)
    ]
    return (
        d.CustomVariable(name)
        .label(label)
        .description(description)
        .values(",".join(values))
        .options(options)
        .current(options[0])
    )


def annotation(name: str, expr: str, colour: str, title: str, text: str) -> dict[str, Any]:
    """Marks on every panel where a query has a value; written out, as the SDK lacks half of it."""
    return {
        "name": name,
        "datasource": {"type": q.PROMETHEUS_TYPE, "uid": q.PROMETHEUS},
        "enable": True,
        "iconColor": colour,
        "expr": expr,
        "step": "60s",
        "titleFormat": title,
        "textFormat": text,
        "tagKeys": "rank,device",
    }
