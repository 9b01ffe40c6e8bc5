"""Memory over time for a page: from the events of a trace, or from the readings of a recording."""

from __future__ import annotations

import re
from array import array
from heapq import heappop, heappush, nlargest
from operator import sub
from typing import TYPE_CHECKING, Any

from gpumem_otel.base.aggregate import add
from gpumem_otel.base.text import human_bytes
from gpumem_otel.page.columns import OTHER_NODE
from gpumem_otel.profiles.heap import live_profile
from gpumem_otel.snapshot.labels import AnnotatedRanges
from gpumem_otel.snapshot.roots import builder_for, stackless_root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.base.profile import Sample
    from gpumem_otel.base.protocols import FrameNamer
    from gpumem_otel.page.columns import Columns, PageStacks
    from gpumem_otel.recording.recorded import RecordedReading
    from gpumem_otel.snapshot.snapshot import TorchSnapshot
    from gpumem_otel.snapshot.trace import Replay, TraceMark

MAX_ALLOCATIONS = 1_500_000
"""Of a longer trace the largest; what the others hold at a moment is in [other] there."""
MAX_MOMENTS = 2_000_000
"""Of a longer trace the lowest and the highest of neighbours; the peak is always there."""
_MAX_SPANS = 20_000
_MAX_LANES = 256
"""Real ranges nest ten deep."""
_MAX_LABEL = 200
"""Characters; thousands of marks and ranges may share a long text."""
_MAX_READING_SAMPLES = 4_000_000
_BYTES = re.compile(r"(\d+)( bytes| free)")


def events_form(
    snapshot: TorchSnapshot,
    device: int,
    stacks: PageStacks,
    columns: Columns,
    namer: FrameNamer,
    *,
    max_allocations: int = MAX_ALLOCATIONS,
    max_moments: int = MAX_MOMENTS,
) -> tuple[dict[str, Any], list[str]]:
    """A trace, and what a reader should know about what was left out.

    The page finds what was alive at a moment from the births and deaths; `allocated` is exact at
    every moment that is kept, so that what was left out is never missing from a sum.

    Args:
        snapshot: whose trace has events.
        device: torch's index.
        stacks: takes the stacks.
        columns: takes the columns.
        namer: names Python frames.
        max_allocations: how many to keep.
        max_moments: how many to keep.
    """
    replay = snapshot.replay(device)
    notes: list[str] = []
    kept = _kept_moments(replay, max_moments)
    allocated = _chosen(replay.allocated_bytes, kept)
    times = _chosen(replay.time_us, kept)
    if kept is not None:
        notes.append(
            f"device {device}: the timeline shows {len(kept)} of {replay.events + 1} moments, the "
            "lowest and the highest of each few neighbours"
        )
    allocations, note = _allocations(
        snapshot, replay, stacks, columns, namer, max_allocations=max_allocations
    )
    known = min(times, default=-1) >= 0
    spans, left_out = _spans(snapshot, device) if known else ([], 0)
    if left_out:
        notes.append(
            f"device {device}: {left_out} annotated ranges are not in the timeline, the shortest "
            f"and those more than {_MAX_LANES} deep"
        )
    form = {
        "device": device,
        "what": "events",
        "unit": "requested bytes",
        "moment": None if kept is None else columns.add("u32", kept, delta=True),
        "time": columns.add("f64", times, delta=True) if known else None,
        "allocated": columns.add("f64", allocated, delta=True),
        "reserved": columns.add("f64", _chosen(replay.reserved_bytes, kept), delta=True),
        "peak": replay.peak_moment if kept is None else kept.index(replay.peak_moment),
        "marks": _marks(replay.marks),
        "spans": spans,
        "allocations": allocations,
        "readings": None,
    }
    return form, notes + note


