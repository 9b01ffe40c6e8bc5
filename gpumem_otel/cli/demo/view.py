"""What the demo shows: a live table on a terminal, a few lines now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from gpumem_otel.base.text import human_bytes, percent, printable
from gpumem_otel.profiles.tables import top_rows
from gpumem_otel.snapshot.stacks import basename

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpumem_otel.base.profile import Frame, HeapProfile
    from gpumem_otel.cli.demo.profile_files import Moment
    from gpumem_otel.profiles.tables import TopRow

_ROWS = 12
_PLAIN_ROWS = 3
_PLAIN_SECONDS = 5.0


class StackRow(NamedTuple):
    """What the stacks with the same line hold."""

    size_bytes: int
    objects: int
    line: str


@contextlib.contextmanager
def view() -> Iterator[Callable[[Moment | None, float], None]]:
    """A function that shows a moment (None before the first reading) and the seconds left."""
    if not sys.stdout.isatty():
        yield _Plain()
        return
    from rich.live import Live

    with Live(auto_refresh=False, transient=False) as live:

        def draw(moment: Moment | None, left_seconds: float) -> None:
            live.update(_table(moment, left_seconds), refresh=True)

        yield draw


def stack_line(row: TopRow) -> str:
    """A stack in one line: where it was allocated, and the job's own line that led there."""
    leaf = row.stack[0]
    own = next((frame for frame in row.stack if not frame.name.startswith("torch.")), leaf)
    if own is leaf:
        return printable(f"{_short(leaf)}{_place(leaf)}")
    return printable(f"{_short(leaf)}, from {_short(own)}{_place(own)}")


def _short(frame: Frame) -> str:
    """`Linear.forward` of `torch.nn.modules.linear.Linear.forward`."""
    name = frame.name.replace(".<locals>", "")
    return name if name.startswith("[") else ".".join(name.split(".")[-2:])


def _place(frame: Frame) -> str:
    return f" ({basename(frame.filename)}:{frame.line})" if frame.filename else ""


def shown_rows(profile: HeapProfile, limit: int) -> list[StackRow]:
    """The lines that hold most; stacks that differ only in what is not shown are one line."""
    totals: dict[str, tuple[int, int]] = {}
    for row in top_rows(profile):
        line = stack_line(row)
        size_bytes, objects = totals.get(line, (0, 0))
        totals[line] = (size_bytes + row.self_bytes, objects + row.objects)
    rows = [StackRow(*total, line) for line, total in totals.items()]
    rows.sort(key=lambda row: -row.size_bytes)
    return rows[:limit]


def device_line(moment: Moment, profile: HeapProfile) -> str:
    """The line above the rows of a device: the total of which they have shares."""
    reserved = moment.reserved_bytes(profile)
    parts = [f"allocated {human_bytes(profile.total_bytes)}"]
    if reserved is not None:
        parts.append(f"reserved {human_bytes(reserved)}")
    if moment.steps:
        parts.append(f"step {moment.steps}")
    return f"device {profile.device}: {', '.join(parts)}"


def _titled(moment: Moment | None) -> list[tuple[HeapProfile, str]]:
    if moment is None:
        return []
    return [(profile, device_line(moment, profile)) for profile in moment.profiles]


def _table(moment: Moment | None, left_seconds: float) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = []
    for profile, title in _titled(moment):
        table = Table(title=Text(title, style="bold"), expand=True, title_justify="left")
        for name in ("held", "share", "count"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("stack, innermost first", overflow="ellipsis", no_wrap=True, ratio=1)
        for row in shown_rows(profile, _ROWS):
            table.add_row(
                human_bytes(row.size_bytes),
                percent(row.size_bytes, profile.total_bytes),
                f"{row.objects:,}",
                Text(row.line),
            )
        parts.append(table)
    parts.append(Text(f"{left_seconds:.0f} s left, Ctrl-C ends it", style="dim"))
    return Group(*parts)


class _Plain:
    """Lines every few seconds, for logs and pipes."""

    def __init__(self) -> None:
        self._last_left = float("inf")

    def __call__(self, moment: Moment | None, left_seconds: float) -> None:
        due = self._last_left - left_seconds >= _PLAIN_SECONDS or left_seconds <= 0
        if moment is None or not due:
            return
        self._last_left = left_seconds
        for profile, title in _titled(moment):
            click.echo(title)
            for row in shown_rows(profile, _PLAIN_ROWS):
                share = percent(row.size_bytes, profile.total_bytes)
                click.echo(f"  {human_bytes(row.size_bytes):>10} {share:>6}  {row.line}")
        sys.stdout.flush()
