"""The protocols that pushes read from and send to, and everything that a pusher needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from gpumem_otel.base.clock import SystemClock

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import HeapProfile, Identity, ProfileKind, SourceStatus
    from gpumem_otel.base.protocols import Clock
    from gpumem_otel.settings.config import ProfileConfig


class ProfileReader(Protocol):
    """Profiles on demand, for the pusher and the listener."""

    def live(self) -> tuple[HeapProfile, ...]:
        """What is alive now, one budgeted profile per device.

        Raises:
            CaptureError: the allocator could not be read.
        """
        ...

    def allocated(self, seconds: float, stop: threading.Event) -> tuple[HeapProfile, ...]:
        """What is allocated during the next `seconds`, one profile per device.

        Where another window is open this waits until it has ended, for a bounded time.

        Raises:
            BusyError: it is open for longer, or `stop` came first.
            CaptureError: events cannot be recorded here.
        """
        ...


class PushReader(Protocol):
    """The profiles of a push, made for it alone and not shared with pulls."""

    def live(self) -> tuple[HeapProfile, ...]:
        """What is alive at this moment, one profile per device.

        Raises:
            CaptureError: the allocator could not be read.
        """
        ...

    def derived(self, kind: ProfileKind, live: tuple[HeapProfile, ...]) -> tuple[HeapProfile, ...]:
        """Profiles of another kind (`growth`, `pinned`) from the read-out that gave `live`.

        Raises:
            CaptureError: they are not available here.
        """
        ...

    def windowed(
        self, kinds: Collection[ProfileKind], limit_seconds: float, stop: threading.Event
    ) -> Mapping[ProfileKind, tuple[HeapProfile, ...]]:
        """Profiles of several kinds (`allocated`, `peak`) from one recorded window.

        Raises:
            BusyError: not now, which is no failure.
            CaptureError: events could not be recorded.
        """
        ...


class ProfileSink(Protocol):
    """Where an encoded profile goes."""

    def push(self, profile: bytes, kind: ProfileKind, device: int, deadline_seconds: float) -> None:
        """Send one uncompressed pprof; returns once it is stored.

        Raises:
            PushError: it was not stored, or may not have been; `retryable` where a retry may help.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDependencies:
    """What a pusher is made of.

    Attributes:
        reader: takes the profiles, on the pusher's thread.
        sink: where they go, None where they are only shown to `on_profiles`.
        encode: one profile -> uncompressed pprof; counts its own time.
        config: interval, kinds and budgets.
        counters: count every push, drop and error.
        identity: asked each round, since the rank may be known late.
        status: nothing is read before it reports armed.
        clock: replaced in tests.
        stall_seconds: how long the last read-out held the interpreter lock; what the counter
            `exporter_stall_seconds` rose by meanwhile counts too.
        on_profiles: called with the kind and profiles of each read-out, on the pusher's thread.
        push_timeout_seconds: deadline of one push.
        final_read: read once more at the end also without a sink and `on_profiles`, since
            something else uses what is read, for instance a recording.
    """

    reader: PushReader
    sink: ProfileSink | None
    encode: Callable[[HeapProfile], bytes]
    config: ProfileConfig
    counters: Counters
    identity: Callable[[], Identity]
    status: Callable[[], SourceStatus]
    clock: Clock = field(default_factory=SystemClock)
    stall_seconds: Callable[[], float] = float
    on_profiles: Sequence[Callable[[ProfileKind, tuple[HeapProfile, ...]], None]] = ()
    push_timeout_seconds: float = 10.0
    final_read: bool = True
