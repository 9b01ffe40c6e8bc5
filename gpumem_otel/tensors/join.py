"""Joins the tensors of a walk with the allocator's blocks, by address, into the tensor report.

The named parts of a device add up to the allocator's `allocated`; memory that no Python object
holds is one of them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from gpumem_otel.snapshot.roots import builder_for, stackless_root
from gpumem_otel.snapshot.tensor_classes import TensorClass, class_of_root
from gpumem_otel.snapshot.torch_format import requested_of
from gpumem_otel.tensors.report import (
    DeviceReport,
    ReportData,
    TensorFields,
    TensorInfo,
    TensorPart,
    place_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpumem_otel.base.profile import DeviceStats, DeviceTotals, Stack
    from gpumem_otel.base.protocols import FrameNamer
    from gpumem_otel.snapshot.reading import Reading
    from gpumem_otel.snapshot.torch_format import RawBlock
    from gpumem_otel.tensors.report import FoundTensor

NOT_INSTALLED = "[no stacks: install() is not active]"
"""Root of a block without a stack where stacks are not recorded."""

_TOP = 3
_NOT_IN_PYTHON = {
    TensorClass.WORKSPACE: "workspace of cuBLAS (probable)",
    TensorClass.ACTIVATION: "saved by autograd or held by C++, in no Python object",
    TensorClass.GRADIENT: "made by backward, in no Python object",
    TensorClass.UNATTRIBUTED: "in no Python object (C++, another library, or freed meanwhile)",
}


def join(
    tensors: Iterable[FoundTensor],
    reading: Reading | None,
    *,
    namer: FrameNamer,
    recorded: bool,
    notes: Sequence[str] = (),
    devices: Sequence[str] = (),
) -> ReportData:
    """The report of these tensors and of the blocks that hold them.

    Args:
        tensors: in the order of the report.
        reading: taken after the walk, None where there is no allocator to read.
        namer: names Python frames.
        recorded: whether stacks are recorded; else a missing one says nothing.
        notes: of the walk.
        devices: only these; all where none is given.
    """
    by_device: dict[str, list[FoundTensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    notes = list(notes)
    indexes: dict[str, int] = {}
    if reading is not None:
        for stats in reading.after:
            if stats.allocated_bytes or f"cuda:{stats.device}" in by_device:
                indexes[f"cuda:{stats.device}"] = stats.device
                by_device.setdefault(f"cuda:{stats.device}", [])
        if any(reading.raced(index) for index in indexes.values()):
            notes.append(
                "another thread allocated or freed while this was read: rows and blocks may not "
                "match"
            )
    reports = []
    for device in sorted(by_device, key=_device_order):
        if devices and device not in devices:
            continue
        blocks = None
        if reading is not None and device in indexes:
            blocks = Blocks(reading, indexes[device], namer, recorded=recorded)
        reports.append(_device_report(device, by_device[device], blocks))
    return ReportData(devices=tuple(reports), notes=tuple(notes))


def _device_order(device: str) -> tuple[bool, str, int]:
    kind, _, index = device.partition(":")
    return (kind == "cpu", kind, int(index) if index.isdigit() else -1)


class Blocks:
    """The live blocks of one device, with what is known of each.

    Args:
        reading: of the allocator.
        device: torch's index.
        namer: names Python frames.
        recorded: whether stacks are recorded; else a missing one says nothing.

    Attributes:
        totals: over all its blocks.
        stats: its allocator's counters, None where they were not read.
    """

    def __init__(self, reading: Reading, device: int, namer: FrameNamer, *, recorded: bool) -> None:
        self.device = device
        snapshot = reading.snapshot
        self.totals: DeviceTotals = snapshot.totals(device)
        self.stats: DeviceStats | None = {s.device: s for s in reading.after}.get(device)
        self._reading = reading
        self._recorded = recorded or self.totals.bytes_without_stack < self.totals.allocated_bytes
        self._builder = builder_for(snapshot, namer)
        self._by_address = _blocks_of(reading, device)
        self._addresses = sorted(self._by_address)

    def at(self, address: int) -> RawBlock | None:
        """The live block that an address is in."""
        place = bisect_right(self._addresses, address) - 1
        if place < 0:
            return None
        start = self._addresses[place]
        block = self._by_address[start]
        return block if address == start or address < start + block["size"] else None

    def all(self) -> Iterable[tuple[int, RawBlock]]:
        """(address, block) of each."""
        return self._by_address.items()

    def stack(self, block: RawBlock) -> Stack:
        """The stack that allocated it, leaf first; its named root where it has none."""
        frames = block.get("frames")
        if frames:
            return self._builder.build(frames)
        return self._builder.root(self._root(block))

    def _root(self, block: RawBlock) -> str:
        stackless = self._reading.stackless
        if not self._recorded:
            return NOT_INSTALLED
        if stackless is None:
            return stackless_root(has_event=False)
        return stackless(self.device, block.get("address"))

    def class_of(self, block: RawBlock) -> TensorClass:
        """Its tensor class; `unattributed` without a classifier."""
        classifier = self._reading.classifier
        if classifier is None:
            return TensorClass.UNATTRIBUTED
        tensor_class = classifier.of_block(block)
        if tensor_class is not None:
            return tensor_class
        frames = block.get("frames")
        return classifier.of_stack(frames) if frames else class_of_root(self._root(block))


def _blocks_of(reading: Reading, device: int) -> dict[int, RawBlock]:
    """The live blocks of a device by address."""
    return {
        address: block
        for segment in reading.snapshot.raw_segments(device)
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and (address := block.get("address")) is not None
    }


class _Totals:
    """Totals of one device while its rows are made.

    Attributes:
        first_of: storage -> name and class of its first row.
        blocks: addresses of the blocks that rows have.
        outside: bytes of storages that are no blocks of their own.
        saved: bytes of blocks that autograd alone holds.
        classes: class -> [bytes, blocks].
    """

    def __init__(self) -> None:
        self.first_of: dict[int, tuple[str, TensorClass]] = {}
        self.blocks: set[int] = set()
        self.rounding = self.outside = self.outside_count = self.saved = 0
        self.saved_names: list[tuple[int, str]] = []
        self.classes: dict[TensorClass, list[int]] = {}

    def add_class(self, tensor_class: TensorClass, size: int) -> None:
        total = self.classes.setdefault(tensor_class, [0, 0])
        total[0] += size
        total[1] += 1


def _device_report(device: str, tensors: list[FoundTensor], blocks: Blocks | None) -> DeviceReport:
    totals = _Totals()
    # first what Python holds: a storage that autograd saved too counts there
    held = [_row(tensor, totals, blocks) for tensor in tensors if not tensor.saved]
    saved = [
        _row(tensor, totals, blocks)
        for tensor in tensors
        if tensor.saved and tensor.storage not in totals.first_of
    ]
    report = DeviceReport(device=device, rows=tuple(held), saved=tuple(saved))
    if blocks is None:
        return replace(report, classes=_class_parts(totals))
    not_in_python = _not_in_python(blocks, totals)
    allocated = blocks.stats.allocated_bytes if blocks.stats else blocks.totals.allocated_bytes
    parts = [
        TensorPart(
            "tensors above, as asked for", report.used_bytes, len(totals.first_of) - len(saved)
        ),
        TensorPart("rounding of their blocks", totals.rounding),
    ]
    if totals.saved_names:
        totals.saved_names.sort(key=lambda entry: (-entry[0], entry[1]))
        names = tuple(name for _, name in totals.saved_names[:_TOP])
        count = len(totals.saved_names)
        parts.append(
            TensorPart("saved for backward, by autograd alone", totals.saved, count, names)
        )
    parts += not_in_python
    if totals.outside:
        name = (
            "of these, storages that are no blocks of their own (imported, or cut out of another)"
        )
        parts.append(TensorPart(name, -totals.outside, totals.outside_count))
    if rest := allocated - sum(part.size_bytes for part in parts):
        parts.append(TensorPart("allocated or freed while this was read", rest))
    allocator = blocks.totals
    cached = (
        TensorPart("free segments", allocator.free_segment_bytes),
        TensorPart("split remainders", allocator.split_remainder_bytes),
        TensorPart("waiting for another stream", allocator.pending_free_bytes),
        TensorPart("private pools", allocator.private_pool_free_bytes),
    )
    return replace(
        report,
        allocated_bytes=allocated,
        parts=tuple(part for part in parts if part.size_bytes or part.count),
        reserved_bytes=allocator.reserved_bytes,
        cached=tuple(part for part in cached if part.size_bytes),
        classes=_class_parts(totals),
    )


def _class_parts(totals: _Totals) -> tuple[TensorPart, ...]:
    return _largest_first(
        TensorPart(tensor_class.value, size, count)
        for tensor_class, (size, count) in totals.classes.items()
    )


def _largest_first(parts: Iterable[TensorPart]) -> tuple[TensorPart, ...]:
    return tuple(sorted(parts, key=lambda part: (-part.size_bytes, part.name)))


def _row(tensor: FoundTensor, totals: _Totals, blocks: Blocks | None) -> TensorInfo:
    first = totals.first_of.get(tensor.storage)
    block = blocks.at(tensor.address) if blocks is not None and tensor.address else None
    tensor_class = tensor.tensor_class or (first[1] if first is not None else None)
    if block is not None and blocks is not None and tensor_class is None:
        tensor_class = blocks.class_of(block)
    tensor_class = tensor_class or TensorClass.UNATTRIBUTED
    if first is None:
        totals.first_of[tensor.storage] = (tensor.name, tensor_class)
    used = tensor.storage_bytes if first is None else 0
    block_bytes: int | None = None
    if blocks is not None and first is None:
        block_bytes = _count_block(tensor, block, tensor_class, totals)
    elif blocks is None and used:
        totals.add_class(tensor_class, used)
    return TensorInfo(
        **{field.name: getattr(tensor, field.name) for field in fields(TensorFields)},
        used_bytes=used,
        shares=first[0] if first is not None else "",
        tensor_class=tensor_class,
        block_bytes=block_bytes,
        requested_bytes=requested_of(block) if block is not None else None,
        stack=blocks.stack(block) if block is not None and blocks is not None else (),
    )


def _count_block(
    tensor: FoundTensor, block: RawBlock | None, tensor_class: TensorClass, totals: _Totals
) -> int | None:
    """The size of its block where it is the first in it, else 0; None without a block."""
    size = tensor.storage_bytes
    if block is None:
        if not tensor.saved:
            totals.outside += size
            totals.outside_count += bool(size)
        return None
    address = block.get("address") or 0
    if address in totals.blocks:
        # a second storage in one block, which was cut up or handed on
        if not tensor.saved:
            totals.outside += size
            totals.outside_count += 1
        return 0
    totals.blocks.add(address)
    totals.add_class(tensor_class, block["size"])
    if tensor.saved:
        totals.saved += block["size"]
        shape = ", ".join(map(str, tensor.shape))
        totals.saved_names.append((block["size"], f"{tensor.name} ({shape})"))
    else:
        totals.rounding += block["size"] - size
    return block["size"]


def _not_in_python(blocks: Blocks, totals: _Totals) -> tuple[TensorPart, ...]:
    """Blocks that no tensor has, by class, with the places that hold most."""
    by_class: dict[TensorClass, tuple[list[int], dict[str, int]]] = {}
    for address, block in blocks.all():
        if address in totals.blocks:
            continue
        tensor_class = blocks.class_of(block)
        totals.add_class(tensor_class, block["size"])
        sizes, places = by_class.setdefault(tensor_class, ([], {}))
        sizes.append(block["size"])
        place = place_of(blocks.stack(block))
        places[place] = places.get(place, 0) + block["size"]
    parts = []
    for tensor_class, (sizes, places) in by_class.items():
        top = sorted(places, key=lambda place: (-places[place], place))[:_TOP]
        name = _NOT_IN_PYTHON.get(tensor_class, f"{tensor_class.value}, in no Python object")
        parts.append(TensorPart(name, sum(sizes), len(sizes), tuple(top)))
    return _largest_first(parts)
