"""The live torch process as a `Source` and a `WindowSource`."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.capture.exports import Exports
from gpumem_otel.capture.pacer import Pacer
from gpumem_otel.capture.recorder import Recorder, torch_version
from gpumem_otel.capture.restored import Replaced, Restored
from gpumem_otel.capture.stackless import StacklessRoots
from gpumem_otel.capture.stats import StatsReader
from gpumem_otel.capture.tensors import TensorTable
from gpumem_otel.capture.workspaces import workspace_sizes
from gpumem_otel.core.classify import Classifier, workspaces_in
from gpumem_otel.core.model import DeviceStats, SourceStatus
from gpumem_otel.core.ports import Reading
from gpumem_otel.core.quiet import QuietGate
from gpumem_otel.core.snapshot import from_torch
from gpumem_otel.errors import BusyError, CaptureError
from gpumem_otel.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from gpumem_otel.capture.restored import Entries
    from gpumem_otel.capture.stackless import Roots
    from gpumem_otel.capture.tensors import TableEntries
    from gpumem_otel.core.counters import Counters
    from gpumem_otel.core.ports import Clock
    from gpumem_otel.core.snapshot import Snapshot

__all__ = ["TorchSource"]

_log = named_logger("gpumem_otel.capture")

_NO_CACHING: Final = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
_WINDOW_TICK_SECONDS: Final = 0.05
_STEP_TICK_SECONDS: Final = 0.02
_COPY_LIMIT_SECONDS: Final = 0.25
_BLOCK_SECONDS: Final = 3e-6
"""Of a snapshot, by live block, before one was taken: 2.6 us on an H200's host."""
_ENTRY_SECONDS: Final = 3e-7
"""Of an entry of the address table."""
_PACE_FROM_BLOCKS: Final = 1000
"""With fewer the time is not that of the blocks."""
_ENGINE_IS_NAMED_SINCE: Final = (2, 4)
_JOB_RECORDS: Final = "job_records_history"
_QUIET: Final = "the driver holds this process: nothing is read until it runs again"

_UNSUPPORTED: Final = {
    "allocator_backend": "allocator backend %s keeps no stacks: device metrics only",
    "no_caching": "PYTORCH_NO_CUDA_MEMORY_CACHING is set: device metrics only",
    _JOB_RECORDS: (
        "the job records memory history, and this torch (before 2.11) copies all of it with each "
        "snapshot: no profiles until it stops recording"
    ),
}


