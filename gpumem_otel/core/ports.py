"""The seams between the parts: Protocols of at most three methods, and the values they pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Mapping

    from gpumem_otel.core.classify import Classifier
    from gpumem_otel.core.model import (
        DeviceStats,
        HeapProfile,
        Observation,
        ProfileKind,
        SourceStatus,
    )
    from gpumem_otel.core.snapshot import Snapshot
    from gpumem_otel.core.yields import Operation, RestoreRequest, YieldRequest, YieldStatus

__all__ = [
    "Clock",
    "FrameNamer",
    "Observer",
    "Pacing",
    "Pause",
    "ProfileReader",
    "ProfileSink",
    "PushReader",
    "Reading",
    "Source",
    "StacklessRule",
    "Waitable",
    "WindowSource",
    "YieldControl",
    "no_pause",
]

Pause: TypeAlias = "Callable[[], None]"
"""Called every few dozen items of a long pure-Python loop, so that the caller can give up the
interpreter lock (hazard: a thread that holds it stalls the job). The core itself has no clock."""


def no_pause() -> None:
    """A `Pause` of work that gives nothing up: nobody waits for it, or the job itself does it."""


FrameNamer: TypeAlias = "Callable[[str, str, int], str]"
"""(function name, file name, line) as recorded -> the unique name shown in flame graphs."""

StacklessRule: TypeAlias = "Callable[[int, int | None], str]"
"""(device, block address) -> the named root of memory that carries no stack."""


class Pacing(Protocol):
    """Slices one piece of our own work at a time, and measures it."""

    def begin(self) -> None:
        """Start a piece of work."""
        ...

    def pause(self) -> None:
        """Give up the interpreter lock where it is due."""
        ...

    def end(self) -> float:
        """Finish; seconds spent working, the pauses left out."""
        ...


class Waitable(Protocol):
    """An event, of whatever kind."""

    def is_set(self) -> bool:
        """Whether it was set."""
        ...

    def wait(self, seconds: float, /) -> bool:
        """At most so long; True if it is set."""
        ...


class Clock(Protocol):
    """Time, injected so that tests need none."""

    def time_ns(self) -> int:
        """Wall clock, nanoseconds since 1970."""
        ...

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    def wait(self, event: Waitable, seconds: float) -> bool:
        """Wait for the event, at most so long; True if it is set."""
        ...


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

    snapshot: Snapshot
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


class ProfileReader(Protocol):
    """Profiles on demand; what the pusher and the listener are given."""

    def live(self) -> tuple[HeapProfile, ...]:
        """What is alive now, one budgeted profile per device.

        Raises:
            CaptureError: the allocator could not be read.
        """
        ...

    def allocated(self, seconds: float, stop: threading.Event) -> tuple[HeapProfile, ...]:
        """What is allocated during the next so many seconds, one profile per device.

        Where another window is open this waits until it has ended, for a bounded time.

        Raises:
            BusyError: it is open for longer, or `stop` came first.
            CaptureError: events can not be recorded here.
        """
        ...


class PushReader(Protocol):
    """The profiles of a push: nothing is shared with those who pull."""

    def live(self) -> tuple[HeapProfile, ...]:
        """What is alive at this very moment, one profile per device.

        Raises:
            CaptureError: the allocator could not be read.
        """
        ...

    def beside(self, kind: ProfileKind, live: tuple[HeapProfile, ...]) -> tuple[HeapProfile, ...]:
        """Profiles of another kind (`growth`, `pinned`) out of the read-out just made.

        Args:
            kind: what to make.
            live: what that read-out gave.

        Raises:
            CaptureError: they can not be had here.
        """
        ...

    def windowed(
        self, kinds: Collection[ProfileKind], limit_seconds: float, stop: threading.Event
    ) -> Mapping[ProfileKind, tuple[HeapProfile, ...]]:
        """Profiles of several kinds (`allocated`, `peak`) out of one recorded window.

        Raises:
            BusyError: not now, and not for a fault of ours.
            CaptureError: events could not be recorded.
        """
        ...


class ProfileSink(Protocol):
    """Where an encoded profile goes."""

    def push(self, profile: bytes, kind: ProfileKind, device: int, deadline_seconds: float) -> None:
        """Send one uncompressed pprof; returns once it is stored.

        Raises:
            PushError: it was not stored (or nobody knows); says whether trying again may help.
        """
        ...


class Observer(Protocol):
    """Where the METRICS table gets its values."""

    def __call__(self) -> Observation | None:
        """The values of now (at most a second old), None where there is nothing to export."""
        ...


class YieldControl(Protocol):
    """Commands to yield and restore, and what became of them; from any thread."""

    def submit(self, request: YieldRequest | RestoreRequest, who: str) -> Operation:
        """Begin it in the background.

        A command that repeats the one that runs, or the state that is there, gives that operation.

        Raises:
            YieldRefusedError: another operation runs, or it can not be begun at all.
        """
        ...

    def operation(self, operation_id: str) -> Operation | None:
        """One of the last hundred, None where it is unknown."""
        ...

    def wait(self, version: int, seconds: float) -> YieldStatus:
        """The status, once its version is another than this one, or after so long.

        Never calls torch or CUDA.
        """
        ...
