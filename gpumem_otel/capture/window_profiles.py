"""Makes profiles of recorded windows: allocations, and memory alive at the peak.

A window covers a few whole steps of the job, or a fixed time if no steps are counted, and never
more events than the allocator's ring holds. Both kinds of profile can come from one window.
Requests for windows are queued (`window_queue.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from gpumem_otel.base.profile import ProfileKind, StepStats
from gpumem_otel.capture.costs import devices_of, with_comments
from gpumem_otel.capture.window_queue import PULL_WAIT_SECONDS, WindowQueue
from gpumem_otel.errors import BusyError
from gpumem_otel.profiles.heap import allocated_profile, apply_budget
from gpumem_otel.profiles.window_peak import PeakCounter, window_peak
from gpumem_otel.snapshot.labels import region_labels, with_phases

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection

    from gpumem_otel.base.aggregate import Labels
    from gpumem_otel.base.profile import DeviceStats, HeapProfile
    from gpumem_otel.base.protocols import Clock, FrameNamer, Pause
    from gpumem_otel.capture.costs import Costs
    from gpumem_otel.capture.gil_pacing import Pacer
    from gpumem_otel.settings.config import ProfileConfig
    from gpumem_otel.snapshot.reading import Reading, Source, WindowSource
    from gpumem_otel.snapshot.tensor_classes import ClassAs
    from gpumem_otel.snapshot.torch_format import RawEvent

    Made = dict[ProfileKind, tuple[HeapProfile, ...]]

WHOLE_STEPS: Final = 2
"""Whole steps in a pushed window."""


class WholeSteps:
    """Ends a window once it holds enough whole steps. Used by one thread.

    Args:
        stats: returns the steps so far.
        now_ns: wall clock, when the window begins.
        wanted: whole steps.

    Attributes:
        number: whole steps so far.
        ticking: whether the last step is recent enough to expect one within the limit.
    """

    def __init__(
        self,
        stats: Callable[[], StepStats],
        now_ns: int,
        limit_seconds: float,
        wanted: int = WHOLE_STEPS,
    ) -> None:
        steps = stats()
        age_ns = now_ns - steps.last_step_time_ns
        self.number = 0
        self.ticking = steps.steps > 0 and age_ns < limit_seconds * 1e9
        self._stats = stats
        self._wanted = wanted
        self._seen = steps.steps
        self._first: tuple[int, int] | None = None
        self._last_ns = 0

    def enough(self) -> bool:
        """Check the count; the boundary times are those noted by the job's thread."""
        now = self._stats()
        if now.steps == self._seen:
            return False
        self._seen, self._last_ns = now.steps, now.last_step_time_ns
        if self._first is None:
            self._first = now.steps, now.last_step_time_ns
        self.number = now.steps - self._first[0]
        return self.number >= self._wanted

    @property
    def between_us(self) -> tuple[int, int] | None:
        """Times of the first and last boundary; None without a whole step."""
        if self._first is None or not self.number:
            return None
        return self._first[1] // 1000, self._last_ns // 1000


@dataclass(frozen=True, slots=True)
class _Window:
    """A recorded window."""

    reading: Reading
    started_ns: int
    seconds: float
    steps: WholeSteps | None = None

    def sentence(self, device: int) -> str:
        events = len(self.reading.snapshot.raw_events(device))
        text = f"recorded in a window of {self.seconds:.3f} s with {events} events"
        if self.steps is None:
            return text
        number = self.steps.number
        if not number:
            return f"{text}, no whole step"
        return f"{text}, {number} whole step{'s' if number > 1 else ''}"


