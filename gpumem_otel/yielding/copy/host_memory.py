"""Host memory for what leaves the device: huge pages, pinned piece by piece, kept between yields.

Pinning through torch costs 2.3 GiB/s. Here memory is an anonymous map that asks for huge pages:
threads touch it, piece by piece, and whoever copies has each piece registered with the driver just
before its copies, so that the one piece is registered while the link is busy with the one before.
Registering runs no faster on several threads, and who registers ahead of the copies keeps them from
the driver's lock: all of it was registered before the first byte moved. What is pinned stays so
between yields, up to a limit, until it is given back. Where the driver refuses to pin, a piece
stays pageable and the pool says so.

Pieces are kept out of forked children (`MADV_DONTFORK`): a child would copy every page of it. There
other memory may lie where they were, so that a child unmaps nothing: the maps are made with mmap(2)
itself and have no owner in Python that would unmap them when it is collected.
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
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.copy.gc_control import tell_in_child

if TYPE_CHECKING:
    from collections.abc import Callable

# A few daemon threads with a queue, for work that runs without the interpreter lock.
#
# Not `concurrent.futures`, whose threads the interpreter waits for when it ends.

_log = named_logger("gpumem_otel.yielding")


class PinThreads:
    """Threads that begin with the first job and end with `finish`.

    Args:
        threads: at most so many.
        name: what they are called, with a number.
        first: called by each thread before its first job; what it raises is logged.
    """

    def __init__(self, threads: int, name: str, first: Callable[[], None] | None = None) -> None:
        self._most = max(threads, 1)
        self._name = name
        self._first = first
        self._threads: list[threading.Thread] = []
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._ends = False

    def do(self, job: Callable[[], None]) -> None:
        """Have it done; what it raises is logged.

        Raises:
            RuntimeError: there is no thread, and none can be started.
        """
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()
            if len(self._jobs) > self._idle and len(self._threads) < self._most:
                number = len(self._threads)
                thread = threading.Thread(
                    target=self._work, name=f"{self._name}-{number}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    if self._threads:
                        return  # those that there are do it
                    self._jobs.pop()
                    raise
                self._threads.append(thread)

    def anew(self) -> PinThreads:
        """The same without threads and jobs: for a forked child, which has none of them."""
        return PinThreads(self._most, self._name, self._first)

    def finish(self, *, drop: bool = False) -> int:
        """Wait until all jobs are done, and the threads have ended; then it can be used again.

        Args:
            drop: do none of those that wait.

        Returns:
            How many were dropped.
        """
        with self._changed:
            dropped = len(self._jobs) if drop else 0
            if drop:
                self._jobs.clear()
            self._ends = True
            self._changed.notify_all()
        try:
            for thread in self._threads:
                thread.join()
        finally:  # after an interrupt some are still at work: the next call waits for them
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._ends = False
        return dropped

    def _work(self) -> None:
        try:
            if self._first is not None:
                self._first()
        except Exception:  # it does its jobs all the same: somebody waits for them
            _log.warning("a thread of ours could not be set up", exc_info=True)
        while True:
            with self._changed:
                while not self._jobs:
                    if self._ends:
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                job = self._jobs.popleft()
            try:
                job()
            except BaseException as error:  # the next ones are waited for too
                with contextlib.suppress(Exception):  # the job's handlers and filters
                    _log.warning("a thread of ours: %r", error)
            del job  # holds what it was given


_HUGE_PAGE: Final = 2 << 20
_PAGE: Final = 4096
_DEFAULT_PIECE: Final = 256 << 20
_MOST_THREADS: Final = 16
_POPULATE_WRITE: Final = 23
"""`MADV_POPULATE_WRITE` of Linux 5.14 (include/uapi/asm-generic/mman-common.h)."""
_POPULATE_BYTES: Final = 8 << 20
"""In one call: it holds the lock of the address space, which registering wants too."""
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_loaded: Final[list[Any]] = []


class Registrar(Protocol):
    """Who pins host memory: the devices."""

    def use(self, device: int) -> None:
        """This thread works for a device."""
        ...

    def register(self, address: int, size_bytes: int, device: int) -> str:
        """Pin it; "" where that is done, else why not."""
        ...

    def unregister(self, address: int) -> None:
        """Undo it."""
        ...

    def host_bytes(self, address: int, size_bytes: int) -> Any:
        """A tensor over it."""
        ...


def threads_of_process() -> int:
    """One for each CPU of this process, at most 16."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))))


def _libc() -> Any:
    """The C library, which lets go of the interpreter lock."""
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
    found: int | None = _libc().mmap(
        *_range(0, size_bytes), mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, ctypes.c_long(0),
    )  # fmt: skip
    if found is None or found == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # a kernel without it: slower, or a larger child
        if hasattr(mmap, advice):
            _libc().madvise(*_range(found, size_bytes), getattr(mmap, advice))
    return found


