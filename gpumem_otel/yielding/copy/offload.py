"""Moves storages off the device and back: copies at link speed, empties, allocates, fills again.

The storage object stays, so everything that refers to it is unchanged: views, tied weights, the
identity of `.grad`, tensors saved by autograd, optimizer states; no version counter moves.

A call that fails undoes its changes: before `free` nothing of the job is touched; `free` empties
all storages or none; `copy_back` brings back all requested storages or none, and the host copy
stays until all are back.
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
from gpumem_otel.yielding.copy.mover import Mover, never, no_progress
from gpumem_otel.yielding.copy.placement import Item, memory_needed, parts_of, place
from gpumem_otel.yielding.copy.prefetch import Prefetch, prefetch_bytes
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
"""A smaller copy does not show the speed of a large one."""


class Offload:
    """One yield after the other: begin, admit, copy_out, free, copy_back, verify.

    Called by one thread at a time, at a safe point.

    Args:
        devices: of the storages.
        pool: host memory, kept between yields.
        host: the reservations of host memory.
        gpus: the locks of the GPUs.
        keep_bytes: limit of the host memory kept pinned between yields; None for all.
        staging: makes a ring of buffers for a device.
        moves: receives the storages that have moved.

    Attributes:
        on_waiting: called once per device with the reason why a restore waits for memory.
        notes: remarks for people about the last yield and its restore.
        zeroed: classes whose contents `free` had already discarded when it had to undo itself.
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
        self._reload = Reload(
            devices,
            gpus,
            self._mover,
            moves=moves,
            monotonic=monotonic,
            on_waiting=lambda why: self.on_waiting(why),  # noqa: PLW0108 - it is set later
        )
        self._items: list[Item] = []
        self._prefetch: Prefetch | None = None
        self._prefetch_since: float | None = None
        self._scan_seconds = 0.0
        self._unverified: list[Item] = []
        self._file: DiskFile | None = None
        self._closing: threading.Thread | None = None
        self._memory_bytes = 0
        self._release_host = False
        self._verify = False
        self._out_speed = self._back_speed = 0.0
        self.notes: list[str] = []
        self.zeroed: set[str] = set()

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """Bytes by class of emptied storages whose contents are kept."""
        return bytes_by_class(
            item.candidate for item in self._items if item.away and item.place is not None
        )

    @property
    def discarded_bytes(self) -> Mapping[str, int]:
        """Bytes by class of emptied storages whose contents were discarded."""
        return bytes_by_class(
            item.candidate for item in self._items if item.away and item.place is None
        )

    @property
    def host_bytes(self) -> int:
        """Size of the host memory pool."""
        return self._pool.capacity_bytes

    @property
    def disk_bytes(self) -> int:
        """Size of the file on disk."""
        return self._file.size_bytes if self._file is not None else 0

    @property
    def bytes_per_second(self) -> float:
        """Speed of the last large copy out, else of the last one back; 0.0 before the first."""
        return self._out_speed or self._back_speed

    # yield

    @property
    def copies_ahead(self) -> bool:
        """Whether a prefetch is in progress."""
        return self._prefetch is not None

    def begin(self, candidates: Sequence[Candidate]) -> None:
        """Start the prefetch of storages that will probably move.

        Does nothing unless an earlier yield left pinned host memory that is free. `admit` continues
        the prefetch if all of it is to be kept, else drops it; `abandon` drops it.
        """
        self._prefetch_since = self._now()
        if candidates and self._pool.ready_bytes and not self._items and self._prefetch is None:
            devices = len({one.device for one in candidates})
            most = prefetch_bytes(devices, self._scan_seconds, self.bytes_per_second)
            self._prefetch = Prefetch(candidates, self._devices, self._pool, self._mover(), most)
            self._prefetch.start()

    def _drop_prefetch(self) -> None:
        if self._prefetch is not None:
            try:
                self._prefetch.drop()
            finally:  # even after an interrupt no copy is in progress
                self._prefetch = None

    def admit(self, candidates: Sequence[Candidate], request: YieldRequest) -> tuple[int, int]:
        """Reserve host memory and disk. Touches nothing of the job; `abandon` undoes it.

        Returns:
            Bytes of host memory and of disk.

        Raises:
            YieldRefusedError: there is not enough of one of them.
        """
        if self._items:
            raise YieldRefusedError("offload: memory is held already; restore it first")
        kept = [one for one in candidates if one.tensor_class not in request.discard]
        gone = [one for one in candidates if one.tensor_class in request.discard]
        if self._prefetch_since is not None:
            self._scan_seconds = self._now() - self._prefetch_since
        if self._prefetch is not None and not self._prefetch.takes(kept):
            self._drop_prefetch()  # the job has changed, or the request
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
                self._prefetch.items if self._prefetch is not None else (),
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
        """Copy all storages that are kept. Nothing of the job is changed yet.

        Raises:
            YieldRefusedError: stopped, or host memory or disk failed: call `abandon`.
        """
        started = self._now()
        kept = [item for item in self._items if item.place is not None]
        total = sum(item.size for item in kept)
        used = self._used()
        prefetch = self._prefetch
        first, synchronized = (prefetch.items, prefetch.used) if prefetch is not None else ([], [])
        with self._devices.at_rest(used):
            with prefetch.go_on() if prefetch is not None else self._mover() as mover:
                if used:
                    self._pool.grow_to(self._memory_bytes, used[0])
                for device in set(used).difference(synchronized):
                    self._devices.synchronize(device)
                if self._verify:
                    self._note_checksums(kept)
                copying = self._now()
                mover.observe(progress, stop, total)
                with uncollected():
                    mover.out(parts_of(kept[len(first) :], self._devices))
            self._prefetch = None
            seconds = self._now() - copying
        self._host.settle()
        if total >= _MEASURED_BYTES and seconds > 0 and not mover.waited:
            if prefetch is None or self._prefetch_since is None:
                self._out_speed = total / seconds
            else:  # two lower bounds: the second includes the scan
                rest, since = total - prefetch.size_bytes, self._now() - self._prefetch_since
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
            BaseException: interrupted: some may be empty (see `held_bytes`); call `copy_back`.
        """
        for item in self._items:
            one = item.candidate
            if one.storage.nbytes() != one.size_bytes or one.storage.data_ptr() != one.address:
                raise YieldRefusedError(
                    f"offload: a storage of class {one.tensor_class} changed while it was copied; "
                    "something else uses the device: nothing was freed"
                )
        with self._devices.at_rest(self._used()):
            try:
                self._pool.settle()
                with uncollected():
                    self._reload.empty(self._items)
                    self._devices.empty_cache()
            except Exception as error:
                self._undo_free(error)
                raise YieldRefusedError(f"offload: freeing failed: {error}; undone") from error
        self._reload.settled(self._items)

    def _undo_free(self, error: Exception) -> None:
        away = [item for item in self._items if item.away]
        try:
            self._reload.bring_back(away, 0, 0.0, no_progress, never)
        except Exception as second:
            try:
                self._reload.empty_again(away)
            except Exception:  # they stay `away`, and are emptied before they are filled
                _log.warning("reallocated storages could not be emptied again", exc_info=True)
            self._reload.settled(away)
            raise YieldFailedError(
                f"offload: freeing failed ({error}) and so did undoing it ({second}); "
                "the host copy stays: restore again"
            ) from second
        for item in away:
            item.away = False
        self.zeroed = {item.tensor_class for item in away if item.place is None}
        self._reload.settled(away)

    def discard(self, classes: Collection[str]) -> None:
        """Drop the kept contents of these classes; they are zeros after the restore."""
        for item in self._items:
            if item.away and item.tensor_class in classes:
                item.place = item.checksum = None

    def abandon(self) -> None:
        """Undo `begin`, `admit` and `copy_out`; no storage is empty."""
        if any(item.away for item in self._items):
            raise YieldFailedError("offload: storages are empty; restore them first")
        self._drop_prefetch()
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
            classes: only these; None for all that are left.
            wait_seconds: for memory on the devices.
            progress: called with (bytes done, total bytes).
            stop: called between copies; True ends them.

        Raises:
            YieldRefusedError: no device memory, or stopped: storages of this call are emptied
                again, and the host copy stays.
            YieldFailedError: reading back from disk failed.
        """
        started = self._now()
        self._drop_those_in_use(classes)
        todo = [i for i in self._items if i.away and (classes is None or i.tensor_class in classes)]
        total = sum(item.size for item in todo if item.place is not None)
        with self._devices.at_rest(self._used()):
            for device in sorted({item.candidate.device for item in todo}):
                self._devices.synchronize(device)
            # interrupted while emptying or filling: the host has the contents
            self._reload.empty([item for item in todo if not item.emptied])
            try:
                seconds = self._reload.bring_back(todo, total, wait_seconds, progress, stop)
            except BaseException:
                self._reload.empty_again(todo)
                raise
        ended = self._now()
        if total >= _MEASURED_BYTES and seconds > 0:
            self._back_speed = total / seconds
        for item in todo:
            item.away = False
        self._reload.settled(todo)
        self._unverified += [item for item in todo if item.checksum is not None]
        if not any(item.away for item in self._items):
            self._finish()
        return PhaseTime(Phase.RELOAD, ended - started, total)

    def _drop_those_in_use(self, classes: Collection[str] | None) -> None:
        """Skip storages that the job has resized since we emptied them."""
        used = [
            item
            for item in self._items
            if item.away
            and item.emptied
            and (classes is None or item.tensor_class in classes)
            and item.candidate.storage.nbytes()
        ]
        for item in used:
            item.away = False
            item.checksum = None
        for tensor_class, size in bytes_by_class(item.candidate for item in used).items():
            self.notes.append(
                f"the job itself has allocated {size} bytes of class {tensor_class} meanwhile: "
                "left as they are"
            )

    def verify(self) -> str:
        """Compare the checksums of storages that came back since the last call.

        Returns:
            "equal"; "" if no checksums were requested.

        Raises:
            YieldFailedError: they differ; names the number of storages by class.
        """
        items = self._unverified
        if not items:
            return ""
        wrong: Counter[str] = Counter()
        with self._devices.at_rest(self._used()):
            self._unverified = []
            for item, now in zip(items, self._checksums_of(items), strict=True):
                wrong[item.tensor_class] += item.checksum != now
            self._devices.empty_cache()  # working memory of the checksums
        counts = ", ".join(f"{count} of {name}" for name, count in sorted(wrong.items()) if count)
        if counts:
            raise YieldFailedError(
                f"verify: the contents of storages differ from before: {counts}; "
                "stop the job and go back to its last checkpoint"
            )
        return "equal"

    def _used(self) -> list[int]:
        """The devices of the items, or of the last ones until they are verified."""
        return sorted({item.candidate.device for item in self._items or self._unverified})

    def _mover(self) -> Mover:
        return Mover(self._devices, self._pool, staging=self._staging)

    def _note_checksums(self, items: Sequence[Item]) -> None:
        try:
            values = self._checksums_of(items)
        except Exception as error:
            if not self._devices.is_short_of_memory(error):
                raise
            raise YieldRefusedError(
                "verify: the device has no 48 MiB left for checksums; nothing was moved"
            ) from error
        for item, value in zip(items, values, strict=True):
            item.checksum = value

    def _checksums_of(self, items: Sequence[Item]) -> list[int]:
        values: dict[int, int] = {}
        for device in sorted({item.candidate.device for item in items}):
            here = [item for item in items if item.candidate.device == device]
            views = [self._devices.bytes_of(item.candidate.storage, device) for item in here]
            for item, value in zip(here, checksums(self._devices.torch, views), strict=True):
                values[id(item)] = value
        return [values[id(item)] for item in items]

    def _finish(self) -> None:
        """Drop all items, and the pool as far as it is not kept."""
        self._forget()
        if self._release_host:
            self._pool.give_back()
        elif self._keep_bytes is not None:
            self._pool.give_back(self._keep_bytes)
        self._host.keep(self._pool.capacity_bytes)

    def _forget(self) -> None:
        self._drop_prefetch()
        self._items = []
        self._memory_bytes = 0
        if self._file is not None:
            # on a thread: closing an unnamed file of many GiB takes seconds
            self._closing = threading.Thread(
                target=self._file.close, name="gpumem-close", daemon=True
            )
            self._closing.start()
            self._file = None

    def give_back(self) -> int:
        """Unpin and free the host memory that is kept between yields.

        Returns:
            Bytes freed; 0 while it is in use.
        """
        if self._items or self._prefetch is not None:
            return 0
        freed = self._pool.give_back()
        self._host.keep(self._pool.capacity_bytes)
        return freed

    def close(self) -> bool:
        """Free all pinned and reserved memory; it can be used again.

        Returns:
            False, without any effect, while memory is in use.
        """
        if self._items or self._prefetch is not None:
            return False
        self.give_back()
        self._host.close()
        if self._closing is not None:
            self._closing.join()
        return True
