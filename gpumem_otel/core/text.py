"""Tables for people, in plain text. Bytes become GiB only here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_otel.core.frames import basename
from gpumem_otel.core.model import Sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpumem_otel.core.model import DeviceBooks, DeviceStats, Frame, HeapProfile, Stack

__all__ = [
    "TopRow",
    "books_table",
    "by_size",
    "human_bytes",
    "percent",
    "printable",
    "stack_lines",
    "stats_table",
    "table",
    "top_rows",
    "top_table",
]

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_NO_FILE = "[no file]"
# C0, C1, DEL, and what turns or hides text: a name must not drive the reader's terminal
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2064\u2066-\u2069\ufeff]"
)


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


def human_bytes(size_bytes: int) -> str:
    """Bytes in the largest unit of 1024 that they fill, rounded half up: "75.8 GiB"."""
    sign = "-" if size_bytes < 0 else ""
    size = abs(size_bytes)
    if size < 1024:  # noqa: PLR2004 (the unit)
        return f"{sign}{size} B"
    power, tenths = 0, 10240
    while tenths >= 10240 and power < len(_UNITS):  # noqa: PLR2004 (1024.0 is 1 of the next)
        power += 1
        scale = 1024**power
        # whole numbers throughout: a float loses bytes beyond 8 PiB and rounds halves to even
        tenths = (size * 20 + scale) // (2 * scale)
    return f"{sign}{tenths // 10}.{tenths % 10} {_UNITS[power - 1]}"


def by_size(sizes: Mapping[str, int]) -> str:
    """Names with their bytes, the largest first: "gradient 4.0 GiB, parameter 2.0 GiB"."""
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {human_bytes(size)}" for name, size in ordered)


def percent(part: int, whole: int) -> str:
    """Share in percent with one digit; "-" where there is no whole."""
    if whole <= 0:
        return "-"
    return f"{100 * part / whole:.1f}%"


def printable(text: str) -> str:
    """The text without anything that a terminal would act on."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, left: frozenset[int]) -> str:
    """Columns under their headers, two blanks apart.

    Args:
        headers: one per column.
        rows: cells as text.
        left: columns aligned to the left; the others are numbers, aligned to the right.
    """
    lines = [list(headers), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        + "\n"
        for line in lines
    )


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


def books_table(books: Iterable[DeviceBooks]) -> str:
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
        for b in books
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
    sums: dict[str, list[int]] = {}
    for sample in profile.samples:
        value = dict(sample.labels).get(key)
        if value is None:
            raise ValueError(f"top by {key!r}: neither a way to sum up nor a label of each sample")
        entry = sums.setdefault(value, [0, 0])
        entry[0] += sample.objects
        entry[1] += sample.size_bytes
    rows = [TopRow(name, own, size, size) for name, (own, size) in sums.items()]
    rows.sort(key=lambda row: (-row.self_bytes, row.name))
    return rows


def _rows_by(profile: HeapProfile, name_of: Callable[[Frame], str]) -> list[TopRow]:
    sums: dict[str, list[int]] = {}
    for sample in profile.samples:
        own = sums.setdefault(name_of(sample.frames[0]), [0, 0, 0])
        own[0] += sample.objects
        own[1] += sample.size_bytes
        for name in {name_of(frame) for frame in sample.frames}:
            sums.setdefault(name, [0, 0, 0])[2] += sample.size_bytes
    rows = [TopRow(name, own, size, total) for name, (own, size, total) in sums.items()]
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
