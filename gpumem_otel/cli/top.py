"""`gpumem-otel top IN`: what holds the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.inputs import open_source, pick_devices
from gpumem_otel.cli.output import fields_of, frames_of, print_json, progress, warn_about
from gpumem_otel.cli.shared_options import DEVICE, ROWS, SOURCE, json_option, kind_option

if TYPE_CHECKING:
    from gpumem_otel.base.profile import HeapProfile
    from gpumem_otel.profiles.tables import TopRow
    from gpumem_otel.snapshot.labels import Label

_EPILOG = """\b
Examples:
  gpumem-otel top snapshot.pickle
  gpumem-otel top -n 5 --by function snapshot.pickle
  gpumem-otel top --kind peak --by line snapshot.pickle
  gpumem-otel top --by file --json run.gpumem
"""


_LABELS: dict[str, Label] = {
    "pool": "pool",
    "compile-context": "compile_context",
    "annotation": "annotation",
}
"""Choices of --by that group by a label of the allocation."""


@click.command("top", epilog=_EPILOG, short_help="Print what holds the memory.")
@SOURCE
@click.option("-n", "--number", type=ROWS, default=10, show_default=True, help="Rows a device.")
@click.option(
    "--by",
    type=click.Choice(["stack", "function", "file", "line", *_LABELS]),
    default="stack",
    show_default=True,
    help="function, file, line: self was allocated right there, total by what it called too.",
)
@kind_option(
    "What is alive, what the recorded events allocated, what was alive at their peak, or "
    "pinned host memory.",
    "live", "allocated", "peak", "pinned",
)  # fmt: skip
@click.option(
    "--frames",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Frames shown of a stack; what is between the ends is cut.",
)
@DEVICE
@json_option("Bytes and whole stacks as JSON.")
def command(
    source: str,
    *,
    number: int,
    by: str,
    kind: str,
    frames: int,
    device: int | None,
    as_json: bool,
) -> None:
    """Print what holds the memory in the snapshot or recording IN, largest first.

    Sizes of live memory are the allocator's, rounded; those out of a trace are as requested. Of a
    recording, live is its last reading, peak the one that held most, and allocated is of its last
    window of events.
    """
    from gpumem_otel.base.profile import ProfileKind
    from gpumem_otel.profiles.tables import top_rows, top_table

    opened, chosen = open_source(source), ProfileKind(kind)
    pick_devices(opened.snapshot, device)
    with progress("adding up"):
        profiles = opened.profiles(chosen, device, label=_LABELS.get(by))
    key = _LABELS.get(by, by)
    if as_json:
        devices = [_form(profile, top_rows(profile, key), by, number) for profile in profiles]
        print_json({"devices": devices, "warnings": list(opened.warnings_of(chosen))})
        return
    warn_about(opened, chosen)
    if not profiles:
        click.echo(f"{opened.snapshot.source}: no memory of any device")
    for profile in profiles:
        if by == "stack":
            _print_stacks(profile, top_rows(profile, by), number, frames)
        else:
            click.echo(top_table(profile, key, number), nl=False)


def _form(profile: HeapProfile, rows: list[TopRow], by: str, number: int) -> dict[str, object]:
    shown, rest = rows[:number], rows[number:]
    return {
        "device": profile.device,
        "by": by,
        "kind": profile.kind.value,
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
    form = fields_of(row, "name", "objects", "self_bytes", "total_bytes")
    return {**form, "frames": frames_of(row.stack)} if row.stack else form


def _print_stacks(profile: HeapProfile, rows: list[TopRow], number: int, frames: int) -> None:
    from gpumem_otel.base.text import human_bytes, percent
    from gpumem_otel.profiles.stack_text import count_of, short_stack

    total = profile.total_bytes
    click.echo(
        f"{_title(profile)}: {human_bytes(total)} in {profile.total_objects:,} allocations, "
        f"{len(rows):,} stacks"
    )
    for row in rows[:number]:
        numbers = f"{human_bytes(row.self_bytes):>10} {percent(row.self_bytes, total):>6}"
        lead = f"{numbers} {row.objects:>7,}x  "
        for line in short_stack(row.stack, frames):
            click.echo(f"{lead}{line}")
            lead = " " * len(lead)
    rest = rows[number:]
    if rest:
        size = sum(row.self_bytes for row in rest)
        click.echo(
            f"{human_bytes(size):>10} {percent(size, total):>6} in "
            f"{count_of(len(rest), 'more stack')}"
        )


def _title(profile: HeapProfile) -> str:
    from gpumem_otel.base.profile import ProfileKind, Sizes

    if profile.kind is ProfileKind.LIVE:
        return f"device {profile.device}"
    units = " (requested bytes)" if profile.sizes is Sizes.REQUESTED else ""
    return f"device {profile.device}, {profile.kind.value}{units}"
