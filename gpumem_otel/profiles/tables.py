"""Profiles and totals as tables of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_otel.base.aggregate import add
from gpumem_otel.base.profile import Sizes
from gpumem_otel.base.text import human_bytes, percent, printable, table
from gpumem_otel.snapshot.stacks import basename

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpumem_otel.base.profile import DeviceStats, DeviceTotals, Frame, HeapProfile, Stack

_NO_FILE = "[no file]"


@dataclass(frozen=True, slots=True)
class TopRow:
    """One line of a list of what holds most.

    Attributes:
        name: function, file, or the leaf of the stack.
        objects: allocations made there itself.
        self_bytes: of allocations made there itself.
        total_bytes: of those made there or in what it called.
        stack: the whole stack, leaf first, where the list is by stack; else ().
    """

    name: str
    objects: int
    self_bytes: int
    total_bytes: int
    stack: Stack = ()


def top_rows(profile: HeapProfile, by: str = "stack", limit: int | None = None) -> list[TopRow]:
    """What holds most, the largest first.

    A function that calls itself counts once per stack, so its total is never more than the
    profile's.

    Args:
        profile: of any kind.
        by: `stack`; `function`, `file` or `line`, where a row's total counts what it called; or the
            key of a label that the samples carry, where self and total are the same.
        limit: rows at most.

    Raises:
        ValueError: `by` is none of these.
    """
    name_of = {"function": _function, "file": _file, "line": _line}.get(by)
    if by == "stack":
        rows = [
            TopRow(s.frames[0].name, s.objects, s.size_bytes, s.size_bytes, s.frames)
            for s in profile.samples
        ]
        rows.sort(key=lambda row: -row.self_bytes)
    elif name_of is not None:
        rows = _rows_by(profile, name_of)
    else:
        rows = _rows_by_label(profile, by)
    return rows if limit is None else rows[: max(0, limit)]


def top_table(profile: HeapProfile, by: str = "stack", limit: int = 10) -> str:
    """`top_rows` as a table, with a line that says how much it shows; stacks are written out."""
    rows = top_rows(profile, by, limit)
    total = profile.total_bytes
    shown = sum(row.self_bytes for row in rows)
    units = " (requested bytes)" if profile.sizes is Sizes.REQUESTED else ""
    where = "all devices" if profile.device < 0 else f"device {profile.device}"
    title = (
        f"{where}, {profile.kind.value}{units}: {human_bytes(total)} in "
        f"{profile.total_objects} allocations; shown: {percent(shown, total)}\n"
    )
    if not rows:
        return title
    if by == "stack":
        return title + "".join(_stack_block(row, total) for row in rows)
    cells = [
        (
            human_bytes(row.self_bytes),
            percent(row.self_bytes, total),
            human_bytes(row.total_bytes),
            percent(row.total_bytes, total),
            str(row.objects),
            row.name,
        )
        for row in rows
    ]
    headers = ("self", "self%", "total", "total%", "objects", by)
    return title + table(headers, cells, left=frozenset({5}))


def stack_lines(stack: Stack) -> list[str]:
    """A stack for people, leaf first: name and where it is."""
    return [printable(f"{frame.name}{_place(frame)}") for frame in stack]


def totals_table(totals: Iterable[DeviceTotals]) -> str:
    """One row per device: what its allocator holds."""
    cells = [
        (
            str(b.device),
            human_bytes(b.reserved_bytes),
            human_bytes(b.allocated_bytes),
            human_bytes(b.active_bytes),
            human_bytes(b.requested_bytes),
            str(b.segments),
            str(b.blocks),
            human_bytes(b.bytes_without_stack),
            "yes" if b.history else "no",
        )
        for b in totals
    ]
    headers = (
        "device",
        "reserved",
        "allocated",
        "active",
        "requested",
        "segments",
        "blocks",
        "without stack",
        "history",
    )
    return table(headers, cells, left=frozenset())


def stats_table(stats: Iterable[DeviceStats]) -> str:
    """One row per device: its allocator's counters now; "-" for what is unknown."""
    cells = [
        (
            str(s.device),
            human_bytes(s.allocated_bytes),
            human_bytes(s.allocated_peak_bytes),
            human_bytes(s.reserved_bytes),
            "-" if s.limit_bytes is None else human_bytes(s.limit_bytes),
            "-" if s.device_used_bytes is None else human_bytes(s.device_used_bytes),
            str(s.allocations),
            str(s.ooms),
        )
        for s in stats
    ]
    headers = ("device", "allocated", "peak", "reserved", "limit", "used", "allocations", "ooms")
    return table(headers, cells, left=frozenset())


def _function(frame: Frame) -> str:
    return frame.name


def _file(frame: Frame) -> str:
    if frame.filename in ("", "??"):
        return frame.name if frame.name.startswith("[") else _NO_FILE
    return frame.filename


def _line(frame: Frame) -> str:
    file = _file(frame)
    return f"{file}:{frame.line}" if frame.line and file == frame.filename else file


def _rows_by_label(profile: HeapProfile, key: str) -> list[TopRow]:
    totals: dict[str, list[int]] = {}
    for sample in profile.samples:
        value = dict(sample.labels).get(key)
        if value is None:
            raise ValueError(f"top by {key!r}: neither a way to sum up nor a label of each sample")
        add(totals, value, sample.objects, sample.size_bytes)
    rows = [TopRow(name, own, size, size) for name, (own, size) in totals.items()]
    rows.sort(key=lambda row: (-row.self_bytes, row.name))
    return rows


def _rows_by(profile: HeapProfile, name_of: Callable[[Frame], str]) -> list[TopRow]:
    totals: dict[str, list[int]] = {}
    for sample in profile.samples:
        own = totals.setdefault(name_of(sample.frames[0]), [0, 0, 0])
        own[0] += sample.objects
        own[1] += sample.size_bytes
        for name in {name_of(frame) for frame in sample.frames}:
            totals.setdefault(name, [0, 0, 0])[2] += sample.size_bytes
    rows = [TopRow(name, own, size, total) for name, (own, size, total) in totals.items()]
    rows.sort(key=lambda row: (-row.self_bytes, -row.total_bytes, row.name))
    return rows


def _stack_block(row: TopRow, total: int) -> str:
    head = f"\n{human_bytes(row.self_bytes)} ({percent(row.self_bytes, total)})"
    lines = "".join(f"    {line}\n" for line in stack_lines(row.stack))
    return f"{head} in {row.objects} allocations\n{lines}"


def _place(frame: Frame) -> str:
    if frame.filename in ("", "??"):
        return ""
    where = basename(frame.filename)
    return f" ({where}:{frame.line})" if frame.line else f" ({where})"
