"""Copies the bytes of storages to their places and back, many pieces at once.

Pinned memory is copied directly; pageable memory and disk go through a ring of pinned buffers
(`staging.py`).
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.copy.disk import DISK_BLOCK, DiskFile
from gpumem_otel.yielding.copy.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gpumem_otel.yielding.copy.devices import Devices, Lane, StreamMark
    from gpumem_otel.yielding.copy.host_memory import HostPool, Piece

_log = named_logger("gpumem_otel.yielding")

_MARK_BYTES: Final = 64 << 20
_MARK_COPIES: Final = 256
"""A mark follows this many bytes or copies: only then do they start."""
_TRIES: Final = 3
"""To end copies in progress, despite a second interrupt or an error of another copy."""
_AHEAD_BYTES: Final = 8 << 30
"""In progress per device at most: 0.16 s, enough time to request many small copies."""


@dataclass(frozen=True, slots=True)
class InMemory:
    """A range of the host memory pool."""

    offset: int


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A range of whole blocks of a file."""

    file: DiskFile
    offset: int


@dataclass(frozen=True, slots=True)
class CopyPart:
    """A storage's bytes and their place.

    Attributes:
        bytes: a byte tensor over the storage.
        place: None if discarded: they become zeros.
        stream: of its block (raw handle); on the way back copies wait for its work.
    """

    device: int
    bytes: Any
    size_bytes: int
    place: InMemory | OnDisk | None
    stream: int = 0


