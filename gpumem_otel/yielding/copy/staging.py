"""Copies through a small ring of pinned buffers, for what the driver can not reach by itself.

The device fills some buffers while threads empty others into pageable memory or a file, and the
other way round.
"""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.yielding.copy.disk import DISK_BLOCK
from gpumem_otel.yielding.copy.host_memory import HostPool, PinThreads, threads_of_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.yielding.copy.devices import Devices, StreamMark
    from gpumem_otel.yielding.copy.host_memory import Piece

RING_BUFFERS: Final = 24
RING_BYTES: Final = 16 << 20


class Staging:
    """The ring and its threads.

    Args:
        devices: does the copies.
        device: whose context pins the ring.
        buffers: how many.
        buffer_bytes: of each.
        threads: that empty and fill buffers; None for one per CPU of this process, at most 16.
    """

    def __init__(
        self,
        devices: Devices,
        device: int,
        *,
        buffers: int = RING_BUFFERS,
        buffer_bytes: int = RING_BYTES,
        threads: int | None = None,
    ) -> None:
        self.buffer_bytes = -(-buffer_bytes // DISK_BLOCK) * DISK_BLOCK
        self._pool = HostPool(devices, piece_bytes=self.buffer_bytes)
        self._pool.grow_to(buffers * self.buffer_bytes, device)
        self._buffers = buffers
        count = threads or threads_of_process()
        self._workers = PinThreads(count, "gpumem-copy", lambda: devices.use(device))
        self._inbox: queue.SimpleQueue[tuple[Piece, Callable[[], StreamMark] | None]] = (
            queue.SimpleQueue()
        )
        self._free = [
            self._pool.piece_at(number * self.buffer_bytes) for number in reversed(range(buffers))
        ]
        self._error: BaseException | None = None

    def out(
        self, begin: Callable[[Any], StreamMark], length: int, keep: Callable[[int], None]
    ) -> None:
        """Have a buffer filled by the device, and emptied by a thread.

        Args:
            begin: begins the copy into a tensor of bytes; gives the moment of its end.
            length: bytes, at most `buffer_bytes`.
            keep: takes what lies at an address; without the interpreter lock.

        Raises:
            GpumemError: what an earlier `keep` raised.
        """
        buffer = self._take()
        mark = begin(buffer.bytes[:length])

        def empty() -> None:
            try:
                mark.wait()
                keep(buffer.address)
            except BaseException as error:
                self._error = self._error or error
            self._inbox.put((buffer, None))

        self._workers.do(empty)

    def back(
        self, fill: Callable[[int], None], length: int, begin: Callable[[Any], StreamMark]
    ) -> None:
        """Have a buffer filled by a thread, and copied to the device.

        Args:
            fill: puts the bytes at an address; without the interpreter lock.
            length: bytes, at most `buffer_bytes`.
            begin: begins the copy out of a tensor of bytes; gives the moment of its end.

        Raises:
            GpumemError: what an earlier `fill` raised.
        """
        buffer = self._take()

        def put() -> None:
            try:
                fill(buffer.address)
            except BaseException as error:
                self._error = self._error or error
                self._inbox.put((buffer, None))
            else:
                self._inbox.put((buffer, lambda: begin(buffer.bytes[:length])))

        self._workers.do(put)

    def flush(self) -> None:
        """Wait until nothing is under way.

        Raises:
            GpumemError: what a `keep` or `fill` raised.
        """
        while len(self._free) < self._buffers:
            self._next()
        self._raise()

    def stop(self) -> None:
        """Begin nothing more; what the threads are at is waited for."""
        self._workers.finish()

    def close(self) -> None:
        """Give the ring back, after `stop`: no device uses it any more."""
        self._free = []
        self._pool.give_back()

    def _take(self) -> Piece:
        while not self._free:
            self._next()
        self._raise()
        buffer = self._free.pop()
        self._pool.wait_for(buffer)
        return buffer

    def _next(self) -> None:
        """One buffer that a thread is through with."""
        buffer, begin = self._inbox.get()
        if begin is None:
            self._free.append(buffer)
            return
        mark = begin()  # on this thread: a lane is for one

        def release() -> None:
            try:
                mark.wait()
            except BaseException as error:
                self._error = self._error or error
            self._inbox.put((buffer, None))

        self._workers.do(release)

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
