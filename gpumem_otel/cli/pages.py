"""Writing a page: what the verbs `flamegraph` and `timeline` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.inputs import keep_inputs, open_source, pick_devices
from gpumem_otel.cli.output import progress, warn, warn_about, write_output

if TYPE_CHECKING:
    from gpumem_otel.base.profile import ProfileKind

_SUFFIXES = (".gz", ".pickle", ".pkl", ".json", ".gpumem")


def default_output(source: str, verb: str) -> str:
    """The default name of the page: that of the input, in the current folder."""
    if source == "-":
        return f"{verb}.html"
    name = Path(source).name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return f"{name or 'snapshot'}.{verb}.html"


def write_page(
    source: str,
    output: str | None,
    *,
    verb: str,
    view: str,
    kind: ProfileKind,
    device: int | None,
    before: str | None = None,
) -> None:
    """Read one input or two, and write the page about them.

    Raises:
        PageError: the page was not built into this installation.
        SnapshotError: an input cannot be read.
        CommandFailed: the page cannot be written.
        click.UsageError: both inputs are standard input.
    """
    from gpumem_otel.base.profile import ProfileKind
    from gpumem_otel.page import html

    if source == "-" and before == "-":
        raise click.UsageError("only one input can be standard input")
    html.require()  # before reading a large file
    target = output or default_output(source, verb)
    keep_inputs(target, source, before)
    earlier = [] if before is None else [open_source(before)]
    opened = open_source(source)
    if device is not None:
        pick_devices(opened.snapshot, device)
    with progress(f"writing {target}"):
        text = html.file_html(
            opened, before=earlier[0] if earlier else None, device=device, view=view, kind=kind
        )
        encoded = text.encode("ascii")
        write_output(target, encoded)
    if not opened.has(kind):
        warn(f"{opened.snapshot.source}: holds no {kind.value} profile; the page opens with live")
    for file in (*earlier, opened):
        warn_about(file, ProfileKind.PEAK)
    if target != "-":
        click.echo(f"{target}: {len(encoded):,} bytes, opens in any browser, needs no network")
