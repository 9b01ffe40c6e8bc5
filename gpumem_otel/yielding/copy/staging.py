"""Copies through a small ring of pinned buffers, to and from pageable memory or a file.

The device fills some buffers while threads empty others, and the other way round.
"""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.yielding.copy.disk import DISK_BLOCK
from gpumem_otel.yielding.copy.host_memory import HostPool
from gpumem_otel.yielding.copy.workers import WorkerThreads, threads_of_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.yielding.copy.devices import Devices, StreamMark
    from gpumem_otel.yielding.copy.host_memory import Piece

RING_BUFFERS: Final = 24
RING_BYTES: Final = 16 << 20


class Staging:
    """The ring and its threads.

    Args:
        devices: makes the copies.
        device: whose context pins the ring.
        buffers: number of buffers.
        buffer_bytes: size of each.
        threads: that empty and fill buffers; None for one per CPU, at most 16.
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
        self._workers = WorkerThreads(count, "gpumem-copy", lambda: devices.use(device))
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
        """Have the device fill a buffer and a thread empty it.

        Args:
            begin: starts the copy into a byte tensor and returns a mark of its end.
            length: bytes, at most `buffer_bytes`.
            keep: stores the bytes at an address; releases the interpreter lock.

        Raises:
            GpumemError: an earlier `keep` failed.
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
        """Have a thread fill a buffer and the device copy it.

        Args:
            fill: puts the bytes at an address; releases the interpreter lock.
            length: bytes, at most `buffer_bytes`.
            begin: starts the copy from a byte tensor and returns a mark of its end.

        Raises:
            GpumemError: an earlier `fill` failed.
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
        """Wait until all buffers are free.

        Raises:
            GpumemError: a `keep` or `fill` failed.
        """
        while len(self._free) < self._buffers:
            self._next()
        self._raise()

    def stop(self) -> None:
        """Wait for the threads' running jobs and end the threads."""
        self._workers.finish()

    def close(self) -> None:
        """Free the ring, after `stop` and once no device uses it."""
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
        """Handle one buffer that a thread has finished with."""
        buffer, begin = self._inbox.get()
        if begin is None:
            self._free.append(buffer)
            return
        mark = begin()  # on this thread: a lane belongs to one thread

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
