"""`gpumem-otel stats IN`: each device's totals, as the allocator wrote them down."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import click

from gpumem_otel.cli.common import load, pick_devices, print_json, progress, warn

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
"""First keys of a device in the JSON form, in order: part of the interface."""


class _Device(NamedTuple):
    """All that is known of a device; peak is None where its trace tells none."""

    books: DeviceTotals
    layout: Layout
    events: int
    peak: Replay | None


@click.command("stats", epilog=_EPILOG, short_help="Print what a snapshot says about each device.")
@click.argument("source", metavar="IN")
@click.option("--device", type=int, metavar="N", help="Only this device.")
@click.option("--json", "as_json", is_flag=True, help="Bytes as JSON, for programs.")
def command(source: str, device: int | None, *, as_json: bool) -> None:
    """Print what the snapshot or recording IN says about each device.

    A recording is read at its last snapshot. reserved = allocated + waiting for a stream + free,
    and the causes of free add up to it. The peak is of the recorded events, in requested bytes.
    """
    snapshot = load(source)
    numbers = pick_devices(snapshot, device)
    with progress("adding up"):
        devices = [_device(snapshot, number) for number in numbers]
    warnings = [*snapshot.warnings, *(text for one in devices for text in _told(one))]
    if as_json:
        print_json({"devices": [_form(one) for one in devices], "warnings": warnings})
        return
    for warning in warnings:
        warn(f"{snapshot.source}: {warning}")
    if not devices:
        click.echo(f"{snapshot.source}: no memory of any device")
    elif sys.stdout.isatty():
        _table(devices)
    else:
        _print(devices)


def _device(snapshot: TorchSnapshot, device: int) -> _Device:
    from gpumem_otel.snapshot.layout import lay_out

    events = snapshot.raw_events(device)
    # what record mode `state` keeps, a single event, is no trace
    known = len(events) > 1 and any(event.get("action") == "alloc" for event in events)
    return _Device(
        snapshot.books(device),
        lay_out(device, snapshot.raw_segments(device)),
        len(events),
        snapshot.replay(device) if known else None,
    )


def _told(one: _Device) -> tuple[str, ...]:
    if one.peak is None:
        return ()
    failed = [mark for mark in one.peak.marks if mark.action == "oom"]
    if not failed:
        return one.peak.warnings
    times = "once" if len(failed) == 1 else f"{len(failed)} times"
    said = f"device {one.books.device}: an allocation failed {times}, last at event "
    return (*one.peak.warnings, f"{said}{failed[-1].moment}: {failed[-1].text}")


def _form(one: _Device) -> dict[str, object]:
    layout, free = one.layout, one.layout.free
    largest = layout.largest_free
    return {
        **{name: getattr(one.books, name) for name in _FIELDS},
        "events": one.events,
        "states": {
            state.value: {
                "blocks": sums.blocks,
                "size_bytes": sums.size_bytes,
                "requested_bytes": sums.requested_bytes,
            }
            for state, sums in layout.states.items()
        },
        "free_bytes": one.books.reserved_bytes - one.books.active_bytes,
        "free": {
            "segments_bytes": free.segment_bytes,
            "expandable_bytes": free.expandable_bytes,
            "split_bytes": free.split_bytes,
            "private_pools_bytes": free.private_bytes,
        },
        "split_expandable_bytes": free.split_expandable_bytes,
        "pending_free_bytes": one.books.pending_free_bytes,
        "largest_free_block": None
        if largest is None
        else {
            "size_bytes": largest.size_bytes,
            "address": largest.address,
            "stream": largest.stream,
            "kind": largest.kind,
        },
        "pools": [
            {
                "pool": list(pool),
                "segments": sums.segments,
                "reserved_bytes": sums.reserved_bytes,
                "allocated_bytes": sums.allocated_bytes,
                "pending_free_bytes": sums.pending_free_bytes,
                "free_bytes": sums.free_bytes,
                "largest_free_bytes": sums.largest_free_bytes,
            }
            for pool, sums in sorted(layout.pools.items())
        ],
        "expandable": {
            "segments": layout.expandable.segments,
            "ranges": layout.expandable.ranges,
            "reserved_bytes": layout.expandable.reserved_bytes,
        },
        "peak": None if one.peak is None else _peak_form(one.peak),
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


def _rows(one: _Device) -> list[tuple[str, str]]:
    from gpumem_otel.base.text import human_bytes, percent

    book, layout, free = one.books, one.layout, one.layout.free
    free_bytes = book.reserved_bytes - book.active_bytes

    def part(size_bytes: int, of_bytes: int = book.reserved_bytes) -> str:
        return f"{human_bytes(size_bytes)} {percent(size_bytes, of_bytes):>6}"

    rows = [
        ("reserved", part(book.reserved_bytes)),
        ("  allocated", part(book.allocated_bytes)),
        ("  waiting for a stream", part(book.pending_free_bytes)),
        ("  free", part(free_bytes)),
        ("    whole free segments", part(free.segment_bytes)),
        ("    whole free expandable ranges", part(free.expandable_bytes)),
        ("    free split remainders", part(free.split_bytes)),
        ("    free in private pools", part(free.private_bytes)),
        ("largest free block", _largest(layout)),
        ("active", human_bytes(book.active_bytes)),
        ("requested", human_bytes(book.requested_bytes)),
        ("without a stack", part(book.bytes_without_stack, book.allocated_bytes)),
        ("segments", f"{book.segments:,}"),
        ("blocks", f"{book.blocks:,}"),
    ]
    rows += [
        (f"  {state.value}", f"{human_bytes(sums.size_bytes)} in {sums.blocks:,}")
        for state, sums in layout.states.items()
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
    rows += [("history recorded", "yes" if book.history else "no"), ("events", f"{one.events:,}")]
    if one.peak is not None:
        rows += _peak_rows(one.peak)
    return rows


def _largest(layout: Layout) -> str:
    from gpumem_otel.base.text import human_bytes, printable

    block = layout.largest_free
    if block is None:
        return "none"
    kind = f" ({printable(block.kind)})" if block.kind else ""
    return f"{human_bytes(block.size_bytes)}{kind}"


def _pool_rows(layout: Layout) -> list[tuple[str, str]]:
    from gpumem_otel.base.text import human_bytes
    from gpumem_otel.snapshot.labels import pool_name

    rows = []
    for pool, sums in sorted(layout.pools.items()):
        rows += [
            (f"pool {pool_name(pool)} reserved", human_bytes(sums.reserved_bytes)),
            ("  allocated", human_bytes(sums.allocated_bytes)),
            ("  waiting for a stream", human_bytes(sums.pending_free_bytes)),
            ("  free", human_bytes(sums.free_bytes)),
        ]
    return rows


def _peak_rows(replay: Replay) -> list[tuple[str, str]]:
    from gpumem_otel.base.text import human_bytes

    moment = replay.peak_moment
    return [
        ("peak of allocated (requested bytes)", human_bytes(replay.allocated_bytes[moment])),
        ("  after event", f"{moment:,}"),
        ("  reserved then", human_bytes(replay.reserved_bytes[moment])),
        ("peak of reserved", human_bytes(max(replay.reserved_bytes))),
    ]


def _print(devices: Sequence[_Device]) -> None:
    """Without a terminal: a line per device, then each in full."""
    from gpumem_otel.base.text import table
    from gpumem_otel.profiles.tables import books_table

    click.echo(books_table([one.books for one in devices]), nl=False)
    for one in devices:
        headers = (f"device {one.books.device}", "")
        click.echo(f"\n{table(headers, _rows(one), left=frozenset({0}))}", nl=False)


def _table(devices: Sequence[_Device]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # a name may stand under several headings, and a device may lack one: rows are named in full
    columns = [_in_full(_rows(one)) for one in devices]
    shown = Table()
    shown.add_column("")
    for one in devices:
        shown.add_column(f"device {one.books.device}", justify="right")
    for key in dict.fromkeys(key for column in columns for key in column):
        # a plain string would be read for markup, and the cells hold words of a stranger's file
        shown.add_row(key[-1], *(Text(column.get(key, "")) for column in columns))
    Console().print(shown)


def _in_full(rows: Sequence[tuple[str, str]]) -> dict[tuple[str, ...], str]:
    found: dict[tuple[str, ...], str] = {}
    heading = ""
    for name, value in rows:
        if not name.startswith(" "):
            heading = name
        found[heading, name] = value
    return found
