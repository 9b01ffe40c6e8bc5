"""Storages that are emptied, and that are given memory and their contents again.

A block goes back to the stream that it belonged to, and comes back to the same, each copy as soon
as its storage is there.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Final

from gpumem_otel.base.text import human_bytes
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.copy.gc_control import uncollected
from gpumem_otel.yielding.copy.placement import in_turn, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from gpumem_otel.yielding.copy.devices import Devices
    from gpumem_otel.yielding.copy.mover import Mover
    from gpumem_otel.yielding.copy.placement import Item
    from gpumem_otel.yielding.copy.reservations import DeviceReservations
    from gpumem_otel.yielding.protocols import Moves

_HERE: Final = __file__
_DEVICE_SLACK: Final = 64 << 20
"""The allocator reserves whole segments: asked for beside the blocks themselves."""


class Reload:
    """Works on items of a yield; keeps nothing.

    Args:
        devices: where the storages are.
        gpus: the locks of the GPUs.
        mover: makes a run of copies.
        moves: told what was moved.
        monotonic: seconds of a clock that never goes back.
        on_waiting: told why it waits for room on a device, once for each.
    """

    def __init__(
        self,
        devices: Devices,
        gpus: DeviceReservations,
        mover: Callable[[], Mover],
        *,
        moves: Moves | None = None,
        monotonic: Callable[[], float] = time.perf_counter,
        on_waiting: Callable[[str], object] = lambda _why: None,
    ) -> None:
        self._on_waiting = on_waiting
        self._devices = devices
        self._gpus = gpus
        self._mover = mover
        self._moves = moves
        self._now = monotonic

    def empty(self, items: Sequence[Item]) -> None:
        """A block goes back to the stream that it belongs to, whatever stream is current."""
        for device in sorted({item.movable.device for item in items}):
            with self._devices.allocating(device, 0):
                for item in items:
                    if item.movable.device == device:
                        # away first: an interrupt between the two leaves it to be filled again
                        item.away, item.emptied = True, False
                        item.movable.storage.resize_(0)
                        item.emptied = True

    def empty_again(self, items: Sequence[Item]) -> None:
        """Take back what could not all be filled."""
        self.empty(items)
        self._devices.empty_cache()

    def settled(self, items: Iterable[Item]) -> None:
        """These have other addresses than before, or none."""
        if self._moves is not None:
            self._moves.settled([item.movable for item in items])

    def bring_back(
        self,
        items: Sequence[Item],
        total: int,
        wait_seconds: float,
        progress: Callable[[int, int], None],
        stop: Callable[[], bool],
    ) -> float:
        """Allocate and fill: each copy begins as soon as its storage is there.

        Returns:
            Seconds that it took, the wait for room left out.
        """
        devices = self._devices
        end = self._now() + wait_seconds
        with ExitStack() as rooms:
            for device in sorted({item.movable.device for item in items}):
                here = [item for item in items if item.movable.device == device]
                need = sum(
                    max(item.movable.block_bytes, item.size)
                    for item in here
                    if not item.movable.storage.nbytes()
                )
                need += min(_DEVICE_SLACK, need // 4)
                free = partial(self._free_bytes, device, need, [])
                seconds = max(end - self._now(), 0.0)
                rooms.enter_context(
                    self._gpus.room(devices.uuid(device), need, free, seconds, stop)
                )
            copying = self._now()
            with closing(self._allocated(items)) as ready, self._mover() as mover, uncollected():
                mover.tell(progress, stop, total)
                mover.back(parts_of(ready, devices))
            return self._now() - copying

    def _free_bytes(self, device: int, need_bytes: int, told: list[str]) -> int:
        """What the device has free, with the cache of this process's allocator where it must be."""
        found = self._devices.free_bytes(device)
        if found < need_bytes:
            self._devices.empty_cache()
            found = self._devices.free_bytes(device)
        if found < need_bytes and not told:
            told.append(
                f"device {self._devices.uuid(device)}: waits for room, "
                f"{human_bytes(need_bytes - found)} of {human_bytes(need_bytes)} are missing"
            )
            self._on_waiting(told[0])
        return found

    def _allocated(self, items: Sequence[Item]) -> Generator[Item, None, None]:
        """One after the other, each on its block's own stream."""
        item_of = {id(item.movable): item for item in items}
        ordered = [item_of[id(one)] for one in in_turn([item.movable for item in items])]
        at: tuple[int, int] | None = None
        with ExitStack() as stream:
            for number, item in enumerate(ordered):
                one = item.movable
                if at != (one.device, one.stream):
                    stream.close()
                    stream.enter_context(self._devices.allocating(one.device, one.stream))
                    at = one.device, one.stream
                item.emptied = False
                try:
                    with nullcontext() if self._moves is None else self._moves.placing(one, _HERE):
                        one.storage.resize_(item.size)
                except Exception as error:
                    if not self._devices.is_short_of_memory(error):
                        raise
                    left = sum(i.size for i in ordered[number:] if i.movable.device == one.device)
                    raise YieldRefusedError(
                        f"device {one.device}: no room for the last {left} bytes of "
                        f"{sum(i.size for i in ordered if i.movable.device == one.device)}; free "
                        "them and restore again: the host copy stays"
                    ) from error
                yield item
