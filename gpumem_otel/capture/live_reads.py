"""Makes readings of live memory and of windows of events.

A reading is a snapshot, plus what torch does not know about its blocks.
That is their tensor classes, the roots of blocks without a stack, and the original stacks of memory
that a restore has allocated.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.base.profile import DeviceStats
from gpumem_otel.base.protocols import no_pause
from gpumem_otel.capture.restored import Replaced
from gpumem_otel.capture.stackless import StacklessRoots
from gpumem_otel.capture.table_entries import workspace_sizes
from gpumem_otel.capture.tensor_table import TensorTable
from gpumem_otel.capture.window_queue import ANOTHER_IS_OPEN
from gpumem_otel.errors import BusyError, CaptureError
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.tensor_classes import Classifier, workspaces_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.gate import QuietGate
    from gpumem_otel.base.protocols import Clock
    from gpumem_otel.capture.device_stats import StatsReader
    from gpumem_otel.capture.gil_pacing import Pacer
    from gpumem_otel.capture.recorder import Recorder
    from gpumem_otel.capture.restored import Entries, Restored
    from gpumem_otel.capture.stackless import Roots
    from gpumem_otel.capture.table_entries import TableEntries
    from gpumem_otel.snapshot.snapshot import TorchSnapshot

COPIES_HISTORY: Final = (
    "the job records memory history, and this torch (before 2.11) copies all of it with each "
    "snapshot: no profiles until it stops recording"
)
"""Why there are no readings if `SnapshotTaker.too_slow`."""

_log = named_logger("gpumem_otel.capture")

_COPY_LIMIT_SECONDS: Final = 0.25
_BLOCK_SECONDS: Final = 3e-6
"""Cost of a snapshot per live block, before one was measured: 2.6 us on an H200's host."""
_ENTRY_SECONDS: Final = 3e-7
"""Cost per entry of the address table."""
_TICK_SECONDS: Final = 0.05
_STEP_TICK_SECONDS: Final = 0.02
_PACE_FROM_BLOCKS: Final = 1000
"""With fewer blocks their cost cannot be measured."""


class SnapshotTaker:
    """Takes snapshots with the counters before and after, and measures their cost.

    Args:
        recorder: reads the allocator.
        restored: its lock keeps restores from allocating meanwhile.

    Attributes:
        block_seconds: cost of the last snapshot per live block.
    """

    def __init__(self, recorder: Recorder, restored: Restored, clock: Clock) -> None:
        self.block_seconds = _BLOCK_SECONDS
        self._recorder = recorder
        self._restored = restored
        self._clock = clock
        self._slow_copy_at = -1  # value of `Recorder.gaps`
        self._logged_slow = False

    def take(self, stats: StatsReader, *, traces: bool) -> tuple[Any, Reading]:
        """The snapshot as torch returns it, and the reading made of it.

        Args:
            stats: reads the counters.
            traces: include events.

        Raises:
            CaptureError: the allocator could not be read.
        """
        now = self._clock.monotonic
        try:
            started = now()
            devices = stats.devices()
            before = stats.counters(devices)
            time_ns = self._clock.time_ns()
            with self._restored.lock:
                raw = self._recorder.snapshot(traces=traces)
            after = stats.counters(devices)
            stall_seconds = now() - started
            if not traces:
                self._note_pace(before, stall_seconds)
        except RuntimeError as error:
            raise CaptureError(f"read: {error}; no profile this time") from error
        return raw, Reading(
            snapshot=from_torch(raw, source="torch"),
            time_ns=time_ns,
            before=before,
            after=after,
            stall_seconds=stall_seconds,
        )

    def expected_seconds(self, stats: StatsReader, entries: int) -> float:
        """The expected duration of a snapshot now.

        Args:
            stats: reads the counters.
            entries: number of entries of the address table.
        """
        blocks = _live_blocks(stats.counters(stats.devices()))
        return blocks * self.block_seconds + entries * _ENTRY_SECONDS

    def _note_pace(self, before: Sequence[DeviceStats], seconds: float) -> None:
        blocks = _live_blocks(before)
        if blocks >= _PACE_FROM_BLOCKS:
            self.block_seconds = seconds / blocks

    # torch before 2.11 copies the job's events with each snapshot

    @property
    def too_slow(self) -> bool:
        """Whether the job's events made a snapshot slow, and the job still records."""
        return self._slow_copy_at == self._recorder.gaps

    def note_copy(self, seconds: float) -> None:
        """Note the duration of a snapshot without events; logs once if it is too long."""
        if seconds <= _COPY_LIMIT_SECONDS or not self._recorder.copies_events:
            return
        self._slow_copy_at = self._recorder.gaps  # increases once the job stops
        if not self._logged_slow:
            self._logged_slow = True
            _log.warning("%s (a snapshot took %.2f s)", COPIES_HISTORY, seconds)

    def forget_copy(self) -> None:
        """Reset, since recording has started again."""
        self._slow_copy_at = -1


