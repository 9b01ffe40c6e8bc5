"""`gpumem-otel dump IN -o OUT.pickle`: a recording as a snapshot pickle that memory_viz reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpumem_otel.cli.inputs import keep_inputs, name_of, read_bytes
from gpumem_otel.cli.output import progress, warn_of, write_output
from gpumem_otel.cli.shared_options import OUTPUT, SOURCE

if TYPE_CHECKING:
    from gpumem_otel.recording.recorded import Recording

_EPILOG = """\b
Examples:
  gpumem-otel dump run.gpumem -o last.pickle
  gpumem-otel dump run.gpumem -o third.pickle --at 3
  python -m torch.cuda._memory_viz trace_plot last.pickle -o last.html

Of a recording: the segments and blocks of one reading, and the allocations of its windows as
events (record --profiles live,allocated). A window tells neither order nor lifetime, so each
allocation is shown as freed at once. A snapshot that is gzip, JSON or the bare list of segments
comes out as the plain pickle that PyTorch's own tools need.
"""


@click.command("dump", epilog=_EPILOG, short_help="Turn a recording into a snapshot pickle.")
@SOURCE
@OUTPUT
@click.option(
    "--at",
    default="last",
    show_default=True,
    metavar="N|last",
    help="Which reading of the recording, counted from 1.",
)
def command(source: str, output: str, at: str) -> None:
    """Turn the recording IN into a snapshot pickle that memory_viz reads."""
    from gpumem_otel.profiles.of_file import raw_or_recording
    from gpumem_otel.recording import torch_dump
    from gpumem_otel.recording.reader import load_recording
    from gpumem_otel.snapshot import load

    keep_inputs(output, source)
    name = name_of(source)
    with progress(f"reading {source}"):
        raw = raw_or_recording(read_bytes(source), name)
        if isinstance(raw, load.RecordingBytes):
            recording = load_recording(raw.data, name=name)
            form, warnings = _recorded(recording, at)
        elif at != "last":
            raise click.BadParameter(
                f"{name} is a snapshot, only recordings have readings", param_hint="'--at'"
            )
        else:
            form, warnings = torch_dump.plain_snapshot(raw), ()
    warn_of(name, warnings)
    with progress(f"writing {output}"):
        write_output(output, torch_dump.dumped(form, name))


def _recorded(recording: Recording, at: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    from gpumem_otel.errors import SnapshotError
    from gpumem_otel.recording import torch_dump

    count = len(recording.readings)
    if not count:
        raise SnapshotError(recording.source, "the recording holds no reading")
    number = count if at == "last" else int(at) if at.isdecimal() and len(at) < 10 else 0  # noqa: PLR2004
    if not 1 <= number <= count:
        raise click.BadParameter(
            f"{at!r} is not a reading of {recording.source}: 1 to {count}, or last",
            param_hint="'--at'",
        )
    form, warnings = torch_dump.recorded_snapshot(recording, number - 1)
    return form, (*recording.warnings, *warnings)
