"""One reading of the allocator, and what gives readings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from gpumem_otel.base.profile import DeviceStats, SourceStatus
    from gpumem_otel.base.protocols import StacklessRule
    from gpumem_otel.snapshot.snapshot import TorchSnapshot
    from gpumem_otel.snapshot.tensor_classes import Classifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One read-out of the allocator, with the counters before and after it.

    Stats and snapshot are two acquisitions of the allocator's lock: only where the counters of
    `before` and `after` are equal must the snapshot's totals equal the stats.

    Attributes:
        time_ns: when the snapshot was taken.
        stall_seconds: time spent in calls that hold the interpreter lock.
        stackless: names the root of blocks without a stack; None where the snapshot says it.
        stackless_blocks: of a window, the same for what is older than it.
        classifier: tells the tensor classes of its blocks; None where nothing does.
    """

    snapshot: TorchSnapshot
    time_ns: int
    before: tuple[DeviceStats, ...]
    after: tuple[DeviceStats, ...]
    stall_seconds: float = 0.0
    stackless: StacklessRule | None = None
    classifier: Classifier | None = None
    stackless_blocks: StacklessRule | None = None

    def raced(self, device: int) -> bool:
        """Whether the job allocated or freed on this device while it was read."""
        first = {s.device: s for s in self.before}.get(device)
        second = {s.device: s for s in self.after}.get(device)
        if first is None or second is None:
            return True
        return (first.allocations, first.frees) != (second.allocations, second.frees)


class Source(Protocol):
    """Where memory state comes from: a live torch process, or a recording that is played."""

    def status(self) -> SourceStatus:
        """Cheap; creates nothing; never raises."""
        ...

    def stats(self) -> tuple[DeviceStats, ...]:
        """Allocator counters of each armed device. Microseconds; () where not armed.

        Raises:
            CaptureError: the allocator could not be read.
        """
        ...

    def read(self) -> Reading:
        """One snapshot of all armed devices, events left out where that is possible.

        Raises:
            CaptureError: the allocator could not be read.
        """
        ...


class WindowSource(Protocol):
    """A source that can also record events for a while."""

    def window(
        self,
        seconds: float,
        stop: threading.Event,
        *,
        frees: bool = False,
        enough: Callable[[], bool] | None = None,
    ) -> Reading:
        """Record events for so long (or until `stop`), bounded in number, and read them.

        The reading's snapshot holds only events of the window; `before` and `after` are the
        counters at its two ends.

        Args:
            seconds: the longest it takes.
            stop: ends it early.
            frees: record frees too, whose frames are those of the allocation.
            enough: asked many times a second; the window ends once it says so.

        Raises:
            BusyError: the job records memory history itself, or another window is open.
            CaptureError: recording could not be switched.
        """
        ...
