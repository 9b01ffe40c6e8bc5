"""The live torch process as a `Source` and a `WindowSource`.

This file decides when it can be read and reads its counters; `live_reads.py` makes the readings.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.gate import QuietGate
from gpumem_otel.base.logs import named_logger
from gpumem_otel.base.profile import SourceStatus
from gpumem_otel.capture.device_stats import StatsReader
from gpumem_otel.capture.gil_pacing import Pacer
from gpumem_otel.capture.live_reads import COPIES_HISTORY, LiveReads, SnapshotTaker
from gpumem_otel.capture.objects.shared_storages import SharedStorages
from gpumem_otel.capture.recorder import Recorder, torch_version
from gpumem_otel.capture.restored import Restored
from gpumem_otel.capture.tensor_table import TensorTable
from gpumem_otel.errors import BusyError, CaptureError
from gpumem_otel.snapshot.snapshot import from_torch

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import DeviceStats
    from gpumem_otel.base.protocols import Clock, Waitable
    from gpumem_otel.capture.stackless import Roots
    from gpumem_otel.snapshot.reading import Reading

_log = named_logger("gpumem_otel.capture")

_NO_CACHING: Final = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
_ENGINE_IS_NAMED_SINCE: Final = (2, 4)
_JOB_RECORDS: Final = "job_records_history"
_QUIET: Final = "the driver holds this process: nothing is read until it runs again"

_UNSUPPORTED: Final = {
    "allocator_backend": "allocator backend %s keeps no stacks: device metrics only",
    "no_caching": "PYTORCH_NO_CUDA_MEMORY_CACHING is set: device metrics only",
}


class TorchSource:
    """Reads the allocator of this process.

    `Arming` calls `prepare` once torch is imported and `start` once CUDA is initialised; then it
    can be read from any thread until `stop`. Before `start` nothing of CUDA is touched.

    Args:
        stacks: `python`, or `all` for C++ frames too.
        counters: takes `exporter_history_overflow`, and `exporter_stall_seconds` of work that
            yields no reading.
        clock: time; the real one by default.
        environ: the process's environment, for the variables that turn the allocator off.
        max_window_events: of one window, per device.
        pacer: releases the interpreter lock between slices of a pass over all blocks.
        classes: whether readings have tensor classes.
        pinned: record stacks of pinned host memory too, if torch can.
        annotations: record annotated ranges of all threads.
        gate: guards each call into torch; while it is closed readings raise BusyError.

    Attributes:
        tensors: the address table; None without classes.
        exports: the storages shared with another process or library.
        restored: memory allocated by restores, with its original stacks.
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
        self.exports = SharedStorages()
        self.restored = Restored(self.tensors)
        self._counters = counters
        self._clock: Clock = clock or _RealTime()
        self._environ = environ or {}
        self._snapshots = SnapshotTaker(self.recorder, self.restored, self._clock)
        self._reads = LiveReads(
            self.recorder,
            self._snapshots,
            tensors=self.tensors,
            restored=self.restored,
            pacer=pacer or Pacer(),
            environ=self._environ,
            counters=counters,
            clock=self._clock,
            gate=self.gate,
            max_window_events=max_window_events,
        )
        self._pid = os.getpid()
        self._stats: StatsReader | None = None
        self._reason = ""
        self._stopped = False
        self._devices: tuple[int, ...] = ()

    # life

    def prepare(self, torch: Any) -> None:
        """Watch the job's own recording calls from now on; initialises nothing."""
        self.recorder.prepare(torch)
        self.exports.start(torch)
        if self.tensors is not None:
            self.tensors.start()

    def start(self) -> None:
        """Start recording; CUDA is initialised, or is being initialised by this thread.

        If recording is not possible, `status()` has the reason and metrics continue.
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
        self._reads.forget_roots(engine_is_named=named)
        if self._reason:
            return
        try:
            self.recorder.start()
            self._remember_what_was_before()
        except (CaptureError, RuntimeError) as error:
            self._reason = "error"
            _log.warning("no profiles, metrics only: %s", error)

    def stop(self) -> None:
        """Undo `prepare` and `start`. A read in progress may end with an error."""
        self._stopped = True
        self._stats = None
        self._reads.forget_roots()
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
        """In a forked child with a CUDA context of its own: inherit nothing."""
        self._pid = os.getpid()
        self.gate.forget_parent()
        self._stats = None
        self.recorder.forget_parent()
        self.exports.forget_parent()
        self.restored.clear()
        self._reads.forget_parent()
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
        """Handle memory allocated before a late install; on the job's thread."""
        self._reads.recording_began()
        self._snapshots.forget_copy()
        stats = self._stats
        if stats is None or not any(stats.allocated(stats.devices()).values()):
            self.exports.began(())
            return
        started = self._clock.monotonic()
        raw = self.recorder.snapshot(traces=False)
        self._snapshots.note_copy(self._clock.monotonic() - started)
        self._reads.roots.remember_before_install(raw)
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
        if not reason and self._snapshots.too_slow:
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
        """See `Source`. If `status()` is unsupported, only the device's own numbers are valid."""
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
        """Within, torch may be called.

        Raises:
            BusyError: the gate is closed.
        """
        if not self.gate.enter():
            raise BusyError(f"{what}: {_QUIET}")
        try:
            yield
        finally:
            self.gate.leave()

    def allocated(self) -> dict[int, int]:
        """Bytes allocated now by device, 11 us each; {} if not armed. Never raises."""
        stats = self._stats
        if stats is None or self._reason or self._pid != os.getpid() or not self.gate.enter():
            return {}
        try:
            return stats.allocated(stats.devices())
        except Exception:  # this is the job's thread
            return {}
        finally:
            self.gate.leave()

    def read(self) -> Reading:
        """See `Source`. One at a time; a window may be open meanwhile.

        Torch before 2.11 cannot leave events out. Once copying those of a job that records history
        itself takes longer than 0.25 s, with the interpreter lock held, there are no more readings
        until the job stops recording; see `status()`.
        """
        with self._within("read"):
            return self._reads.read(self._readable())

    def as_before_restores(self, raw: Any) -> Roots:
        """Put original stacks into restored blocks of a snapshot by this source's recorder.

        Returns:
            The roots of blocks without a stack.
        """
        return self._reads.as_before_restores(raw)

    def read_at_once(self, budget_seconds: float) -> Reading | None:
        """A reading on the job's own thread; `completed` adds the slow parts later.

        Takes the snapshot and checks which storages of the address table live. Blocks without a
        stack get the roots known to the last `read`.

        Args:
            budget_seconds: returns None if the snapshot is expected to take longer.

        Raises:
            CaptureError: the allocator could not be read.
        """
        with self._within("read"):
            return self._reads.read_at_once(self._readable(), budget_seconds)

    def completed(self, reading: Reading) -> Reading:
        """Complete a reading of `read_at_once` with work too slow for the job's thread."""
        return self._reads.completed(reading)

    def _readable(self) -> StatsReader:
        status = self.status()
        stats = self._stats
        if status.reason == _JOB_RECORDS:
            raise CaptureError(f"read: {COPIES_HISTORY}")
        if stats is None or not status.supported:
            raise CaptureError(f"read: not possible here ({status.reason or 'disabled'})")
        return stats

    # WindowSource

    def window(
        self,
        seconds: float,
        stop: threading.Event,
        *,
        frees: bool = False,
        enough: Callable[[], bool] | None = None,
    ) -> Reading:
        """See `WindowSource`. Ends early near `max_window_events`, or when the gate closes.

        `stall_seconds` of the reading include opening and closing, but not the idle wait.
        """
        with self._within("window"):
            return self._reads.window(self._readable(), seconds, stop, frees=frees, enough=enough)


def _count_refresh(counters: Counters, seconds: float) -> None:
    """Count a refresh of the table; on the job's thread, so all of it is stall."""
    counters.add("exporter_stall_seconds", seconds)
    counters.add("exporter_runs", stage="classes")
    counters.add("exporter_seconds", seconds, stage="classes")


class _RealTime:
    """The `Clock` of a running process."""

    def time_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.perf_counter()

    def wait(self, event: Waitable, seconds: float) -> bool:
        return event.wait(seconds)
