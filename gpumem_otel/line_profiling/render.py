"""Renders the rows of the line profiler: text, HTML, JSON, Prometheus text, pandas, pprof."""

from __future__ import annotations

import html
import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.text import human_bytes, printable, table
from gpumem_otel.errors import MissingPackageError
from gpumem_otel.line_profiling.accounts import ACTIVE_PEAK, RESERVED_PEAK, LineUse
from gpumem_otel.snapshot.stacks import basename

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pandas as pd

    from gpumem_otel.base.profile import HeapProfile
    from gpumem_otel.line_profiling.accounts import FunctionLines, LineRow

METRIC_ROWS: Final = 200
"""Pairs of line and device on the metrics endpoint, those that allocated most."""

NOTHING: Final = "no line was profiled: no profiled function was called\n"
_NO_GPU: Final = "(no GPU memory was used by this process)\n"

_HEADERS: Final = (
    "gpu",
    "hits",
    "after",
    "net",
    "peak",
    "peak rise",
    "allocated",
    "allocs",
    "active peak",
    "reserved peak",
)

_METRICS: Final = (
    ("line_hits_total", "counter", "Executions of the line."),
    ("line_after_bytes", "gauge", "Allocated after the line, in the execution that left most."),
    ("line_peak_bytes", "gauge", "The most that was allocated while the line ran."),
    ("line_net_bytes", "gauge", "Allocated after minus before, over all executions."),
    ("line_allocation_bytes_total", "counter", "Allocated by the line and what it called."),
    ("line_allocations_total", "counter", "Allocations of the line and what it called."),
)


def _values(use: LineUse, columns: Sequence[str]) -> list[str]:
    if columns:
        return [
            human_bytes(use.columns[name]) if "byte" in name else str(use.columns[name])
            for name in columns
        ]
    return [
        human_bytes(use.after_bytes),
        _signed(use.net_bytes),
        human_bytes(use.peak_bytes),
        _signed(use.peak_rise_bytes),
        human_bytes(use.allocation_bytes),
        str(use.allocations),
        human_bytes(use.columns.get(ACTIVE_PEAK, 0)),
        human_bytes(use.columns.get(RESERVED_PEAK, 0)),
    ]


def _signed(size_bytes: int) -> str:
    return f"+{human_bytes(size_bytes)}" if size_bytes > 0 else human_bytes(size_bytes)


def _shown(row: LineRow | None, device: int | None) -> list[tuple[int, LineUse]]:
    if row is None:
        return []
    if device is not None:
        return [(d, use) for d, use in row.devices.items() if d == device]
    return [(d, use) for d, use in row.devices.items() if use.shown]


def _lines(function: FunctionLines) -> Iterator[tuple[int, LineRow | None, str]]:
    """(number, row or None, source) of every line that ran or whose source is known."""
    rows = {row.line: row for row in function.rows}
    source = dict(enumerate(function.source, function.first_line))
    for number in sorted({*rows, *source}):
        yield number, rows.get(number), source.get(number, "").rstrip()


def line_cells(
    function: FunctionLines, columns: Sequence[str] = (), device: int | None = None
) -> tuple[list[str], list[list[str]]]:
    """Headers and cells, one row per line and device shown; the last two are line and code."""
    headers = ["gpu", "hits", *columns] if columns else list(_HEADERS)
    used = sorted({at for row in function.rows for at, _ in _shown(row, device)})
    nothing = [(at, LineUse(0, 0, 0, 0, 0, 0, 0, dict.fromkeys(columns, 0))) for at in used[:1]]
    cells = []
    for number, row, code in _lines(function):
        hits = "" if row is None else str(row.hits)
        shown = _shown(row, device)
        if row is not None and not row.devices:
            shown = nothing  # it ran before the device was in use
        if not shown:
            blanks = [""] * (len(headers) - 2)
            cells.append(["", hits, *blanks, str(number), code])
        for place, (at, use) in enumerate(shown):
            text = code if place == 0 else ""
            cells.append([str(at), hits, *_values(use, columns), str(number), text])
    return [*headers, "line", "code"], cells


def _title(function: FunctionLines) -> str:
    where = f"{basename(function.filename)}:{function.first_line}"
    calls = "1 call" if function.calls == 1 else f"{function.calls} calls"
    return f"{function.full_name} ({where}), {calls}"


def lines_text(
    functions: Iterable[FunctionLines], columns: Sequence[str] = (), device: int | None = None
) -> str:
    """One table per function that ran.

    Args:
        functions: in the order of the tables.
        columns: torch's names of counters in place of the usual columns.
        device: only this one, in place of those to show.
    """
    parts = []
    for function in functions:
        if not function.rows:
            continue
        headers, cells = line_cells(function, columns, device)
        used = any(row.devices for row in function.rows)
        text = table(headers, cells, left=frozenset({len(headers) - 1}))
        parts.append(f"## {printable(_title(function))}\n\n{text}{'' if used else _NO_GPU}")
    return "\n".join(parts) or NOTHING


def lines_html(
    functions: Iterable[FunctionLines], columns: Sequence[str] = (), device: int | None = None
) -> str:
    """The same tables for a notebook, with a bar for each peak; no script, no network."""
    parts = []
    for function in functions:
        if not function.rows:
            continue
        headers, cells = line_cells(function, columns, device)
        bars = _bars(function, device)
        head = "".join(f"<th>{html.escape(name)}</th>" for name in headers)
        body = []
        for row in cells:
            share = bars.get((row[-2], row[0]), 0)
            style = (
                "text-align:left;white-space:pre;font-family:monospace;background:"
                f"linear-gradient(90deg,#9ecae188 {share}%,transparent {share}%)"
            )
            numbers = "".join(f"<td>{html.escape(cell)}</td>" for cell in row[:-1])
            code = html.escape(printable(row[-1]))
            body.append(f'<tr>{numbers}<td style="{style}">{code}</td></tr>')
        parts.append(
            f"<h4>{html.escape(printable(_title(function)))}</h4>"
            f"<table><tr>{head}</tr>{''.join(body)}</table>"
        )
    return "".join(parts) or f"<p>{html.escape(NOTHING.strip())}</p>"


