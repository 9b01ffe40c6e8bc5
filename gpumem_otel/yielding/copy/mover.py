"""Bytes of storages to where they are kept and back, in large pieces, many under way at once.

Pinned memory is copied to and from directly. What is pageable or on disk goes through a ring of
pinned buffers (`staging`).
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
"""A mark follows so many bytes or copies: until then they are only asked for."""
_TRIES: Final = 3
"""To end what is under way: a second interrupt, an error of another copy."""
_AHEAD_BYTES: Final = 8 << 30
"""Under way at once, by device: 0.16 s, in which many small copies can be asked."""


@dataclass(frozen=True, slots=True)
class InMemory:
    """A range of the pool's line."""

    offset: int


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A range of a file, whole blocks of it."""

    file: DiskFile
    offset: int


@dataclass(frozen=True, slots=True)
class CopyPart:
    """A storage's bytes and where they are kept.

    Attributes:
        bytes: a tensor of bytes over the storage.
        place: None: nowhere, they become zeros.
        stream: of its block (raw handle), whose work comes first; on the way back.
    """

    device: int
    bytes: Any
    size_bytes: int
    place: InMemory | OnDisk | None
    stream: int = 0


class Mover:
    """One run of copies; then `close`, which `with` does as well.

    Args:
        devices: does them.
        pool: whose line `InMemory` means.
        staging: makes the ring for a device where it is needed.

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
        self._progress: Callable[[int, int], None] = nobody
        self._stop: Callable[[], bool] = never
        self._total = 0
        self._done = 0
        self._lanes: dict[int, _Tracked] = {}
        self._make_staging = staging
        self._staging: Staging | None = None
        self._send = self._send_out
        self._batch: _Batch | None = None
        self._held = False
        self.waited = False

    def tell(
        self,
        progress: Callable[[int, int], None],
        stop: Callable[[], bool],
        total_bytes: int,
    ) -> None:
        """Who wants to know.

        Args:
            progress: told (bytes done, of so many).
            stop: asked between copies; True ends the run with an error.
            total_bytes: of the run.
        """
        self._progress, self._stop, self._total = progress, stop, total_bytes

    def out(self, parts: Iterable[CopyPart]) -> None:
        """From the devices; returns when all of it is kept.

        Raises:
            YieldRefusedError: stopped, or a place failed; what was copied counts for nothing.
        """
        self._ask_out(parts)
        self._finish()

    def plan_out(self, parts: Iterable[CopyPart]) -> None:
        """Have these copied out by `begin`; all of them are kept in pinned memory that is ready."""
        self._held = True
        self._ask_out(parts)

    def begin(self) -> None:
        """Begin what was planned: one call of torch, without the interpreter lock; on any thread.

        What comes next goes on from there.
        """
        self._held = False
        for lane in self._lanes.values():
            lane.begin()

    def _ask_out(self, parts: Iterable[CopyPart]) -> None:
        self._send = self._send_out
        for part in parts:
            lane = self._lane(part.device)
            if isinstance(part.place, InMemory):
                for start, size, piece, at in self._spans(part, part.place):
                    self._check()
                    self.waited = self.waited or not piece.ready.is_set()
                    self._pool.wait_for(piece)
                    source = part.bytes[start : start + size]
                    if piece.pinned:
                        lane.copy(piece.bytes[at : at + size], source, size, held=self._held)
                    else:
                        self._gather(lane, source, size, piece, at)
            elif isinstance(part.place, OnDisk):
                self._gather(lane, part.bytes, part.size_bytes, part.place.file, part.place.offset)

    def back(self, parts: Iterable[CopyPart]) -> None:
        """To the devices; returns when all of it is there.

        Raises:
            YieldRefusedError: stopped.
            YieldFailedError: the disk does not give back what it took.
        """
        self._send = self._send_back
        for part in parts:
            lane = self._lane(part.device)
            lane.after(part.stream)
            if isinstance(part.place, InMemory):
                for start, size, piece, at in self._spans(part, part.place):
                    self._check()
                    target = part.bytes[start : start + size]
                    if piece.pinned:
                        lane.copy(target, piece.bytes[at : at + size], size)
                    else:
                        self._gather(lane, target, size, piece, at)
            elif isinstance(part.place, OnDisk):
                self._gather(lane, part.bytes, part.size_bytes, part.place.file, part.place.offset)
            else:
                lane.zero(part.bytes)
        self._finish()

    def __enter__(self) -> Mover:  # noqa: PYI034 - Self is of Python 3.11
        """Ends with `close`; where an error is under way already, one of `close` is logged."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        """See `__enter__`."""
        if error is None:
            self.close()
        else:
            self.drop()

    def drop(self) -> None:
        """As `close`, of copies that count for nothing: errors are logged."""
        try:
            self.close()
        except Exception:
            _log.warning("copies that failed did not end well", exc_info=True)

    def close(self) -> None:
        """Let go of the ring; waits for what is under way, also where some of that fails.

        Raises:
            BaseException: the first that was raised meanwhile; nothing is under way all the same.
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
        """Ask for a staged copy; small neighbours go together in one buffer."""
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
        if batch is not None and self._staging is not None:
            self._send(self._staging, batch)

    @staticmethod
    def _send_out(staging: Staging, batch: _Batch) -> None:
        staging.out(batch.fill, batch.end - batch.start, batch.keep)

    @staticmethod
    def _send_back(staging: Staging, batch: _Batch) -> None:
        staging.back(batch.load, batch.end - batch.start, batch.drain)

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


