"""`gpumem-otel convert IN -o OUT`: a snapshot as pprof, folded stacks or JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.common import (
    load,
    load_with_window,
    pick_devices,
    profiles_of,
    progress,
    window_profiles,
    write_output,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.core.model import HeapProfile, ProfileKind

__all__ = ["command"]

_EPILOG = """\b
Examples:
  gpumem-otel convert snapshot.pickle -o live.pb.gz
  gpumem-otel convert snapshot.pickle -o - --format folded | flamegraph.pl > live.svg
  gpumem-otel convert snapshot.pickle -o made.pb.gz --kind allocated --device 0

pprof is written gzipped; the same input gives the same bytes. Its samples carry the device as
label "device". OUT is written whole or not at all. Of a recording, live is its last snapshot and
allocated the last window in it (record --profiles live,allocated).
"""


@click.command("convert", epilog=_EPILOG, short_help="Turn a snapshot into pprof or stacks.")
@click.argument("source", metavar="IN")
@click.option("-o", "--output", required=True, metavar="OUT", help='File, or "-" for stdout.')
@click.option(
    "--kind",
    type=click.Choice(["live", "allocated"]),
    default="live",
    show_default=True,
    help="What is alive, or what the recorded events allocated.",
)
@click.option("--device", type=int, metavar="N", help="Only this device.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["pprof", "folded", "json"]),
    default="pprof",
    show_default=True,
)
def command(source: str, output: str, kind: str, device: int | None, form: str) -> None:
    """Turn the snapshot or recording IN into a profile."""
    from gpumem_otel.core.model import ProfileKind as Kind

    allocated = Kind(kind) is Kind.ALLOCATED
    snapshot, window = load_with_window(source) if allocated else (load(source), None)
    devices = pick_devices(snapshot, device)
    with progress(f"writing {output}"):
        if window is not None:
            profiles = window_profiles(snapshot, window, devices)
        else:
            profiles = profiles_of(snapshot, Kind(kind), devices)
        write_output(output, _bytes(profiles, form, Kind(kind)))


def _bytes(profiles: Sequence[HeapProfile], form: str, kind: ProfileKind) -> bytes:
    if form == "folded":
        from gpumem_otel.core import folded

        return folded.folded_text(profiles).encode("utf-8", "replace")
    if form == "json":
        from gpumem_otel.core import folded

        forms = {"profiles": [folded.json_form(profile) for profile in profiles]}
        return (json.dumps(forms, indent=1) + "\n").encode()
    from gpumem_otel.core import pprof

    return pprof.gzip_bytes(pprof.encode(profiles, device_labels={}, kind=kind))
