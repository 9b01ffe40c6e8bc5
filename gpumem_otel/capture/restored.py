"""Whose the memory is that a restore has allocated: the stacks of before stand in place of ours.

After a restore every storage that was moved has a new block, and the stack that torch recorded for
it is ours. Who looks at a profile wants to see who holds the memory, and that has not changed. So
for each storage that came back the frames of its first block are kept, as torch gave them, and put
into each snapshot in place of ours. A block is taken for ours only where the innermost Python frame
of its stack is that of the restore: what anybody else allocates at such an address later keeps the
stack that it has.

It costs nothing before the first restore, and afterwards a look at each block of a snapshot for as
long as one of those storages lives. Blocks of one stack share its frames, so these are few. No
storage is kept alive.

Limit: what a restore allocates while a window of events is open is an event of that window, with
our stack.
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
        frames: who allocated it first, as torch recorded it, leaf first; () where nobody knows.
        root: named root of memory without frames, "" where none is known.
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
    """Where a storage that came back is from.

    Attributes:
        frames: of its first block, leaf first; () where it had none.
        root: named root of a block without frames, "" where none is known.
        size_bytes: as it was asked for.
        restored_in: the file whose code allocated it again, as frames name it.
    """

    frames: Sequence[RawFrame]
    root: str
    size_bytes: int
    storage: WeakStorage
    restored_in: str


Entries: TypeAlias = "dict[int, Origin]"
"""By address: what is one device's is no other's, nor the host's."""


class Replaced(NamedTuple):
    """What was put into a snapshot.

    Attributes:
        addresses: of the blocks.
        roots: (device, address) -> named root of those that have no frames, "" where none is known.
    """

    addresses: Collection[int]
    roots: dict[tuple[int, int], str]


class Restored:
    """What restores have brought back, by its address of now.

    Told by the thread that restores; snapshots may be read by others meanwhile.

    Args:
        tensors: the address table, which is told as well.

    Attributes:
        lock: held while a snapshot is taken.
    """

    def __init__(self, tensors: TensorTable | None = None) -> None:
        self._tensors = tensors
        self._entries: Entries = {}
        # an allocation that fails is looked at by the thread that asked, with a snapshot
        self.lock = threading.RLock()
        self._said = False

    # who restores

    @contextmanager
    def placing(self, moved: MovedStorage, restored_in: str) -> Iterator[None]:
        """Within, this storage is given memory again; what is done within is all that raises.

        Snapshots wait for it: none shows memory of which it is not known whose it is.

        Args:
            moved: the storage.
            restored_in: the file of the code that allocates, as frames name it.
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
            self._say()

    def settled(self, movables: Collection[MovedStorage]) -> None:
        """These storages have other addresses than before, or none. Never raises."""
        try:
            addresses = {
                one.storage._cdata: address_of(one.storage)  # noqa: SLF001 - its identity
                for one in movables
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
            self._say()

    def _say(self) -> None:
        if not self._said:
            self._said = True
            _log.warning("restored memory is shown under our own stack", exc_info=True)

    def clear(self) -> None:
        """Forget everything; in a forked child too, where nothing of it is."""
        self.lock = threading.RLock()
        self._entries = {}

    # who reads

    def entries(self) -> Entries:
        """A copy of what is known; empty before the first restore."""
        return self._entries.copy() if self._entries else {}

    def put_into(self, raw: Any, entries: Entries, pause: Pause) -> Replaced:
        """Put the frames of before into a snapshot that torch has just made, in place.

        Of its events only frees are looked at: they carry the stacks of older allocations.

        Args:
            raw: the snapshot.
            entries: what may be in there.
            pause: called every 32 blocks or events.
        """
        if not entries:
            return Replaced((), {})
        if isinstance(raw, dict):
            _put_into_frees(raw.get("device_traces") or (), entries, pause)
            raw = raw["segments"]
        return _put_into_blocks(raw, entries, pause)

    def forget(self, before: Entries, there: Collection[int], pause: Pause) -> None:
        """Drop what is gone, or was given memory elsewhere.

        Args:
            before: what was known before a snapshot was taken, so it must be in there.
            there: what was.
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
    """Whether a restore allocated it: frames of C++ may stand before the one of Python."""
    for frame in frames:
        filename = frame.get("filename", "")
        if filename.endswith(".py"):
            return filename == one.restored_in
    return False
