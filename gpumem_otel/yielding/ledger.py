"""Reservations that the processes of a machine keep in a folder, so that none counts on the same.

Host memory: each of eight processes that yield at once would find the same memory free. Who wants
some takes one lock, reads what is free now, takes off what others have reserved and not yet
touched, and writes down his own. Device memory: whoever comes back to a GPU holds the lock of its
UUID from the look at what is free until all of it is allocated.

Every process has one file there, which it keeps locked as long as it lives: a file that can be
locked is of a process that is gone, also where that had another PID namespace. A forked child
closes what it inherited, so that it does not speak for its parent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
import weakref
from typing import TYPE_CHECKING, Final

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.folders import opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpumem_otel.yielding.hostlimits import HostRoom

__all__ = ["DeviceLedger", "HostLedger"]

_ENTRY: Final = "host-"
_LOCK: Final = "lock"
_TICK_SECONDS: Final = 0.05
_known: Final[weakref.WeakSet[HostLedger]] = weakref.WeakSet()
_hooked: Final[list[bool]] = []


class HostLedger:
    """Host memory that yields of all processes hold or are about to take.

    Args:
        folder: shared by the processes of one user; made where it is not there.
        room: what is free for this process now, see `hostlimits`.
        limit_bytes: all of them together may hold so much; None for no such limit.
    """

    def __init__(
        self, folder: str, room: Callable[[], HostRoom], *, limit_bytes: int | None = None
    ) -> None:
        self._folder = folder
        self._room = room
        self._limit = limit_bytes
        self._entry = -1
        self._name = ""
        self._held = self._pending = 0
        self._pid = 0

    @property
    def held_bytes(self) -> int:
        """Reserved by this process, touched or not."""
        return self._held

    def reserve(self, size_bytes: int, *, at_least: int | None = None) -> int:
        """Take so much more, or the part that there is.

        Args:
            size_bytes: wanted.
            at_least: less than this is of no use; None for all of it.

        Returns:
            What was reserved.

        Raises:
            YieldRefusedError: there is not enough, or the folder can not be used.
        """
        least = size_bytes if at_least is None else at_least
        if size_bytes <= 0:
            return 0
        try:
            with self._locked() as folder:
                held, pending = self._others(folder)
                found = self._room()
                free, by = found.free_bytes - pending - self._pending, found.by
                if self._limit is not None and self._limit - held - self._held < free:
                    free, by = self._limit - held - self._held, "the limit that was set"
                free = max(free, 0)
                granted = min(size_bytes, free)
                if granted < least:
                    raise YieldRefusedError(
                        f"host memory: {_gib(size_bytes)} are needed and {_gib(free)} can be taken "
                        f"({by}, other yields: {_gib(held)}); yield less or allow a disk_dir"
                    )
                self._write(folder, self._held + granted, self._pending + granted)
        except OSError as error:
            raise YieldRefusedError(f"ledger: {self._folder}: {error}") from error
        return granted

    def settle(self) -> None:
        """What was reserved has been touched: the kernel counts it from now on."""
        self._update(self._held, 0)

    def keep(self, size_bytes: int) -> None:
        """Hold so much from now on, all of it touched; 0 for none."""
        self._update(size_bytes, 0)

    def close(self) -> None:
        """Give all of it up."""
        if self._entry >= 0 and self._pid == os.getpid():
            with contextlib.suppress(OSError), self._locked() as folder:
                os.unlink(self._name, dir_fd=folder)
        self._forget()

    def _update(self, held: int, pending: int) -> None:
        if self._entry < 0 and not held:
            return
        with contextlib.suppress(OSError), self._locked() as folder:
            self._write(folder, held, pending)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        with opened(self._folder, "ledger", YieldRefusedError, make=True) as folder:
            lock = _open(_LOCK, folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield folder
            finally:
                os.close(lock)

    def _others(self, folder: int) -> tuple[int, int]:
        """(held, of it pending) by the others that live; files of the dead are removed."""
        held = pending = 0
        for name in os.listdir(folder):
            if not name.startswith(_ENTRY) or name == self._name:
                continue
            try:
                file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except OSError:
                continue
            try:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    numbers = os.pread(file, 100, 0).split()
                    held += int(numbers[0])
                    pending += int(numbers[1])
                else:
                    os.unlink(name, dir_fd=folder)
            except (ValueError, IndexError):
                continue
            finally:
                os.close(file)
        return held, pending

    def _write(self, folder: int, held: int, pending: int) -> None:
        """Under the lock, so that nobody reads half of it."""
        if self._entry < 0 or self._pid != os.getpid():
            self._forget()
            self._pid = os.getpid()
            self._name = f"{_ENTRY}{self._pid}-{secrets.token_hex(4)}"
            self._entry = _open(self._name, folder)
            fcntl.flock(self._entry, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remember(self)
        os.pwrite(self._entry, f"{held} {pending}\n".ljust(64).encode(), 0)
        self._held, self._pending = held, pending

    def _forget(self) -> None:
        if self._entry >= 0:
            os.close(self._entry)
        self._entry, self._name = -1, ""
        self._held = self._pending = 0


class DeviceLedger:
    """One lock for each GPU.

    Args:
        folder: as of `HostLedger`.
        monotonic: seconds of a clock that never goes back.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        folder: str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder = folder
        self._monotonic = monotonic
        self._sleep = sleep

    @contextlib.contextmanager
    def room(
        self,
        uuid: str,
        size_bytes: int,
        free: Callable[[], int],
        wait_seconds: float,
        stop: Callable[[], bool],
    ) -> Iterator[None]:
        """Hold the GPU's lock, with so much free on it; allocate within.

        Args:
            uuid: of the GPU.
            size_bytes: needed.
            free: what it has free now.
            wait_seconds: for both the lock and the room.
            stop: True ends the wait.

        Raises:
            YieldRefusedError: there is no room; says how much is missing.
        """
        end = self._monotonic() + wait_seconds
        missing = size_bytes
        while True:
            with self._try(f"gpu-{uuid}") as mine:
                if mine:
                    missing = size_bytes - free()
                    if missing <= 0:
                        yield
                        return
            left = end - self._monotonic()
            if left <= 0 or stop():
                raise YieldRefusedError(
                    f"device {uuid}: {_gib(max(missing, 0))} of {_gib(size_bytes)} are missing; "
                    "free them and restore again: the host copy stays"
                )
            self._sleep(min(left, _TICK_SECONDS))

    @contextlib.contextmanager
    def _try(self, name: str) -> Iterator[bool]:
        with opened(self._folder, "ledger", YieldRefusedError, make=True) as folder:
            file = _open(name, folder)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(file)


def _open(name: str, folder: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600, dir_fd=folder)


def _remember(ledger: HostLedger) -> None:
    _known.add(ledger)
    if not _hooked:
        _hooked.append(True)
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for ledger in list(_known):
        ledger._forget()  # noqa: SLF001 - of this module


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"
