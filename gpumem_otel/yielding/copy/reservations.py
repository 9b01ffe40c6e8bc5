"""Reservations of memory that the processes of a machine share through a folder.

Host memory: eight processes that yield at once would all see the same memory as free. So a process
takes a lock, reads what is free, subtracts what others have reserved and not yet touched, and
writes down its own reservation. Device memory: a process that returns to a GPU holds the lock of
its UUID from checking the free memory until everything is allocated.

Every process has one file there, locked as long as it lives: a file that can be locked belongs to a
dead process, whatever its PID namespace. A forked child closes the inherited file.

Waits for a lock are bounded, since its holder may be stopped (SIGSTOP). Giving up a reservation
needs no lock: a process that reads at that moment sees too little free memory, never too much.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.base.text import human_bytes
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.settings.files import opened
from gpumem_otel.yielding.copy.gc_control import register_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpumem_otel.yielding.copy.limits import HostRoom

_ENTRY: Final = "host-"
_LOCK: Final = "lock"
_TICK_SECONDS: Final = 0.05
_LOCK_SECONDS: Final = 5.0
_LOCK_TICK_SECONDS: Final = 0.002
"""The lock of host memory is held for about a millisecond."""
_log = named_logger("gpumem_otel.yielding")


class HostReservations:
    """Host memory that yields of all processes hold or will take.

    Args:
        folder: shared by the processes of one user; made if missing.
        room: what is free for this process now, see `limits.py`.
        limit_bytes: for all processes together; None for no limit.
    """

    def __init__(
        self,
        folder: str,
        room: Callable[[], HostRoom],
        *,
        limit_bytes: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder = folder
        self._room = room
        self._limit = limit_bytes
        self._monotonic = monotonic
        self._sleep = sleep
        self._entry = -1
        self._closer: weakref.finalize[[int], HostReservations] | None = None
        self._name = ""
        self._held = self._pending = 0
        self._pid = 0

    @property
    def held_bytes(self) -> int:
        """Reserved by this process, touched or not."""
        return self._held

    def reserve(
        self,
        size_bytes: int,
        *,
        at_least: int | None = None,
        wait_seconds: float | None = None,
    ) -> int:
        """Reserve this much more, or the part that is free.

        Args:
            size_bytes: wanted.
            at_least: the least that is useful; None for `size_bytes`.
            wait_seconds: for the lock, at most five; None for five.

        Returns:
            Bytes reserved.

        Raises:
            YieldRefusedError: there is not enough, the folder cannot be used, or another process
                keeps the lock.
        """
        least = size_bytes if at_least is None else at_least
        patience = _LOCK_SECONDS if wait_seconds is None else min(wait_seconds, _LOCK_SECONDS)
        if size_bytes <= 0:
            return 0
        try:
            with self._locked(patience) as folder:
                held, pending = self._others(folder)
                room = self._room()
                free, by = room.free_bytes - pending - self._pending, room.by
                if self._limit is not None and self._limit - held - self._held < free:
                    free, by = self._limit - held - self._held, "the limit that was set"
                free = max(free, 0)
                granted = min(size_bytes, free)
                if granted < least:
                    raise YieldRefusedError(
                        f"host memory: {human_bytes(size_bytes)} are needed and "
                        f"{human_bytes(free)} can be taken ({by}, other yields: "
                        f"{human_bytes(held)}); yield less or allow a disk_dir"
                    )
                self._enter(folder)
                self._write(self._held + granted, self._pending + granted)
        except OSError as error:
            raise YieldRefusedError(f"reservations: {self._folder}: {error}") from error
        return granted

    def settle(self) -> None:
        """All of it has been touched, so that the kernel counts it."""
        self._update(self._held, 0)

    def keep(self, size_bytes: int) -> None:
        """Hold this much from now on, all of it touched."""
        self._update(size_bytes, 0)

    def close(self) -> None:
        """Give up all reservations."""
        if self._is_ours():
            with (
                contextlib.suppress(OSError, YieldRefusedError),
                opened(self._folder, "reservations", YieldRefusedError) as folder,
            ):
                os.unlink(self._name, dir_fd=folder)
        self.forget_parent()

    def _is_ours(self) -> bool:
        return self._entry >= 0 and self._pid == os.getpid()

    def _update(self, held: int, pending: int) -> None:
        """Never fails, since undoing must not; at worst others see less free memory."""
        try:
            if self._is_ours():
                self._write(held, pending)
            elif held:
                with self._locked(_LOCK_SECONDS) as folder:
                    self._enter(folder)
                    self._write(held, pending)
        except (OSError, YieldRefusedError):
            _log.warning("the reservation of host memory could not be written", exc_info=True)

    @contextlib.contextmanager
    def _locked(self, wait_seconds: float) -> Iterator[int]:
        with opened(self._folder, "reservations", YieldRefusedError, make=True) as folder:
            lock = _open(_LOCK, folder)
            try:
                end = self._monotonic() + wait_seconds
                while not _locks(lock):
                    left = end - self._monotonic()
                    if left <= 0:
                        raise YieldRefusedError(
                            f"host memory: {_holder(lock)} has held the lock of {self._folder} for "
                            f"{wait_seconds:g} s; continue it (SIGCONT) or end it, and try again"
                        )
                    self._sleep(min(left, _LOCK_TICK_SECONDS))
                yield folder
            finally:
                os.close(lock)

    def _others(self, folder: int) -> tuple[int, int]:
        """(held, of which pending) by living processes; files of dead ones are removed."""
        held = pending = 0
        for name in os.listdir(folder):
            if not name.startswith(_ENTRY) or name == self._name:
                continue
            try:
                file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except OSError:
                continue
            try:
                if not _locks(file):
                    numbers = os.pread(file, 100, 0).split()
                    held += int(numbers[0])
                    pending += int(numbers[1])
                else:
                    with contextlib.suppress(FileNotFoundError):  # just removed by its owner
                        os.unlink(name, dir_fd=folder)
            except (ValueError, IndexError):
                continue
            finally:
                os.close(file)
        return held, pending

    def _enter(self, folder: int) -> None:
        """Make our file, under the lock: no process sees it before it is locked itself."""
        if self._is_ours():
            return
        self.forget_parent()
        self._pid = os.getpid()
        self._name = f"{_ENTRY}{self._pid}-{secrets.token_hex(4)}"
        self._entry = _open(self._name, folder)
        # if collected without `close`, the file becomes that of a dead process
        self._closer = weakref.finalize(self, os.close, self._entry)
        self._closer.atexit = False
        fcntl.flock(self._entry, fcntl.LOCK_EX | fcntl.LOCK_NB)
        register_after_fork(self)

    def _write(self, held: int, pending: int) -> None:
        """In one call within a page, so that no process reads half of it."""
        os.pwrite(self._entry, f"{held} {pending}\n".ljust(64).encode(), 0)
        self._held, self._pending = held, pending

    def forget_parent(self) -> None:
        """Close our file but leave it in the folder: in a forked child it is the parent's."""
        closer, self._closer = self._closer, None
        if closer is not None:
            closer()
        self._entry, self._name = -1, ""
        self._held = self._pending = 0


