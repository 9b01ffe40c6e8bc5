"""The tensor report as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_otel.core.tensor_report import place_of
from gpumem_otel.core.text import human_bytes, printable, stack_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gpumem_otel.core.tensor_report import DeviceReport, Part, ReportData, TensorInfo

__all__ = ["report_text"]

_HEADERS = ("Element type", "Size", "Used MEM", "Block", "Class", "dtype", "Allocated by")
_LEFT = frozenset({0, 4, 5, 6})
_BLOCK, _PLACE = 3, 6
_RULE = 79


def report_text(data: ReportData, *, verbose: bool = False) -> str:
    """Rows by device under one header, then what they add up to.

    Args:
        data: what to show.
        verbose: also the other names of tied weights, and every stack in full.
    """
    cells = {
        id(row): _cells(row) for device in data.devices for row in (*device.rows, *device.saved)
    }
    widths = [len(header) for header in _HEADERS]
    for line in cells.values():
        widths = [max(width, len(cell)) for width, cell in zip(widths, line, strict=True)]
    for column, empty in ((_BLOCK, "-"), (_PLACE, "")):  # where no allocator tells
        if all(line[column] == empty for line in cells.values()):
            widths[column] = 0
    lines = [_line(_HEADERS, widths)]
    for device in data.devices:
        lines += ["-" * _RULE, f"Storage on {printable(device.device)}"]
        lines += _rows(device.rows, cells, widths, verbose=verbose)
        if device.saved:
            lines.append(f"Saved for backward on {printable(device.device)}, by autograd alone")
            lines += _rows(device.saved, cells, widths, verbose=verbose)
        lines += ["-" * _RULE, *_totals(device)]
    if not data.devices:
        lines += ["-" * _RULE, "No tensors"]
    lines.append("-" * _RULE)
    lines += [f"note: {printable(note)}" for note in data.notes]
    return "".join(f"{line}\n" for line in lines)


def _rows(
    rows: Iterable[TensorInfo],
    cells: dict[int, tuple[str, ...]],
    widths: Sequence[int],
    *,
    verbose: bool,
) -> Iterator[str]:
    for row in rows:
        yield _line(cells[id(row)], widths)
        if verbose:
            for alias in row.aliases:
                name = f"{printable(alias)}(->{printable(row.name)})"
                yield _line((name, cells[id(row)][1], human_bytes(0)), widths)
            yield from (f"    {line}" for line in stack_lines(row.stack))


def _cells(row: TensorInfo) -> tuple[str, ...]:
    name = f"{row.name}(->{row.shares})" if row.shares else row.name
    return (
        printable(name),
        printable(f"({', '.join(map(str, row.shape))}{',' if len(row.shape) == 1 else ''})"),
        human_bytes(row.used_bytes),
        "-" if row.block_bytes is None else human_bytes(row.block_bytes),
        row.tensor_class.value,
        printable(row.dtype),
        printable(place_of(row.stack)),
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(
        cell.ljust(width) if column in _LEFT else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=False))
        if width
    ).rstrip()


def _totals(device: DeviceReport) -> Iterator[str]:
    where = printable(device.device)
    yield (
        f"Total Tensors: {device.elements} elements of {_count(len(device.rows), 'tensor')}"
        f"   Used Memory: {_exact(device.used_bytes)}"
    )
    if device.allocated_bytes is not None:
        yield f"The allocated memory on {where}: {_exact(device.allocated_bytes)}, which is"
        yield from (_part(part) for part in device.parts)
    if device.reserved_bytes is not None:
        cached = ", ".join(f"{human_bytes(p.size_bytes)} {p.name}" for p in device.cached)
        yield f"Reserved on {where}: {_exact(device.reserved_bytes)}; cached: {cached or 'nothing'}"
    if device.classes:
        classes = ", ".join(
            f"{part.name} {human_bytes(part.size_bytes)}" for part in device.classes
        )
        yield f"By class: {classes}"


def _part(part: Part) -> str:
    count = f" ({part.count})" if part.count else ""
    examples = f": {', '.join(map(printable, part.examples))}" if any(part.examples) else ""
    return f"{human_bytes(part.size_bytes):>12}  {part.name}{count}{examples}"


def _exact(size_bytes: int) -> str:
    return f"{human_bytes(size_bytes)} ({size_bytes} bytes)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
