"""Where the bytes of each storage go, and in which order: host memory first, then the disk."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpumem_otel.yielding.copy.disk import DISK_BLOCK
from gpumem_otel.yielding.copy.host_memory import rounded
from gpumem_otel.yielding.copy.mover import CopyPart, InMemory, OnDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gpumem_otel.yielding.copy.devices import Devices
    from gpumem_otel.yielding.copy.disk import DiskFile
    from gpumem_otel.yielding.values import Candidate

_ALIGNMENT: Final = 512
_SMALL_BYTES: Final = 1 << 20
"""Torch's allocator keeps blocks up to this size in segments of their own (`kSmallSize`): when they
are allocated does not matter to the larger ones."""


@dataclass(slots=True, eq=False)
class Item:
    """A storage on its way.

    Attributes:
        place: None where its contents are thrown away.
        away: the host has the contents, or they were thrown away; said before it is emptied.
        emptied: it is known to have been emptied, and was not given memory by us since.
        checksum: of before, None where none was asked for.
    """

    movable: Candidate
    place: InMemory | OnDisk | None
    away: bool = False
    emptied: bool = False
    checksum: int | None = None

    @property
    def size(self) -> int:
        """Bytes of the storage."""
        return self.movable.size_bytes

    @property
    def tensor_class(self) -> str:
        """What it holds."""
        return self.movable.tensor_class


def parts_of(items: Iterable[Item], devices: Devices) -> Iterator[CopyPart]:
    """Bytes of each storage and where they are kept, as copies are asked for."""
    for item in items:
        one = item.movable
        view = devices.bytes_of(one.storage, one.device)
        yield CopyPart(one.device, view, item.size, item.place, one.stream)


def memory_needed(movables: Iterable[Candidate]) -> int:
    """Bytes of host memory that would hold all of them."""
    return sum(rounded(one.size_bytes, _ALIGNMENT) for one in movables)


def place_first(movables: Sequence[Candidate], room_bytes: int, each_bytes: int) -> list[Item]:
    """Those that are copied first.

    Args:
        movables: what is kept.
        room_bytes: of host memory.
        each_bytes: of each device at most.
    """
    items: list[Item] = []
    at = 0
    ahead: Counter[int] = Counter()
    for one in in_turn(movables):
        size = rounded(one.size_bytes, _ALIGNMENT)
        if at + size > room_bytes:
            break
        if ahead[one.device] + size > each_bytes:
            continue
        items.append(Item(one, InMemory(at)))
        at += size
        ahead[one.device] += size
    return items


def place(
    movables: Sequence[Candidate],
    room_bytes: int,
    make_file: Callable[[int], DiskFile],
    first: Sequence[Item] = (),
) -> tuple[list[Item], int]:
    """Items in the order in which they are copied, and the bytes of host memory they take.

    Args:
        movables: what is kept.
        room_bytes: of host memory; what does not fit goes to a file.
        make_file: makes one for so many bytes.
        first: from `place_first`: these have their places, and are of the movables.

    Raises:
        YieldRefusedError: the file can not be had.
    """
    items = list(first)
    disk: list[Candidate] = []
    at = sum(rounded(item.size, _ALIGNMENT) for item in first)
    placed = {id(item.movable) for item in first}
    left = [one for one in movables if id(one) not in placed]
    fits = _largest_that_fit(left, room_bytes - at)
    for one in in_turn(left):
        if id(one) in fits:
            items.append(Item(one, InMemory(at)))
            at += rounded(one.size_bytes, _ALIGNMENT)
        else:
            disk.append(one)
    memory_bytes = at
    if disk:
        file = make_file(sum(rounded(one.size_bytes, DISK_BLOCK) for one in disk))
        at = 0
        for one in disk:
            items.append(Item(one, OnDisk(file, at)))
            at += rounded(one.size_bytes, DISK_BLOCK)
    return items, memory_bytes


def _largest_that_fit(movables: Iterable[Candidate], room_bytes: int) -> set[int]:
    """Identities: small ones may not take the room of a large one, which would go to the disk."""
    found: set[int] = set()
    for one in sorted(movables, key=lambda one: -one.size_bytes):
        size = rounded(one.size_bytes, _ALIGNMENT)
        if size <= room_bytes:
            found.add(id(one))
            room_bytes -= size
    return found


def in_turn(movables: Sequence[Candidate]) -> list[Candidate]:
    """In which order they are copied, and allocated anew.

    The largest first, since a block that comes later may take the room of a larger one; of several
    devices in turn by the share that is through, so that all links are at work. Small ones evenly
    among the large ones: asking for one takes longer than copying it, which costs nothing while a
    link has large ones to copy.
    """
    ordered = sorted(movables, key=lambda one: -one.size_bytes)
    totals: Counter[tuple[int, bool]] = Counter()
    for one in ordered:
        totals[one.device, _is_small(one)] += _weight(one)
    done: Counter[tuple[int, bool]] = Counter()
    ranked: list[tuple[float, int, Candidate]] = []
    for number, one in enumerate(ordered):
        kind = one.device, _is_small(one)
        ranked.append((done[kind] / totals[kind], number, one))
        done[kind] += _weight(one)
    return [one for _, _, one in sorted(ranked, key=lambda entry: entry[:2])]


def _is_small(one: Candidate) -> bool:
    return one.size_bytes <= _SMALL_BYTES


def _weight(one: Candidate) -> int:
    """What it takes: small ones all the same, whatever their size."""
    return 1 if _is_small(one) else one.size_bytes