def _bars(function: FunctionLines, device: int | None) -> dict[tuple[str, str], int]:
    """(line, device) as in the cells -> the line's peak in percent of the function's."""
    peaks = {
        (str(row.line), str(at)): use.peak_bytes
        for row in function.rows
        for at, use in _shown(row, device)
    }
    most = max(peaks.values(), default=0)
    return {key: 100 * peak // most for key, peak in peaks.items()} if most else {}


def lines_json(functions: Iterable[FunctionLines]) -> dict[str, Any]:
    """All rows of all devices, for `json.dumps`."""
    return {
        "format": "gpumem-lines",
        "version": 1,
        "functions": [
            {
                "name": f.name,
                "module": f.module,
                "file": f.filename,
                "first_line": f.first_line,
                "calls": f.calls,
                "lines": [
                    {
                        "line": row.line,
                        "hits": row.hits,
                        "code": code,
                        "devices": {str(d): _use_json(use) for d, use in row.devices.items()},
                    }
                    for _, row, code in _lines(f)
                    if row is not None
                ],
            }
            for f in functions
            if f.rows
        ],
    }


def _use_json(use: LineUse) -> dict[str, Any]:
    numbers = {f.name: getattr(use, f.name) for f in fields(use) if f.type == "int"}
    return {**numbers, "columns": dict(use.columns)}


def lines_metrics(
    functions: Iterable[FunctionLines], rank: int, *, max_rows: int = METRIC_ROWS
) -> str:
    """Prometheus text, format 0.0.4 of https://prometheus.io/docs/instrumenting/exposition_formats.

    Args:
        functions: rows of one name, file and line are added up.
        rank: of this process.
        max_rows: pairs of line and device; the others are counted in
            `gpumem_line_rows_left_out`.
    """
    rows: dict[tuple[str, str, int, int], list[int]] = {}
    for function in functions:
        for row in function.rows:
            for device, use in row.devices.items():
                key = (function.full_name, basename(function.filename), row.line, device)
                totals = rows.setdefault(key, [0, 0, 0, 0, 0, 0])
                totals[0] += row.hits
                totals[1] = max(totals[1], use.after_bytes)
                totals[2] = max(totals[2], use.peak_bytes)
                totals[3] += use.net_bytes
                totals[4] += use.allocation_bytes
                totals[5] += use.allocations
    most = sorted(rows.items(), key=lambda item: (-item[1][4], -item[1][2], item[0]))[:max_rows]
    most.sort()
    text = []
    for place, (name, kind, meaning) in enumerate(_METRICS):
        text.append(f"# HELP gpumem_{name} {meaning}\n# TYPE gpumem_{name} {kind}\n")
        for (function_name, file, line, device), values in most:
            labels = (
                f'rank="{rank}",device="{device}",function="{_label(function_name)}",'
                f'file="{_label(file)}",line="{line}"'
            )
            text.append(f"gpumem_{name}{{{labels}}} {values[place]}\n")
    left_out = len(rows) - len(most)
    text.append(
        "# HELP gpumem_line_rows_left_out Lines that ran and are not among those shown here.\n"
        "# TYPE gpumem_line_rows_left_out gauge\n"
        f'gpumem_line_rows_left_out{{rank="{rank}"}} {left_out}\n'
    )
    return "".join(text)


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class LineReport:
    """What profiled lines did until the report was made.

    Args:
        functions: with their lines.
        profiles: the same by chain of calls, one per device.
        columns: names of counters to show in place of the usual columns.
        device: the one to show; None: those of `set_target_gpu`, else all.
    """

    def __init__(
        self,
        functions: Sequence[FunctionLines],
        profiles: Sequence[HeapProfile] = (),
        *,
        columns: Sequence[str] = (),
        device: int | None = None,
    ) -> None:
        self.functions = tuple(functions)
        self.profiles = tuple(profiles)
        self._columns = tuple(columns)
        self._device = device

    def __str__(self) -> str:
        return lines_text(self.functions, self._columns, self._device)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return lines_html(self.functions, self._columns, self._device)

    def to_dict(self) -> dict[str, Any]:
        """All rows of all devices, as plain values."""
        return lines_json(self.functions)

    def to_json(self) -> str:
        """`to_dict()` as text."""
        return json.dumps(self.to_dict(), indent=1)

    def pprof(self) -> bytes:
        """Bytes allocated, with a line as frame, as gzipped pprof (`go tool pprof`, Pyroscope)."""
        from gpumem_otel.base.profile import ProfileKind
        from gpumem_otel.profiles import pprof

        kind = ProfileKind.ALLOCATED
        return pprof.gzip_bytes(pprof.encode(self.profiles, device_labels={}, kind=kind))

    def to_pandas(self) -> pd.DataFrame:
        """One row per function, line and device.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise MissingPackageError("to_pandas() needs pandas: pip install pandas") from None
        rows: list[dict[str, Any]] = []
        for function in self.to_dict()["functions"]:
            place = {name: function[name] for name in ("module", "name", "file")}
            for line in function["lines"]:
                for device, use in line["devices"].items():
                    columns = use.pop("columns")
                    rows.append(
                        {
                            **place,
                            "line": line["line"],
                            "code": line["code"],
                            "device": int(device),
                            "hits": line["hits"],
                            **use,
                            **columns,
                        }
                    )
        return pd.DataFrame(rows)