def _live_blocks(stats: Sequence[DeviceStats]) -> int:
    return sum(one.allocations - one.frees for one in stats)


class LiveReads:
    """Makes readings; the caller makes sure that torch may be called.

    Args:
        recorder: tells whether the job records itself.
        snapshots: takes the snapshots.
        tensors: the address table; None without tensor classes.
        restored: memory allocated by restores.
        pacer: releases the interpreter lock between slices of a pass over all blocks.
        environ: the process's environment, for the size of cuBLAS's workspace.
        counters: takes `exporter_history_overflow`, and `exporter_stall_seconds` of `completed` and
            of windows that fail.
        gate: a window ends early when it closes.
        max_window_events: of one window, per device.

    Attributes:
        roots: names blocks without a stack.
    """

    def __init__(
        self,
        recorder: Recorder,
        snapshots: SnapshotTaker,
        *,
        tensors: TensorTable | None,
        restored: Restored,
        pacer: Pacer,
        environ: Mapping[str, str],
        counters: Counters,
        clock: Clock,
        gate: QuietGate,
        max_window_events: int,
    ) -> None:
        self._recorder = recorder
        self._snapshots = snapshots
        self._tensors = tensors
        self._restored = restored
        self._pacer = pacer
        self._environ = environ
        self._counters = counters
        self._clock = clock
        self._gate = gate
        self._max_window_events = max_window_events
        self._window_lock = threading.Lock()
        self._idle_seconds = 0.0
        self._workspaces: tuple[int, ...] | None = None
        self._workspaces_before: set[int] = set()
        self._gaps_seen = 0
        self.forget_roots()

    def forget_roots(self, *, engine_is_named: bool = False) -> None:
        """Forget all roots; see `StacklessRoots` for `engine_is_named`."""
        self.roots = StacklessRoots(self._pacer, engine_is_named=engine_is_named)

    def recording_began(self) -> None:
        """Memory allocated before this call is older than our recording."""
        self._gaps_seen = self._recorder.gaps

    def forget_parent(self) -> None:
        """In a forked child: the parent's workspaces and window do not exist."""
        self._workspaces_before = set()
        self._window_lock = threading.Lock()

    # on our thread, in slices

    def read(self, stats: StatsReader) -> Reading:
        """Read live memory, see `Source.read`."""
        self._recorder.keep_on()
        gaps = self._recorder.gaps
        entries = self._tensors.snapshot() if self._tensors is not None else {}
        restored = self._restored.entries()
        raw, reading = self._snapshots.take(stats, traces=False)
        self._snapshots.note_copy(reading.stall_seconds)
        replaced, sliced_seconds = self.put_originals(raw, restored)
        sliced_seconds += self.roots.update(
            raw, unrecorded=gaps != self._gaps_seen, restored=replaced.roots
        )
        self._gaps_seen = gaps
        classifier = None
        if self._tensors is not None:
            classifier, seconds = self.classifier(reading.snapshot, entries)
            sliced_seconds += seconds
        return replace(
            reading,
            stall_seconds=reading.stall_seconds + sliced_seconds,
            stackless=self.roots.of_blocks(ours=not self._recorder.job_records),
            classifier=classifier,
        )

    def put_originals(self, raw: Any, before: Entries) -> tuple[Replaced, float]:
        """Put original stacks into restored blocks; returns the seconds of our slices too.

        Args:
            raw: the snapshot.
            before: the entries known before the snapshot: those missing in it are gone.
        """
        entries = {**before, **self._restored.entries()}
        if not entries:
            return Replaced((), {}), 0.0
        self._pacer.begin()
        try:
            replaced = self._restored.put_into(raw, entries, self._pacer.pause)
            self._restored.forget(before, replaced.addresses, self._pacer.pause)
        finally:
            seconds = self._pacer.end()
        return replaced, seconds

    def classifier(
        self, snapshot: TorchSnapshot, entries: TableEntries
    ) -> tuple[Classifier, float]:
        """The classifier of a snapshot's blocks, and the seconds of our slices."""
        if not entries and not self._workspace_sizes():
            return Classifier({}), 0.0
        self._pacer.begin()
        try:
            known = TensorTable.alive(entries, self._pacer.pause)
            self._workspaces_before = workspaces = self._workspaces_in(snapshot, known)
        finally:
            seconds = self._pacer.end()
        return Classifier(known, workspaces), seconds

    def _workspaces_in(self, snapshot: TorchSnapshot, known: Collection[int]) -> set[int]:
        return workspaces_in(
            snapshot.raw_segments(),
            self._workspace_sizes(),
            known,
            self._workspaces_before,
            self._pacer.pause,
        )

    def _workspace_sizes(self) -> tuple[int, ...]:
        if self._workspaces is None:
            self._workspaces = workspace_sizes(self._environ)
        return self._workspaces

    # on the job's own thread, at once

    def read_at_once(self, stats: StatsReader, budget_seconds: float) -> Reading | None:
        """See `TorchSource.read_at_once`."""
        entries = self._tensors.snapshot() if self._tensors is not None else {}
        if self._snapshots.expected_seconds(stats, len(entries)) > budget_seconds:
            return None
        raw, reading = self._snapshots.take(stats, traces=False)
        replaced = self._restored.put_into(raw, self._restored.entries(), no_pause)
        roots = self.roots.of_blocks(ours=not self._recorder.job_records, restored=replaced.roots)
        classifier = None
        if self._tensors is not None:
            # checked now: an ending job frees its storages soon
            classifier = Classifier(TensorTable.alive(entries, no_pause))
        return replace(reading, stackless=roots, classifier=classifier)

    def completed(self, reading: Reading) -> Reading:
        """Complete a reading of `read_at_once` with work too slow for the job's thread."""
        if reading.classifier is None:
            return reading
        known = reading.classifier.by_address
        self._pacer.begin()
        try:
            workspaces = self._workspaces_in(reading.snapshot, known)
        finally:
            self._counters.add("exporter_stall_seconds", self._pacer.end())
        return replace(reading, classifier=Classifier(known, workspaces))

    def as_before_restores(self, raw: Any) -> Roots:
        """See `TorchSource.as_before_restores`."""
        replaced = self._restored.put_into(raw, self._restored.entries(), no_pause)
        return self.roots.remembered(replaced.roots)

    # windows of events

    def window(
        self,
        stats: StatsReader,
        seconds: float,
        stop: threading.Event,
        *,
        frees: bool,
        enough: Callable[[], bool] | None,
    ) -> Reading:
        """Record one window at a time, see `WindowSource.window`.

        Raises:
            BusyError: another window is open.
            CaptureError: recording could not be switched, or the allocator could not be read.
        """
        if not self._window_lock.acquire(blocking=False):
            raise BusyError(ANOTHER_IS_OPEN)
        started = self._clock.monotonic()
        self._idle_seconds = 0.0
        try:
            restored = self._restored.entries()
            before, raw, reading, entries = self._record_events(stats, seconds, stop, frees, enough)
        except (CaptureError, RuntimeError) as error:
            self._counters.add("exporter_stall_seconds", self._busy_since(started))
            if isinstance(error, CaptureError):
                raise
            raise CaptureError(f"window: {error}; no profile this time") from error
        else:
            stall_seconds = self._busy_since(started)
        finally:
            self._window_lock.release()
        replaced, put_seconds = self.put_originals(raw, restored)
        stall_seconds += put_seconds
        classifier = None
        if entries is not None:
            classifier, sliced_seconds = self.classifier(reading.snapshot, entries)
            stall_seconds += sliced_seconds
        return replace(
            reading,
            before=before + _fresh(before, reading.after),
            stall_seconds=stall_seconds,
            stackless=self.roots.of_events(),
            stackless_blocks=self.roots.of_blocks(ours=True, restored=replaced.roots),
            classifier=classifier,
        )

    def _busy_since(self, started: float) -> float:
        return self._clock.monotonic() - started - self._idle_seconds

    def _record_events(
        self,
        stats: StatsReader,
        seconds: float,
        stop: threading.Event,
        frees: bool,
        enough: Callable[[], bool] | None,
    ) -> tuple[tuple[DeviceStats, ...], Any, Reading, TableEntries | None]:
        before = stats.counters(stats.devices())
        self._recorder.open_window(self._max_window_events, frees=frees)
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

    def _wait(  # noqa: PLR0917 - as `window` was called
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
        limit = self._max_window_events * 4 // 5  # leaves space for events until the next check
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
            if len(trace) >= self._max_window_events:
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
