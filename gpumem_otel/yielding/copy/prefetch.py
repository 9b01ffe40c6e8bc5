"""Starts copying the storages that will probably move, while the scan still runs.

The scan takes 0.1 s or more of Python, in which a link moves several GiB. So the storages that the
last yield moved are copied meanwhile, into host memory that is already pinned: one call of torch on
a thread of ours, without the interpreter lock. It only reads memory of the stopped job; copies of
storages that do not move after all are dropped.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.base.threads import copying
from gpumem_otel.yielding.copy.placement import Item, parts_of, place_first
from gpumem_otel.yielding.signal_safe import Claim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.yielding.copy.devices import Devices
    from gpumem_otel.yielding.copy.host_memory import HostPool
    from gpumem_otel.yielding.copy.mover import Mover
    from gpumem_otel.yielding.values import Candidate

_log = named_logger("gpumem_otel.yielding")

_FIRST_BYTES: Final = 12 << 30
"""Per device, before the duration of a scan is known: 0.23 s of copying."""
_MARGIN: Final = 1.25
_THREAD: Final = "thread"
_OWNER: Final = "owner"


def prefetch_bytes(devices: int, scan_seconds: float, bytes_per_second: float) -> int:
    """What can be copied during a scan, so that dropping it waits no longer than a scan takes.

    Args:
        devices: number of devices.
        scan_seconds: of the last scan, 0.0 before the first.
        bytes_per_second: of the last copy, over all devices.
    """
    return max(devices * _FIRST_BYTES, round(_MARGIN * scan_seconds * bytes_per_second))


class Prefetch:
    """One prefetch: `start`, then `go_on` or `drop`; both may be called again.

    Its owner stores it before `start`, so that an error at any line cannot lose it.

    Args:
        candidates: the storages that will probably move.
        devices: of the candidates.
        pool: filled from offset 0; nothing is stored there.
        mover: a run of copies that has not started.
        most_bytes: limit over all devices.

    Attributes:
        items: the copies and their places.
        size_bytes: of the items.
        used: devices, synchronized by `start`.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        devices: Devices,
        pool: HostPool,
        mover: Mover,
        most_bytes: int,
    ) -> None:
        self._devices = devices
        self._mover = mover
        self._error: BaseException | None = None
        self._claim = Claim()  # either the thread or the owner starts the copies
        self._done = threading.Event()
        self.used = sorted({one.device for one in candidates})
        self.items = place_first(candidates, pool.ready_bytes, most_bytes // max(len(self.used), 1))
        self.size_bytes = sum(item.size for item in self.items)

    def start(self) -> None:
        """Request the copies; returns before they are done."""
        devices = self._devices
        with devices.at_rest(self.used):
            for device in self.used:
                devices.synchronize(device)
            self._mover.plan_out(parts_of(self.items, devices))
        try:
            threading.Thread(target=self._begin, name="gpumem-copy", daemon=True).start()
        except RuntimeError:  # no thread can be started: `go_on` starts them
            _log.debug("no prefetch: no thread can be started", exc_info=True)

    def _begin(self) -> None:
        if not self._claim.goes_to(_THREAD):
            return
        try:
            with copying(), self._devices.at_rest(self.used):
                self._mover.begin()
        except BaseException as error:  # raised by `go_on`
            self._error = error
        finally:
            self._done.set()

    def _wait(self) -> None:
        """Wait until the thread has finished, or keep it from starting."""
        if not self._claim.goes_to(_OWNER):
            self._done.wait()

    def takes(self, kept: Sequence[Candidate]) -> bool:
        """Whether all items are still to be kept, at the same address; takes over `kept`."""
        by_block = {_block(one): one for one in kept}
        now = [by_block.get(_block(item.candidate)) for item in self.items]
        items = [Item(one, item.place) for one, item in zip(now, self.items, strict=True) if one]
        if len(items) < len(self.items):
            return False
        self.items = items
        return True

    def go_on(self) -> Mover:
        """The run of copies, which the caller continues."""
        self._wait()
        if self._error is not None:
            raise self._error
        if self._claim.goes_to(_OWNER):
            self._mover.begin()
        return self._mover

    def drop(self) -> None:
        """Give up: returns, or raises an interrupt, once no copy is in progress."""
        errors: list[BaseException] = []
        while not self._waited(errors):
            pass
        with self._devices.at_rest(self.used):
            self._mover.drop()
        if errors:
            raise errors[0]

    def _waited(self, errors: list[BaseException]) -> bool:
        """False after an interrupt: the wait goes on, since the device writes to our memory."""
        try:
            self._wait()
        except BaseException as error:
            errors.append(error)
            return False
        return True


def _block(one: Candidate) -> tuple[int, int, int]:
    return one.device, one.address, one.size_bytes
