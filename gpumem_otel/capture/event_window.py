"""Records the allocator's events for a limited time and number, and reads them."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.profile import DeviceStats
from gpumem_otel.capture.window_queue import ANOTHER_IS_OPEN
from gpumem_otel.errors import BusyError, CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.gate import QuietGate
    from gpumem_otel.base.protocols import Clock
    from gpumem_otel.capture.device_stats import StatsReader
    from gpumem_otel.capture.live_reads import LiveReads, SnapshotTaker
    from gpumem_otel.capture.recorder import Recorder
    from gpumem_otel.capture.restored import Restored
    from gpumem_otel.capture.table_entries import TableEntries
    from gpumem_otel.capture.tensor_table import TensorTable
    from gpumem_otel.snapshot.reading import Reading

_TICK_SECONDS: Final = 0.05
_STEP_TICK_SECONDS: Final = 0.02


class EventWindow:
    """Records one window at a time.

    Args:
        recorder: switches events on and off.
        snapshots: takes the recorded events.
        reads: adds classes, roots and the original stacks of restored memory.
        tensors: the address table; None without tensor classes.
        restored: memory allocated by restores.
        max_events: of one window, per device.
        gate: the window ends early when it closes.
        clock: time.
        counters: takes `exporter_history_overflow`, and `exporter_stall_seconds` of windows that
            fail.
    """

    def __init__(
        self,
        recorder: Recorder,
        snapshots: SnapshotTaker,
        reads: LiveReads,
        *,
        tensors: TensorTable | None,
        restored: Restored,
        max_events: int,
        gate: QuietGate,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self._max_events = max_events
        self._recorder = recorder
        self._snapshots = snapshots
        self._reads = reads
        self._tensors = tensors
        self._restored = restored
        self._gate = gate
        self._clock = clock
        self._counters = counters
        self._lock = threading.Lock()
        self._idle_seconds = 0.0

    def forget_parent(self) -> None:
        """In a forked child: the parent's window does not exist."""
        self._lock = threading.Lock()

    def record(
        self,
        stats: StatsReader,
        seconds: float,
        stop: threading.Event,
        *,
        frees: bool,
        enough: Callable[[], bool] | None,
    ) -> Reading:
        """See `WindowSource.window`.

        Args:
            stats: reads the counters.
            seconds: the longest duration.
            stop: ends it early.
            frees: record frees too.
            enough: called many times a second; True ends it.

        Raises:
            BusyError: another window is open.
            CaptureError: recording could not be switched, or the allocator could not be read.
        """
        if not self._lock.acquire(blocking=False):
            raise BusyError(ANOTHER_IS_OPEN)
        started = self._clock.monotonic()
        self._idle_seconds = 0.0
        try:
            restored = self._restored.entries()
            before, raw, reading, entries = self._record(stats, seconds, stop, frees, enough)
        except (CaptureError, RuntimeError) as error:
            self._counters.add("exporter_stall_seconds", self._busy_since(started))
            if isinstance(error, CaptureError):
                raise
            raise CaptureError(f"window: {error}; no profile this time") from error
        else:
            stall_seconds = self._busy_since(started)
        finally:
            self._lock.release()
        replaced, put_seconds = self._reads.put_originals(raw, restored)
        stall_seconds += put_seconds
        classifier = None
        if entries is not None:
            classifier, sliced_seconds = self._reads.classifier(reading.snapshot, entries)
            stall_seconds += sliced_seconds
        return replace(
            reading,
            before=before + _fresh(before, reading.after),
            stall_seconds=stall_seconds,
            stackless=self._reads.roots.of_events(),
            stackless_blocks=self._reads.roots.of_blocks(ours=True, restored=replaced.roots),
            classifier=classifier,
        )

    def _busy_since(self, started: float) -> float:
        return self._clock.monotonic() - started - self._idle_seconds

    def _record(
        self,
        stats: StatsReader,
        seconds: float,
        stop: threading.Event,
        frees: bool,
        enough: Callable[[], bool] | None,
    ) -> tuple[tuple[DeviceStats, ...], Any, Reading, TableEntries | None]:
        before = stats.counters(stats.devices())
        self._recorder.open_window(self._max_events, frees=frees)
        per_free = max(self._recorder.events_per_free, int(frees))
        # only peak profiles, which need frees, show tensor classes
        tensors = self._tensors if frees else None
        try:
            with nullcontext() if tensors is None else tensors.wanted_now():
                self._wait(stats, before, seconds, stop, per_free, enough)
            entries = None if tensors is None else tensors.snapshot()
            raw, reading = self._snapshots.take(stats, traces=True)
        finally:
            undisturbed = self._recorder.close_window()
        if not undisturbed:
            raise CaptureError("window: the job switched memory history itself; its events stay")
        self._count_overflow(raw)
        return before, raw, reading, entries

    def _wait(  # noqa: PLR0917 - as `record` was called
        self,
        stats: StatsReader,
        before: Sequence[DeviceStats],
        seconds: float,
        stop: threading.Event,
        events_per_free: int,
        enough: Callable[[], bool] | None,
    ) -> None:
        clock = self._clock
        end = clock.monotonic() + seconds
        tick = _TICK_SECONDS if enough is None else _STEP_TICK_SECONDS
        first = {s.device: (s.allocations, s.frees) for s in before}
        limit = self._max_events * 4 // 5  # leaves space for events until the next check
        while (left := end - clock.monotonic()) > 0:
            asleep = clock.monotonic()
            stopped = clock.wait(stop, min(left, tick))
            self._idle_seconds += clock.monotonic() - asleep
            if stopped or self._gate.closed or (enough is not None and enough()):
                return
            for now in stats.counters(stats.devices()):
                allocations, frees = first.get(now.device, (0, 0))
                freed = (now.frees - frees) * events_per_free
                if now.allocations - allocations + freed >= limit:
                    return

    def _count_overflow(self, raw: Any) -> None:
        traces = raw.get("device_traces") or () if isinstance(raw, dict) else ()
        for trace in traces:
            if len(trace) >= self._max_events:
                self._counters.add("exporter_history_overflow")


def _fresh(before: Sequence[DeviceStats], after: Sequence[DeviceStats]) -> tuple[DeviceStats, ...]:
    """Zero counters for devices that came into use within the window."""
    known = {one.device for one in before}
    return tuple(
        DeviceStats(
            device=one.device, allocated_bytes=0, requested_bytes=0, active_bytes=0,
            reserved_bytes=0,
        )
        for one in after
        if one.device not in known
    )  # fmt: skip