def _kept_moments(replay: Replay, limit: int) -> list[int] | None:
    """The moments to show; None: all."""
    held = replay.allocated_bytes
    if len(held) <= limit:
        return None
    each = -(-2 * len(held) // (limit - 3))
    kept = {0, len(held) - 1, replay.peak_moment}
    for start in range(0, len(held), each):
        part = held[start : start + each]
        kept.add(start + part.index(min(part)))
        kept.add(start + part.index(max(part)))
    return sorted(kept)


def _chosen(values: array[int], kept: list[int] | None) -> array[int]:
    return values if kept is None else array(values.typecode, (values[index] for index in kept))


def _allocations(
    snapshot: TorchSnapshot,
    replay: Replay,
    stacks: PageStacks,
    columns: Columns,
    namer: FrameNamer,
    *,
    max_allocations: int,
) -> tuple[dict[str, Any], list[str]]:
    total = len(replay.size_bytes)
    notes: list[str] = []
    chosen: Sequence[int] = range(total)
    if total > max_allocations:
        chosen = sorted(nlargest(max_allocations, chosen, key=replay.size_bytes.__getitem__))
        notes.append(
            f"device {replay.device}: of a moment in the timeline the page knows the stacks of the "
            f"{max_allocations} largest of {total} allocations, the others are in [other]"
        )
    builder = builder_for(snapshot, namer)
    totals: dict[int, int] = {}
    for index in chosen:
        stack = replay.stack[index]
        totals[stack] = totals.get(stack, 0) + replay.size_bytes[index]
    # the largest first, should there not be room for all
    of_stack = {
        stack: stacks.node(builder.build(replay.stacks[stack]))
        for stack in sorted(totals, key=lambda stack: -totals[stack])
        if stack
    }
    bare = {has: stacks.node(builder.root(stackless_root(has))) for has in (False, True)}
    traced = replay.traced
    nodes = (
        of_stack[replay.stack[index]] if replay.stack[index] else bare[index in traced]
        for index in chosen
    )
    if len(chosen) == total:
        sizes, born, died = replay.size_bytes, replay.born, replay.died
    else:
        sizes, born, died = (
            array(values.typecode, (values[index] for index in chosen))
            for values in (replay.size_bytes, replay.born, replay.died)
        )
    form = {
        "node": columns.add("u32", nodes),
        "bytes": columns.add("f64", sizes),
        "born": columns.add("u32", born, delta=True),
        "life": columns.add("u32", map(sub, died, born)),
        "left_out": sum(replay.size_bytes) - sum(sizes),
    }
    return form, notes


def _marks(marks: Sequence[TraceMark]) -> list[dict[str, Any]]:
    return [
        {
            "moment": mark.moment,
            "action": mark.action,
            "text": _human(mark.text) if mark.action == "oom" else mark.text[:_MAX_LABEL],
        }
        for mark in marks
    ]


def _human(text: str) -> str:
    def shown(match: re.Match[str]) -> str:
        return human_bytes(int(match[1])) + match[2].removesuffix(" bytes")

    return _BYTES.sub(shown, text)


def _spans(snapshot: TorchSnapshot, device: int) -> tuple[list[dict[str, Any]], int]:
    """Annotated ranges, in lanes in which none overlaps another; how many are left out."""
    ranges = AnnotatedRanges(snapshot.annotations_of(device)).ranges
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (until, lane)
    spans = []
    for name, start, end in ranges:
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        heappush(busy, (2**63 if end is None else end, lane))
        if lane < _MAX_LANES:
            span = {"name": name[:_MAX_LABEL], "from_us": start, "to_us": end, "lane": lane}
            spans.append(span)
    if len(spans) > _MAX_SPANS:
        longest = nlargest(_MAX_SPANS, spans, key=_length)
        spans = sorted(longest, key=lambda span: (span["from_us"], span["lane"]))
    return spans, len(ranges) - len(spans)


def _length(span: dict[str, Any]) -> int:
    length: int = (2**63 if span["to_us"] is None else span["to_us"]) - span["from_us"]
    return length


def readings_form(
    readings: Sequence[RecordedReading],
    device: int,
    stacks: PageStacks,
    columns: Columns,
    namer: FrameNamer,
    *,
    max_samples: int = _MAX_READING_SAMPLES,
) -> tuple[dict[str, Any], int, list[str]]:
    """The readings of a recording: each is a moment, with what was alive at it.

    Args:
        readings: those that hold the device, in order of time.
        device: torch's index.
        stacks: takes the stacks.
        columns: takes the columns.
        namer: names frames.
        max_samples: of all readings together.

    Returns:
        the timeline, the index of the reading with the most allocated, and what a reader should
        know about what was merged.
    """
    each = max(100, max_samples // max(1, len(readings)))
    start, node, objects, sizes = [0], array("I"), array("Q"), array("Q")
    allocated, reserved = array("Q"), array("Q")
    merged = 0
    for reading in readings:
        snapshot = reading.snapshot
        samples = live_profile(snapshot, device, namer=namer).samples
        merged += max(0, len(samples) - each)
        for leaf, number, size in _largest(samples, stacks, each):
            node.append(leaf)
            objects.append(number)
            sizes.append(size)
        start.append(len(node))
        totals = snapshot.totals(device)
        allocated.append(totals.allocated_bytes)
        reserved.append(totals.reserved_bytes)
    peak = allocated.index(max(allocated))
    notes = []
    if merged:
        notes.append(
            f"device {device}: the timeline keeps {each} stacks of each reading, the smallest are "
            "in [other]"
        )
    form = {
        "device": device,
        "what": "readings",
        "unit": "bytes as the allocator rounds them",
        "moment": None,
        "time": columns.add("f64", (reading.time_ns // 1000 for reading in readings), delta=True),
        "allocated": columns.add("f64", allocated, delta=True),
        "reserved": columns.add("f64", reserved, delta=True),
        "peak": peak,
        "marks": [],
        "spans": [],
        "allocations": None,
        "readings": {
            "start": columns.add("u32", start, delta=True),
            "node": columns.add("u32", node),
            "objects": columns.add("f64", objects),
            "bytes": columns.add("f64", sizes),
        },
    }
    return form, peak, notes


def _largest(
    samples: Sequence[Sample], stacks: PageStacks, limit: int
) -> list[tuple[int, int, int]]:
    """(node, objects, bytes) of samples, the largest first; what is beyond the limit in one."""
    totals: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        node = stacks.node(sample.frames) if place < limit else OTHER_NODE
        add(totals, node, sample.objects, sample.size_bytes)
    return [(node, objects, size) for node, (objects, size) in totals.items()]
