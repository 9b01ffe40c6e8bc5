"""Tensors and blocks -> the tensor report.

What a walk over the process found comes in as `FoundTensor` values, what the allocator holds as a
reading; the two are joined by address. The books of a device are closed: the named parts add up to
the allocator's `allocated`; whatever was not seen in Python is one of them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpumem_otel.snapshot.roots import builder_for, stackless_root
from gpumem_otel.snapshot.tensor_classes import TensorClass, class_of_root
from gpumem_otel.snapshot.torch_format import requested_of
from gpumem_otel.tensors.report import DeviceReport, ReportData, TensorInfo, TensorPart, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpumem_otel.base.profile import DeviceStats, DeviceTotals, Stack
    from gpumem_otel.base.protocols import FrameNamer
    from gpumem_otel.snapshot.reading import Reading
    from gpumem_otel.snapshot.torch_format import RawBlock
    from gpumem_otel.tensors.report import FoundTensor

NOT_INSTALLED = "[no stacks: install() is not active]"
"""Root of a block without a stack where nobody records them."""

_TOP = 3
_ACTIVATION = "saved by autograd or held by C++, in no Python object"
_UNSEEN = {
    TensorClass.WORKSPACE: "workspace of cuBLAS (probable)",
    TensorClass.ACTIVATION: _ACTIVATION,
    TensorClass.GRADIENT: "made by backward, in no Python object",
    TensorClass.UNATTRIBUTED: "in no Python object (C++, another library, or freed meanwhile)",
}


def join(
    found: Iterable[FoundTensor],
    reading: Reading | None,
    *,
    namer: FrameNamer,
    recorded: bool,
    notes: Sequence[str] = (),
    devices: Sequence[str] = (),
) -> ReportData:
    """Put tensors and blocks together.

    Args:
        found: in the order of the report.
        reading: taken after the walk, None where there is no allocator to read.
        namer: names Python frames.
        recorded: whether stacks are recorded; else a missing one says nothing.
        notes: of the walk.
        devices: only these; all where none is given.
    """
    by_device: dict[str, list[FoundTensor]] = {}
    for tensor in found:
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
                "another thread allocated or freed while this was read: rows and blocks are of "
                "moments a little apart"
            )
    parts = []
    for device in sorted(by_device, key=_device_order):
        if devices and device not in devices:
            continue
        joiner = None
        if reading is not None and device in indexes:
            joiner = Blocks(reading, indexes[device], namer, recorded=recorded)
        parts.append(_device(device, by_device[device], joiner))
    return ReportData(devices=tuple(parts), notes=tuple(notes))


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
        books: sums over all its blocks.
        stats: its allocator's counters, None where they were not read.
    """

    def __init__(self, reading: Reading, device: int, namer: FrameNamer, *, recorded: bool) -> None:
        self.device = device
        snapshot = reading.snapshot
        self.books: DeviceTotals = snapshot.books(device)
        stats = {s.device: s for s in reading.after}
        self.stats: DeviceStats | None = stats.get(device)
        self._reading = reading
        self._recorded = recorded or self.books.bytes_without_stack < self.books.allocated_bytes
        self._builder = builder_for(snapshot, namer)
        self._by_address = _blocks_of(reading, device)
        self._addresses = sorted(self._by_address)

    def at(self, address: int) -> RawBlock | None:
        """The live block that an address is in."""
        found = self._by_address.get(address)
        if found is None and address:
            place = bisect_right(self._addresses, address) - 1
            if place >= 0:
                start = self._addresses[place]
                inside = address < start + self._by_address[start]["size"]
                found = self._by_address[start] if inside else None
        return found

    def all(self) -> Iterable[tuple[int, RawBlock]]:
        """(where it begins, block) of each."""
        return self._by_address.items()

    def stack(self, block: RawBlock) -> Stack:
        """That allocated it, leaf first; the named root where it has none."""
        frames = block.get("frames")
        if frames:
            return self._builder.build(frames)
        return self._builder.root(self._root(block))

    def _root(self, block: RawBlock) -> str:
        reading = self._reading
        if not self._recorded:
            return NOT_INSTALLED
        if reading.stackless is None:
            return stackless_root(has_event=False)
        return reading.stackless(self.device, block.get("address"))

    def class_of(self, block: RawBlock) -> TensorClass:
        """What the classifier says; `unattributed` without one."""
        classifier = self._reading.classifier
        if classifier is None:
            return TensorClass.UNATTRIBUTED
        frames = block.get("frames")
        known = classifier.of_block(block)
        if known is not None:
            return known
        return classifier.of_stack(frames) if frames else class_of_root(self._root(block))


def _blocks_of(reading: Reading, device: int) -> dict[int, RawBlock]:
    """The live blocks of a device by where they begin."""
    found: dict[int, RawBlock] = {}
    for segment in reading.snapshot.raw_segments(device):
        for block in segment["blocks"]:
            address = block.get("address")
            if block["state"] == "active_allocated" and address is not None:
                found[address] = block
    return found


class _Counted:
    """Sums of one device while its rows are made."""

    def __init__(self) -> None:
        self.first_of: dict[int, tuple[str, TensorClass]] = {}
        self.blocks: dict[int, str] = {}
        self.rounding = self.outside = self.outside_count = self.saved = 0
        self.saved_names: list[tuple[int, str]] = []
        self.classes: dict[TensorClass, list[int]] = {}

    def add_class(self, tensor_class: TensorClass, size: int) -> None:
        sums = self.classes.setdefault(tensor_class, [0, 0])
        sums[0] += size
        sums[1] += 1


