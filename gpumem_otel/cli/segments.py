"""`gpumem-otel segments IN`: each segment with its blocks, drawn in the terminal."""

from __future__ import annotations

import re
import shutil
import sys
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from gpumem_otel.base.text import human_bytes, percent, printable
from gpumem_otel.cli.inputs import environ, load, pick_devices, stack_builder
from gpumem_otel.cli.output import fields_of, frames_of, print_json, progress, warn_of
from gpumem_otel.cli.shared_options import DEVICE, ROWS, SOURCE, json_option
from gpumem_otel.snapshot.layout import LEGEND, allocated_in, free_in, strip

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpumem_otel.base.profile import Block, Segment, Stack
    from gpumem_otel.snapshot.snapshot import TorchSnapshot
    from gpumem_otel.snapshot.stacks import StackBuilder

_EPILOG = """\b
Examples:
  gpumem-otel segments snapshot.pickle
  gpumem-otel segments --sort free -n 5 --blocks snapshot.pickle
  gpumem-otel segments --pool private --json snapshot.pickle | jq '.segments[].address'

A strip is as wide as the terminal leaves room for, whatever the size of its segment.
"""

_NARROWEST = 24
"""Cells of a strip; where there is less room, each strip has its own line."""
_WITHOUT_TERMINAL = 120
"""Columns where there is no terminal."""
_COLOURS = {"#": "green", "=": "cyan", "~": "yellow", "+": "magenta"}
_HEADERS = ("device", "address", "size", "used", "blocks", "stream", "pool", "kind")
_LEFT = frozenset({1, 6, 7})
_POOL = re.compile(r"(\d{1,19}),(\d{1,19})")


@click.command("segments", epilog=_EPILOG, short_help="Draw each segment with its blocks.")
@SOURCE
@DEVICE
@click.option(
    "--pool", metavar="POOL", help='Only this pool: "default", "private", or two numbers as 0,1.'
)
@click.option(
    "--sort",
    type=click.Choice(["address", "size", "free"]),
    default="address",
    show_default=True,
    help="size and free: the largest first.",
)
@click.option("-n", "--number", type=ROWS, metavar="N", help="Only the first N.")
@click.option("--blocks", "each", is_flag=True, help="Name each block under its segment.")
@click.option("--width", type=click.IntRange(40, 10_000), metavar="N", help="Columns to draw in.")
@json_option("Every block as JSON.")
def command(
    source: str,
    *,
    device: int | None,
    pool: str | None,
    sort: str,
    number: int | None,
    width: int | None,
    each: bool,
    as_json: bool,
) -> None:
    """Draw each segment of the snapshot or recording IN with its blocks.

    used is the share that is allocated. Segments of a private pool say which.
    """
    wanted = _pool_test(pool)
    snapshot = load(source)
    devices = pick_devices(snapshot, device)
    with progress("sorting"):
        segments = [s for d in devices for s in snapshot.segments(d) if wanted(s.pool_id)]
        segments.sort(key=_ORDERS[sort])
    shown = segments[:number]
    rest = segments[len(shown) :]
    if as_json:
        print_json(_json(snapshot, shown, rest))
        return
    warn_of(snapshot.source, snapshot.warnings)
    if not segments:
        which = "" if pool is None else f" in pool {pool}"
        click.echo(f"{snapshot.source}: no segment of any device{which}")
        return
    click.echo(_title(segments))
    columns = width or shutil.get_terminal_size((_WITHOUT_TERMINAL, 24)).columns
    _print(snapshot, shown, columns, each=each)
    if rest:
        click.echo(f"not shown: {_title(rest)}")


def _pool_test(pool: str | None) -> Callable[[tuple[int, int]], bool]:
    """A test of pool ids.

    Raises:
        click.BadParameter: it is not a pool.
    """
    if pool is None:
        return lambda _: True
    if pool in {"default", "private"}:
        return lambda pool_id: (pool_id == (0, 0)) is (pool == "default")
    match = _POOL.fullmatch(pool)
    if match is None:
        raise click.BadParameter(
            f'{pool!r} is not a pool: write "default", "private" or two numbers as 0,1',
            param_hint="'--pool'",
        )
    chosen = (int(match[1]), int(match[2]))
    return lambda pool_id: pool_id == chosen


_ORDERS: dict[str, Callable[[Segment], Any]] = {
    "address": lambda s: (s.device, s.address),
    "size": lambda s: (-s.size_bytes, s.device, s.address),
    "free": lambda s: (-free_in(s), -s.size_bytes, s.device, s.address),
}


