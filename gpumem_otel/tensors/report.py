"""The tensor report: its values, and what it looks like as text, JSON and columns.

One row per tensor, and per device the allocator's figure with the parts that add up to it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from gpumem_otel.base.text import human_bytes, printable
from gpumem_otel.profiles.tables import stack_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gpumem_otel.base.profile import Stack
    from gpumem_otel.snapshot.tensor_classes import TensorClass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFields:
    """What is known of a tensor without the allocator, or of one part of a wrapper around several.

    Attributes:
        name: as inferred; unique on its device but for tensors that share a name in the job.
        device: as torch writes it, `cuda:0`.
        shape: sizes; a size that is no number (nested tensors) as text.
        kind: Python type, with the layout where it is not strided: `Parameter`, `DTensor`.
        elements: how many, 0 where that is unknown.
        tensor_bytes: of its elements.
        address: where its storage begins, 0 where it has no memory.
        aliases: other names that the models have for the same tensor (tied weights).
    """

    name: str
    device: str
    shape: tuple[int | str, ...]
    dtype: str
    kind: str
    elements: int
    tensor_bytes: int
    address: int
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTensor(TensorFields):
    """What the walk knows of one tensor.

    Attributes:
        storage_bytes: that its storage asked the allocator for.
        storage: identifies the storage: its address, or a number below 0 where it has none.
        tensor_class: None where the walk does not know it.
        saved: held by autograd alone, for backward.
    """

    storage_bytes: int
    storage: int
    tensor_class: TensorClass | None = None
    saved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo(TensorFields):
    """One row.

    Attributes:
        used_bytes: that its storage asked for; 0 where an earlier row has this storage.
        shares: name of that row, "" where this is the first of its storage.
        block_bytes: of the allocator's block that holds it, rounding included; None where there is
            none (CPU, memory that torch did not allocate), 0 where an earlier row has this block.
        requested_bytes: that were asked for that block, by the allocator's own count.
        stack: that allocated the block, leaf first; () where it is unknown.
    """

    used_bytes: int
    shares: str
    tensor_class: TensorClass
    block_bytes: int | None
    requested_bytes: int | None
    stack: Stack


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A named part of a total.

    Attributes:
        examples: what is in it, the largest first.
    """

    name: str
    size_bytes: int
    count: int = 0
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """All rows of one device and their totals.

    Attributes:
        rows: tensors that Python holds.
        saved: tensors that autograd alone holds.
        allocated_bytes: the allocator's figure; None where there is none (CPU) or it cannot be
            read.
        parts: add up to `allocated_bytes`; () where that is None.
        reserved_bytes: from the device, for this process.
        cached: by cause; they add up to reserved minus allocated.
        classes: bytes of the allocator's blocks by class, adding up to what the snapshot held;
            without a snapshot the bytes of the rows' storages.
    """

    device: str
    rows: tuple[TensorInfo, ...]
    saved: tuple[TensorInfo, ...] = ()
    allocated_bytes: int | None = None
    parts: tuple[TensorPart, ...] = ()
    reserved_bytes: int | None = None
    cached: tuple[TensorPart, ...] = ()
    classes: tuple[TensorPart, ...] = ()

    @property
    def used_bytes(self) -> int:
        """Bytes that the distinct storages of all rows asked for."""
        return sum(row.used_bytes for row in self.rows)

    @property
    def elements(self) -> int:
        """Of all rows; those of a shared storage count for each tensor."""
        return sum(row.elements for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """The whole report.

    Attributes:
        notes: what a reader of the numbers should know, one sentence each.
    """

    devices: tuple[DeviceReport, ...]
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[TensorInfo, ...]:
        """The rows of all devices."""
        return tuple(row for device in self.devices for row in device.rows)


def place_of(stack: Stack) -> str:
    """The innermost frame that is not torch's own, else the innermost, with file and line."""
    if not stack:
        return ""
    frame = next((f for f in stack if not _is_of_torch(f.name, f.filename)), stack[0])
    if not frame.filename or frame.filename == "??":
        return frame.name
    where = frame.filename.replace("\\", "/").rpartition("/")[2]
    return f"{frame.name} ({where}:{frame.line})" if frame.line else f"{frame.name} ({where})"


def _is_of_torch(name: str, filename: str) -> bool:
    path = filename.replace("\\", "/")
    return name.startswith("torch.") or "/torch/" in path or path.endswith((".cpp", "??"))


_COLUMNS = (
    "name", "device", "tensor_class", "shape", "dtype", "kind", "elements", "tensor_bytes",
    "used_bytes", "block_bytes", "shares", "saved", "allocated_by", "address",
)  # fmt: skip


def columns(data: ReportData) -> dict[str, list[Any]]:
    """The rows as columns of a table; sizes are bytes."""
    rows = [
        {**_values(row), "saved": saved, "allocated_by": place_of(row.stack)}
        for saved in (False, True)
        for device in data.devices
        for row in (device.saved if saved else device.rows)
    ]
    return {column: [row[column] for row in rows] for column in _COLUMNS}


def _values(row: TensorInfo) -> dict[str, Any]:
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    return {**values, "tensor_class": row.tensor_class.value}


def to_json(data: ReportData) -> dict[str, Any]:
    """The report as plain dicts and lists; sizes are bytes, stacks leaf first."""
    return {
        "devices": [
            {
                "device": device.device,
                "used_bytes": device.used_bytes,
                "elements": device.elements,
                "allocated_bytes": device.allocated_bytes,
                "reserved_bytes": device.reserved_bytes,
                "parts": [asdict(part) for part in device.parts],
                "cached": [asdict(part) for part in device.cached],
                "classes": {part.name: part.size_bytes for part in device.classes},
                "tensors": [_json_row(row) for row in device.rows],
                "saved": [_json_row(row) for row in device.saved],
            }
            for device in data.devices
        ],
        "notes": list(data.notes),
    }


def _json_row(row: TensorInfo) -> dict[str, Any]:
    return {
        **_values(row),
        "shape": list(row.shape),
        "aliases": list(row.aliases),
        "stack": [[frame.name, frame.filename, frame.line] for frame in row.stack],
    }


# As text.

_HEADERS = ("Element type", "Size", "Used MEM", "Block", "Class", "dtype", "Allocated by")
_LEFT = frozenset({0, 4, 5, 6})
_BLOCK, _PLACE = 3, 6
_RULE = 79


def report_text(data: ReportData, *, verbose: bool = False) -> str:
    """Rows by device under one header, then their totals.

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
    for column, empty in ((_BLOCK, "-"), (_PLACE, "")):  # left out where nothing is known
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


def _part(part: TensorPart) -> str:
    count = f" ({part.count})" if part.count else ""
    examples = f": {', '.join(map(printable, part.examples))}" if any(part.examples) else ""
    return f"{human_bytes(part.size_bytes):>12}  {part.name}{count}{examples}"


def _exact(size_bytes: int) -> str:
    return f"{human_bytes(size_bytes)} ({size_bytes} bytes)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