def _device(device: str, found: list[FoundTensor], blocks: Blocks | None) -> DeviceReport:
    counted = _Counted()
    # what Python holds has its storage first, whatever autograd saved of it too
    held = [_row(tensor, counted, blocks) for tensor in found if not tensor.saved]
    saved = [
        _row(tensor, counted, blocks)
        for tensor in found
        if tensor.saved and tensor.storage not in counted.first_of
    ]
    report = DeviceReport(device=device, rows=tuple(held), saved=tuple(saved))
    if blocks is None:
        return replace(report, classes=_class_parts(counted))
    unseen = _unseen(blocks, counted)
    allocated = blocks.stats.allocated_bytes if blocks.stats else blocks.books.allocated_bytes
    parts = [
        TensorPart(
            "tensors above, as asked for", report.used_bytes, len(counted.first_of) - len(saved)
        ),
        TensorPart("rounding of their blocks", counted.rounding),
    ]
    if counted.saved_names:
        counted.saved_names.sort(key=lambda entry: (-entry[0], entry[1]))
        names = tuple(name for _, name in counted.saved_names[:_TOP])
        count = len(counted.saved_names)
        parts.append(
            TensorPart("saved for backward, by autograd alone", counted.saved, count, names)
        )
    parts += unseen
    if counted.outside:
        name = (
            "of these, storages that are no blocks of their own (imported, or cut out of another)"
        )
        parts.append(TensorPart(name, -counted.outside, counted.outside_count))
    if rest := allocated - sum(part.size_bytes for part in parts):
        parts.append(TensorPart("allocated or freed while this was read", rest))
    books = blocks.books
    cached = (
        TensorPart("free segments", books.free_segment_bytes),
        TensorPart("split remainders", books.split_remainder_bytes),
        TensorPart("waiting for another stream", books.pending_free_bytes),
        TensorPart("private pools", books.private_pool_free_bytes),
    )
    return replace(
        report,
        allocated_bytes=allocated,
        parts=tuple(part for part in parts if part.size_bytes or part.count),
        reserved_bytes=books.reserved_bytes,
        cached=tuple(part for part in cached if part.size_bytes),
        classes=_class_parts(counted),
    )


def _class_parts(counted: _Counted) -> tuple[TensorPart, ...]:
    found = [TensorPart(name.value, size, count) for name, (size, count) in counted.classes.items()]
    return tuple(sorted(found, key=lambda part: (-part.size_bytes, part.name)))


def _row(tensor: FoundTensor, counted: _Counted, blocks: Blocks | None) -> TensorInfo:
    first = counted.first_of.get(tensor.storage)
    block = blocks.at(tensor.address) if blocks is not None and tensor.address else None
    known = tensor.tensor_class or (first[1] if first is not None else None)
    if block is not None and blocks is not None and known is None:
        known = blocks.class_of(block)
    tensor_class = known or TensorClass.UNATTRIBUTED
    if first is None:
        counted.first_of[tensor.storage] = (tensor.name, tensor_class)
    used = tensor.storage_bytes if first is None else 0
    block_bytes: int | None = None
    if blocks is not None and first is None:
        block_bytes = _count_block(tensor, block, tensor_class, counted)
    elif blocks is None and used:
        counted.add_class(tensor_class, used)
    return TensorInfo(
        name=tensor.name,
        device=tensor.device,
        shape=tensor.shape,
        dtype=tensor.dtype,
        kind=tensor.kind,
        elements=tensor.elements,
        tensor_bytes=tensor.tensor_bytes,
        used_bytes=used,
        shares=first[0] if first is not None else "",
        tensor_class=tensor_class,
        address=tensor.address,
        block_bytes=block_bytes,
        requested_bytes=requested_of(block) if block is not None else None,
        stack=blocks.stack(block) if block is not None and blocks is not None else (),
        aliases=tensor.aliases,
    )


def _count_block(
    tensor: FoundTensor, block: RawBlock | None, tensor_class: TensorClass, counted: _Counted
) -> int | None:
    """The size of its block where it is the first in it, else 0; None without a block."""
    size = tensor.storage_bytes
    if block is None:
        if not tensor.saved:
            counted.outside += size
            counted.outside_count += bool(size)
        return None
    address = block.get("address") or 0
    if address in counted.blocks:
        # a second storage within one block: memory that somebody cut up, or that was given away
        if not tensor.saved:
            counted.outside += size
            counted.outside_count += 1
        return 0
    counted.blocks[address] = tensor.name
    counted.add_class(tensor_class, block["size"])
    if tensor.saved:
        counted.saved += block["size"]
        shape = ", ".join(map(str, tensor.shape))
        counted.saved_names.append((block["size"], f"{tensor.name} ({shape})"))
    else:
        counted.rounding += block["size"] - size
    return block["size"]


def _unseen(blocks: Blocks, counted: _Counted) -> list[TensorPart]:
    """Blocks that no tensor has, by class, with the places that hold most."""
    sums: dict[TensorClass, list[Any]] = {}
    for address, block in blocks.all():
        if address in counted.blocks:
            continue
        tensor_class = blocks.class_of(block)
        counted.add_class(tensor_class, block["size"])
        entry = sums.setdefault(tensor_class, [0, 0, {}])
        entry[0] += block["size"]
        entry[1] += 1
        place = place_of(blocks.stack(block))
        entry[2][place] = entry[2].get(place, 0) + block["size"]
    parts = []
    for tensor_class, (size, count, places) in sums.items():
        top = sorted(places, key=lambda place: (-places[place], place))[:_TOP]
        name = _UNSEEN.get(tensor_class, f"{tensor_class.value}, in no Python object")
        parts.append(TensorPart(name, size, count, tuple(top)))
    return sorted(parts, key=lambda part: (-part.size_bytes, part.name))