class WindowReader:
    """Makes profiles from event windows, from any thread.

    Args:
        source: a live process or a recording.
        costs: takes the stall, and runs and seconds of the stage `window`, without the wait for the
            window's end and without taps.
        pacer: releases the interpreter lock between slices of our own work.
        lock: held while profiles are made, never while a window is open.

    Attributes:
        tap: called with each recorded window and its seconds, without holding a lock.
        steps: returns the steps so far.
        turns: the queue for windows.
    """

    def __init__(
        self,
        source: Source,
        *,
        namer: FrameNamer,
        clock: Clock,
        costs: Costs,
        config: ProfileConfig,
        pacer: Pacer,
        lock: threading.Lock,
    ) -> None:
        self.tap: list[Callable[[Reading, float], object]] = []
        self.steps: Callable[[], StepStats] = StepStats
        self.turns = WindowQueue(clock)
        self._source = source
        self._namer = namer
        self._clock = clock
        self._costs = costs
        self._config = config
        self._pacer = pacer
        self._lock = lock
        self._counted_until: dict[int, DeviceStats] = {}
        self._counted_until_ns = 0
        self._peaks: dict[int, int] = {}

    # pulled

    def allocated(self, seconds: float, stop: threading.Event) -> tuple[HeapProfile, ...]:
        """See `ProfileReader`: allocations of the next `seconds`, and only those."""
        window = self._pull(seconds, stop)
        with self._lock:
            return self._make(window, {ProfileKind.ALLOCATED})[ProfileKind.ALLOCATED]

    def peak(self, seconds: float, stop: threading.Event) -> tuple[HeapProfile, ...]:
        """Memory alive at the peak of the next `seconds`.

        Raises:
            BusyError: other windows take longer than this waits.
            CaptureError: events cannot be recorded here.
        """
        window = self._pull(seconds, stop, frees=True)
        with self._lock:
            return self._make(window, {ProfileKind.PEAK})[ProfileKind.PEAK]

    def _pull(self, seconds: float, stop: threading.Event, *, frees: bool = False) -> _Window:
        with self.turns.turn(seconds, stop, wait_seconds=PULL_WAIT_SECONDS):
            window = self._record(seconds, stop, frees=frees)
        return self._tapped(window)

    # pushed

    def pushed(
        self, kinds: Collection[ProfileKind], limit_seconds: float, stop: threading.Event
    ) -> Made:
        """Profiles of these kinds from one window, covering the time since the last call.

        `allocated` is a true delta: its totals are the allocator's counters over the whole time,
        its stacks those of the window. The first call counts from its own start. `peak` is the
        window's; if the allocator's own peak since the last call is higher, the difference is
        `[peak not recorded]`.

        Args:
            kinds: of `allocated` and `peak`.
            limit_seconds: limit for the window and the wait for it; without steps the window takes
                `allocated_window_seconds`.
            stop: ends it early.

        Raises:
            BusyError: the job records memory history itself, the source has no events, or a
                requested window takes too long.
            CaptureError: events could not be recorded.
        """
        end = self._clock.monotonic() + limit_seconds
        # leaves enough time for the window itself
        spare_seconds = limit_seconds - min(
            self._config.allocated_window_seconds, limit_seconds / 2
        )
        with self.turns.turn(limit_seconds, stop, wait_seconds=spare_seconds, own=True):
            left_seconds = max(end - self._clock.monotonic(), 0.0)
            steps = WholeSteps(self.steps, self._clock.time_ns(), left_seconds)
            seconds = min(self._config.allocated_window_seconds, left_seconds)
            window = self._record(
                left_seconds if steps.ticking else seconds,
                stop,
                frees=ProfileKind.PEAK in kinds,
                steps=steps if steps.ticking else None,
            )
        self._tapped(window)
        with self._lock:
            return self._make(window, kinds, pushed=True)

    def _record(
        self,
        seconds: float,
        stop: threading.Event,
        *,
        frees: bool = False,
        steps: WholeSteps | None = None,
    ) -> _Window:
        if not callable(getattr(self._source, "window", None)):
            raise BusyError("window: this source records no events; ask for live profiles")
        # without the lock: a window may be long, and live profiles must continue
        started_ns, started = self._clock.time_ns(), self._clock.monotonic()
        reading = cast("WindowSource", self._source).window(
            seconds, stop, frees=frees, enough=None if steps is None else steps.enough
        )
        return _Window(reading, started_ns, self._clock.monotonic() - started, steps)

    def _tapped(self, window: _Window) -> _Window:
        for call in self.tap:
            call(window.reading, window.seconds)
        return window

    def _make(
        self, window: _Window, kinds: Collection[ProfileKind], *, pushed: bool = False
    ) -> Made:
        """The profiles of a window, made in slices."""
        reading, started = window.reading, self._clock.monotonic()
        before = {stats.device: stats for stats in reading.before}
        started_ns = window.started_ns
        if pushed and self._counted_until_ns:
            started_ns = self._counted_until_ns
            before = {device: self._counted_until.get(device, s) for device, s in before.items()}
        extra = self._costs.comments()
        made: dict[ProfileKind, list[HeapProfile]] = {kind: [] for kind in kinds}
        self._pacer.begin()
        try:
            for device in devices_of(reading):
                for kind, profiles in made.items():
                    if kind is ProfileKind.ALLOCATED:
                        profile = self._allocated(window, device, before.get(device), started_ns)
                    else:
                        profile = self._peak(window, device, pushed=pushed)
                    profile = apply_budget(profile, max_samples=self._config.max_samples)
                    profiles.append(with_comments(profile, extra))
        finally:
            sliced_seconds = self._pacer.end()
        if pushed:
            self._counted_until = {stats.device: stats for stats in reading.after}
            self._counted_until_ns = reading.time_ns
        self._costs.stalled(reading.stall_seconds + sliced_seconds)
        # the stall of the source is work; its wait is not
        self._costs.count("window", reading.stall_seconds + self._clock.monotonic() - started)
        return {kind: tuple(profiles) for kind, profiles in made.items()}

    def _allocated(
        self, window: _Window, device: int, first: DeviceStats | None, started_ns: int
    ) -> HeapProfile:
        reading, pause = window.reading, self._pacer.pause
        last = _stats_of(reading.after, device)
        profile = allocated_profile(
            reading.snapshot,
            device,
            namer=self._namer,
            stackless=reading.stackless,
            requested_total_bytes=_grown(first, last, "requested_allocation_bytes"),
            objects_total=_grown(first, last, "allocations"),
            time_ns=reading.time_ns,
            duration_ns=max(reading.time_ns - started_ns, 0),
            pause=pause,
            max_depth=self._config.max_depth,
            between_us=None if window.steps is None else window.steps.between_us,
            labels_of=self._labels_of(reading, device, pause),
        )
        comments = [window.sentence(device)]
        if first is None or last is None:
            comments.append("no counters for this device: recorded events only")
        return with_comments(profile, comments)

    def _labels_of(
        self, reading: Reading, device: int, pause: Pause
    ) -> Callable[[RawEvent], Labels] | None:
        phases = self._config.phases
        snapshot = reading.snapshot
        if not phases and not snapshot.has_metadata(device, pause):
            return None
        regions = region_labels()
        if not phases:
            return regions
        return with_phases(regions, snapshot.annotations_of(device), reading.stackless, device)

    def _peak(self, window: _Window, device: int, *, pushed: bool) -> HeapProfile:
        reading = window.reading
        now = _stats_of(reading.after, device)
        # a pulled window does not cover the time before it
        before_bytes = now.requested_peak_bytes if now is not None else 0
        if pushed and now is not None:
            before_bytes, self._peaks[device] = self._peaks.get(device, 0), before_bytes
        class_as: ClassAs = "label" if self._config.class_as == "label" else "root"
        return window_peak(
            reading,
            device,
            namer=self._namer,
            counter=PeakCounter(before_bytes, now),
            comments=(window.sentence(device),),
            pause=self._pacer.pause,
            max_depth=self._config.max_depth,
            class_as=None if self._config.class_as == "off" else class_as,
        )


def _stats_of(all_stats: tuple[DeviceStats, ...], device: int) -> DeviceStats | None:
    return next((stats for stats in all_stats if stats.device == device), None)


def _grown(first: DeviceStats | None, last: DeviceStats | None, field: str) -> int | None:
    if first is None or last is None:
        return None
    grown: int = getattr(last, field) - getattr(first, field)
    return max(grown, 0)  # the job may have reset its accumulated counters
