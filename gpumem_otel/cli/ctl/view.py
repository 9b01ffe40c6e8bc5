"""What `gpumem-otel ctl` shows: a table of states, a bar for each operation, a report."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import click

from gpumem_otel.base.text import by_size, human_bytes, printable, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpumem_otel.cli.ctl.jobs import OperationProgress, Outcome

_LINE_SECONDS: Final = 10.0
"""Without a terminal: how often a long phase is reported."""

_GIB: Final = 1 << 30

_NS: Final = 1_000_000_000


def name_of(outcome: Outcome) -> str:
    """The job and rank of a process."""
    return _process_name(outcome.process)


def _process_name(process: dict[str, Any]) -> str:
    service = process.get("service_name") or "a job"
    return printable(f"{service} rank {process.get('rank', '?')} (pid {process.get('pid', '?')})")


def state_table(outcomes: list[Outcome], now_ns: int) -> str:
    """One row per process that answered, and a line for each state with a reason."""
    rows, reasons = [], []
    for outcome in outcomes:
        if outcome.error:
            continue
        status, process = outcome.value, outcome.process
        rows.append(
            (
                printable(str(process.get("service_name", ""))),
                str(process.get("rank", "")),
                str(process.get("pid", "")),
                printable(str(status["state"])),
                _ago(now_ns - int(status["since_ns"])) if status["since_ns"] else "",
                human_bytes(int(status["moved_bytes"])),
                _lease(int(status["lease_expiry_ns"]) - now_ns)
                if status["lease_expiry_ns"]
                else "-",
                printable(outcome.url),
            )
        )
        if status["reason"]:
            reasons.append(f"{name_of(outcome)}: {printable(str(status['reason']))}\n")
    headers = ("job", "rank", "pid", "state", "since", "away", "lease", "target")
    return table(headers, rows, left=frozenset({0, 3, 7})) + "".join(reasons)


def change_line(outcome: Outcome) -> str:
    """One change of one process."""
    status = outcome.value
    operation = status["operation"] or {}
    parts = [f"{name_of(outcome)}: {status['state']}"]
    if operation.get("state") == "running":
        parts.append(f"{operation['kind']} {operation['phase'] or 'waits'}")
        if operation["total_bytes"]:
            done, total = operation["done_bytes"], operation["total_bytes"]
            parts.append(f"{human_bytes(done)} of {human_bytes(total)}")
    elif status["moved_bytes"]:
        parts.append(f"{human_bytes(status['moved_bytes'])} away")
    if operation.get("error"):
        parts.append(f"{operation['kind']} {operation['state']}: {operation['error']}")
    if status["reason"]:
        parts.append(status["reason"])
    return printable(", ".join(map(str, parts)))


def report_lines(outcome: Outcome) -> list[str]:
    """What an operation did, or would do."""
    operation, name = outcome.value, name_of(outcome)
    report = operation["report"]
    if operation["state"] == "running":
        return [printable(f"{name}: {operation['kind']} {operation['id']} has begun")]
    if operation.get("already"):  # absent in jobs of older versions
        return [printable(f"{name}: {_already(operation)}")]
    if report is None:
        return [printable(f"{name}: {operation['kind']} done: nothing had to be moved")]
    gone = sum(report["moved_bytes"].values()) + sum(report["discarded_bytes"].values())
    phases = report["phases"]
    seconds = sum(phase["seconds"] for phase in phases)
    dry = operation["kind"] == "yield" and not report["operation"]
    if dry:
        expected = report["expected_seconds"]
        length = "" if expected is None else f", in about {expected:.1f} s"
        lines = [f"{name}: a yield would give back {human_bytes(gone)}{length}"]
    else:
        verb = "gave back" if operation["kind"] == "yield" else "took again"
        lines = [f"{name}: {verb} {human_bytes(gone)} in {seconds:.2f} s"]
    lines += [
        f"  {title}: {by_size(sizes)}"
        for title, sizes in (
            ("moved", report["moved_bytes"]),
            ("discarded", report["discarded_bytes"]),
            ("left on the device", report["residual_bytes"]),
        )
        if sizes
    ]
    for phase in phases:
        speed = ""
        moving = phase.get("moving_seconds") or phase["seconds"]  # older versions lack the former
        if phase["size_bytes"] and moving > 0:
            rate = phase["size_bytes"] / moving / _GIB
            speed = f", {human_bytes(phase['size_bytes'])}, {rate:.1f} GiB/s"
        lines.append(f"  {phase['phase']}: {phase['seconds']:.2f} s{speed}")
    if report["host_bytes"] or report["disk_bytes"]:
        disk = f", {human_bytes(report['disk_bytes'])} on disk" if report["disk_bytes"] else ""
        verb = "needed" if dry else "held"
        lines.append(f"  {verb} in host memory: {human_bytes(report['host_bytes'])}{disk}")
    if report["checksums"]:
        lines.append(f"  checksums {report['checksums']}")
    lines += [f"  may kill a parked job: {line}" for line in report["dangers"]]
    lines += [f"  note: {line}" for line in report["notes"]]
    return [printable(line) for line in lines]


@contextmanager
def bars(
    names: dict[str, str], kind: str = "", *, silent: bool = False
) -> Iterator[Callable[[OperationProgress], None]]:
    """A bar on stderr for each target, with GiB and GiB/s; lines without a terminal.

    Args:
        names: URL -> what to call it.
        kind: of the operation, for lines.
        silent: no lines.
    """
    if not sys.stderr.isatty():
        yield (lambda _: None) if silent else _Lines(kind).show
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    with Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[sizes]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        speeds: dict[str, tuple[str, float, int]] = {}
        tasks = {
            url: bar.add_task(printable(name), total=None, sizes="") for url, name in names.items()
        }

        def show(progress: OperationProgress) -> None:
            phase, begun, first = speeds.get(progress.url, ("", 0.0, 0))
            now = time.monotonic()
            if phase != progress.phase:
                begun, first = now, progress.done_bytes
                speeds[progress.url] = (progress.phase, begun, first)
            rate = (progress.done_bytes - first) / max(now - begun, 1e-3) / _GIB
            bar.update(
                tasks[progress.url],
                description=printable(f"{names[progress.url]} {progress.phase or 'waits'}"),
                completed=progress.done_bytes,
                total=progress.total_bytes or None,
                sizes=f"{progress.done_bytes / _GIB:.1f}/{progress.total_bytes / _GIB:.1f} GiB"
                f" {max(rate, 0.0):.1f} GiB/s",
            )

        yield show


class _Lines:
    """A line on stderr for each phase, and every ten seconds for a long one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._shown: dict[str, tuple[str, float]] = {}

    def show(self, progress: OperationProgress) -> None:
        """Print the progress where it has changed."""
        phase, at = self._shown.get(progress.url, (None, 0.0))
        now = time.monotonic()
        if phase == progress.phase and now - at < _LINE_SECONDS:
            return
        self._shown[progress.url] = progress.phase, now
        begun = " has begun" if phase is None else " waits"
        line = _process_name(progress.process) + f": {self._kind}"
        line += f": {progress.phase}" if progress.phase else begun
        if progress.total_bytes:
            done, total = human_bytes(progress.done_bytes), human_bytes(progress.total_bytes)
            line += f", {done} of {total}"
        with suppress(OSError):  # stderr on a full disk must not end the command
            click.echo(printable(line), err=True)


def _already(operation: dict[str, Any]) -> str:
    if operation["kind"] == "restore":
        return "nothing is away, nothing had to be restored"
    moved = sum(((operation["report"] or {}).get("moved_bytes") or {}).values())
    size = f" ({human_bytes(moved)})" if moved else ""
    return f"its memory is away already{size}, nothing had to be moved"


def _ago(age_ns: int) -> str:
    return _length(max(0, age_ns) // _NS)


def _lease(left_ns: int) -> str:
    return f"{_length(left_ns // _NS)} left" if left_ns > 0 else "over"


def _length(seconds: int) -> str:
    if seconds < 120:  # noqa: PLR2004
        return f"{seconds} s"
    minutes, hours = seconds // 60, seconds // 3600
    return f"{minutes} min" if minutes < 120 else f"{hours} h"  # noqa: PLR2004
