"""Empties storages, and allocates and fills them again.

A block is freed and allocated on the stream that it belongs to; each copy starts as soon as its
storage has memory.
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
"""Required in addition to the blocks, since the allocator reserves whole segments."""


class Reload:
    """Empties and fills the items of a yield; has no state.

    Args:
        devices: of the storages.
        gpus: the locks of the GPUs.
        mover: makes a run of copies.
        moves: receives the storages that have moved.
        on_waiting: called once per device with the reason why memory is waited for.
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
        """Free the storages' memory; each block returns to its own stream."""
        for device in sorted({item.candidate.device for item in items}):
            with self._devices.allocating(device, 0):
                for item in items:
                    if item.candidate.device == device:
                        # `away` first: after an interrupt in between it is filled again
                        item.away, item.emptied = True, False
                        item.candidate.storage.resize_(0)
                        item.emptied = True

    def empty_again(self, items: Sequence[Item]) -> None:
        """Empty items after a reload that failed."""
        self.empty(items)
        self._devices.empty_cache()

    def settled(self, items: Iterable[Item]) -> None:
        """Report that these items have new addresses, or none."""
        if self._moves is not None:
            self._moves.settled([item.candidate for item in items])

    def bring_back(
        self,
        items: Sequence[Item],
        total: int,
        wait_seconds: float,
        progress: Callable[[int, int], None],
        stop: Callable[[], bool],
    ) -> float:
        """Allocate and fill; each copy starts as soon as its storage has memory.

        Returns:
            Seconds, without the wait for device memory.
        """
        devices = self._devices
        end = self._now() + wait_seconds
        with ExitStack() as rooms:
            for device in sorted({item.candidate.device for item in items}):
                here = [item for item in items if item.candidate.device == device]
                need = sum(
                    max(item.candidate.block_bytes, item.size)
                    for item in here
                    if not item.candidate.storage.nbytes()
                )
                need += min(_DEVICE_SLACK, need // 4)
                free = partial(self._free_bytes, device, need, [])
                seconds = max(end - self._now(), 0.0)
                rooms.enter_context(
                    self._gpus.room(devices.uuid(device), need, free, seconds, stop)
                )
            copying = self._now()
            with closing(self._allocated(items)) as ready, self._mover() as mover, uncollected():
                mover.observe(progress, stop, total)
                mover.back(parts_of(ready, devices))
            return self._now() - copying

    def _free_bytes(self, device: int, need_bytes: int, reported: list[str]) -> int:
        """Free memory of the device; empties this process's cache if that is not enough."""
        free = self._devices.free_bytes(device)
        if free < need_bytes:
            self._devices.empty_cache()
            free = self._devices.free_bytes(device)
        if free < need_bytes and not reported:
            reported.append(
                f"device {self._devices.uuid(device)}: waits for memory, "
                f"{human_bytes(need_bytes - free)} of {human_bytes(need_bytes)} are missing"
            )
            self._on_waiting(reported[0])
        return free

    def _allocated(self, items: Sequence[Item]) -> Generator[Item, None, None]:
        """Allocate the items one by one, each on its block's own stream."""
        item_of = {id(item.candidate): item for item in items}
        ordered = [item_of[id(one)] for one in in_turn([item.candidate for item in items])]
        at: tuple[int, int] | None = None
        with ExitStack() as stream:
            for number, item in enumerate(ordered):
                one = item.candidate
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
                    left = sum(i.size for i in ordered[number:] if i.candidate.device == one.device)
                    raise YieldRefusedError(
                        f"device {one.device}: no memory for the last {left} bytes of "
                        f"{sum(i.size for i in ordered if i.candidate.device == one.device)}; free "
                        "them and restore again: the host copy stays"
                    ) from error
                yield item