class Mover:
    """One run of copies, then `close`; also a context manager.

    Args:
        devices: makes the copies.
        pool: of the places `InMemory`.
        staging: makes the ring for a device when it is needed.

    Attributes:
        waited: a copy had to wait until its host memory was ready.
    """

    def __init__(
        self,
        devices: Devices,
        pool: HostPool,
        *,
        staging: Callable[[Devices, int], Staging] = Staging,
    ) -> None:
        self._devices = devices
        self._pool = pool
        self._progress: Callable[[int, int], None] = no_progress
        self._stop: Callable[[], bool] = never
        self._total = 0
        self._done = 0
        self._lanes: dict[int, _Tracked] = {}
        self._make_staging = staging
        self._staging: Staging | None = None
        self._outward = True
        self._batch: _Batch | None = None
        self.waited = False

    def observe(
        self,
        progress: Callable[[int, int], None],
        stop: Callable[[], bool],
        total_bytes: int,
    ) -> None:
        """Set the callbacks of the run.

        Args:
            progress: called with (bytes done, total bytes).
            stop: called between copies; True ends the run with an error.
            total_bytes: of the run.
        """
        self._progress, self._stop, self._total = progress, stop, total_bytes

    def out(self, parts: Iterable[CopyPart]) -> None:
        """Copy from the devices; returns when all is stored.

        Raises:
            YieldRefusedError: stopped, or a place failed; the copies are worthless.
        """
        self._request(parts, outward=True)
        self._finish()

    def plan_out(self, parts: Iterable[CopyPart]) -> None:
        """Request copies to pinned memory that is ready; `begin` starts them."""
        self._request(parts, outward=True, held=True)

    def begin(self) -> None:
        """Start the planned copies: one call of torch, without the interpreter lock; any thread."""
        for lane in self._lanes.values():
            lane.begin()

    def back(self, parts: Iterable[CopyPart]) -> None:
        """Copy to the devices; returns when all is there.

        Raises:
            YieldRefusedError: stopped.
            YieldFailedError: reading back from disk failed.
        """
        self._request(parts, outward=False)
        self._finish()

    def _request(self, parts: Iterable[CopyPart], *, outward: bool, held: bool = False) -> None:
        self._outward = outward
        for part in parts:
            lane = self._lane(part.device)
            if not outward:
                lane.after(part.stream)
            if isinstance(part.place, InMemory):
                for start, size, piece, at in self._spans(part, part.place):
                    self._check()
                    if outward:
                        self.waited = self.waited or not piece.ready.is_set()
                        self._pool.wait_for(piece)
                    tensor = part.bytes[start : start + size]
                    if not piece.pinned:
                        self._gather(lane, tensor, size, piece, at)
                    elif outward:
                        lane.copy(piece.bytes[at : at + size], tensor, size, held=held)
                    else:
                        lane.copy(tensor, piece.bytes[at : at + size], size)
            elif isinstance(part.place, OnDisk):
                self._gather(lane, part.bytes, part.size_bytes, part.place.file, part.place.offset)
            elif not outward:
                lane.zero(part.bytes)

    def __enter__(self) -> Mover:  # noqa: PYI034 - Self is of Python 3.11
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        if error is None:
            self.close()
        else:
            self.drop()

    def drop(self) -> None:
        """`close`, for copies that no longer matter: errors are logged."""
        try:
            self.close()
        except Exception:
            _log.warning("ending abandoned copies failed", exc_info=True)

    def close(self) -> None:
        """Wait for all copies in progress, even if some fail, and free the ring.

        Raises:
            BaseException: the first error; no copy is in progress all the same.
        """
        staging, self._staging = self._staging, None
        endings = [lane.drain for lane in self._lanes.values()]
        if staging is not None:
            endings = [staging.stop, *endings, staging.close]
        errors: list[BaseException] = []
        for end in endings:
            _ended(end, errors)
        if errors:
            raise errors[0]

    # one part

    def _spans(self, part: CopyPart, place: InMemory) -> Iterator[tuple[int, int, Piece, int]]:
        """(offset in the storage, bytes, piece, offset in the piece)."""
        start = 0
        while start < part.size_bytes:
            piece = self._pool.piece_at(place.offset + start)
            at = place.offset + start - piece.start
            size = min(part.size_bytes - start, piece.size_bytes - at)
            yield start, size, piece, at
            start += size

    def _gather(
        self, lane: _Tracked, tensor: Any, size: int, home: Piece | DiskFile, at: int
    ) -> None:
        """Request a staged copy; small neighbours share a buffer."""
        most = self._ring(lane).buffer_bytes
        for offset in range(0, size, most):
            self._check()
            length = min(most, size - offset)
            start, end = at + offset, at + offset + length
            batch = self._batch
            if batch is None or not batch.takes(home, start, end, most):
                self._submit()
                batch = self._batch = _Batch(home, start)
            part = tensor[offset : offset + length]
            batch.copies.append((lane, part, start - batch.start, length))
            batch.end = end

    def _submit(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None or self._staging is None:
            return
        if self._outward:
            self._staging.out(batch.fill, batch.end - batch.start, batch.keep)
        else:
            self._staging.back(batch.load, batch.end - batch.start, batch.drain)

    def _ring(self, lane: _Tracked) -> Staging:
        if self._staging is None:
            self._staging = self._make_staging(self._devices, lane.device)
        return self._staging

    # the run

    def _lane(self, device: int) -> _Tracked:
        lane = self._lanes.get(device)
        if lane is None:
            made = self._devices.lane(device)
            lane = self._lanes[device] = _Tracked(made, device, self._add)
        return lane

    def _add(self, size_bytes: int) -> None:
        self._done += size_bytes
        self._progress(self._done, self._total)

    def _check(self) -> None:
        if self._stop():
            raise YieldRefusedError("stopped before all of it was copied; nothing has changed")

    def _finish(self) -> None:
        self._submit()
        if self._staging is not None:
            self._staging.flush()
        for lane in self._lanes.values():
            lane.drain()


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


def never() -> bool:
    """Never stop."""
    return False


def _ended(end: Callable[[], None], errors: list[BaseException]) -> None:
    """Retry after an interrupt: a device may still write to the memory."""
    for _ in range(_TRIES):
        try:
            end()
            break
        except BaseException as error:
            errors.append(error)


class _Tracked:
    """A lane with a limit on the bytes in progress."""

    def __init__(self, lane: Lane, device: int, on_done: Callable[[int], None]) -> None:
        self.device = device
        self._lane = lane
        self._on_done = on_done
        self._since_mark = self._copies = 0
        self._in_progress: deque[tuple[StreamMark, int]] = deque()
        self._ahead = 0

    def copy(self, to: Any, source: Any, size: int, *, held: bool = False) -> None:
        """`held`: the caller makes the next mark, which covers this copy too."""
        self._lane.copy(to, source)
        self._since_mark += size
        self._copies += 1
        if not held and (self._since_mark >= _MARK_BYTES or self._copies >= _MARK_COPIES):
            self.mark()

    def zero(self, to: Any) -> None:
        self._lane.zero(to)

    def mark(self) -> StreamMark:
        mark = self.begin()
        while self._ahead > _AHEAD_BYTES:
            self._oldest()
        return mark

    def begin(self) -> StreamMark:
        """As `mark`, without a limit."""
        mark = self._lane.mark()
        self._in_progress.append((mark, self._since_mark))
        self._ahead += self._since_mark
        self._since_mark = self._copies = 0
        return mark

    def after(self, stream: int) -> None:
        self._lane.after(stream)

    def drain(self) -> None:
        self.mark()
        while self._in_progress:
            self._oldest()

    def _oldest(self) -> None:
        mark, size = self._in_progress[0]
        mark.wait()
        self._in_progress.popleft()  # only now: an interrupted wait is repeated
        self._ahead -= size
        if size:
            self._on_done(size)


class _Batch:
    """Neighbouring ranges of a piece or file that share a buffer of the ring.

    Attributes:
        copies: (lane, bytes of a storage, offset in the buffer, size).
    """

    def __init__(self, home: Piece | DiskFile, start: int) -> None:
        self.home = home
        self.start = self.end = start
        self.copies: list[tuple[_Tracked, Any, int, int]] = []

    def takes(self, home: Piece | DiskFile, start: int, end: int, most: int) -> bool:
        return home is self.home and start >= self.end and end - self.start <= most

    def fill(self, buffer: Any) -> StreamMark:
        """Copy storages to the buffer."""
        for lane, part, at, length in self.copies:
            lane.copy(buffer[at : at + length], part, length, held=True)
        return self._marks()

    def drain(self, buffer: Any) -> StreamMark:
        """Copy the buffer to storages."""
        for lane, part, at, length in self.copies:
            lane.copy(part, buffer[at : at + length], length, held=True)
        return self._marks()

    def _marks(self) -> StreamMark:
        """One mark per lane."""
        return _Marks([lane.mark() for lane in {id(c[0]): c[0] for c in self.copies}.values()])

    def keep(self, address: int) -> None:
        """Copy the buffer to its place."""
        length = self.end - self.start
        if isinstance(self.home, DiskFile):
            self.home.write(self.start, _blocks(address, length))
        else:
            ctypes.memmove(self.home.address + self.start, address, length)

    def load(self, address: int) -> None:
        """Copy from the place to the buffer."""
        length = self.end - self.start
        if isinstance(self.home, DiskFile):
            self.home.read(self.start, _blocks(address, length))
        else:
            ctypes.memmove(address, self.home.address + self.start, length)


class _Marks:
    def __init__(self, marks: list[StreamMark]) -> None:
        self._marks = marks

    def wait(self) -> None:
        for mark in self._marks:
            mark.wait()


def _blocks(address: int, length: int) -> memoryview:
    """A ring buffer's bytes, rounded up to whole blocks."""
    whole = -(-length // DISK_BLOCK) * DISK_BLOCK
    return memoryview((ctypes.c_char * whole).from_address(address)).cast("B")
