"""Decides where the bytes of each storage go and in which order: host memory, then the disk."""

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
    """A storage that is moved.

    Attributes:
        place: None if its contents are discarded.
        away: only the host has the contents, or they were discarded; set before it is emptied.
        emptied: it was emptied, and we have not allocated it since.
        checksum: from before the yield, None if not requested.
    """

    candidate: Candidate
    place: InMemory | OnDisk | None
    away: bool = False
    emptied: bool = False
    checksum: int | None = None

    @property
    def size(self) -> int:
        """Of the storage in bytes."""
        return self.candidate.size_bytes

    @property
    def tensor_class(self) -> str:
        """Of the candidate."""
        return self.candidate.tensor_class


def parts_of(items: Iterable[Item], devices: Devices) -> Iterator[CopyPart]:
    """The copies of these items, made lazily."""
    for item in items:
        one = item.candidate
        view = devices.bytes_of(one.storage, one.device)
        yield CopyPart(one.device, view, item.size, item.place, one.stream)


def memory_needed(candidates: Iterable[Candidate]) -> int:
    """Bytes of host memory that hold all candidates."""
    return sum(rounded(one.size_bytes, _ALIGNMENT) for one in candidates)


def place_first(candidates: Sequence[Candidate], room_bytes: int, each_bytes: int) -> list[Item]:
    """The items that are copied first.

    Args:
        candidates: the storages to keep.
        room_bytes: of host memory.
        each_bytes: limit per device.
    """
    items: list[Item] = []
    at = 0
    ahead: Counter[int] = Counter()
    for one in in_turn(candidates):
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
    candidates: Sequence[Candidate],
    room_bytes: int,
    make_file: Callable[[int], DiskFile],
    first: Sequence[Item] = (),
) -> tuple[list[Item], int]:
    """The items in copy order, and the bytes of host memory that they take.

    Args:
        candidates: the storages to keep.
        room_bytes: of host memory; the rest goes to a file.
        make_file: makes a file of a given size.
        first: items of `place_first` for some of the candidates; they keep their places.

    Raises:
        YieldRefusedError: the file cannot be made.
    """
    items = list(first)
    disk: list[Candidate] = []
    at = sum(rounded(item.size, _ALIGNMENT) for item in first)
    placed = {id(item.candidate) for item in first}
    left = [one for one in candidates if id(one) not in placed]
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


def _largest_that_fit(candidates: Iterable[Candidate], room_bytes: int) -> set[int]:
    """Their ids; largest first, so that small ones do not push a large one to disk."""
    chosen: set[int] = set()
    for one in sorted(candidates, key=lambda one: -one.size_bytes):
        size = rounded(one.size_bytes, _ALIGNMENT)
        if size <= room_bytes:
            chosen.add(id(one))
            room_bytes -= size
    return chosen


def in_turn(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The order in which candidates are copied, and allocated again.

    Largest first, since small blocks could take the space of larger ones; devices advance at the
    same rate, so that all links are busy. Small ones are spread evenly among the large ones:
    requesting one takes longer than copying it, which costs nothing while a link is busy.
    """
    ordered = sorted(candidates, key=lambda one: -one.size_bytes)
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
    """Relative cost of a copy: the same for all small ones."""
    return 1 if _is_small(one) else one.size_bytes
