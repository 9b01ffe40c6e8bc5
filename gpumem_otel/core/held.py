"""Who holds a piece of memory: its block, stack and class, and the paths that lead to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpumem_otel.core.classify import TensorClass
from gpumem_otel.core.tensor_join import Blocks
from gpumem_otel.core.text import human_bytes, printable, stack_lines

if TYPE_CHECKING:
    from gpumem_otel.core.model import Stack
    from gpumem_otel.core.ports import FrameNamer, Reading

__all__ = ["Holder", "Holders", "Subject", "describe"]


@dataclass(frozen=True, slots=True)
class Holder:
    """One way that leads to the memory.

    Attributes:
        path: as code would write it, from a root that lives by itself: `model.layers[0].weight`.
        kind: what the root is: `module`, `frame`, `last traceback`, `notebook output`, `closure`,
            `class`, `autograd`, `object` (nobody known refers to it).
        place: function and line of a frame, module of an attribute; "" where there is none.
    """

    path: str
    kind: str
    place: str = ""

    def __str__(self) -> str:
        place = f", {self.place}" if self.place else ""
        return printable(f"{self.path}  [{self.kind}{place}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What was asked about.

    Attributes:
        title: in words: `Tensor (1024, 1024) float32`.
        address: where its storage begins, or as given; 0 where it has no memory.
        storage_bytes: that its storage asked for; 0 where only an address is known.
        tensors: Python objects that have this storage.
    """

    title: str
    device: str
    address: int
    storage_bytes: int
    tensors: int
    tensor_class: TensorClass | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """The answer; `str()` of it is for people.

    Attributes:
        block_bytes: of the allocator's block, rounding included; None where no live block of torch
            is there.
        requested_bytes: that were asked for it.
        stack: that allocated the block, leaf first; () where nothing is known of it.
        held_by: the ways that lead to it, the shortest first.
    """

    subject: Subject
    tensor_class: TensorClass
    block_bytes: int | None
    requested_bytes: int | None
    stack: Stack
    held_by: tuple[Holder, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        subject = self.subject
        size = f"{human_bytes(subject.storage_bytes)} asked for" if subject.storage_bytes else ""
        if self.block_bytes is not None:
            block = f"a block of {human_bytes(self.block_bytes)} ({self.block_bytes} bytes)"
            size = f"{size}, {block}" if size else block
        where = f" at 0x{subject.address:x}" if subject.address else ""
        lines = [
            f"{printable(subject.title)} on {subject.device}{where}: {size or 'no memory'}",
            f"class: {self.tensor_class.value}",
        ]
        if self.stack:
            lines += ["allocated by", *(f"    {line}" for line in stack_lines(self.stack))]
        if self.held_by:
            lines += ["held by", *(f"    {holder}" for holder in self.held_by)]
        else:
            lines.append("held by nothing that Python can see")
        lines += [f"note: {printable(note)}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; sizes are bytes, the stack is leaf first."""
        return {
            "title": self.subject.title,
            "device": self.subject.device,
            "address": self.subject.address,
            "storage_bytes": self.subject.storage_bytes,
            "tensors": self.subject.tensors,
            "tensor_class": self.tensor_class.value,
            "block_bytes": self.block_bytes,
            "requested_bytes": self.requested_bytes,
            "stack": [[frame.name, frame.filename, frame.line] for frame in self.stack],
            "held_by": [
                {"path": holder.path, "kind": holder.kind, "place": holder.place}
                for holder in self.held_by
            ],
            "notes": list(self.notes),
        }


def describe(
    subject: Subject,
    held_by: tuple[Holder, ...],
    reading: Reading | None,
    *,
    namer: FrameNamer,
    recorded: bool,
    notes: tuple[str, ...] = (),
) -> Holders:
    """Add what the allocator knows of the block.

    Args:
        subject: what was asked about.
        held_by: who refers to it.
        reading: of the allocator, None where there is none.
        namer: names Python frames.
        recorded: whether stacks are recorded.
        notes: what a reader should know.
    """
    tensor_class = subject.tensor_class
    stack: Stack = ()
    block = None
    if reading is not None and subject.address:
        for index in reading.snapshot.devices():
            if subject.device not in ("cuda", f"cuda:{index}"):
                continue
            blocks = Blocks(reading, index, namer, recorded=recorded)
            block = blocks.at(subject.address)
            if block is not None:
                subject = replace(subject, device=f"cuda:{index}")
                stack = blocks.stack(block)
                tensor_class = tensor_class or blocks.class_of(block)
                break
    return Holders(
        subject=subject,
        tensor_class=tensor_class or TensorClass.UNATTRIBUTED,
        block_bytes=block["size"] if block is not None else None,
        requested_bytes=block.get("requested_size") if block is not None else None,
        stack=stack,
        held_by=held_by,
        notes=notes,
    )
