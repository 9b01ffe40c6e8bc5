"""`gpumem-otel stats IN`: the totals of each device, as the allocator recorded them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import click

from gpumem_otel.base.text import human_bytes, percent, printable, table
from gpumem_otel.cli.inputs import load, pick_devices
from gpumem_otel.cli.output import fields_of, print_json, progress, warn_of
from gpumem_otel.cli.shared_options import DEVICE, SOURCE, json_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.base.profile import DeviceTotals
    from gpumem_otel.snapshot.layout import Layout
    from gpumem_otel.snapshot.snapshot import TorchSnapshot
    from gpumem_otel.snapshot.trace import Replay

_EPILOG = """\b
Examples:
  gpumem-otel stats snapshot.pickle
  gpumem-otel stats --json snapshot.pickle | jq .devices[0].allocated_bytes
"""

_FIELDS = (
    "device",
    "reserved_bytes",
    "allocated_bytes",
    "active_bytes",
    "requested_bytes",
    "segments",
    "blocks",
    "bytes_without_stack",
    "history",
)
"""The first keys of a device in the JSON output, in order: part of the interface."""


class _Device(NamedTuple):
    """What is known of a device; peak is None where its trace has no allocations."""

    totals: DeviceTotals
    layout: Layout
    events: int
    peak: Replay | None


@click.command("stats", epilog=_EPILOG, short_help="Print what a snapshot says about each device.")
@SOURCE
@DEVICE
@json_option("Bytes as JSON, for programs.")
def command(source: str, device: int | None, *, as_json: bool) -> None:
    """Print what the snapshot or recording IN says about each device.

    A recording is read at its last snapshot. reserved = allocated + waiting for a stream + free,
    and the causes of free add up to it. The peak is of the recorded events, in requested bytes.
    """
    snapshot = load(source)
    numbers = pick_devices(snapshot, device)
    with progress("adding up"):
        devices = [_device(snapshot, number) for number in numbers]
    warnings = [*snapshot.warnings, *(text for item in devices for text in _warnings(item))]
    if as_json:
        print_json({"devices": [_form(item) for item in devices], "warnings": warnings})
        return
    warn_of(snapshot.source, warnings)
    if not devices:
        click.echo(f"{snapshot.source}: no memory of any device")
    elif sys.stdout.isatty():
        _print_side_by_side(devices)
    else:
        _print(devices)


def _device(snapshot: TorchSnapshot, device: int) -> _Device:
    from gpumem_otel.snapshot.layout import lay_out

    events = snapshot.raw_events(device)
    # record mode `state` keeps a single event, which is not a trace
    has_trace = len(events) > 1 and any(event.get("action") == "alloc" for event in events)
    return _Device(
        snapshot.totals(device),
        lay_out(device, snapshot.raw_segments(device)),
        len(events),
        snapshot.replay(device) if has_trace else None,
    )


def _warnings(item: _Device) -> tuple[str, ...]:
    if item.peak is None:
        return ()
    failed = [mark for mark in item.peak.marks if mark.action == "oom"]
    if not failed:
        return item.peak.warnings
    times = "once" if len(failed) == 1 else f"{len(failed)} times"
    last = f"last at event {failed[-1].moment}: {failed[-1].text}"
    line = f"device {item.totals.device}: an allocation failed {times}, {last}"
    return (*item.peak.warnings, line)


def _form(item: _Device) -> dict[str, object]:
    totals, layout, free = item.totals, item.layout, item.layout.free
    largest = layout.largest_free
    pool_fields = (
        "segments", "reserved_bytes", "allocated_bytes", "pending_free_bytes", "free_bytes",
        "largest_free_bytes",
    )  # fmt: skip
    return {
        **fields_of(totals, *_FIELDS),
        "events": item.events,
        "states": {
            state.value: fields_of(group, "blocks", "size_bytes", "requested_bytes")
            for state, group in layout.states.items()
        },
        "free_bytes": totals.reserved_bytes - totals.active_bytes,
        "free": {
            "segments_bytes": free.segment_bytes,
            "expandable_bytes": free.expandable_bytes,
            "split_bytes": free.split_bytes,
            "private_pools_bytes": free.private_bytes,
        },
        "split_expandable_bytes": free.split_expandable_bytes,
        "pending_free_bytes": totals.pending_free_bytes,
        "largest_free_block": None
        if largest is None
        else fields_of(largest, "size_bytes", "address", "stream", "kind"),
        "pools": [
            {"pool": list(pool), **fields_of(pool_totals, *pool_fields)}
            for pool, pool_totals in sorted(layout.pools.items())
        ],
        "expandable": fields_of(layout.expandable, "segments", "ranges", "reserved_bytes"),
        "peak": None if item.peak is None else _peak_form(item.peak),
    }


def _peak_form(replay: Replay) -> dict[str, object]:
    moment = replay.peak_moment
    time_us = replay.time_us[moment]
    return {
        "allocated_bytes": replay.allocated_bytes[moment],
        "sizes": "requested",
        "event": moment,
        "time_us": None if time_us < 0 else time_us,
        "reserved_bytes": replay.reserved_bytes[moment],
        "reserved_peak_bytes": max(replay.reserved_bytes),
    }


def _rows(item: _Device) -> list[tuple[str, str]]:
    totals, layout, free = item.totals, item.layout, item.layout.free
    free_bytes = totals.reserved_bytes - totals.active_bytes

    def part(size_bytes: int, of_bytes: int = totals.reserved_bytes) -> str:
        return f"{human_bytes(size_bytes)} {percent(size_bytes, of_bytes):>6}"

    rows = [
        ("reserved", part(totals.reserved_bytes)),
        ("  allocated", part(totals.allocated_bytes)),
        ("  waiting for a stream", part(totals.pending_free_bytes)),
        ("  free", part(free_bytes)),
        ("    whole free segments", part(free.segment_bytes)),
        ("    whole free expandable ranges", part(free.expandable_bytes)),
        ("    free split remainders", part(free.split_bytes)),
        ("    free in private pools", part(free.private_bytes)),
        ("largest free block", _largest(layout)),
        ("active", human_bytes(totals.active_bytes)),
        ("requested", human_bytes(totals.requested_bytes)),
        ("without a stack", part(totals.bytes_without_stack, totals.allocated_bytes)),
        ("segments", f"{totals.segments:,}"),
        ("blocks", f"{totals.blocks:,}"),
    ]
    rows += [
        (f"  {state.value}", f"{human_bytes(group.size_bytes)} in {group.blocks:,}")
        for state, group in layout.states.items()
    ]
    if layout.expandable.segments:
        count = f"{layout.expandable.segments:,} in {layout.expandable.ranges:,}"
        rows += [
            ("expandable segments, in reserved ranges", count),
            ("  reserved", human_bytes(layout.expandable.reserved_bytes)),
            ("  free split remainders", human_bytes(free.split_expandable_bytes)),
        ]
    if set(layout.pools) - {(0, 0)}:
        rows += _pool_rows(layout)
    rows += [
        ("history recorded", "yes" if totals.history else "no"),
        ("events", f"{item.events:,}"),
    ]
    if item.peak is not None:
        rows += _peak_rows(item.peak)
    return rows


def _largest(layout: Layout) -> str:
    block = layout.largest_free
    if block is None:
        return "none"
    kind = f" ({printable(block.kind)})" if block.kind else ""
    return f"{human_bytes(block.size_bytes)}{kind}"


def _pool_rows(layout: Layout) -> list[tuple[str, str]]:
    from gpumem_otel.snapshot.labels import pool_name

    rows = []
    for pool, pool_totals in sorted(layout.pools.items()):
        rows += [
            (f"pool {pool_name(pool)} reserved", human_bytes(pool_totals.reserved_bytes)),
            ("  allocated", human_bytes(pool_totals.allocated_bytes)),
            ("  waiting for a stream", human_bytes(pool_totals.pending_free_bytes)),
            ("  free", human_bytes(pool_totals.free_bytes)),
        ]
    return rows


def _peak_rows(replay: Replay) -> list[tuple[str, str]]:
    moment = replay.peak_moment
    return [
        ("peak of allocated (requested bytes)", human_bytes(replay.allocated_bytes[moment])),
        ("  after event", f"{moment:,}"),
        ("  reserved then", human_bytes(replay.reserved_bytes[moment])),
        ("peak of reserved", human_bytes(max(replay.reserved_bytes))),
    ]


def _print(devices: Sequence[_Device]) -> None:
    """Without a terminal: a line per device, then each in full."""
    from gpumem_otel.profiles.tables import totals_table

    click.echo(totals_table([item.totals for item in devices]), nl=False)
    for item in devices:
        headers = (f"device {item.totals.device}", "")
        click.echo(f"\n{table(headers, _rows(item), left=frozenset({0}))}", nl=False)


def _print_side_by_side(devices: Sequence[_Device]) -> None:
    """On a terminal: a column per device."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # a name may be under several headings, and a device may lack one: rows have their full names
    columns = [_full_names(_rows(item)) for item in devices]
    shown = Table()
    shown.add_column("")
    for item in devices:
        shown.add_column(f"device {item.totals.device}", justify="right")
    for key in dict.fromkeys(key for column in columns for key in column):
        # Text, since rich reads markup in a plain string, and cells hold text of untrusted files
        shown.add_row(key[-1], *(Text(column.get(key, "")) for column in columns))
    Console().print(shown)


def _full_names(rows: Sequence[tuple[str, str]]) -> dict[tuple[str, ...], str]:
    named: dict[tuple[str, ...], str] = {}
    heading = ""
    for name, value in rows:
        if not name.startswith(" "):
            heading = name
        named[heading, name] = value
    return named