def nobody(done: int, total: int) -> None:
    """Nobody watches."""


def never() -> bool:
    """Nothing stops it."""
    return False


def _ended(end: Callable[[], None], errors: list[BaseException]) -> None:
    """Have something end, an interrupt or not: a device may still write there."""
    for _ in range(_TRIES):
        try:
            end()
            break
        except BaseException as error:
            errors.append(error)


class _Tracked:
    """A lane that never has more than so many bytes under way."""

    def __init__(self, lane: Lane, device: int, done: Callable[[int], None]) -> None:
        self.device = device
        self._lane = lane
        self._tell = done
        self._since_mark = self._copies = 0
        self._under_way: deque[tuple[StreamMark, int]] = deque()
        self._ahead = 0

    def copy(self, to: Any, source: Any, size: int, *, held: bool = False) -> None:
        """Held: the next mark is the caller's, and for this copy too."""
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
        """As `mark`, however much is under way."""
        mark = self._lane.mark()
        self._under_way.append((mark, self._since_mark))
        self._ahead += self._since_mark
        self._since_mark = self._copies = 0
        return mark

    def after(self, stream: int) -> None:
        self._lane.after(stream)

    def drain(self) -> None:
        self.mark()
        while self._under_way:
            self._oldest()

    def _oldest(self) -> None:
        mark, size = self._under_way[0]
        mark.wait()
        self._under_way.popleft()  # not before: an interrupted wait begins anew
        self._ahead -= size
        if size:
            self._tell(size)


class _Batch:
    """Neighbours in one piece or file that share a buffer of the ring.

    Attributes:
        copies: (lane, bytes of a storage, where they lie in the buffer, how many).
    """

    def __init__(self, home: Piece | DiskFile, start: int) -> None:
        self.home = home
        self.start = self.end = start
        self.copies: list[tuple[_Tracked, Any, int, int]] = []

    def takes(self, home: Piece | DiskFile, start: int, end: int, most: int) -> bool:
        return home is self.home and start >= self.end and end - self.start <= most

    def fill(self, buffer: Any) -> StreamMark:
        """Storages to the buffer; one mark of each lane is for all of them."""
        for lane, part, at, length in self.copies:
            lane.copy(buffer[at : at + length], part, length, held=True)
        return _Marks([lane.mark() for lane in {id(c[0]): c[0] for c in self.copies}.values()])

    def drain(self, buffer: Any) -> StreamMark:
        """The buffer to storages."""
        for lane, part, at, length in self.copies:
            lane.copy(part, buffer[at : at + length], length, held=True)
        return _Marks([lane.mark() for lane in {id(c[0]): c[0] for c in self.copies}.values()])

    def keep(self, address: int) -> None:
        """The buffer to where it is kept."""
        length = self.end - self.start
        if isinstance(self.home, DiskFile):
            self.home.write(self.start, _blocks(address, length))
        else:
            ctypes.memmove(self.home.address + self.start, address, length)

    def load(self, address: int) -> None:
        """What is kept to the buffer."""
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
    """Of a ring buffer, up to the end of its last block."""
    whole = -(-length // DISK_BLOCK) * DISK_BLOCK
    return memoryview((ctypes.c_char * whole).from_address(address)).cast("B")
