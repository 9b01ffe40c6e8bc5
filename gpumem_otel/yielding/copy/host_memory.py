"""The pool of pinned host memory that takes what leaves the device, and is kept between yields.

Pinning through torch runs at 2.3 GiB/s only. Here memory is an anonymous map with huge pages:
threads touch it piece by piece, and each piece is registered with the driver just before its
copies, while the link is busy with the piece before. Registering is no faster on several threads,
and registering far ahead holds the driver's lock and delays the first copy. Where the driver
refuses to pin, a piece stays pageable and the pool reports it.

Pieces are kept out of forked children (`MADV_DONTFORK`), which would copy every page of them. A
child may have other memory at the same addresses and must unmap nothing, so the maps are made with
mmap(2) itself: no Python object owns them and unmaps them when it is collected.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.copy.gc_control import register_after_fork
from gpumem_otel.yielding.copy.workers import WorkerThreads, threads_of_process

if TYPE_CHECKING:
    from gpumem_otel.yielding.copy.devices import Devices

_log = named_logger("gpumem_otel.yielding")

_HUGE_PAGE: Final = 2 << 20
_PAGE: Final = 4096
_DEFAULT_PIECE: Final = 256 << 20
_POPULATE_WRITE: Final = 23
"""`MADV_POPULATE_WRITE` of Linux 5.14 (include/uapi/asm-generic/mman-common.h)."""
_POPULATE_BYTES: Final = 8 << 20
"""Per call, which holds the lock of the address space; registering needs that lock too."""
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_loaded: Final[list[Any]] = []


def _libc() -> Any:
    """The C library; calls through it release the interpreter lock."""
    if not _loaded:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        _loaded.append(libc)
    return _loaded[0]


def _range(address: int, size_bytes: int) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)


def _map(size_bytes: int) -> int:
    """Address of an anonymous map.

    Raises:
        OSError: there is no address space for it.
    """
    address: int | None = _libc().mmap(
        *_range(0, size_bytes), mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, ctypes.c_long(0),
    )  # fmt: skip
    if address is None or address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # without it: slower, or a larger child
        if hasattr(mmap, advice):
            _libc().madvise(*_range(address, size_bytes), getattr(mmap, advice))
    return address


def _populate(address: int, size_bytes: int) -> None:
    """Have the kernel back a range with memory, without holding the interpreter lock.

    Raises:
        MemoryError: the kernel has none left.
    """
    for at in range(0, size_bytes, _POPULATE_BYTES):
        length = min(_POPULATE_BYTES, size_bytes - at)
        if _libc().madvise(*_range(address + at, length), _POPULATE_WRITE):
            if ctypes.get_errno() == 12:  # ENOMEM  # noqa: PLR2004
                raise MemoryError
            ctypes.memset(address + at, 0, length)  # an older kernel


class Piece:
    """A range of host memory.

    Attributes:
        start: its offset in the pool.
        size_bytes: of it.
        pinned: whether the driver copies to and from it directly.
        device: whose context pinned it.
        bytes: a tensor over it.
    """

    def __init__(self, start: int, size_bytes: int, devices: Devices) -> None:
        self.start = start
        self.size_bytes = size_bytes
        self.pinned = False
        self.device = 0
        self.error: BaseException | None = None
        self._devices = devices
        self._pid = os.getpid()
        self._mapped_bytes = size_bytes + _HUGE_PAGE
        self._mapped = _map(self._mapped_bytes)
        self.address = -(-self._mapped // _HUGE_PAGE) * _HUGE_PAGE
        self.bytes: Any = devices.host_bytes(self.address, size_bytes)
        self.touched = threading.Event()
        """Backed by memory, or failed."""
        self.ready = threading.Event()
        """Touched, and pinned where that is possible; or failed."""
        self.pin_requested = False

    def pin(self, device: int) -> str:
        """Register it with the driver; "" for success, else the reason."""
        self.device = device
        try:
            why = self._devices.register(self.address, self.size_bytes, device)
        except Exception as error:
            why = str(error)
        self.pinned = not why
        return why

    def end(self, error: BaseException | None = None) -> None:
        """Mark it as ready, or as failed."""
        self.error = self.error or error
        self.touched.set()
        self.ready.set()

    def check(self) -> None:
        """Raise the error of a piece that failed.

        Raises:
            YieldRefusedError: the piece failed.
        """
        if self.error is not None:
            raise YieldRefusedError(
                f"host memory: {self.size_bytes >> 20} MiB could not be allocated "
                f"({type(self.error).__name__}: {self.error}); nothing was moved"
            ) from self.error

    def close(self) -> None:
        """Unpin and unmap; no copy may be in progress. Does nothing in a forked child."""
        self.bytes = None
        mapped, self._mapped = self._mapped, 0
        if not mapped or os.getpid() != self._pid:
            return
        if self.pinned:
            self.pinned = False
            self._devices.unregister(self.address)
        _libc().munmap(*_range(mapped, self._mapped_bytes))


class HostPool:
    """Pieces with consecutive offsets; grows at the end and is kept between yields.

    A pool that is collected gives its memory back on a thread of its own.

    Args:
        devices: pins memory.
        piece_bytes: largest size of a piece.
        threads: that touch memory; None for three quarters of this process's CPUs (at most 16),
            which leaves the others to registering and copying.
        pinned_limit_bytes: pin at most this much; None for as much as the driver allows.
    """

    def __init__(
        self,
        devices: Devices,
        *,
        piece_bytes: int = _DEFAULT_PIECE,
        threads: int | None = None,
        pinned_limit_bytes: int | None = None,
    ) -> None:
        self._devices = devices
        self._piece_bytes = max(rounded(piece_bytes, _PAGE), _PAGE)
        self._limit = pinned_limit_bytes
        self._device = 0
        cpus = threads_of_process()
        most = threads or cpus - cpus // 4
        self._touchers = WorkerThreads(most, "gpumem-touch", self._first)
        # not on the copying thread, whose next kernel would report a refused registration
        self._pinner = WorkerThreads(1, "gpumem-pin", self._first)
        self._pieces: list[Piece] = []
        self._starts: list[int] = []
        self.why_pageable = ""
        register_after_fork(self)
        weakref.finalize(self, _give_back_left, devices, self._pieces).atexit = False

    @property
    def capacity_bytes(self) -> int:
        """Total size of the pieces, ready or not."""
        return sum(piece.size_bytes for piece in self._pieces)

    @property
    def pinned_bytes(self) -> int:
        """Total size of the pinned pieces."""
        return sum(piece.size_bytes for piece in self._pieces if piece.pinned)

    @property
    def ready_bytes(self) -> int:
        """Length of the start of the pool that is pinned and ready for copies."""
        ready = 0
        for piece in self._pieces:
            if not (piece.pinned and piece.ready.is_set()):
                break
            ready += piece.size_bytes
        return ready

    def room_for(self, size_bytes: int) -> int:
        """Bytes by which the pool would have to grow, rounded to pages."""
        return max(rounded(size_bytes, _PAGE) - self.capacity_bytes, 0)

    def grow_to(self, size_bytes: int, device: int) -> None:
        """Start growing the pool to this size; returns at once. `wait_for` has pieces pinned.

        Args:
            size_bytes: of the whole pool.
            device: whose context pins.

        Raises:
            YieldRefusedError: the kernel has no address space for it.
        """
        left = self.room_for(size_bytes)
        fresh: list[Piece] = []
        at = self.capacity_bytes
        self._device = device
        try:
            while left > 0:
                piece = Piece(at, min(left, self._piece_bytes), self._devices)
                fresh.append(piece)
                at, left = at + piece.size_bytes, left - piece.size_bytes
        except OSError as error:
            for piece in fresh:
                piece.close()
            raise YieldRefusedError(f"host memory: {left} bytes cannot be mapped: {error}") from (
                error
            )
        self._pieces += fresh
        self._starts += [piece.start for piece in fresh]
        for piece in fresh:
            self._touchers.do(lambda piece=piece: self._touch(piece))  # type: ignore[misc]

    def piece_at(self, offset: int) -> Piece:
        """The piece that holds the byte at an offset."""
        return self._pieces[bisect.bisect_right(self._starts, offset) - 1]

    def wait_for(self, piece: Piece) -> None:
        """Wait until a piece is ready; the first call has it pinned.

        Raises:
            YieldRefusedError: the piece failed.
        """
        if not piece.pin_requested:
            piece.pin_requested = True
            try:
                self._pinner.do(lambda: self._pin(piece))
            except RuntimeError as error:  # no thread can be started
                piece.end(error)
        piece.ready.wait()
        piece.check()

    def settle(self) -> None:
        """Wait for the background work: no thread of the pool runs afterwards."""
        self._touchers.finish()
        self._pinner.finish()

    def stop(self) -> None:
        """Drop the pieces that are not ready, after waiting for those in progress."""
        self._touchers.finish(drop=True)
        for piece in self._pieces:
            if not piece.touched.is_set():  # first, since pinning waits for it
                piece.end(InterruptedError("given up"))
        self._pinner.finish(drop=True)
        for piece in self._pieces:
            if not piece.ready.is_set():
                piece.end(InterruptedError("given up"))
        # no gaps: drop everything after the first piece that failed
        keep = next((i for i, piece in enumerate(self._pieces) if piece.error), len(self._pieces))
        self._cut(keep)

    def give_back(self, keep_bytes: int = 0) -> int:
        """Unpin and unmap all pieces after this many bytes. Nothing may be stored in them.

        Returns:
            Bytes given back.
        """
        self.stop()
        keep = sum(piece.start + piece.size_bytes <= keep_bytes for piece in self._pieces)
        return self._cut(keep)

    def _cut(self, keep: int) -> int:
        gone = self._pieces[keep:]
        freed = sum(piece.size_bytes for piece in gone)
        more_room = any(piece.pinned for piece in gone)
        del self._pieces[keep:], self._starts[keep:]
        try:
            for piece in gone:
                self._touchers.do(lambda piece=piece: _close(piece))  # type: ignore[misc]
        except RuntimeError:  # no thread can be started
            if not sys.is_finalizing():  # at exit the kernel frees it all, and CUDA may be gone
                for piece in gone:
                    _close(piece)
        self._touchers.finish()
        if more_room or not self._pieces:
            self.why_pageable = ""
        return freed

    def forget_parent(self) -> None:
        """In a forked child: pieces and threads belong to the parent."""
        self._pieces.clear()
        self._starts.clear()
        self._touchers, self._pinner = self._touchers.renewed(), self._pinner.renewed()
        self.why_pageable = ""

    # on the threads

    def _first(self) -> None:
        self._devices.use(self._device)

    @staticmethod
    def _touch(piece: Piece) -> None:
        try:
            _populate(piece.address, piece.size_bytes)
        except BaseException as error:  # raised by `wait_for`
            piece.end(error)
        piece.touched.set()

    def _pin(self, piece: Piece) -> None:
        piece.touched.wait()
        try:
            if piece.error is None:
                self._pin_within_limit(piece)
        finally:  # `wait_for` must return in every case
            piece.end()

    def _pin_within_limit(self, piece: Piece) -> None:
        if self._limit is not None and self.pinned_bytes + piece.size_bytes > self._limit:
            self.why_pageable = self.why_pageable or "the limit for pinned memory is reached"
        if self.why_pageable:
            return
        why = piece.pin(self._device)
        if why:
            self.why_pageable = why
            _log.warning("host memory is not pinned from now on, copies are slower: %s", why)


def _give_back_left(devices: Devices, pieces: list[Piece]) -> None:
    """Free the pieces of a pool that was collected, on a new thread set to their device.

    At interpreter exit nothing is unpinned: CUDA may be gone, and the kernel frees it all.
    """

    def give_back() -> None:
        for piece in pieces:
            devices.use(piece.device)
            _close(piece)

    if pieces and not sys.is_finalizing():
        with contextlib.suppress(RuntimeError):  # no thread can be started: it stays pinned
            threading.Thread(target=give_back, name="gpumem-unpin", daemon=True).start()


def _close(piece: Piece) -> None:
    try:
        piece.close()
    except Exception:
        _log.warning("host memory could not be given back", exc_info=True)


def rounded(size_bytes: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-size_bytes // unit) * unit