def _populate(address: int, size_bytes: int) -> None:
    """Have the kernel back a range with memory, without the interpreter lock.

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
        start: where it lies in the pool's one line of bytes.
        size_bytes: of it.
        pinned: whether the driver copies from it directly.
        device: whose context pinned it.
        bytes: a tensor over it.
    """

    def __init__(self, start: int, size_bytes: int, registrar: Registrar) -> None:
        self.start = start
        self.size_bytes = size_bytes
        self.pinned = False
        self.device = 0
        self.error: BaseException | None = None
        self._registrar = registrar
        self._pid = os.getpid()
        self._mapped_bytes = size_bytes + _HUGE_PAGE
        self._mapped = _map(self._mapped_bytes)
        self.address = -(-self._mapped // _HUGE_PAGE) * _HUGE_PAGE
        self.bytes: Any = registrar.host_bytes(self.address, size_bytes)
        self.touched = threading.Event()
        """The kernel has backed it with memory; or it never will."""
        self.ready = threading.Event()
        """Touched, and pinned where that was to be; or it never will be."""
        self.asked = False
        """Somebody wants it ready."""

    def pin(self, device: int) -> str:
        """Register it with the driver; "" where that is done, else why not."""
        self.device = device
        try:
            why = self._registrar.register(self.address, self.size_bytes, device)
        except Exception as error:
            why = str(error)
        self.pinned = not why
        return why

    def end(self, error: BaseException | None = None) -> None:
        """It is ready, or it never will be."""
        self.error = self.error or error
        self.touched.set()
        self.ready.set()

    def check(self) -> None:
        """Raise what went wrong.

        Raises:
            YieldRefusedError: it can not be had.
        """
        if self.error is not None:
            raise YieldRefusedError(
                f"host memory: {self.size_bytes >> 20} MiB could not be had "
                f"({type(self.error).__name__}: {self.error}); nothing was moved"
            ) from self.error

    def close(self) -> None:
        """Unpin and unmap; nothing is under way in it. Does nothing in a forked child."""
        self.bytes = None
        mapped, self._mapped = self._mapped, 0
        if not mapped or os.getpid() != self._pid:
            return
        if self.pinned:
            self.pinned = False
            self._registrar.unregister(self.address)
        _libc().munmap(*_range(mapped, self._mapped_bytes))


class HostPool:
    """Pieces in one line, which grows at its end and is kept between yields.

    A pool that nobody refers to any more gives back what it has, on a thread of its own.

    Args:
        registrar: pins memory.
        piece_bytes: largest size of a piece.
        threads: that touch; None for as many as this process has CPUs, at most 16, of which every
            fourth is left to those that register and copy.
        pinned_limit_bytes: pin at most so much; None for as much as the driver lets.
    """

    def __init__(
        self,
        registrar: Registrar,
        *,
        piece_bytes: int = _DEFAULT_PIECE,
        threads: int | None = None,
        pinned_limit_bytes: int | None = None,
    ) -> None:
        self._registrar = registrar
        self._piece_bytes = max(rounded(piece_bytes, _PAGE), _PAGE)
        self._limit = pinned_limit_bytes
        self._device = 0
        cpus = threads_of_process()
        most = threads or cpus - cpus // 4
        self._touchers = PinThreads(most, "gpumem-touch", self._first)
        # not the thread that copies: what the driver refused to pin would be the error of its next
        # kernel
        self._pinner = PinThreads(1, "gpumem-pin", self._first)
        self._pieces: list[Piece] = []
        self._starts: list[int] = []
        self.why_pageable = ""
        tell_in_child(self)
        weakref.finalize(self, _give_back_left, registrar, self._pieces).atexit = False

    @property
    def capacity_bytes(self) -> int:
        """Held now, ready or about to be."""
        return sum(piece.size_bytes for piece in self._pieces)

    @property
    def pinned_bytes(self) -> int:
        """Of it pinned."""
        return sum(piece.size_bytes for piece in self._pieces if piece.pinned)

    @property
    def ready_bytes(self) -> int:
        """From the beginning of the line: pinned, and ready to be copied to."""
        ready = 0
        for piece in self._pieces:
            if not (piece.pinned and piece.ready.is_set()):
                break
            ready += piece.size_bytes
        return ready

    def room_for(self, size_bytes: int) -> int:
        """Bytes that the pool would have to grow by, its own rounding included."""
        return max(rounded(size_bytes, _PAGE) - self.capacity_bytes, 0)

    def grow_to(self, size_bytes: int, device: int) -> None:
        """Begin to make the line so long; returns at once. `wait_for` has it pinned.

        Args:
            size_bytes: of the whole line.
            device: whose context pins.

        Raises:
            YieldRefusedError: the kernel gives no address space for it.
        """
        left = self.room_for(size_bytes)
        fresh: list[Piece] = []
        at = self.capacity_bytes
        self._device = device
        try:
            while left > 0:
                piece = Piece(at, min(left, self._piece_bytes), self._registrar)
                fresh.append(piece)
                at, left = at + piece.size_bytes, left - piece.size_bytes
        except OSError as error:
            for piece in fresh:
                piece.close()
            raise YieldRefusedError(f"host memory: {left} bytes can not be mapped: {error}") from (
                error
            )
        self._pieces += fresh
        self._starts += [piece.start for piece in fresh]
        for piece in fresh:
            self._touchers.do(lambda piece=piece: self._touch(piece))  # type: ignore[misc]

    def piece_at(self, offset: int) -> Piece:
        """The piece that holds a byte of the line."""
        return self._pieces[bisect.bisect_right(self._starts, offset) - 1]

    def wait_for(self, piece: Piece) -> None:
        """Until it is ready; the first who waits has it pinned.

        Raises:
            YieldRefusedError: it can not be had.
        """
        if not piece.asked:
            piece.asked = True
            try:
                self._pinner.do(lambda: self._pin(piece))
            except RuntimeError as error:  # no thread can be started
                piece.end(error)
        piece.ready.wait()
        piece.check()

    def settle(self) -> None:
        """Wait for what is done in the background: no thread of ours is at work afterwards."""
        self._touchers.finish()
        self._pinner.finish()

    def stop(self) -> None:
        """Prepare nothing more; what is not ready is dropped. Waits for the pieces under way."""
        self._touchers.finish(drop=True)
        for piece in self._pieces:
            if not piece.touched.is_set():  # before: who pins waits for it
                piece.end(InterruptedError("given up"))
        self._pinner.finish(drop=True)
        for piece in self._pieces:
            if not piece.ready.is_set():
                piece.end(InterruptedError("given up"))
        # a line without holes: nothing behind the first that failed
        keep = next((i for i, piece in enumerate(self._pieces) if piece.error), len(self._pieces))
        self._cut(keep)

    def give_back(self, keep_bytes: int = 0) -> int:
        """Unpin and unmap all pieces behind so many bytes. Nothing may be stored in them.

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
            if (
                not sys.is_finalizing()
            ):  # then the process takes all of it along, and CUDA may be gone
                for piece in gone:
                    _close(piece)
        self._touchers.finish()
        if more_room or not self._pieces:
            self.why_pageable = ""
        return freed

    def forget_parent(self) -> None:
        """In a forked child: what there is belongs to the parent, and so do the threads."""
        self._pieces.clear()
        self._starts.clear()
        self._touchers, self._pinner = self._touchers.anew(), self._pinner.anew()
        self.why_pageable = ""

    # on the threads

    def _first(self) -> None:
        self._registrar.use(self._device)

    @staticmethod
    def _touch(piece: Piece) -> None:
        try:
            _populate(piece.address, piece.size_bytes)
        except BaseException as error:  # told to whoever waits for it
            piece.end(error)
        piece.touched.set()

    def _pin(self, piece: Piece) -> None:
        piece.touched.wait()
        try:
            if piece.error is None:
                self._pin_within_limit(piece)
        finally:  # whatever happens: somebody waits for it
            piece.end()

    def _pin_within_limit(self, piece: Piece) -> None:
        if self._limit is not None and self.pinned_bytes + piece.size_bytes > self._limit:
            self.why_pageable = self.why_pageable or "the limit for pinned memory is met"
        if self.why_pageable:
            return
        why = piece.pin(self._device)
        if why:
            self.why_pageable = why
            _log.warning("host memory stays pageable from here on, and slower: %s", why)


def _give_back_left(registrar: Registrar, pieces: list[Piece]) -> None:
    """Of a pool that was collected, on whichever thread and at whichever moment.

    Not there: unpinning wants a thread that works for the device. Where the interpreter ends,
    nothing is unpinned, for CUDA may be gone; the process takes it all along.
    """

    def give_back() -> None:
        for piece in pieces:
            registrar.use(piece.device)
            _close(piece)

    if pieces and not sys.is_finalizing():
        with contextlib.suppress(RuntimeError):  # no thread can be started: it stays as it is
            threading.Thread(target=give_back, name="gpumem-unpin", daemon=True).start()


def _close(piece: Piece) -> None:
    try:
        piece.close()
    except Exception:
        _log.warning("host memory could not be given back", exc_info=True)


def rounded(size_bytes: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-size_bytes // unit) * unit
