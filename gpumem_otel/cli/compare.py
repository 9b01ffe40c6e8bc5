"""`gpumem-otel compare BEFORE AFTER`: what grew, shrank, came and went between two snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from gpumem_otel.cli.common import ROWS, CommandFailed, open_source, print_json, progress, warn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpumem_otel.base.profile import HeapProfile, ProfileKind, Segment
    from gpumem_otel.profiles.compare import Category, Comparison, SegmentComparison, StackChange
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


class _Pair(NamedTuple):
    """The same device in both files; None: the file has none."""

    before: int | None
    after: int | None


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
@click.option("--device", type=int, metavar="N", help="Only this device.")
@click.option("-n", "--number", type=ROWS, help="Rows a device; by default 10, in JSON all.")
@click.option(
    "--frames", type=click.IntRange(1), default=4, show_default=True, help="Frames of a stack."
)
@click.option("--exact-lines", is_flag=True, help="Do not match stacks whose lines have moved.")
@click.option("--json", "as_json", is_flag=True, help="Bytes and whole stacks as JSON.")
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

    if before == after == "-":
        raise click.UsageError("only one of BEFORE and AFTER can be standard input")
    if by == "segment" and kind is not None:
        raise click.UsageError("--kind is about stacks: leave it out with --by segment")
    chosen = ProfileKind(kind or "live")
    opened = (open_source(before), open_source(after))
    snapshots = (opened[0].snapshot, opened[1].snapshot)
    pairs = _pairs(*snapshots, device)
    if not as_json:
        for warning in _warnings(opened, chosen):
            warn(warning)
        if not pairs:
            click.echo("no memory of any device in either file")
    if by == "segment":
        _by_segment(opened, pairs, number, as_json=as_json)
        return
    with progress("adding up"):
        profiles = (
            _profiles(opened[0], [pair.before for pair in pairs], chosen),
            _profiles(opened[1], [pair.after for pair in pairs], chosen),
        )
        found = [
            (pair, _comparison(*profiles, pair, chosen, exact_lines=exact_lines)) for pair in pairs
        ]
    if as_json:
        told = _warnings(opened, chosen)
        forms = [_form(pair, comparison, number) for pair, comparison in found]
        print_json({"by": by, "kind": chosen.value, "devices": forms, "warnings": told})
        return
    for pair, comparison in found:
        _print(pair, comparison, chosen, number or _SHOWN, frames)


def _warnings(opened: Sequence[OpenedFile], kind: ProfileKind) -> list[str]:
    return [f"{one.snapshot.source}: {told}" for one in opened for told in one.warnings_of(kind)]


def _pairs(before: TorchSnapshot, after: TorchSnapshot, device: int | None) -> list[_Pair]:
    """Which devices to compare.

    Raises:
        click.BadParameter: neither file has the device asked for.
    """
    first, second = before.devices(), after.devices()
    if device is not None:
        if device not in {*first, *second}:
            there = ", ".join(map(str, sorted({*first, *second}))) or "none"
            raise click.BadParameter(
                f"device {device} is in neither file (devices: {there})", param_hint="'--device'"
            )
        first = tuple(one for one in first if one == device)
        second = tuple(one for one in second if one == device)
    elif len(first) == len(second) == 1:
        # two ranks of a job, each with a device of its own
        return [_Pair(first[0], second[0])]
    return [
        _Pair(one if one in first else None, one if one in second else None)
        for one in sorted({*first, *second})
    ]


def _profiles(
    opened: OpenedFile, devices: Sequence[int | None], kind: ProfileKind
) -> dict[int, HeapProfile]:
    """Of a file; devices without the events that the kind needs are left out.

    Raises:
        NoHistoryError: no device has them.
    """
    there = [device for device in devices if device is not None]
    if not there:
        return {}
    found = opened.profiles(kind, there[0] if len(there) == 1 else None)
    return {profile.device: profile for profile in found if profile.device in there}


def _comparison(
    before: Mapping[int, HeapProfile],
    after: Mapping[int, HeapProfile],
    pair: _Pair,
    kind: ProfileKind,
    *,
    exact_lines: bool,
) -> Comparison:
    from gpumem_otel.base.profile import HeapProfile
    from gpumem_otel.profiles.compare import compare_profiles

    def of(profiles: Mapping[int, HeapProfile], device: int | None) -> HeapProfile:
        none = HeapProfile(kind, -1, ())
        return none if device is None else profiles.get(device, none)

    try:
        return compare_profiles(
            of(before, pair.before), of(after, pair.after), exact_lines=exact_lines
        )
    except ValueError as error:
        raise CommandFailed(
            f"{kind.value} of a recording and of a snapshot file: {error}"
        ) from None


def _name(pair: _Pair) -> str:
    if pair.before == pair.after:
        return f"device {pair.before}"
    if pair.before is None or pair.after is None:
        only = "before" if pair.after is None else "after"
        return f"device {pair.before if pair.after is None else pair.after} (only {only})"
    return f"device {pair.before} before, {pair.after} after"


def _signed(size_bytes: int) -> str:
    from gpumem_otel.base.text import human_bytes

    return f"{'+' if size_bytes > 0 else ''}{human_bytes(size_bytes)}"


def _print(
    pair: _Pair, comparison: Comparison, kind: ProfileKind, number: int, frames: int
) -> None:
    from gpumem_otel.base.profile import Sizes
    from gpumem_otel.base.text import human_bytes, table
    from gpumem_otel.profiles.stack_text import more, short_stack

    delta = comparison.after_bytes - comparison.before_bytes
    units = " (requested bytes)" if comparison.sizes is Sizes.REQUESTED else ""
    click.echo(
        f"{_name(pair)}, {kind.value}{units}: {human_bytes(comparison.before_bytes)} -> "
        f"{human_bytes(comparison.after_bytes)} ({_signed(delta)}), "
        f"{comparison.before_objects:,} -> {comparison.after_objects:,} allocations"
    )
    rows = [
        (
            f"  {change.value}",
            _signed(sums.delta_bytes),
            human_bytes(sums.before_bytes),
            human_bytes(sums.after_bytes),
            f"{sums.before_objects:,}",
            f"{sums.after_objects:,}",
            f"{sums.stacks:,}",
        )
        for change, sums in comparison.categories.items()
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


def _form(pair: _Pair, comparison: Comparison, number: int | None) -> dict[str, object]:
    shown = comparison.changes[:number]
    return {
        "device_before": pair.before,
        "device_after": pair.after,
        "before_bytes": comparison.before_bytes,
        "after_bytes": comparison.after_bytes,
        "before_objects": comparison.before_objects,
        "after_objects": comparison.after_objects,
        "categories": {
            change.value: _category_form(sums) for change, sums in comparison.categories.items()
        },
        "changes": [_change_form(change) for change in shown],
        "changes_left_out": len(comparison.changes) - len(shown),
    }


def _category_form(sums: Category) -> dict[str, int]:
    return {
        "stacks": sums.stacks,
        "before_bytes": sums.before_bytes,
        "after_bytes": sums.after_bytes,
        "before_objects": sums.before_objects,
        "after_objects": sums.after_objects,
    }


def _change_form(change: StackChange) -> dict[str, object]:
    return {
        "change": change.change.value,
        "before_bytes": change.before_bytes,
        "after_bytes": change.after_bytes,
        "before_objects": change.before_objects,
        "after_objects": change.after_objects,
        "lines_moved": change.moved,
        "frames": [{"name": f.name, "filename": f.filename, "line": f.line} for f in change.frames],
    }


def _by_segment(
    opened: tuple[OpenedFile, OpenedFile],
    pairs: Sequence[_Pair],
    number: int | None,
    *,
    as_json: bool,
) -> None:
    from gpumem_otel.base.profile import ProfileKind
    from gpumem_otel.profiles.compare import compare_segments

    before, after = opened[0].snapshot, opened[1].snapshot
    found = [
        (
            pair,
            compare_segments(
                () if pair.before is None else before.segments(pair.before),
                () if pair.after is None else after.segments(pair.after),
            ),
        )
        for pair in pairs
    ]
    if as_json:
        forms = [_segments_form(pair, comparison) for pair, comparison in found]
        warnings = _warnings(opened, ProfileKind.LIVE)
        print_json({"by": "segment", "devices": forms, "warnings": warnings})
        return
    for pair, comparison in found:
        _print_segments(pair, comparison, number or _SHOWN)


def _print_segments(pair: _Pair, comparison: SegmentComparison, number: int) -> None:
    from gpumem_otel.base.text import human_bytes
    from gpumem_otel.profiles.stack_text import count_of, more

    first, second = comparison.only_before, comparison.only_after
    both = sum(after.size_bytes for _, after in comparison.both)
    click.echo(
        f"{_name(pair)}: "
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
    from gpumem_otel.base.text import human_bytes, printable
    from gpumem_otel.snapshot.labels import pool_name
    from gpumem_otel.snapshot.layout import allocated_in

    return (
        f"{segment.address:#x}  {human_bytes(segment.size_bytes):>10}  "
        f"allocated {human_bytes(allocated_in(segment)):>10}  stream {segment.stream:#x}  "
        f"pool {pool_name(segment.pool_id)}  {printable(segment.kind)}"
    )


def _size(segments: Sequence[Segment]) -> int:
    return sum(segment.size_bytes for segment in segments)


def _segments_form(pair: _Pair, comparison: SegmentComparison) -> dict[str, object]:
    return {
        "device_before": pair.before,
        "device_after": pair.after,
        "only_before": [_segment_form(segment) for segment in comparison.only_before],
        "only_after": [_segment_form(segment) for segment in comparison.only_after],
        "both": {
            "segments": len(comparison.both),
            "size_bytes": sum(after.size_bytes for _, after in comparison.both),
            "refilled": comparison.refilled,
        },
    }


def _segment_form(segment: Segment) -> dict[str, object]:
    from gpumem_otel.snapshot.layout import allocated_in

    return {
        "address": segment.address,
        "size_bytes": segment.size_bytes,
        "allocated_bytes": allocated_in(segment),
        "stream": segment.stream,
        "pool": list(segment.pool_id),
        "kind": segment.kind,
        "expandable": segment.is_expandable,
    }
