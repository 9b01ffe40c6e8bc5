"""Profiles on demand, from any source: reads, aggregates in slices, checks the books."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from gpumem_otel.capture.pacer import Pacer
from gpumem_otel.core.heap import allocated_profile, apply_budget, live_profile
from gpumem_otel.errors import CaptureError
from gpumem_otel.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpumem_otel.config import ProfileConfig
    from gpumem_otel.core.counters import Counters
    from gpumem_otel.core.model import DeviceBooks, DeviceStats, HeapProfile
    from gpumem_otel.core.ports import Clock, FrameNamer, Reading, Source, WindowSource

__all__ = ["Reader"]

_log = named_logger("gpumem_otel.capture")

SHARE_SECONDS: Final = 1.0
"""Callers that come within this time of a read-out are given its profiles."""

EQUAL: Final = "equal to the allocator's own counter of allocated bytes"
RACED: Final = "the job allocated or freed while this was read: counters and snapshot differ"
"""Comments of a profile."""


class Reader:
    """Implements `ProfileReader`; one read-out at a time, from any thread.

    Args:
        source: a live process or a recording.
        namer: names Python frames.
        clock: time.
        counters: takes `exporter_stall_seconds`, `exporter_runs` and `exporter_seconds` of the
            stages `read` and `window`, `readouts_raced`, `readouts_breached`. Waiting for a
            window to end is not in its seconds, and taps are in no stage of ours. A failure is
            raised and counted by the caller, who knows what it was for.
        config: budgets.
        pacer: gives up the interpreter lock between slices of our own work.
        describe: more comments for every profile (rank, versions), asked at each read-out.
        share_seconds: see `SHARE_SECONDS`; 0: every call reads.

    Attributes:
        tap: called with each live reading before it is let go, for recordings. It runs inside
            the read-out, must not raise, and slices and counts its own work: its time is in
            neither stall nor seconds of the stage `read`.
        window_tap: the same for each recorded window, with its seconds, outside of any lock.
        last_stall_seconds: how long the last read-out held the interpreter lock: the C calls
            that can not be sliced and our own slices together.
    """

    def __init__(
        self,
        source: Source,
        *,
        namer: FrameNamer,
        clock: Clock,
        counters: Counters,
        config: ProfileConfig,
        pacer: Pacer | None = None,
        describe: Callable[[], Sequence[str]] | None = None,
        share_seconds: float = SHARE_SECONDS,
    ) -> None:
        self.tap: list[Callable[[Reading], object]] = []
        self.window_tap: list[Callable[[Reading, float], object]] = []
        self.last_stall_seconds = 0.0
        self._source = source
        self._namer = namer
        self._clock = clock
        self._counters = counters
        self._config = config
        self._pacer = pacer or Pacer()
        self._describe = describe
        self._share_seconds = share_seconds
        self._lock = threading.Lock()
        self._books: Mapping[int, DeviceBooks] = {}
        self._last: tuple[float, tuple[HeapProfile, ...]] | None = None
        self._counted_until: dict[int, DeviceStats] = {}
        self._counted_until_ns = 0
        self._said_breach = False

    # ProfileReader

    def live(self) -> tuple[HeapProfile, ...]:
        """See `ProfileReader`."""
        with self._lock:
            last, started = self._last, self._clock.monotonic()
            if last is not None and 0 <= started - last[0] < self._share_seconds:
                return last[1]
            return self._read_and_keep(started)

    def live_now(self) -> tuple[HeapProfile, ...]:
        """A read-out of this very moment: all ranks read at the same one, so none is shared.

        Raises:
            CaptureError: the allocator could not be read.
        """
        with self._lock:
            return self._read_and_keep(self._clock.monotonic())

    def allocated(self, seconds: float, stop: threading.Event) -> tuple[HeapProfile, ...]:
        """See `ProfileReader`: what is allocated in the next so many seconds, and only that."""
        started_ns = self._clock.time_ns()
        reading = self._window(seconds, stop)
        before = {stats.device: stats for stats in reading.before}
        with self._lock:
            return self._allocated(reading, before, started_ns)

    def allocated_since_last(
        self, seconds: float, stop: threading.Event
    ) -> tuple[HeapProfile, ...]:
        """What was allocated since the last call of this: a true delta, for pushing.

        The stacks come from a window of so many seconds at the end, the totals from the
        allocator's counters over the whole time. The first call counts from its own beginning.

        Raises:
            CaptureError: events can not be recorded here.
        """
        started_ns = self._clock.time_ns()
        reading = self._window(seconds, stop)
        with self._lock:
            before = {stats.device: stats for stats in reading.before}
            if self._counted_until_ns:
                started_ns = self._counted_until_ns
                before = {
                    device: self._counted_until.get(device, s) for device, s in before.items()
                }
            self._counted_until = {stats.device: stats for stats in reading.after}
            self._counted_until_ns = reading.time_ns
            return self._allocated(reading, before, started_ns)

    def books(self) -> Mapping[int, DeviceBooks]:
        """What the last live read-out summed up, by device; {} before the first."""
        return self._books

    # live

    def _read_and_keep(self, started: float) -> tuple[HeapProfile, ...]:
        reading = self._source.read()
        profiles, sliced_seconds = self._live(reading)
        stall_seconds = reading.stall_seconds + sliced_seconds
        self._count("read", self._clock.monotonic() - started)
        for call in self.tap:
            call(reading)
        self._last = (self._clock.monotonic(), profiles)
        letting_go = time.perf_counter()
        del reading  # many small objects: letting them go is one more piece that holds the lock
        self._stalled(stall_seconds + time.perf_counter() - letting_go)
        return profiles

    def _live(self, reading: Reading) -> tuple[tuple[HeapProfile, ...], float]:
        """The profiles, and the seconds that our slices took."""
        pacer, config = self._pacer, self._config
        books: dict[int, DeviceBooks] = {}
        profiles = []
        extra = self._comments()
        pacer.begin()
        try:
            for device in _devices(reading):
                books[device] = reading.snapshot.books(device, pacer.pause)
                profile = live_profile(
                    reading.snapshot,
                    device,
                    namer=self._namer,
                    stackless=reading.stackless,
                    time_ns=reading.time_ns,
                    pause=pacer.pause,
                    max_depth=config.max_depth,
                )
                profile = apply_budget(profile, max_samples=config.max_samples)
                verdict = self._check(reading, device, books[device], profile)
                profiles.append(_with_comments(profile, (verdict, *extra)))
        finally:
            sliced_seconds = pacer.end()
        self._books = books
        return tuple(profiles), sliced_seconds

    def _check(
        self, reading: Reading, device: int, books: DeviceBooks, profile: HeapProfile
    ) -> str:
        """Compare profile, snapshot and counters; says in a sentence how they stand.

        A profile must equal its own snapshot whatever the job did meanwhile; only the allocator's
        counters, which are read before and after, say nothing where the job allocated.
        """
        total_bytes = profile.total_bytes
        stats = {s.device: s for s in reading.before}.get(device)
        raced = reading.raced(device) or stats is None
        if raced:
            self._counters.add("readouts_raced")
        told = f"device {device}: profile {total_bytes}, snapshot {books.allocated_bytes}"
        if raced or stats is None:
            if total_bytes == books.allocated_bytes:
                return RACED
            told += " bytes allocated"
        else:
            if total_bytes == books.allocated_bytes == stats.allocated_bytes:
                return EQUAL
            told += (
                f", allocator {stats.allocated_bytes} bytes allocated, while nothing was allocated"
            )
        self._counters.add("readouts_breached")
        if not self._said_breach:
            self._said_breach = True
            _log.warning("the books do not close: %s", told)
        return told

    # allocated

    def _window(self, seconds: float, stop: threading.Event) -> Reading:
        if not callable(getattr(self._source, "window", None)):
            raise CaptureError("window: this source records no events; ask for live profiles")
        # outside of the lock: a window may be long, and live profiles go on meanwhile
        started = self._clock.monotonic()
        reading = cast("WindowSource", self._source).window(seconds, stop)
        for call in self.window_tap:
            call(reading, self._clock.monotonic() - started)
        return reading

    def _allocated(
        self, reading: Reading, before: Mapping[int, DeviceStats], started_ns: int
    ) -> tuple[HeapProfile, ...]:
        pacer, config = self._pacer, self._config
        started = self._clock.monotonic()
        after = {stats.device: stats for stats in reading.after}
        profiles = []
        extra = self._comments()
        pacer.begin()
        try:
            for device in _devices(reading):
                first, last = before.get(device), after.get(device)
                counted = first is not None and last is not None
                profile = allocated_profile(
                    reading.snapshot,
                    device,
                    namer=self._namer,
                    stackless=reading.stackless,
                    requested_total_bytes=_grown(first, last, "requested_allocation_bytes"),
                    objects_total=_grown(first, last, "allocations"),
                    time_ns=reading.time_ns,
                    duration_ns=max(reading.time_ns - started_ns, 0),
                    pause=pacer.pause,
                    max_depth=config.max_depth,
                )
                note = () if counted else ("no counters for this device: recorded events only",)
                profile = apply_budget(profile, max_samples=config.max_samples)
                profiles.append(_with_comments(profile, (*note, *extra)))
        finally:
            sliced_seconds = pacer.end()
        self._stalled(reading.stall_seconds + sliced_seconds)
        # what the source did was stall but for the wait, which is nobody's work
        self._count("window", reading.stall_seconds + self._clock.monotonic() - started)
        return tuple(profiles)

    # shared

    def _comments(self) -> tuple[str, ...]:
        return tuple(self._describe()) if self._describe is not None else ()

    def _stalled(self, seconds: float) -> None:
        self.last_stall_seconds = seconds
        self._counters.add("exporter_stall_seconds", seconds)

    def _count(self, stage: str, seconds: float) -> None:
        self._counters.add("exporter_runs", stage=stage)
        self._counters.add("exporter_seconds", seconds, stage=stage)


def _with_comments(profile: HeapProfile, comments: Sequence[str]) -> HeapProfile:
    return replace(profile, comments=(*profile.comments, *comments))


def _devices(reading: Reading) -> list[int]:
    """Devices with something to tell, those of which only the counters know too."""
    counted = {stats.device for stats in (*reading.before, *reading.after)}
    return sorted(counted.union(reading.snapshot.devices()))


def _grown(first: DeviceStats | None, last: DeviceStats | None, field: str) -> int | None:
    if first is None or last is None:
        return None
    grown: int = getattr(last, field) - getattr(first, field)
    return max(grown, 0)  # the job may have reset its accumulated counters
