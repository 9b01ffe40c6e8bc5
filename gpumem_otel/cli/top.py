"""`gpumem-otel top IN`: what holds the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.common import load, pick_devices, print_json, profiles_of, progress, warn

if TYPE_CHECKING:
    from gpumem_otel.core.model import Frame, HeapProfile, Stack
    from gpumem_otel.core.text import TopRow

__all__ = ["command"]

_EPILOG = """\b
Examples:
  gpumem-otel top snapshot.pickle
  gpumem-otel top -n 5 --by function snapshot.pickle
  gpumem-otel top --by file --json run.gpumem
"""


_ENDS = 2
"""With so few frames shown, only the ends are."""


@click.command("top", epilog=_EPILOG, short_help="Print what holds the memory.")
@click.argument("source", metavar="IN")
@click.option(
    "-n", "--number", type=click.IntRange(1), default=10, show_default=True, help="Rows a device."
)
@click.option(
    "--by",
    type=click.Choice(["stack", "function", "file"]),
    default="stack",
    show_default=True,
    help="function and file: self was allocated right there, total by what it called too.",
)
@click.option(
    "--frames",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Frames shown of a stack; what is between the ends is cut.",
)
@click.option("--device", type=int, metavar="N", help="Only this device.")
@click.option("--json", "as_json", is_flag=True, help="Bytes and whole stacks as JSON.")
def command(
    source: str, number: int, by: str, frames: int, device: int | None, *, as_json: bool
) -> None:
    """Print what holds the memory in the snapshot or recording IN, largest first."""
    from gpumem_otel.core.model import ProfileKind
    from gpumem_otel.core.text import top_rows, top_table

    snapshot = load(source)
    devices = pick_devices(snapshot, device)
    with progress("adding up"):
        profiles = profiles_of(snapshot, ProfileKind.LIVE, devices)
    if as_json:
        print_json(
            {
                "devices": [
                    _form(profile, top_rows(profile, by), by, number) for profile in profiles
                ],
                "warnings": list(snapshot.warnings),
            }
        )
        return
    for warning in snapshot.warnings:
        warn(f"{snapshot.source}: {warning}")
    if not profiles:
        click.echo(f"{snapshot.source}: no memory of any device")
    for profile in profiles:
        if by == "stack":
            _print_stacks(profile, top_rows(profile, by), number, frames)
        else:
            click.echo(top_table(profile, by, number), nl=False)


def _form(profile: HeapProfile, rows: list[TopRow], by: str, number: int) -> dict[str, object]:
    shown, rest = rows[:number], rows[number:]
    return {
        "device": profile.device,
        "by": by,
        "total_bytes": profile.total_bytes,
        "total_objects": profile.total_objects,
        "rows": [_row_form(row) for row in shown],
        "rest": {
            "rows": len(rest),
            "objects": sum(row.objects for row in rest),
            "self_bytes": sum(row.self_bytes for row in rest),
        },
    }


def _row_form(row: TopRow) -> dict[str, object]:
    form: dict[str, object] = {
        "name": row.name,
        "objects": row.objects,
        "self_bytes": row.self_bytes,
        "total_bytes": row.total_bytes,
    }
    if row.stack:
        form["frames"] = [
            {"name": frame.name, "filename": frame.filename, "line": frame.line}
            for frame in row.stack
        ]
    return form


def _print_stacks(profile: HeapProfile, rows: list[TopRow], number: int, frames: int) -> None:
    from gpumem_otel.core.text import human_bytes, percent, stack_lines

    total = profile.total_bytes
    click.echo(
        f"device {profile.device}: {human_bytes(total)} in {profile.total_objects:,} allocations, "
        f"{len(rows):,} stacks"
    )
    for row in rows[:number]:
        numbers = f"{human_bytes(row.self_bytes):>10} {percent(row.self_bytes, total):>6}"
        lead = f"{numbers} {row.objects:>7,}x  "
        following = 0
        for index in _shown(row.stack, frames):
            if index > following:
                click.echo(f"{lead}{_more(index - following, 'frame')}")
                lead = " " * len(lead)
            click.echo(f"{lead}{stack_lines(row.stack[index : index + 1])[0]}")
            lead = " " * len(lead)
            following = index + 1
        if len(row.stack) > following:
            click.echo(f"{lead}{_more(len(row.stack) - following, 'frame')}")
    rest = rows[number:]
    if rest:
        size = sum(row.self_bytes for row in rest)
        click.echo(
            f"{human_bytes(size):>10} {percent(size, total):>6} in {len(rest):,} more "
            f"{'stack' if len(rest) == 1 else 'stacks'}"
        )


def _more(count: int, what: str) -> str:
    return f"... {count:,} more {what}{'' if count == 1 else 's'}"


def _shown(stack: Stack, number: int) -> list[int]:
    """Which frames of a stack tell most: the ends, and the first that is not torch's own."""
    if len(stack) <= number:
        return list(range(len(stack)))
    outer = min(2, number // 2)
    shown = set(range(len(stack) - outer, len(stack)))
    own = next((i for i, frame in enumerate(stack) if not _is_torch(frame)), None)
    if own is not None and number > _ENDS:
        shown.add(own)
    for index in range(len(stack)):
        if len(shown) == number:
            break
        shown.add(index)
    return sorted(shown)


def _is_torch(frame: Frame) -> bool:
    """Whether a frame is of torch, or of no Python file."""
    parts = frame.filename.replace("\\", "/").split("/")
    inside = "torch" in parts[:-1] or frame.name.startswith("torch.")
    return inside or not frame.filename.endswith(".py")
