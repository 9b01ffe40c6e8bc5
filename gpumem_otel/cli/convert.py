"""`gpumem-otel convert IN -o OUT`: a snapshot as pprof, folded stacks, speedscope or JSON."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.inputs import keep_inputs, open_source, pick_devices
from gpumem_otel.cli.output import progress, warn_about, write_output
from gpumem_otel.cli.shared_options import DEVICE, OUTPUT, SOURCE, kind_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.base.profile import HeapProfile, ProfileKind

_EPILOG = """\b
Examples:
  gpumem-otel convert snapshot.pickle -o live.pb.gz
  gpumem-otel convert snapshot.pickle -o peak.pb.gz --kind peak
  gpumem-otel convert snapshot.pickle -o - --format folded | flamegraph.pl > live.svg
  gpumem-otel convert snapshot.pickle -o live.speedscope.json --format speedscope

pprof is written gzipped; the same input gives the same bytes. Its samples carry the device as
label "device". OUT is written whole or not at all.

Of a recording, live is its last snapshot, allocated the last window in it (record
--profiles live,allocated), and peak the reading that held most. Sizes of allocated, and of peak
in a snapshot file, are requested bytes: that is what a trace holds. Pinned host memory is in
snapshots of torch 2.14 and newer, recorded with record_pinned_host_memory=True.
"""


@click.command("convert", epilog=_EPILOG, short_help="Turn a snapshot into pprof or stacks.")
@SOURCE
@OUTPUT
@kind_option(
    "What is alive, what the recorded events allocated, what was alive when most was, or "
    "pinned host memory.",
    "live", "allocated", "peak", "pinned",
)  # fmt: skip
@DEVICE
@click.option(
    "--format",
    "form",
    type=click.Choice(["pprof", "folded", "speedscope", "json"]),
    default="pprof",
    show_default=True,
)
def command(source: str, output: str, kind: str, device: int | None, form: str) -> None:
    """Turn the snapshot or recording IN into a profile."""
    from gpumem_otel.base.profile import ProfileKind as Kind

    keep_inputs(output, source)
    opened = open_source(source)
    pick_devices(opened.snapshot, device)
    with progress(f"writing {output}"):
        profiles = opened.profiles(Kind(kind), device)
        write_output(output, _bytes(profiles, form, Kind(kind), opened.snapshot.source))
    warn_about(opened, Kind(kind))


def _bytes(profiles: Sequence[HeapProfile], form: str, kind: ProfileKind, source: str) -> bytes:
    from gpumem_otel.profiles import folded

    if form == "folded":
        return folded.folded_text(profiles).encode("utf-8", "replace")
    if form == "json":
        forms = {"profiles": [folded.json_form(profile) for profile in profiles]}
        return (json.dumps(forms, indent=1) + "\n").encode()
    if form == "speedscope":
        from gpumem_otel._version import __version__

        name, exporter = PurePath(source).name, f"gpumem-otel@{__version__}"
        value = folded.speedscope_form(profiles, name=name, exporter=exporter, kind=kind)
        return (json.dumps(value, separators=(",", ":")) + "\n").encode()
    from gpumem_otel.profiles import pprof

    return pprof.gzip_bytes(pprof.encode(profiles, device_labels={}, kind=kind))
