"""What the demo shows: a live table on a terminal, a few lines now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Protocol

import click

from gpumem_otel.core.frames import basename
from gpumem_otel.core.text import human_bytes, percent, printable, top_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpumem_otel.core.model import Frame, HeapProfile, Observation
    from gpumem_otel.core.text import TopRow

__all__ = ["Draw", "stack_line", "view"]

_ROWS = 12
_PLAIN_ROWS = 3
_PLAIN_SECONDS = 5.0


class Draw(Protocol):
    """Shows the state of now."""

    def __call__(
        self,
        profiles: tuple[HeapProfile, ...],
        observation: Observation | None,
        left_seconds: float,
    ) -> None:
        """Profiles may be () and the observation None before the first reading."""
        ...


@contextlib.contextmanager
def view() -> Iterator[Draw]:
    """The view that fits stdout."""
    if not sys.stdout.isatty():
        yield _Plain()
        return
    from rich.live import Live

    with Live(auto_refresh=False, transient=False) as live:

        def draw(
            profiles: tuple[HeapProfile, ...],
            observation: Observation | None,
            left_seconds: float,
        ) -> None:
            live.update(_table(profiles, observation, left_seconds), refresh=True)

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


def _totals(observation: Observation | None) -> list[str]:
    if observation is None:
        return []
    steps = f", step {observation.steps.steps}" if observation.steps.steps else ""
    return [
        f"device {one.device}: allocated {human_bytes(one.allocated_bytes)}, "
        f"reserved {human_bytes(one.reserved_bytes)}{steps}"
        for one in observation.devices
    ]


def _table(
    profiles: tuple[HeapProfile, ...], observation: Observation | None, left_seconds: float
) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [Text(line, style="bold") for line in _totals(observation)]
    for profile in profiles:
        table = Table(
            title=f"what holds device {profile.device}", expand=True, title_justify="left"
        )
        table.add_column("held", justify="right", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
        table.add_column("count", justify="right", no_wrap=True)
        table.add_column("stack, innermost first", overflow="ellipsis", no_wrap=True, ratio=1)
        for row in top_rows(profile, limit=_ROWS):
            table.add_row(
                human_bytes(row.self_bytes),
                percent(row.self_bytes, profile.total_bytes),
                f"{row.objects:,}",
                Text(stack_line(row)),
            )
        parts.append(table)
    parts.append(Text(f"{left_seconds:.0f} s left, Ctrl-C ends it", style="dim"))
    return Group(*parts)


class _Plain:
    """Lines every few seconds, for logs and pipes."""

    def __init__(self) -> None:
        self._last_left = float("inf")

    def __call__(
        self,
        profiles: tuple[HeapProfile, ...],
        observation: Observation | None,
        left_seconds: float,
    ) -> None:
        """See `Draw`."""
        due = self._last_left - left_seconds >= _PLAIN_SECONDS or left_seconds <= 0
        if not profiles or not due:
            return
        self._last_left = left_seconds
        for line in _totals(observation):
            click.echo(line)
        for profile in profiles:
            for row in top_rows(profile, limit=_PLAIN_ROWS):
                share = percent(row.self_bytes, profile.total_bytes)
                click.echo(f"  {human_bytes(row.self_bytes):>10} {share:>6}  {stack_line(row)}")
        sys.stdout.flush()
