"""`gpumem-otel stats IN`: each device's totals, as the allocator wrote them down."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.common import load, print_json, warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.core.model import DeviceBooks

__all__ = ["command"]

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
"""Keys of a device in the JSON form, in order: part of the interface."""


@click.command("stats", epilog=_EPILOG, short_help="Print what a snapshot says about each device.")
@click.argument("source", metavar="IN")
@click.option("--json", "as_json", is_flag=True, help="Bytes as JSON, for programs.")
def command(source: str, *, as_json: bool) -> None:
    """Print what the snapshot or recording IN says about each device.

    A recording is read at its last snapshot.
    """
    snapshot = load(source)
    books = [snapshot.books(device) for device in snapshot.devices()]
    if as_json:
        print_json(
            {
                "devices": [{name: getattr(book, name) for name in _FIELDS} for book in books],
                "warnings": list(snapshot.warnings),
            }
        )
        return
    for warning in snapshot.warnings:
        warn(f"{snapshot.source}: {warning}")
    if not books:
        click.echo(f"{snapshot.source}: no memory of any device")
    elif sys.stdout.isatty():
        _table(books)
    else:
        from gpumem_otel.core.text import books_table

        click.echo(books_table(books), nl=False)


def _rows(book: DeviceBooks) -> list[tuple[str, str]]:
    from gpumem_otel.core.text import human_bytes

    rows = [
        ("reserved", human_bytes(book.reserved_bytes)),
        ("allocated", human_bytes(book.allocated_bytes)),
        ("active", human_bytes(book.active_bytes)),
        ("requested", human_bytes(book.requested_bytes)),
        ("free segments", human_bytes(book.free_segment_bytes)),
        ("free split remainders", human_bytes(book.split_remainder_bytes)),
        ("waiting to be freed", human_bytes(book.pending_free_bytes)),
        ("free in private pools", human_bytes(book.private_pool_free_bytes)),
        ("without a stack", human_bytes(book.bytes_without_stack)),
        ("segments", f"{book.segments:,}"),
        ("blocks", f"{book.blocks:,}"),
        ("history recorded", "yes" if book.history else "no"),
    ]
    rows += [
        (f"pool {pool[0]},{pool[1]} reserved", human_bytes(size))
        for pool, size in sorted(book.pool_reserved_bytes.items())
        if pool != (0, 0)
    ]
    return rows


def _table(books: Sequence[DeviceBooks]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("")
    for book in books:
        table.add_column(f"device {book.device}", justify="right")
    columns = [dict(_rows(book)) for book in books]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "") for column in columns))
    Console().print(table)
