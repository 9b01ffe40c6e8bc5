"""`gpumem-otel timeline IN`: a page with the memory over time."""

from __future__ import annotations

import click

from gpumem_otel.cli.shared_options import DEVICE, SOURCE

_EPILOG = """\b
Examples:
  gpumem-otel timeline snapshot.pickle
  gpumem-otel timeline run.gpumem -o run.html

One file that needs no network. Allocated (requested bytes) and reserved memory with the peak,
failed allocations and annotations marked; click a moment to see what was alive at it, by stack.
Of a recording every reading is a moment. Press ? in it for its keys.
"""


@click.command("timeline", epilog=_EPILOG, short_help="Write a page with the memory over time.")
@SOURCE
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    help='File, or "-" for stdout; by default IN.timeline.html here.',
)
@DEVICE
def command(source: str, output: str | None, device: int | None) -> None:
    """Write a page with the memory of the snapshot or recording IN over time."""
    from gpumem_otel.base.profile import ProfileKind
    from gpumem_otel.cli.pages import write_page

    write_page(
        source, output, verb="timeline", view="timeline", kind=ProfileKind.LIVE, device=device
    )