class TorchSource:
    """Reads the allocator of this process.

    `prepare` once torch is imported, `start` once CUDA is initialised (both are for `Arming`), then
    it can be read from any thread until `stop`. Before `start` nothing of CUDA is touched.

    Args:
        stacks: `python`, or `all` for C++ frames too.
        counters: takes `exporter_history_overflow`, and `exporter_stall_seconds` of what ends in
            no reading.
        clock: time; the real one by default.
        environ: the process's environment, for the variables that turn the allocator off.
        max_window_events: events that one window may hold, per device.
        pacer: gives up the interpreter lock between slices of a pass over all blocks.
        classes: whether readings tell tensor classes.
        pinned: record stacks of pinned host memory too, where torch can.
        annotations: record annotated ranges of all threads.
        gate: stands before each call into torch; while it is closed readings raise BusyError.

    Attributes:
        tensors: the address table; None without classes.
        exports: which storages were given to another process or library.
        restored: which memory was allocated by a restore, and for whom.
    """

    def __init__(
        self,
        *,
        counters: Counters,
        clock: Clock | None = None,
        stacks: str = "python",
        environ: Mapping[str, str] | None = None,
        max_window_events: int = 100_000,
        pacer: Pacer | None = None,
        classes: bool = True,
        pinned: bool = False,
        annotations: bool = False,
        gate: QuietGate | None = None,
    ) -> None:
        self.gate = gate or QuietGate()
        self.recorder = Recorder(stacks=stacks, pinned=pinned, annotations=annotations)
        self.tensors = (
            TensorTable(lambda seconds: _count_refresh(counters, seconds), gate=self.gate)
            if classes
            else None
        )
        self.exports = Exports()
        self.restored = Restored(self.tensors)
        self._workspaces: tuple[int, ...] | None = None
        self._workspaces_before: set[int] = set()
        self._counters = counters
        self._clock: Clock = clock or _RealTime()
        self._environ = environ or {}
        self._max_window_events = max_window_events
        self._pacer = pacer or Pacer()
        self._pid = os.getpid()
        self._stats: StatsReader | None = None
        self._reason = ""
        self._stopped = False
        self._roots = StacklessRoots(self._pacer, engine_is_named=False)
        self._gaps_seen = 0
        self._slow_copy_at = -1  # what `Recorder.gaps` was
        self._said_slow = False
        self._window_lock = threading.Lock()
        self._idle_seconds = 0.0
        self._block_seconds = _BLOCK_SECONDS
        self._devices: tuple[int, ...] = ()

    # life

    def prepare(self, torch: Any) -> None:
        """See the job's own recording calls from here on; initialises nothing."""
        self.recorder.prepare(torch)
        self.exports.start(torch)
        if self.tensors is not None:
            self.tensors.start()

    def start(self) -> None:
        """Start recording; CUDA is initialised, or is being initialised by this very thread.

        Where recording can not be had, `status()` says why and metrics go on.
        """
        torch = sys.modules.get("torch")
        if torch is None:
            return
        if self._pid != os.getpid():
            self._forget_parent()
        self._stopped = False
        self.prepare(torch)
        self._reason = self._why_unsupported(torch)
        self._stats = StatsReader(torch, counted=not self._reason)
        named = torch_version(torch) >= _ENGINE_IS_NAMED_SINCE
        self._roots = StacklessRoots(self._pacer, engine_is_named=named)
        if self._reason:
            return
        try:
            self.recorder.start()
            self._remember_what_was_before()
        except (CaptureError, RuntimeError) as error:
            self._reason = "error"
            _log.warning("no profiles, metrics only: %s", error)

    def stop(self) -> None:
        """Undo `prepare` and `start`. A read that is under way may end with an error."""
        self._stopped = True
        self._stats = None
        self._roots = StacklessRoots(self._pacer, engine_is_named=False)
        if self.tensors is not None:
            self.tensors.stop()
        self.exports.stop()
        self.restored.clear()
        may = self.gate.enter()
        try:
            self.recorder.stop(quiet=not may)
        finally:
            if may:
                self.gate.leave()

    def _forget_parent(self) -> None:
        """This is a forked child that makes a CUDA context of its own: nothing is inherited."""
        self._pid = os.getpid()
        self.gate.forget_parent()
        self._stats = None
        self._window_lock = threading.Lock()
        self.recorder.forget_parent()
        self.exports.forget_parent()
        self.restored.clear()
        self._workspaces_before = set()
        if self.tensors is not None:
            self.tensors.forget_parent()

    def _why_unsupported(self, torch: Any) -> str:
        if any(name in self._environ for name in _NO_CACHING):
            _log.warning(_UNSUPPORTED["no_caching"])
            return "no_caching"
        try:
            backend = str(torch.cuda.get_allocator_backend())
        except Exception as error:
            backend = f"unknown ({error})"
        if backend != "native":
            _log.warning(_UNSUPPORTED["allocator_backend"], backend)
            return "allocator_backend"
        return ""

    def _remember_what_was_before(self) -> None:
        """Install came late: on the job's own thread, which waits for it in any case."""
        self._gaps_seen = self.recorder.gaps
        self._slow_copy_at = -1
        stats = self._stats
        if stats is None or not any(stats.allocated(stats.devices()).values()):
            self.exports.began(())
            return
        started = self._clock.monotonic()
        raw = self.recorder.snapshot(traces=False)
        self._note_copy(self._clock.monotonic() - started)
        self._roots.remember_before_install(raw)
        self.exports.began(from_torch(raw, source="torch").raw_segments())
        self._counters.add("exporter_stall_seconds", self._clock.monotonic() - started)

    # Source

    def status(self) -> SourceStatus:
        """See `Source`."""
        stats = self._stats
        if stats is None:
            return SourceStatus(armed=False, supported=False, reason=self._why_not_armed())
        if self._pid != os.getpid():
            return SourceStatus(armed=False, supported=False, reason="forked")
        if self.gate.enter():
            try:
                self._devices = stats.devices()
            except Exception:
                return SourceStatus(armed=True, supported=False, reason="error")
            finally:
                self.gate.leave()
        reason = self._reason
        if not reason and self._slow_copy_at == self.recorder.gaps:
            reason = _JOB_RECORDS
        return SourceStatus(armed=True, supported=not reason, reason=reason, devices=self._devices)

    def _why_not_armed(self) -> str:
        if self._stopped:
            return "disabled"
        torch = sys.modules.get("torch")
        if torch is None:
            return "no_torch"
        version = getattr(torch, "version", None)
        if not (getattr(version, "cuda", None) or getattr(version, "hip", None)):
            return "no_cuda"
        return "not_initialised"

    def stats(self) -> tuple[DeviceStats, ...]:
        """See `Source`. Where `status()` says unsupported, only the device's own numbers count."""
        stats = self._stats
        if stats is None or self._pid != os.getpid():
            return ()
        with self._within("stats"):
            try:
                return stats.full(stats.devices())
            except RuntimeError as error:
                raise CaptureError(f"stats: {error}; no values this time") from error

    @contextmanager
    def _within(self, what: str) -> Iterator[None]:
        """Where torch may be called.

        Raises:
            BusyError: not now.
        """
        if not self.gate.enter():
            raise BusyError(f"{what}: {_QUIET}")
        try:
            yield
        finally:
            self.gate.leave()

    def allocated(self) -> dict[int, int]:
        """Bytes allocated now, by device: 11 us each. {} where not armed; never raises."""
        stats = self._stats
        if stats is None or self._reason or self._pid != os.getpid() or not self.gate.enter():
            return {}
        try:
            return stats.allocated(stats.devices())
        except Exception:  # asked on the job's own thread
            return {}
        finally:
            self.gate.leave()

    def read(self) -> Reading:
        """See `Source`. One at a time; a window may be open meanwhile.

        Torch before 2.11 can not leave events out. Once copying those of a job that records
        history itself takes longer than a quarter of a second, with the interpreter lock held,
        there are no more readings until the job stops; `status()` says so.
        """
        with self._within("read"):
            return self._read_live()

    def _read_live(self) -> Reading:
        stats = self._readable()
        self.recorder.keep_on()
        gaps = self.recorder.gaps
        entries = self.tensors.snapshot() if self.tensors is not None else {}
        restored = self.restored.entries()
        raw, reading = self._read(stats, traces=False)
        self._note_copy(reading.stall_seconds)
        replaced, sliced_seconds = self._put_originals(raw, restored)
        sliced_seconds += self._roots.update(
            raw, unrecorded=gaps != self._gaps_seen, restored=replaced.roots
        )
        self._gaps_seen = gaps
        classifier = None
        if self.tensors is not None:
            classifier, seconds = self._classifier(reading.snapshot, entries)
            sliced_seconds += seconds
        return replace(
            reading,
            stall_seconds=reading.stall_seconds + sliced_seconds,
            stackless=self._roots.of_blocks(ours=not self.recorder.job_records),
            classifier=classifier,
        )

    def _put_originals(self, raw: Any, before: Entries) -> tuple[Replaced, float]:
        """What restores allocated shows whose it is; and the seconds that took in slices.

        Args:
            raw: the snapshot.
            before: what was known when it was asked for: what is not in it is gone.
        """
        entries = {**before, **self.restored.entries()}
        if not entries:
            return Replaced((), {}), 0.0
        self._pacer.begin()
        try:
            replaced = self.restored.put_into(raw, entries, self._pacer.pause)
            self.restored.forget(before, replaced.addresses, self._pacer.pause)
        finally:
            seconds = self._pacer.end()
        return replaced, seconds

    def as_before_restores(self, raw: Any) -> Roots:
        """Put the stacks of before into a snapshot, at once; what blocks without one are called.

        Args:
            raw: a snapshot of this source's recorder.
        """
        replaced = self.restored.put_into(raw, self.restored.entries(), _no_pause)
        return self._roots.remembered(replaced.roots)

    def _classifier(self, snapshot: Snapshot, entries: TableEntries) -> tuple[Classifier, float]:
        """What tells the classes of a snapshot's blocks, and the seconds that took in slices."""
        if not entries and not self._workspace_sizes():
            return Classifier({}), 0.0
        self._pacer.begin()
        try:
            known = TensorTable.alive(entries, self._pacer.pause)
            self._workspaces_before = workspaces = self._workspaces_in(snapshot, known)
        finally:
            seconds = self._pacer.end()
        return Classifier(known, workspaces), seconds

    def _workspaces_in(self, snapshot: Snapshot, known: Collection[int]) -> set[int]:
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

    def read_at_once(self, budget_seconds: float) -> Reading | None:
        """A reading on the job's own thread, which waits for it; `completed` does the rest.

        The snapshot, and which storages of the address table live. Blocks without a stack are
        named by what the last `read` knew.

        Args:
            budget_seconds: None where the snapshot would take longer, by the time that the blocks
                of the last one took.

        Raises:
            CaptureError: the allocator could not be read.
        """
        with self._within("read"):
            return self._read_at_once(budget_seconds)

    def _read_at_once(self, budget_seconds: float) -> Reading | None:
        stats = self._readable()
        blocks = sum(s.allocations - s.frees for s in stats.counters(stats.devices()))
        entries = self.tensors.snapshot() if self.tensors is not None else {}
        expected = blocks * self._block_seconds + len(entries) * _ENTRY_SECONDS
        if expected > budget_seconds:
            return None
        raw, reading = self._read(stats, traces=False)
        replaced = self.restored.put_into(raw, self.restored.entries(), _no_pause)
        roots = self._roots.of_blocks(ours=not self.recorder.job_records, restored=replaced.roots)
        classifier = None
        if self.tensors is not None:
            # now: on its way out the job lets go of what is alive at this moment
            classifier = Classifier(TensorTable.alive(entries, _no_pause))
        return replace(reading, stackless=roots, classifier=classifier)

    def completed(self, reading: Reading) -> Reading:
        """A reading of `read_at_once` with what took too long for the job's thread."""
        if reading.classifier is None:
            return reading
        known = reading.classifier.by_address
        self._pacer.begin()
        try:
            workspaces = self._workspaces_in(reading.snapshot, known)
        finally:
            self._counters.add("exporter_stall_seconds", self._pacer.end())
        return replace(reading, classifier=Classifier(known, workspaces))

    def _readable(self) -> StatsReader:
        status = self.status()
        stats = self._stats
        if status.reason == _JOB_RECORDS:
            raise CaptureError(f"read: {_UNSUPPORTED[_JOB_RECORDS]}")
        if stats is None or not status.supported:
            raise CaptureError(f"read: not possible here ({status.reason or 'disabled'})")
        return stats

    def _read(self, stats: StatsReader, *, traces: bool) -> tuple[Any, Reading]:
        now = self._clock.monotonic
        try:
            started = now()
            devices = stats.devices()
            before = stats.counters(devices)
            time_ns = self._clock.time_ns()
            with self.restored.lock:
                raw = self.recorder.snapshot(traces=traces)
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

    def _note_pace(self, before: Sequence[DeviceStats], seconds: float) -> None:
        blocks = sum(stats.allocations - stats.frees for stats in before)
        if blocks >= _PACE_FROM_BLOCKS:
            self._block_seconds = seconds / blocks

    def _note_copy(self, seconds: float) -> None:
        if seconds <= _COPY_LIMIT_SECONDS or not self.recorder.copies_events:
            return
        self._slow_copy_at = self.recorder.gaps  # there is one more once the job stops
        if not self._said_slow:
            self._said_slow = True
            _log.warning("%s (a snapshot took %.2f s)", _UNSUPPORTED[_JOB_RECORDS], seconds)

    # WindowSource

    def window(
        self,
        seconds: float,
        stop: threading.Event,
        *,
        frees: bool = False,
        enough: Callable[[], bool] | None = None,
    ) -> Reading:
        """See `WindowSource`. Ends early when `max_window_events` are near, or the gate closes.

        The reading's `stall_seconds` are all but the idle wait: opening and closing too.
        """
        with self._within("window"):
            return self._window(seconds, stop, frees, enough)

    def _window(
        self,
        seconds: float,
        stop: threading.Event,
        frees: bool,
        enough: Callable[[], bool] | None,
    ) -> Reading:
        stats = self._readable()
        if not self._window_lock.acquire(blocking=False):
            raise BusyError("window: another one is open; try again when it is over")
        started = self._clock.monotonic()
        self._idle_seconds = 0.0
        try:
            restored = self.restored.entries()
            before, raw, reading, entries = self._record(stats, seconds, stop, frees, enough)
        except (CaptureError, RuntimeError) as error:
            self._counters.add("exporter_stall_seconds", self._busy_since(started))
            if isinstance(error, CaptureError):
                raise
            raise CaptureError(f"window: {error}; no profile this time") from error
        else:
            stall_seconds = self._busy_since(started)
        finally:
            self._window_lock.release()
        replaced, put_seconds = self._put_originals(raw, restored)
        stall_seconds += put_seconds
        classifier = None
        if entries is not None:
            classifier, sliced_seconds = self._classifier(reading.snapshot, entries)
            stall_seconds += sliced_seconds
        known = {s.device for s in before}
        fresh = tuple(
            DeviceStats(
                device=s.device, allocated_bytes=0, requested_bytes=0, active_bytes=0,
                reserved_bytes=0,
            )
            for s in reading.after
            if s.device not in known
        )  # fmt: skip
        return replace(
            reading,
            before=before + fresh,
            stall_seconds=stall_seconds,
            stackless=self._roots.of_events(),
            stackless_blocks=self._roots.of_blocks(ours=True, restored=replaced.roots),
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
        self.recorder.open_window(self._max_window_events, frees=frees)
        per_free = max(self.recorder.events_per_free, int(frees))
        # what lives at a highest moment has a class; of what was only allocated nobody asks
        tensors = self.tensors if frees else None
        try:
            with nullcontext() if tensors is None else tensors.wanted_now():
                self._wait(stats, before, seconds, stop, per_free, enough)
            entries = None if tensors is None else tensors.snapshot()
            raw, reading = self._read(stats, traces=True)
        finally:
            undisturbed = self.recorder.close_window()
        if not undisturbed:
            raise CaptureError("window: the job switched memory history itself; events are its own")
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
        tick = _WINDOW_TICK_SECONDS if enough is None else _STEP_TICK_SECONDS
        first = {s.device: (s.allocations, s.frees) for s in before}
        room = self._max_window_events * 4 // 5  # what comes before the next look has room too
        while (left := end - clock.monotonic()) > 0:
            asleep = clock.monotonic()
            stopped = clock.wait(stop, min(left, tick))
            self._idle_seconds += clock.monotonic() - asleep
            if stopped or self.gate.closed or (enough is not None and enough()):
                return
            for now in stats.counters(stats.devices()):
                allocations, frees = first.get(now.device, (0, 0))
                freed = (now.frees - frees) * events_per_free
                if now.allocations - allocations + freed >= room:
                    return

    def _count_overflow(self, raw: Any) -> None:
        traces = raw.get("device_traces") or () if isinstance(raw, dict) else ()
        for trace in traces:
            if len(trace) >= self._max_window_events:
                self._counters.add("exporter_history_overflow")


def _no_pause() -> None:
    """The job's thread gives nothing up."""


def _count_refresh(counters: Counters, seconds: float) -> None:
    """The table is made on the job's own thread: all of it is stall."""
    counters.add("exporter_stall_seconds", seconds)
    counters.add("exporter_runs", stage="classes")
    counters.add("exporter_seconds", seconds, stage="classes")


class _RealTime:
    """The `Clock` of a running process."""

    def time_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.perf_counter()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)