class DeviceReservations:
    """One lock for each GPU.

    Args:
        folder: as of `HostReservations`.
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
        """Hold the GPU's lock while enough memory is free on it; allocate in the block.

        Args:
            uuid: of the GPU.
            size_bytes: needed.
            free: returns the free bytes now.
            wait_seconds: for both the lock and the memory.
            stop: True ends the wait.

        Raises:
            YieldRefusedError: names the missing bytes, or the process that holds the lock.
        """
        end = self._monotonic() + wait_seconds
        while True:
            with self._try(f"gpu-{uuid}") as holder:
                if not holder:
                    missing = size_bytes - free()
                    if missing <= 0:
                        yield
                        return
            left = end - self._monotonic()
            if (left <= 0 or stop()) and holder:
                raise YieldRefusedError(
                    f"device {uuid}: {holder} restores there, or was stopped while it did; restore "
                    "again once it has finished: the host copy stays"
                )
            if left <= 0 or stop():
                raise YieldRefusedError(
                    f"device {uuid}: {human_bytes(missing)} of {human_bytes(size_bytes)} are "
                    "missing; free them and restore again: the host copy stays"
                )
            self._sleep(min(left, _TICK_SECONDS))

    @contextlib.contextmanager
    def _try(self, name: str) -> Iterator[str]:
        """The holder of the lock; "" for this process."""
        with opened(self._folder, "reservations", YieldRefusedError, make=True) as folder:
            file = _open(name, folder)
        try:
            yield "" if _locks(file) else _holder(file)
        finally:
            os.close(file)


def _open(name: str, folder: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600, dir_fd=folder)


def _locks(file: int) -> bool:
    """Take the file's lock; False if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: int) -> str:
    """Describes the process that holds a lock, by `/proc/locks`; see proc(5)."""
    inode = f":{os.fstat(file).st_ino}"
    with contextlib.suppress(OSError, IndexError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 1234 fe:00:5678 0 EOF
            if fields[1] == "FLOCK" and fields[5].endswith(inode):
                return f"another process (PID {fields[4]})"
    return "another process"
