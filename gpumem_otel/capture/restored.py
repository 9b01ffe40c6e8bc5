"""Gives memory that a restore has allocated its original stacks.

After a restore every moved storage has a new block, recorded with our own stack; a profile must
show the code that holds the memory. So the frames of each storage's first block are kept as torch
returned them, and replace ours in each snapshot. A block counts as ours only if the innermost
Python frame of its stack is that of the restore: a later allocation at the address keeps its stack.

This costs nothing before the first restore; afterwards each block of a snapshot is checked as long
as one of those storages lives. No storage is kept alive.

Limit: what a restore allocates in an open window of events is an event of it with our stack.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from gpumem_otel.base.logs import named_logger
from gpumem_otel.capture.objects.storages import WeakStorage, address_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from gpumem_otel.base.protocols import Pause
    from gpumem_otel.capture.tensor_table import TensorTable
    from gpumem_otel.snapshot.torch_format import RawEvent, RawFrame, RawSegment

_log = named_logger("gpumem_otel.capture")

_ITEMS_PER_PAUSE: Final = 32
_FREES: Final = frozenset({"free_requested", "free_completed"})


class MovedStorage(Protocol):
    """A storage that a yield has moved.

    Attributes:
        storage: the `torch.UntypedStorage`.
        size_bytes: of the storage.
        frames: of its first allocation, as torch recorded them, leaf first; () if unknown.
        root: named root of memory without frames, "" if unknown.
    """

    @property
    def storage(self) -> Any: ...  # noqa: D102 - above
    @property
    def size_bytes(self) -> int: ...  # noqa: D102
    @property
    def frames(self) -> Sequence[Any]: ...  # noqa: D102
    @property
    def root(self) -> str: ...  # noqa: D102


class Origin(NamedTuple):
    """The origin of a restored storage.

    Attributes:
        frames: of its first block, leaf first; () if it had none.
        root: named root of a block without frames, "" if unknown.
        size_bytes: the requested size.
        restored_in: the file whose code allocated it again, as frames name it.
    """

    frames: Sequence[RawFrame]
    root: str
    size_bytes: int
    storage: WeakStorage
    restored_in: str


Entries: TypeAlias = "dict[int, Origin]"
"""By address; addresses are unique over all devices and the host."""


class Replaced(NamedTuple):
    """The blocks of a snapshot that got their original stacks.

    Attributes:
        addresses: of the blocks.
        roots: (device, address) -> named root of those without frames, "" if unknown.
    """

    addresses: Collection[int]
    roots: dict[tuple[int, int], str]


class Restored:
    """Restored storages by their current address.

    Updated by the restoring thread; other threads may read snapshots meanwhile.

    Args:
        tensors: the address table, which is updated too.

    Attributes:
        lock: held while a snapshot is taken.
    """

    def __init__(self, tensors: TensorTable | None = None) -> None:
        self._tensors = tensors
        self._entries: Entries = {}
        # reentrant: a thread whose allocation fails takes a snapshot
        self.lock = threading.RLock()
        self._logged = False

    @contextmanager
    def placing(self, moved: MovedStorage, restored_in: str) -> Iterator[None]:
        """Allocate this storage in the block; only errors of the block are raised.

        Snapshots wait for it, so that none shows memory of unknown origin.

        Args:
            moved: the storage.
            restored_in: the file of the allocating code, as frames name it.
        """
        with self.lock:
            yield
            self._note(moved, restored_in)

    def _note(self, moved: MovedStorage, restored_in: str) -> None:
        try:
            storage = moved.storage
            weak = WeakStorage.of(storage)
            address = address_of(storage)
            if address:
                self._entries[address] = Origin(
                    moved.frames, moved.root, moved.size_bytes, weak, restored_in
                )
        except Exception:
            self._log_once()

    def settled(self, storages: Collection[MovedStorage]) -> None:
        """These storages have new addresses, or none. Never raises."""
        try:
            addresses = {
                one.storage._cdata: address_of(one.storage)  # noqa: SLF001 - its identity
                for one in storages
            }
            with self.lock:
                self._entries = {
                    address: one
                    for address, one in self._entries.items()
                    if addresses.get(one.storage.identity, address) == address
                    and not one.storage.expired()
                }
            if self._tensors is not None:
                self._tensors.moved(addresses)
        except Exception:
            self._log_once()

    def _log_once(self) -> None:
        if not self._logged:
            self._logged = True
            _log.warning("restored memory is shown under our own stack", exc_info=True)

    def clear(self) -> None:
        """Forget everything; in a forked child too."""
        self.lock = threading.RLock()
        self._entries = {}

    def entries(self) -> Entries:
        """A copy of the entries; empty before the first restore."""
        return self._entries.copy() if self._entries else {}

    def put_into(self, raw: Any, entries: Entries, pause: Pause) -> Replaced:
        """Put the original frames into a new snapshot, in place.

        Of its events only frees are changed: they carry the stacks of older allocations.

        Args:
            raw: the snapshot.
            entries: of storages that it may contain.
            pause: called every 32 blocks or events.
        """
        if not entries:
            return Replaced((), {})
        if isinstance(raw, dict):
            _put_into_frees(raw.get("device_traces") or (), entries, pause)
            raw = raw["segments"]
        return _put_into_blocks(raw, entries, pause)

    def forget(self, before: Entries, there: Collection[int], pause: Pause) -> None:
        """Drop entries of storages that are gone or have moved.

        Args:
            before: the entries before a snapshot, which must contain them.
            there: the addresses that it contains.
            pause: called every 32 entries.
        """
        for count, (address, one) in enumerate(before.items(), 1):
            if not count % _ITEMS_PER_PAUSE:
                pause()
            if address not in there or one.storage.expired():
                with self.lock:
                    if self._entries.get(address) is one:
                        del self._entries[address]


def _put_into_blocks(segments: Iterable[RawSegment], entries: Entries, pause: Pause) -> Replaced:
    addresses: set[int] = set()
    roots: dict[tuple[int, int], str] = {}
    count = 0
    for segment in segments:
        for block in segment["blocks"]:
            count += 1
            if not count % _ITEMS_PER_PAUSE:
                pause()
            address = block.get("address", 0)
            one = entries.get(address)
            if one is None or block.get("requested_size", one.size_bytes) != one.size_bytes:
                continue
            if _is_ours(block.get("frames") or (), one):
                block["frames"] = one.frames
                addresses.add(address)
                if not one.frames:
                    roots[segment["device"], address] = one.root
    return Replaced(addresses, roots)


def _put_into_frees(traces: Iterable[Iterable[RawEvent]], entries: Entries, pause: Pause) -> None:
    for trace in traces:
        for count, event in enumerate(trace, 1):
            if not count % _ITEMS_PER_PAUSE:
                pause()
            if event.get("action") in _FREES:
                one = entries.get(event.get("addr", 0))
                if one is not None and _is_ours(event.get("frames") or (), one):
                    event["frames"] = one.frames


def _is_ours(frames: Sequence[RawFrame], one: Origin) -> bool:
    """Whether a restore allocated it; C++ frames may come before the Python frame."""
    for frame in frames:
        filename = frame.get("filename", "")
        if filename.endswith(".py"):
            return filename == one.restored_in
    return False
