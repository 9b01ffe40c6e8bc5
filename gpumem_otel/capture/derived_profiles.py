"""Profiles derived from live read-outs: growth, and pinned host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_otel.base.logs import named_logger
from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.errors import BusyError, CaptureError
from gpumem_otel.profiles.growth import Growth
from gpumem_otel.profiles.heap import apply_budget
from gpumem_otel.profiles.pinned import pinned_profile, pinned_total

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import DeviceStats, HeapProfile
    from gpumem_otel.base.protocols import FrameNamer
    from gpumem_otel.capture.gil_pacing import Pacer
    from gpumem_otel.settings.config import ProfileConfig
    from gpumem_otel.snapshot.reading import Reading

_log = named_logger("gpumem_otel.capture")

_TOO_OLD = "this torch records no stacks of pinned host memory (2.14 and newer do): the total only"
_NOT_ASKED = (
    "stacks of pinned host memory are recorded with the profile kind pinned: the total only"
)


class DerivedProfiles:
    """Makes them; `note` is a tap of the reader, `make` is for the pushing thread.

    Args:
        config: kinds and budgets.
        counters: takes `exporter_stall_seconds`.
        pacer: releases the interpreter lock between slices of our own work.
        stats: the counters of each device; host counters are those of the process.
        records_pinned: whether stacks of pinned memory are being recorded.
    """

    def __init__(
        self,
        *,
        namer: FrameNamer,
        config: ProfileConfig,
        counters: Counters,
        pacer: Pacer,
        stats: Callable[[], tuple[DeviceStats, ...]],
        records_pinned: Callable[[], bool],
    ) -> None:
        self.wants_pinned = ProfileKind.PINNED.value in config.kinds
        self._namer = namer
        self._config = config
        self._counters = counters
        self._pacer = pacer
        self._stats = stats
        self._records_pinned = records_pinned
        self._growth = Growth(config.growth_pushes)
        self._grown: tuple[HeapProfile, ...] = ()
        self._pinned: tuple[HeapProfile, ...] = ()
        self._logged = False

    def note(self, reading: Reading) -> None:
        """Make the profile of pinned memory from a live reading."""
        if not self.wants_pinned or not self._records_pinned():
            return
        device = min((stats.device for stats in reading.after), default=0)
        self._pacer.begin()
        try:
            profile = pinned_profile(
                reading.snapshot,
                device,
                namer=self._namer,
                time_ns=reading.time_ns,
                pause=self._pacer.pause,
                max_depth=self._config.max_depth,
            )
        except Exception:  # a tap never raises
            self._pinned = ()
            self._counters.add("exporter_errors", stage="read")
            return
        finally:
            self._counters.add("exporter_stall_seconds", self._pacer.end())
        self._pinned = (apply_budget(profile, max_samples=self._config.max_samples),)

    def make(self, kind: ProfileKind, live: tuple[HeapProfile, ...]) -> tuple[HeapProfile, ...]:
        """See `PushReader.derived`."""
        if kind is ProfileKind.PINNED:
            return self.pinned(max((profile.time_ns for profile in live), default=0))
        self._pacer.begin()
        try:
            self._grown = self._growth.add(live, self._pacer.pause)
        finally:
            self._counters.add("exporter_stall_seconds", self._pacer.end())
        return self._grown

    def growth(self) -> tuple[HeapProfile, ...]:
        """The growth profiles of the last push.

        Raises:
            CaptureError: growth is not pushed, or not for long enough.
        """
        if not self._grown:
            raise CaptureError(
                "growth: it compares live profiles of pushes, with the kind growth among "
                f"profiles, and needs {self._config.growth_pushes + 1} of them"
            )
        return self._grown

    def pinned(self, time_ns: int) -> tuple[HeapProfile, ...]:
        """Pinned host memory at the last live read-out; without stacks, the current total.

        Raises:
            BusyError: this torch does not report it.
            CaptureError: the allocator could not be read.
        """
        if self.wants_pinned and self._records_pinned():
            return self._pinned
        stats = self._stats()
        total = next((s.host_pinned_bytes for s in stats if s.host_pinned_bytes is not None), None)
        if total is None:
            raise BusyError("pinned: this torch does not report pinned host memory")
        why = _TOO_OLD if self.wants_pinned else _NOT_ASKED
        if self.wants_pinned and not self._logged:
            self._logged = True
            _log.info("%s", why)
        return (pinned_total(total, min(s.device for s in stats), time_ns, why),)