def _title(segments: Sequence[Segment]) -> str:
    from gpumem_otel.profiles.stack_text import count_of

    size = sum(segment.size_bytes for segment in segments)
    held = sum(map(allocated_in, segments))
    return (
        f"{count_of(len(segments), 'segment')}, {human_bytes(size)} reserved, "
        f"{human_bytes(held)} allocated ({percent(held, size)})"
    )


def _print(snapshot: TorchSnapshot, shown: Sequence[Segment], width: int, *, each: bool) -> None:
    colour = sys.stdout.isatty() and not environ().get("NO_COLOR")
    legend = "   ".join(f"{_coloured(mark, colour)} {text}" for mark, text in LEGEND)
    click.echo(legend, color=colour)
    rows = [_cells(segment) for segment in shown]
    widths = [max(map(len, column)) for column in zip(_HEADERS, *rows, strict=True)]
    # two blanks after each column, and the bars at both ends of a strip
    room = width - sum(widths) - 2 * len(widths) - 2
    same_line = room >= _NARROWEST
    click.echo(_joined(_HEADERS, widths))
    builder = stack_builder(snapshot)
    for segment, row in zip(shown, rows, strict=True):
        blocks = ((block.size_bytes, block.state) for block in segment.blocks)
        drawn = strip(blocks, segment.size_bytes, room if same_line else width - 2)
        drawn = f"|{_coloured(drawn, colour)}|"
        line = _joined(row, widths)
        padding = " " * (sum(widths) + 2 * len(widths) - len(line)) if same_line else "\n"
        click.echo(f"{line}{padding}{drawn}", color=colour)
        if each:
            _print_blocks(segment, builder)


def _cells(segment: Segment) -> tuple[str, ...]:
    from gpumem_otel.snapshot.labels import pool_name

    kind = f"{segment.kind} expandable" if segment.is_expandable else segment.kind
    return (
        str(segment.device),
        f"{segment.address:#x}",
        human_bytes(segment.size_bytes),
        percent(allocated_in(segment), segment.size_bytes),
        f"{len(segment.blocks):,}",
        f"{segment.stream:#x}",
        pool_name(segment.pool_id),
        printable(kind),
    )


def _joined(cells: Sequence[str], widths: Sequence[int]) -> str:
    parts = [
        cell.ljust(width) if column in _LEFT else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(parts).rstrip()


def _coloured(cells: str, colour: bool) -> str:
    if not colour:
        return cells
    return "".join(click.style("".join(run), fg=_COLOURS.get(mark)) for mark, run in groupby(cells))


def _print_blocks(segment: Segment, builder: StackBuilder) -> None:
    from gpumem_otel.profiles.stack_text import short_line

    start = segment.address
    for block in segment.blocks:
        address = start if block.address is None else block.address
        where = "" if block.state.value == "inactive" else short_line(builder.build(block.frames))
        line = f"    {address:#x}  {human_bytes(block.size_bytes):>10}  {block.state.value:19}  "
        click.echo(f"{line}{where}".rstrip())
        start = address + block.size_bytes


def _json(snapshot: TorchSnapshot, shown: Sequence[Segment], rest: Sequence[Segment]) -> object:
    """Stacks are listed once: a block's `stack` is an index of `stacks`, null where it has none."""
    builder = stack_builder(snapshot)
    stacks: dict[Stack, int] = {}

    def index_of(frames: Stack) -> int | None:
        return stacks.setdefault(builder.build(frames), len(stacks)) if frames else None

    segments = [_segment_form(segment, index_of) for segment in shown]
    return {
        "segments": segments,
        "rest": {
            "segments": len(rest),
            "size_bytes": sum(segment.size_bytes for segment in rest),
            "allocated_bytes": sum(map(allocated_in, rest)),
        },
        "stacks": [frames_of(stack) for stack in stacks],
        "warnings": list(snapshot.warnings),
    }


def _segment_form(segment: Segment, index_of: Callable[[Stack], int | None]) -> dict[str, object]:
    free, allocated = free_in(segment), allocated_in(segment)
    return {
        **fields_of(segment, "device", "address", "size_bytes"),
        "allocated_bytes": allocated,
        "pending_free_bytes": segment.size_bytes - free - allocated,
        "free_bytes": free,
        "stream": segment.stream,
        "pool": list(segment.pool_id),
        "kind": segment.kind,
        "expandable": segment.is_expandable,
        "blocks": [_block_form(block, index_of) for block in segment.blocks],
    }


def _block_form(block: Block, index_of: Callable[[Stack], int | None]) -> dict[str, object]:
    inactive = block.state.value == "inactive"
    return {
        **fields_of(block, "address", "size_bytes"),
        # an inactive block has that of the allocation that was there before
        "requested_bytes": None if inactive else block.requested_bytes,
        "state": block.state.value,
        "stack": None if inactive else index_of(block.frames),
    }
