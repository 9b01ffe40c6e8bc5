"""Storages off the device and back: copied at link speed, emptied, allocated anew, filled.

The storage object stays, so everything that refers to it stays as it is: views, tied weights, the
identity of `.grad`, what autograd saved, the state of optimizers; no version counter moves.

What a call changes it undoes where it fails: before `free` nothing of the job is touched; `free`
empties all storages or none; `copy_back` brings back all that it was asked for or nothing, and the
host copy stays until all is back.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.copy.checksums import checksums
from gpumem_otel.yielding.copy.disk import DiskFile
from gpumem_otel.yielding.copy.gc_control import uncollected
from gpumem_otel.yielding.copy.mover import Mover, never, nobody
from gpumem_otel.yielding.copy.placement import Item, memory_needed, parts_of, place
from gpumem_otel.yielding.copy.prefetch import Prefetch, ahead_bytes
from gpumem_otel.yielding.copy.reload import Reload
from gpumem_otel.yielding.copy.staging import Staging
from gpumem_otel.yielding.plan import bytes_by_class
from gpumem_otel.yielding.values import Phase, PhaseTime

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gpumem_otel.yielding.copy.devices import Devices
    from gpumem_otel.yielding.copy.host_memory import HostPool
    from gpumem_otel.yielding.copy.reservations import DeviceReservations, HostReservations
    from gpumem_otel.yielding.protocols import Moves
    from gpumem_otel.yielding.values import Candidate, YieldRequest

_log = named_logger("gpumem_otel.yielding")

_MEASURED_BYTES: Final = 64 << 20
"""A smaller copy says nothing about the speed of a large one."""


class Offload:
    """One yield after the other: begin, admit, copy_out, free, copy_back, verify.

    Called by one thread at a time, at a safe point.

    Args:
        devices: where the storages are.
        pool: host memory, kept between yields.
        host: the reservations of host memory.
        gpus: the locks of the GPUs.
        keep_bytes: host memory to keep pinned between yields, at most; None for all.
        staging: makes a ring of buffers for a device.
        moves: told what was moved.
        monotonic: seconds of a clock that never goes back.

    Attributes:
        on_waiting: told why a restore waits for room on a device, once for each.
        notes: what a person should know of the last yield and its restore.
        zeroed: classes that `free` had thrown away already when it had to undo itself.
    """

    def __init__(
        self,
        devices: Devices,
        pool: HostPool,
        host: HostReservations,
        gpus: DeviceReservations,
        *,
        keep_bytes: int | None = None,
        staging: Callable[[Devices, int], Staging] = Staging,
        moves: Moves | None = None,
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._devices = devices
        self._pool = pool
        self._host = host
        self._keep_bytes = keep_bytes
        self._staging = staging
        self._now = monotonic
        self.on_waiting: Callable[[str], object] = lambda _why: None
        self._refill = Reload(
            devices,
            gpus,
            self._mover,
            moves=moves,
            monotonic=monotonic,
            on_waiting=self._waits,
        )
        self._items: list[Item] = []
        self._head_start: Prefetch | None = None
        self._ahead_since: float | None = None
        self._look_seconds = 0.0
        self._unverified: list[Item] = []
        self._file: DiskFile | None = None
        self._closing: threading.Thread | None = None
        self._memory_bytes = 0
        self._release_host = False
        self._verify = False
        self._out_speed = self._back_speed = 0.0
        self.notes: list[str] = []
        self.zeroed: set[str] = set()

    def _waits(self, why: str) -> None:
        self.on_waiting(why)

    # what can be asked

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """Kept for the job now, by class: bytes of emptied storages."""
        return bytes_by_class(
            item.movable for item in self._items if item.away and item.place is not None
        )

    @property
    def discarded_bytes(self) -> Mapping[str, int]:
        """Thrown away and not yet made anew, by class."""
        return bytes_by_class(
            item.movable for item in self._items if item.away and item.place is None
        )

    @property
    def host_bytes(self) -> int:
        """Host memory held, between yields too."""
        return self._pool.capacity_bytes

    @property
    def disk_bytes(self) -> int:
        """Disk held."""
        return self._file.size_bytes if self._file is not None else 0

    @property
    def bytes_per_second(self) -> float:
        """Of the last large copy out, else of the last one back; 0.0 before the first."""
        return self._out_speed or self._back_speed

    # yield

    @property
    def copies_ahead(self) -> bool:
        """Whether what was begun is on its way."""
        return self._head_start is not None

    def begin(self, movables: Sequence[Candidate]) -> None:
        """Start to copy what will probably go.

        Only where host memory was pinned by an earlier yield, and is free: else it does nothing.
        `admit` goes on with it where all of it is to be kept, and drops it otherwise; `abandon`
        drops it.
        """
        self._ahead_since = self._now()
        if movables and self._pool.ready_bytes and not self._items and self._head_start is None:
            devices = len({one.device for one in movables})
            most = ahead_bytes(devices, self._look_seconds, self.bytes_per_second)
            self._head_start = Prefetch(movables, self._devices, self._pool, self._mover(), most)
            self._head_start.start()

    def _drop_head_start(self) -> None:
        head = self._head_start
        if head is not None:
            try:
                head.drop()
            finally:  # nothing is under way, also where it was interrupted
                self._head_start = None

    def admit(self, movables: Sequence[Candidate], request: YieldRequest) -> tuple[int, int]:
        """Reserve room for what goes. Touches nothing of the job; `abandon` undoes it.

        Returns:
            Bytes of host memory and of disk.

        Raises:
            YieldRefusedError: there is not enough of either; says of which.
        """
        if self._items:
            raise YieldRefusedError("offload: memory is held already; restore it first")
        kept = [one for one in movables if one.tensor_class not in request.discard]
        gone = [one for one in movables if one.tensor_class in request.discard]
        if self._ahead_since is not None:
            self._look_seconds = self._now() - self._ahead_since
        head = self._head_start
        if head is not None and not head.takes(kept):  # the job has changed, or the request
            self._drop_head_start()
            head = None
        need = memory_needed(kept)
        more = self._pool.room_for(need)
        least = 0 if request.disk_dir else None
        granted = self._host.reserve(more, at_least=least, wait_seconds=request.deadline_seconds)
        room = need if granted >= more else granted + self._pool.capacity_bytes
        try:
            self._items, self._memory_bytes = place(
                kept,
                room,
                lambda size_bytes: self._open(request.disk_dir, size_bytes),
                head.items if head is not None else (),
            )
        except BaseException:
            self._host.keep(self._pool.capacity_bytes)
            self._forget()
            raise
        self._items += [Item(one, None) for one in gone]
        self._release_host, self._verify = request.release_host, request.verify
        self.notes, self._unverified, self.zeroed = [], [], set()
        return self._memory_bytes, self.disk_bytes

    def _open(self, disk_dir: str, size_bytes: int) -> DiskFile:
        if self._closing is not None:
            self._closing.join()
        self._file = DiskFile(disk_dir, size_bytes)
        return self._file

    def copy_out(self, progress: Callable[[int, int], None], stop: Callable[[], bool]) -> PhaseTime:
        """Copy all that is kept. Nothing of the job is changed yet.

        Raises:
            YieldRefusedError: stopped, or host memory or disk failed: call `abandon`.
        """
        started = self._now()
        kept = [item for item in self._items if item.place is not None]
        total = sum(item.size for item in kept)
        used = self._used()
        head = self._head_start
        first, still = (head.items, head.used) if head is not None else ([], [])
        with self._devices.at_rest(used):
            with head.go_on() if head is not None else self._mover() as mover:
                if used:
                    self._pool.grow_to(self._memory_bytes, used[0])
                for device in set(used).difference(still):
                    self._devices.synchronize(device)
                if self._verify:
                    self._sum_up(kept)
                copying = self._now()
                mover.tell(progress, stop, total)
                with uncollected():
                    mover.out(parts_of(kept[len(first) :], self._devices))
            self._head_start = None
            seconds = self._now() - copying
        self._host.settle()
        if total >= _MEASURED_BYTES and seconds > 0 and not mover.waited:
            if head is None or self._ahead_since is None:
                self._out_speed = total / seconds
            else:  # of which only lower bounds are known: the look is in the one, its end in both
                rest, since = total - head.size_bytes, self._now() - self._ahead_since
                self._out_speed = max(self._out_speed, rest / seconds, total / since)
        if self._pool.why_pageable and self._memory_bytes:
            pageable = self._pool.capacity_bytes - self._pool.pinned_bytes
            self.notes.append(
                f"{pageable >> 20} MiB of host memory are not pinned: {self._pool.why_pageable}"
            )
        return PhaseTime(Phase.RELEASE, self._now() - started, total)

    def free(self) -> None:
        """Empty all storages and give the allocator's cache back to the devices.

        Raises:
            YieldRefusedError: none was emptied, or all were filled again.
            YieldFailedError: some were emptied and could not be filled.
            BaseException: an interrupt: some may be empty, which `held_bytes` shows; `copy_back`.
        """
        for item in self._items:
            one = item.movable
            if one.storage.nbytes() != one.size_bytes or one.storage.data_ptr() != one.address:
                raise YieldRefusedError(
                    f"offload: a storage of class {one.tensor_class} changed while it was copied; "
                    "something else works with the device: nothing was freed"
                )
        with self._devices.at_rest(self._used()):
            try:
                self._pool.settle()
                with uncollected():
                    self._refill.empty(self._items)
                    self._devices.empty_cache()
            except Exception as error:
                self._undo_free(error)
                raise YieldRefusedError(f"offload: freeing failed: {error}; undone") from error
        self._refill.settled(self._items)

    def _undo_free(self, error: Exception) -> None:
        away = [item for item in self._items if item.away]
        try:
            self._refill.bring_back(away, 0, 0.0, nobody, never)
        except Exception as second:
            try:
                self._refill.empty_again(away)
            except Exception:  # they stay away, and are emptied before they are filled
                _log.warning("storages that were given memory keep it for now", exc_info=True)
            self._refill.settled(away)
            raise YieldFailedError(
                f"offload: freeing failed ({error}) and so did undoing it ({second}); "
                "the host copy stays: restore again"
            ) from second
        for item in away:
            item.away = False
        self.zeroed = {item.tensor_class for item in away if item.place is None}
        self._refill.settled(away)

    def discard(self, classes: Collection[str]) -> None:
        """Throw away what was kept of these classes: zeros when it is back."""
        for item in self._items:
            if item.away and item.tensor_class in classes:
                item.place = item.checksum = None

    def abandon(self) -> None:
        """Undo `begin`, `admit` and `copy_out`; no storage is empty."""
        if any(item.away for item in self._items):
            raise YieldFailedError("offload: storages are empty; restore them first")
        self._drop_head_start()
        self._pool.stop()
        self._finish()

    # restore

    def copy_back(
        self,
        classes: Collection[str] | None,
        wait_seconds: float,
        progress: Callable[[int, int], None],
        stop: Callable[[], bool],
    ) -> PhaseTime:
        """Allocate on each block's own stream, and fill.

        Args:
            classes: only these; None for all that is left.
            wait_seconds: for room on the devices.
            progress: told (bytes copied, of so many).
            stop: asked between copies.

        Raises:
            YieldRefusedError: no room, or stopped: what this call brought back is gone again, and
                the host copy stays.
            YieldFailedError: the disk does not give back what it took.
        """
        started = self._now()
        self._drop_those_in_use(classes)
        todo = [i for i in self._items if i.away and (classes is None or i.tensor_class in classes)]
        total = sum(item.size for item in todo if item.place is not None)
        with self._devices.at_rest(self._used()):
            for device in sorted({item.movable.device for item in todo}):
                self._devices.synchronize(device)
            # what we emptied or filled half way: the host has its contents
            self._refill.empty([item for item in todo if not item.emptied])
            try:
                seconds = self._refill.bring_back(todo, total, wait_seconds, progress, stop)
            except BaseException:
                self._refill.empty_again(todo)
                raise
        ended = self._now()
        if total >= _MEASURED_BYTES and seconds > 0:
            self._back_speed = total / seconds
        for item in todo:
            item.away = False
        self._refill.settled(todo)
        self._unverified += [item for item in todo if item.checksum is not None]
        if not any(item.away for item in self._items):
            self._finish()
        return PhaseTime(Phase.RELOAD, ended - started, total)

    def _drop_those_in_use(self, classes: Collection[str] | None) -> None:
        """Refill only what we emptied and what is still empty: others resize storages too."""
        used = [
            item
            for item in self._items
            if item.away
            and item.emptied
            and (classes is None or item.tensor_class in classes)
            and item.movable.storage.nbytes()
        ]
        for item in used:
            item.away = False
            item.checksum = None
        for tensor_class, size in bytes_by_class(item.movable for item in used).items():
            note = f"{size} bytes of class {tensor_class} were given memory by the job meanwhile"
            self.notes.append(f"{note}: left as they are")

    def verify(self) -> str:
        """Compare what came back since the last call with what went.

        Returns:
            "equal"; "" where no checksums were asked for.

        Raises:
            YieldFailedError: they differ; says of which class how many storages.
        """
        items = self._unverified
        if not items:
            return ""
        wrong: Counter[str] = Counter()
        with self._devices.at_rest(self._used()):
            self._unverified = []
            for item, now in zip(items, self._sums_of(items), strict=True):
                wrong[item.tensor_class] += item.checksum != now
            self._devices.empty_cache()  # of what the sums needed
        told = ", ".join(f"{count} of {name}" for name, count in sorted(wrong.items()) if count)
        if told:
            raise YieldFailedError(
                f"verify: contents differ from before in so many storages: {told}; "
                "stop the job and go back to its last checkpoint"
            )
        return "equal"

    # parts

    def _used(self) -> list[int]:
        """The devices of what is held, or was last."""
        return sorted({item.movable.device for item in self._items or self._unverified})

    def _mover(self) -> Mover:
        return Mover(self._devices, self._pool, staging=self._staging)

    def _sum_up(self, items: Sequence[Item]) -> None:
        try:
            found = self._sums_of(items)
        except Exception as error:
            if not self._devices.is_short_of_memory(error):
                raise
            raise YieldRefusedError(
                "verify: the device has no 48 MiB left for checksums; nothing was moved"
            ) from error
        for item, value in zip(items, found, strict=True):
            item.checksum = value

    def _sums_of(self, items: Sequence[Item]) -> list[int]:
        found: dict[int, int] = {}
        for device in sorted({item.movable.device for item in items}):
            here = [item for item in items if item.movable.device == device]
            views = [self._devices.bytes_of(item.movable.storage, device) for item in here]
            for item, value in zip(here, checksums(self._devices.torch, views), strict=True):
                found[id(item)] = value
        return [found[id(item)] for item in items]

    def _finish(self) -> None:
        """Nothing is held any more but the pool."""
        self._forget()
        if self._release_host:
            self._pool.give_back()
        elif self._keep_bytes is not None:
            self._pool.give_back(self._keep_bytes)
        self._host.keep(self._pool.capacity_bytes)

    def _forget(self) -> None:
        self._drop_head_start()
        self._items = []
        self._memory_bytes = 0
        if self._file is not None:
            # a file without a name gives its room back when it is closed: seconds for many GiB
            self._closing = threading.Thread(
                target=self._file.close, name="gpumem-close", daemon=True
            )
            self._closing.start()
            self._file = None

    def give_back(self) -> int:
        """Unpin and free the host memory that is kept between yields.

        Returns:
            Bytes; 0 while something is stored there.
        """
        if self._items or self._head_start is not None:
            return 0
        freed = self._pool.give_back()
        self._host.keep(self._pool.capacity_bytes)
        return freed

    def close(self) -> bool:
        """Leave nothing of ours pinned or reserved; it can be used again.

        Returns:
            False where something is stored there, which stays.
        """
        if self._items or self._head_start is not None:
            return False
        self.give_back()
        self._host.close()
        if self._closing is not None:
            self._closing.join()
        return True
