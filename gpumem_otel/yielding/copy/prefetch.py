"""The copy of what will probably go, begun before it is known what goes.

The look for all tensors takes a tenth of a second and more of Python, in which a link moves some
GiB. So what the last yield moved is on its way meanwhile, into host memory that is pinned already:
one call of torch on a thread of ours, which needs no interpreter lock. It reads the job's memory,
while the job stands still, and changes none; what turns out not to go was copied for nothing.
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
"""On each device, where it is not known how long the look takes: 0.23 s."""
_MARGIN: Final = 1.25
_THREAD: Final = "thread"
_OWNER: Final = "owner"


def ahead_bytes(devices: int, look_seconds: float, bytes_per_second: float) -> int:
    """What can be copied while the look goes on: giving it up waits no longer than the look did.

    Args:
        devices: how many.
        look_seconds: of the last one, 0.0 if there was none.
        bytes_per_second: of the last copy, of all devices.
    """
    return max(devices * _FIRST_BYTES, round(_MARGIN * look_seconds * bytes_per_second))


class Prefetch:
    """One of them: `start`, then `go_on` or `drop`; both may be called again.

    Known to its owner before it starts: whatever raises afterwards, in whichever line, finds it.

    Args:
        movables: what will probably go.
        devices: of it.
        pool: whose line takes it, from its beginning; nothing is stored there.
        mover: a run of copies that has not begun.
        most_bytes: of it, over all devices.

    Attributes:
        items: what is copied, and where to.
        size_bytes: of it.
        used: devices of which no work is under way any more.
    """

    def __init__(
        self,
        movables: Sequence[Candidate],
        devices: Devices,
        pool: HostPool,
        mover: Mover,
        most_bytes: int,
    ) -> None:
        self._devices = devices
        self._mover = mover
        self._error: BaseException | None = None
        self._turn = Claim()  # one of the two begins the copies
        self._done = threading.Event()
        self.used = sorted({one.device for one in movables})
        self.items = place_first(movables, pool.ready_bytes, most_bytes // max(len(self.used), 1))
        self.size_bytes = sum(item.size for item in self.items)

    def start(self) -> None:
        """Ask for the copies; returns before they are done."""
        devices = self._devices
        with devices.at_rest(self.used):
            for device in self.used:
                devices.synchronize(device)
            self._mover.plan_out(parts_of(self.items, devices))
        try:
            threading.Thread(target=self._begin, name="gpumem-copy", daemon=True).start()
        except RuntimeError:  # no thread can be started: the way out begins them
            _log.debug("the copy is not begun ahead", exc_info=True)

    def _begin(self) -> None:
        if not self._turn.goes_to(_THREAD):
            return
        try:
            with copying(), self._devices.at_rest(self.used):
                self._mover.begin()
        except BaseException as error:  # raised to whoever goes on
            self._error = error
        finally:
            self._done.set()

    def _wait(self) -> None:
        """The thread is done with it, or will never begin."""
        if not self._turn.goes_to(_OWNER):
            self._done.wait()

    def takes(self, kept: Sequence[Candidate]) -> bool:
        """Whether all of it is to be kept, and is where it was; it knows them as given from now."""
        by_block = {_block(one): one for one in kept}
        now = [by_block.get(_block(item.movable)) for item in self.items]
        found = [Item(one, item.place) for one, item in zip(now, self.items, strict=True) if one]
        if len(found) < len(self.items):
            return False
        self.items = found
        return True

    def go_on(self) -> Mover:
        """The run of copies, of which these are the first."""
        self._wait()
        if self._error is not None:
            raise self._error
        if self._turn.goes_to(_OWNER):
            self._mover.begin()
        return self._mover

    def drop(self) -> None:
        """It was for nothing: returns, or raises an interrupt, when nothing is under way."""
        errors: list[BaseException] = []
        while not self._waited(errors):
            pass
        with self._devices.at_rest(self.used):
            self._mover.drop()
        if errors:
            raise errors[0]

    def _waited(self, errors: list[BaseException]) -> bool:
        """A device writes into memory that is given back next: no interrupt is a reason to go."""
        try:
            self._wait()
        except BaseException as error:
            errors.append(error)
            return False
        return True


def _block(one: Candidate) -> tuple[int, int, int]:
    return one.device, one.address, one.size_bytes
