"""`gpumem-otel flamegraph IN`: a page with flame graphs of a snapshot, or of two."""

from __future__ import annotations

import click

from gpumem_otel.cli.shared_options import DEVICE, kind_option

_EPILOG = """\b
Examples:
  gpumem-otel flamegraph snapshot.pickle
  gpumem-otel flamegraph snapshot.pickle -o live.html --kind peak
  gpumem-otel flamegraph before.pickle after.pickle -o change.html
  gpumem-otel flamegraph after.pickle --before before.pickle -o - > change.html

One file that needs no network, with all views: flame graphs of what is live, of the peak, of
what was allocated and by segment; the timeline; the segments; of two files the difference, red
where there is more, blue where there is less. Press ? in it for its keys.
"""


@click.command("flamegraph", epilog=_EPILOG, short_help="Write a page with flame graphs.")
@click.argument("source", metavar="[BEFORE] IN")
@click.argument("second", required=False, metavar="")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    help='File, or "-" for stdout; by default IN.flamegraph.html here.',
)
@click.option("--before", metavar="FILE", help="Compare with this snapshot.")
@kind_option("What the page shows first.", "live", "peak", "allocated", "pinned")
@DEVICE
def command(
    source: str,
    second: str | None,
    output: str | None,
    before: str | None,
    kind: str,
    *,
    device: int | None,
) -> None:
    """Write a page with flame graphs of the snapshot or recording IN, or of what changed."""
    from gpumem_otel.base.profile import ProfileKind
    from gpumem_otel.cli.pages import write_page

    if second is not None:
        if before is not None:
            raise click.UsageError("give the snapshot to compare with once: BEFORE IN, or --before")
        before, source = source, second
    write_page(
        source,
        output,
        verb="flamegraph",
        view="flamegraph" if before is None else "difference",
        kind=ProfileKind(kind),
        device=device,
        before=before,
    )
