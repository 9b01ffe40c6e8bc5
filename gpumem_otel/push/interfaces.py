"""What pushes read from and send to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection, Mapping

    from gpumem_otel.base.profile import HeapProfile, ProfileKind


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
