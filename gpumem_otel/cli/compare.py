"""`gpumem-otel compare BEFORE AFTER`: what grew, shrank, came and went between two snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from gpumem_otel.base.text import human_bytes, printable, table
from gpumem_otel.cli.inputs import no_such_device, open_source
from gpumem_otel.cli.output import CommandFailed, fields_of, frames_of, print_json, progress, warn
from gpumem_otel.cli.shared_options import DEVICE, ROWS, json_option

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpumem_otel.base.profile import HeapProfile, ProfileKind, Segment
    from gpumem_otel.profiles.compare import Comparison, SegmentComparison
    from gpumem_otel.profiles.of_file import OpenedFile
    from gpumem_otel.snapshot.snapshot import TorchSnapshot

_EPILOG = """\b
Examples:
  gpumem-otel compare step100.pickle step200.pickle
  gpumem-otel compare --kind peak old.pickle new.pickle
  gpumem-otel compare --by segment before.pickle after.pickle
  gpumem-otel compare --json a.pickle b.pickle | jq '.devices[].categories.grown'

A stack is the same where the names, base names of files and lines of its frames are; what is left
then is matched by the names alone, and marked "lines moved". Devices are compared by their number;
where each file has a single one, these two are, whatever their numbers.
"""

_SHOWN = 10

_SIZES = ("before_bytes", "after_bytes", "before_objects", "after_objects")


class _Pair(NamedTuple):
    """The same device in both files; None: the file does not have it."""

    before: int | None
    after: int | None

    def form(self) -> dict[str, int | None]:
        return {"device_before": self.before, "device_after": self.after}

    def name(self) -> str:
        if self.before == self.after:
            return f"device {self.before}"
        if self.after is None:
            return f"device {self.before} (only before)"
        if self.before is None:
            return f"device {self.after} (only after)"
        return f"device {self.before} before, {self.after} after"


@click.command("compare", epilog=_EPILOG, short_help="Print what changed between two snapshots.")
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="AFTER")
@click.option(
    "--by",
    type=click.Choice(["stack", "segment"]),
    default="stack",
    show_default=True,
    help="Stacks and what they hold, or segments by address and size.",
)
@click.option(
    "--kind",
    type=click.Choice(["live", "allocated", "peak"]),
    help="What stacks hold: alive (default), allocated by the recorded events, or at their peak.",
)
@DEVICE
@click.option("-n", "--number", type=ROWS, help="Rows a device; by default 10, in JSON all.")
@click.option(
    "--frames", type=click.IntRange(1), default=4, show_default=True, help="Frames of a stack."
)
@click.option("--exact-lines", is_flag=True, help="Do not match stacks whose lines have moved.")
@json_option("Bytes and whole stacks as JSON.")
def command(
    before: str,
    after: str,
    *,
    by: str,
    kind: str | None,
    device: int | None,
    number: int | None,
    frames: int,
    exact_lines: bool,
    as_json: bool,
) -> None:
    """Print what changed from the snapshot or recording BEFORE to AFTER.

    The categories add up to the difference of the totals. That nothing changed is no failure.
    """
    from gpumem_otel.base.profile import ProfileKind

    _check_usage(before, after, by, kind)
    chosen = ProfileKind(kind or "live")
    opened = (open_source(before), open_source(after))
    pairs = _pairs(opened[0].snapshot, opened[1].snapshot, device)
    warnings = _warnings(opened, chosen)
    if not as_json:
        for warning in warnings:
            warn(warning)
        if not pairs:
            click.echo("no memory of any device in either file")
    form: dict[str, object] = {"by": by}
    if by == "segment":
        segments = [(pair, _segments(opened, pair)) for pair in pairs]
        devices = [_segments_form(*result) for result in segments]
    else:
        form["kind"] = chosen.value
        with progress("adding up"):
            stacks = _stacks(opened, pairs, chosen, exact_lines=exact_lines)
        devices = [_stacks_form(*result, number) for result in stacks]
    if as_json:
        print_json({**form, "devices": devices, "warnings": warnings})
    elif by == "segment":
        for pair, changed in segments:
            _print_segments(pair, changed, number or _SHOWN)
    else:
        for pair, comparison in stacks:
            _print_stacks(pair, comparison, chosen, number or _SHOWN, frames)


def _check_usage(before: str, after: str, by: str, kind: str | None) -> None:
    if before == after == "-":
        raise click.UsageError("only one of BEFORE and AFTER can be standard input")
    if by == "segment" and kind is not None:
        raise click.UsageError("--kind is about stacks: leave it out with --by segment")


def _warnings(opened: Sequence[OpenedFile], kind: ProfileKind) -> list[str]:
    return [f"{file.snapshot.source}: {text}" for file in opened for text in file.warnings_of(kind)]


def _pairs(before: TorchSnapshot, after: TorchSnapshot, device: int | None) -> list[_Pair]:
    """Which devices to compare.

    Raises:
        click.BadParameter: neither file has the device asked for.
    """
    first, second = before.devices(), after.devices()
    devices = sorted({*first, *second})
    if device is None:
        if len(first) == len(second) == 1:
            return [_Pair(first[0], second[0])]  # two ranks of a job, each with its own device
    elif device in devices:
        devices = [device]
    else:
        raise no_such_device(device, "in neither file", devices)
    return [
        _Pair(number if number in first else None, number if number in second else None)
        for number in devices
    ]


def _stacks(
    opened: tuple[OpenedFile, OpenedFile],
    pairs: Sequence[_Pair],
    kind: ProfileKind,
    *,
    exact_lines: bool,
) -> list[tuple[_Pair, Comparison]]:
    """The stacks of each pair of devices, compared.

    Raises:
        NoHistoryError: no device of a file has the events that the kind needs.
        CommandFailed: the sizes of the two files have different units.
    """
    from gpumem_otel.base.profile import HeapProfile
    from gpumem_otel.profiles.compare import compare_profiles

    empty = HeapProfile(kind, -1, ())
    before = _profiles(opened[0], [pair.before for pair in pairs], kind)
    after = _profiles(opened[1], [pair.after for pair in pairs], kind)
    try:
        return [
            (
                pair,
                compare_profiles(
                    before.get(pair.before, empty),
                    after.get(pair.after, empty),
                    exact_lines=exact_lines,
                ),
            )
            for pair in pairs
        ]
    except ValueError as error:
        message = f"{kind.value} of a recording and of a snapshot file: {error}"
        raise CommandFailed(message) from None


def _profiles(
    opened: OpenedFile, devices: Sequence[int | None], kind: ProfileKind
) -> Mapping[int | None, HeapProfile]:
    """Profiles of a file by device; devices without the events that the kind needs are left out."""
    present = [device for device in devices if device is not None]
    if not present:
        return {}
    profiles = opened.profiles(kind, present[0] if len(present) == 1 else None)
    return {profile.device: profile for profile in profiles if profile.device in present}


def _signed(size_bytes: int) -> str:
    return f"{'+' if size_bytes > 0 else ''}{human_bytes(size_bytes)}"


def _print_stacks(
    pair: _Pair, comparison: Comparison, kind: ProfileKind, number: int, frames: int
) -> None:
    from gpumem_otel.base.profile import Sizes
    from gpumem_otel.profiles.stack_text import more, short_stack

    delta = comparison.after_bytes - comparison.before_bytes
    units = " (requested bytes)" if comparison.sizes is Sizes.REQUESTED else ""
    click.echo(
        f"{pair.name()}, {kind.value}{units}: {human_bytes(comparison.before_bytes)} -> "
        f"{human_bytes(comparison.after_bytes)} ({_signed(delta)}), "
        f"{comparison.before_objects:,} -> {comparison.after_objects:,} allocations"
    )
    rows = [
        (
            f"  {change.value}",
            _signed(category.delta_bytes),
            human_bytes(category.before_bytes),
            human_bytes(category.after_bytes),
            f"{category.before_objects:,}",
            f"{category.after_objects:,}",
            f"{category.stacks:,}",
        )
        for change, category in comparison.categories.items()
    ]
    headers = ("", "change", "before", "after", "count", "count after", "stacks")
    click.echo(table(headers, rows, left=frozenset({0})), nl=False)
    for change in comparison.changes[:number]:
        lead = (
            f"{change.change.value:6} {_signed(change.delta_bytes):>11}  "
            f"{human_bytes(change.before_bytes):>10} -> {human_bytes(change.after_bytes):>10}  "
            f"{change.before_objects:,}x -> {change.after_objects:,}x"
        )
        click.echo(f"{lead}{'  lines moved' if change.moved else ''}")
        for line in short_stack(change.frames, frames):
            click.echo(f"         {line}")
    left = len(comparison.changes) - number
    if left > 0:
        click.echo(more(left, "changed stack"))


def _stacks_form(pair: _Pair, comparison: Comparison, number: int | None) -> dict[str, object]:
    shown = comparison.changes[:number]
    return {
        **pair.form(),
        **fields_of(comparison, *_SIZES),
        "categories": {
            change.value: fields_of(category, "stacks", *_SIZES)
            for change, category in comparison.categories.items()
        },
        "changes": [
            {
                "change": change.change.value,
                **fields_of(change, *_SIZES),
                "lines_moved": change.moved,
                "frames": frames_of(change.frames),
            }
            for change in shown
        ],
        "changes_left_out": len(comparison.changes) - len(shown),
    }


def _segments(opened: tuple[OpenedFile, OpenedFile], pair: _Pair) -> SegmentComparison:
    from gpumem_otel.profiles.compare import compare_segments

    before, after = opened[0].snapshot, opened[1].snapshot
    return compare_segments(
        () if pair.before is None else before.segments(pair.before),
        () if pair.after is None else after.segments(pair.after),
    )


def _print_segments(pair: _Pair, comparison: SegmentComparison, number: int) -> None:
    from gpumem_otel.profiles.stack_text import count_of, more

    first, second = comparison.only_before, comparison.only_after
    both = _size(after for _, after in comparison.both)
    click.echo(
        f"{pair.name()}: "
        f"{count_of(len(first), 'segment')} only before ({human_bytes(_size(first))}), "
        f"{len(second):,} only after ({human_bytes(_size(second))}), "
        f"{len(comparison.both):,} in both ({human_bytes(both)}), "
        f"{comparison.refilled:,} of these hold more or less"
    )
    click.echo(f"only_before = {[segment.address for segment in first]}")
    click.echo(f"only_after = {[segment.address for segment in second]}")
    for name, segments in (("only_before", first), ("only_after", second)):
        largest = sorted(segments, key=lambda segment: -segment.size_bytes)
        for segment in largest[:number]:
            click.echo(f"{name:11}  {_segment_line(segment)}")
        if len(segments) > number:
            click.echo(f"{name:11}  {more(len(segments) - number, 'segment')}")


def _segment_line(segment: Segment) -> str:
    from gpumem_otel.snapshot.labels import pool_name
    from gpumem_otel.snapshot.layout import allocated_in

    return (
        f"{segment.address:#x}  {human_bytes(segment.size_bytes):>10}  "
        f"allocated {human_bytes(allocated_in(segment)):>10}  stream {segment.stream:#x}  "
        f"pool {pool_name(segment.pool_id)}  {printable(segment.kind)}"
    )


def _size(segments: Iterable[Segment]) -> int:
    return sum(segment.size_bytes for segment in segments)


def _segments_form(pair: _Pair, comparison: SegmentComparison) -> dict[str, object]:
    return {
        **pair.form(),
        "only_before": [_segment_form(segment) for segment in comparison.only_before],
        "only_after": [_segment_form(segment) for segment in comparison.only_after],
        "both": {
            "segments": len(comparison.both),
            "size_bytes": _size(after for _, after in comparison.both),
            "refilled": comparison.refilled,
        },
    }


def _segment_form(segment: Segment) -> dict[str, object]:
    from gpumem_otel.snapshot.layout import allocated_in

    return {
        **fields_of(segment, "address", "size_bytes"),
        "allocated_bytes": allocated_in(segment),
        "stream": segment.stream,
        "pool": list(segment.pool_id),
        "kind": segment.kind,
        "expandable": segment.is_expandable,
    }
