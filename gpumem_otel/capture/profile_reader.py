"""Makes live profiles from any source: reads, aggregates in slices, checks the totals."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.capture.costs import Costs, devices_of, with_comments
from gpumem_otel.capture.gil_pacing import Pacer
from gpumem_otel.capture.window_profiles import WindowReader
from gpumem_otel.profiles.heap import apply_budget, live_profile
from gpumem_otel.snapshot.tensor_classes import classes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import DeviceTotals, HeapProfile
    from gpumem_otel.base.protocols import Clock, FrameNamer
    from gpumem_otel.settings.config import ProfileConfig
    from gpumem_otel.snapshot.reading import Reading, Source
    from gpumem_otel.snapshot.tensor_classes import ClassAs, TensorClass

_log = named_logger("gpumem_otel.capture")

SHARE_SECONDS: Final = 1.0
"""Callers within this time after a read-out get its profiles."""

EQUAL: Final = "equal to the allocator's own counter of allocated bytes"
RACED: Final = "the job allocated or freed while this was read: counters and snapshot differ"
"""Comments of a profile."""


class LiveProfileReader:
    """Implements `ProfileReader`; one read-out at a time, from any thread.

    Args:
        source: a live process or a recording.
        counters: takes `exporter_stall_seconds`, `exporter_runs` and `exporter_seconds` of the
            stages `read` and `window` (without the wait for a window's end and without taps),
            `readouts_raced`, `readouts_breached`. Errors are counted by the caller.
        pacer: releases the interpreter lock between slices of our own work.
        describe: more comments for every profile (rank, versions), called at each read-out.
        share_seconds: see `SHARE_SECONDS`; 0: every call reads.

    Attributes:
        tap: called with each live reading, for recordings. It runs inside the read-out, must not
            raise, and slices and counts its own work, which is in neither stall nor seconds of the
            stage `read`.
        windows: makes the profiles of recorded windows.
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
        self._source = source
        self._namer = namer
        self._clock = clock
        self._counters = counters
        self._config = config
        self._pacer = pacer or Pacer()
        self._costs = Costs(counters, describe)
        self._share_seconds = share_seconds
        self._lock = threading.Lock()
        self._totals: Mapping[int, DeviceTotals] = {}
        self._classes: Mapping[int, Mapping[str, int]] = {}
        self._last: tuple[float, tuple[HeapProfile, ...]] | None = None
        self._logged_breach = False
        self.windows = WindowReader(
            source,
            namer=namer,
            clock=clock,
            costs=self._costs,
            config=config,
            pacer=self._pacer,
            lock=self._lock,
        )

    @property
    def window_tap(self) -> list[Callable[[Reading, float], object]]:
        """See `WindowReader.tap`."""
        return self.windows.tap

    @property
    def last_stall_seconds(self) -> float:
        """How long the last read-out held the interpreter lock: C calls and our own slices."""
        return self._costs.last_stall_seconds

    # ProfileReader

    def live(self) -> tuple[HeapProfile, ...]:
        """See `ProfileReader`."""
        with self._lock:
            last, started = self._last, self._clock.monotonic()
            if last is not None and 0 <= started - last[0] < self._share_seconds:
                return last[1]
            return self._read_and_keep(started)

    def live_now(self) -> tuple[HeapProfile, ...]:
        """A new read-out, not shared, since all ranks read at the same moment.

        Raises:
            CaptureError: the allocator could not be read.
        """
        with self._lock:
            return self._read_and_keep(self._clock.monotonic())

    def last(self) -> tuple[float, tuple[HeapProfile, ...]] | None:
        """The profiles of the last live read-out and their age in seconds; None before it."""
        last = self._last
        return None if last is None else (self._clock.monotonic() - last[0], last[1])

    def allocated(self, seconds: float, stop: threading.Event) -> tuple[HeapProfile, ...]:
        """See `ProfileReader`."""
        return self.windows.allocated(seconds, stop)

    def totals(self) -> Mapping[int, DeviceTotals]:
        """The totals of the last live read-out by device; {} before the first."""
        return self._totals

    def classes(self) -> Mapping[int, Mapping[str, int]]:
        """Bytes by tensor class at the last live read-out, by device; {} before the first.

        They add up to that read-out's `allocated`. A class that has disappeared stays with 0.
        """
        return self._classes

    def profiles_of(self, reading: Reading) -> tuple[HeapProfile, ...]:
        """Live profiles of a reading taken elsewhere; changes nothing else."""
        return self._live(reading)[0]

    # live

    def _read_and_keep(self, started: float) -> tuple[HeapProfile, ...]:
        reading = self._source.read()
        profiles, sliced_seconds, totals, classes = self._live(reading)
        self._totals = totals
        self._classes = _with_those_before(self._classes, classes)
        stall_seconds = reading.stall_seconds + sliced_seconds
        self._costs.count("read", self._clock.monotonic() - started)
        for call in self.tap:
            call(reading)
        self._last = (self._clock.monotonic(), profiles)
        freeing = time.perf_counter()
        del reading  # freeing many small objects holds the interpreter lock too
        self._costs.stalled(stall_seconds + time.perf_counter() - freeing)
        return profiles

    def _live(
        self, reading: Reading
    ) -> tuple[
        tuple[HeapProfile, ...], float, dict[int, DeviceTotals], dict[int, dict[TensorClass, int]]
    ]:
        """The profiles, the seconds of our slices, the totals, and bytes by class."""
        pacer, config = self._pacer, self._config
        totals: dict[int, DeviceTotals] = {}
        classes: dict[int, dict[TensorClass, int]] = {}
        classifier = None if config.class_as == "off" else reading.classifier
        class_as: ClassAs = "label" if config.class_as == "label" else "root"
        profiles = []
        extra = self._costs.comments()
        pacer.begin()
        try:
            for device in devices_of(reading):
                totals[device] = reading.snapshot.totals(device, pacer.pause)
                profile = live_profile(
                    reading.snapshot,
                    device,
                    namer=self._namer,
                    stackless=reading.stackless,
                    time_ns=reading.time_ns,
                    pause=pacer.pause,
                    max_depth=config.max_depth,
                    classifier=classifier,
                    class_as=class_as,
                )
                if classifier is not None:
                    classes[device] = classes_of(profile, class_as)
                profile = apply_budget(profile, max_samples=config.max_samples)
                verdict = self._check(reading, device, totals[device], profile)
                profiles.append(with_comments(profile, (verdict, *extra)))
        finally:
            sliced_seconds = pacer.end()
        return tuple(profiles), sliced_seconds, totals, classes

    def _check(
        self, reading: Reading, device: int, totals: DeviceTotals, profile: HeapProfile
    ) -> str:
        """Compare profile, snapshot and counters; returns the result as a sentence.

        A profile must always equal its own snapshot. The allocator's counters, read before and
        after, are compared only if the job did not allocate meanwhile.
        """
        total_bytes = profile.total_bytes
        stats = {s.device: s for s in reading.before}.get(device)
        raced = reading.raced(device) or stats is None
        if raced:
            self._counters.add("readouts_raced")
        sizes = f"device {device}: profile {total_bytes}, snapshot {totals.allocated_bytes}"
        if raced or stats is None:
            if total_bytes == totals.allocated_bytes:
                return RACED
            sizes += " bytes allocated"
        else:
            if total_bytes == totals.allocated_bytes == stats.allocated_bytes:
                return EQUAL
            sizes += (
                f", allocator {stats.allocated_bytes} bytes allocated, while nothing was allocated"
            )
        self._counters.add("readouts_breached")
        if not self._logged_breach:
            self._logged_breach = True
            _log.warning("accounting mismatch: %s", sizes)
        return sizes


def _with_those_before(
    before: Mapping[int, Mapping[str, int]], now: Mapping[int, Mapping[TensorClass, int]]
) -> dict[int, dict[str, int]]:
    """Classes that have disappeared get 0: graphs would keep the last value of an ended series."""
    return {
        device: {
            **dict.fromkeys(before.get(device, ()), 0),
            **{tensor_class.value: size for tensor_class, size in sizes.items()},
        }
        for device, sizes in now.items()
    }
