"""The live torch process as a `Source` and a `WindowSource`."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.capture.recorder import Recorder
from gpumem_otel.capture.stats import StatsReader
from gpumem_otel.core.frames import BACKWARD, BEFORE_INSTALL
from gpumem_otel.core.model import DeviceStats, SourceStatus
from gpumem_otel.core.ports import Reading
from gpumem_otel.core.snapshot import from_torch
from gpumem_otel.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gpumem_otel.core.counters import Counters
    from gpumem_otel.core.ports import Clock, Pause, StacklessRule

__all__ = ["TorchSource"]

_log = logging.getLogger("gpumem_otel.capture")

_NO_CACHING: Final = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
_WINDOW_TICK_SECONDS: Final = 0.05
_BLOCKS_PER_PAUSE: Final = 32

_UNSUPPORTED: Final = {
    "allocator_backend": "allocator backend %s keeps no stacks: device metrics only",
    "no_caching": "PYTORCH_NO_CUDA_MEMORY_CACHING is set: device metrics only",
}


class TorchSource:
    """Reads the allocator of this process.

    `prepare` once torch is imported, `start` once CUDA is initialised (both are for `Arming`), then
    it can be read from any thread until `stop`. Before `start` nothing of CUDA is touched.

    Args:
        stacks: `python`, or `all` for C++ frames too.
        counters: takes `exporter_history_overflow`.
        clock: time; the real one by default.
        environ: the process's environment, for the variables that turn the allocator off.
        max_window_events: events that one window may hold, per device.
        pause: called every few dozen blocks of a pure-Python loop.
    """

    def __init__(
        self,
        *,
        counters: Counters,
        clock: Clock | None = None,
        stacks: str = "python",
        environ: Mapping[str, str] | None = None,
        max_window_events: int = 100_000,
        pause: Pause | None = None,
    ) -> None:
        self.recorder = Recorder(stacks=stacks)
        self._counters = counters
        self._clock: Clock = clock or _RealTime()
        self._environ = environ or {}
        self._max_window_events = max_window_events
        self._pause: Callable[[], None] = pause or _never
        self._pid = os.getpid()
        self._stats: StatsReader | None = None
        self._reason = ""
        self._stopped = False
        self._before_install: set[tuple[int, int]] = set()
        self._window_lock = threading.Lock()

    # life

    def prepare(self, torch: Any) -> None:
        """See the job's own recording calls from here on; initialises nothing."""
        self.recorder.prepare(torch)

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
        self.recorder.prepare(torch)
        self._reason = self._why_unsupported(torch)
        self._stats = StatsReader(torch, counted=not self._reason)
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
        self._before_install = set()
        self.recorder.stop()

    def _forget_parent(self) -> None:
        """This is a forked child that makes a CUDA context of its own: nothing is inherited."""
        self._pid = os.getpid()
        self._stats = None
        self._before_install = set()
        self._window_lock = threading.Lock()
        self.recorder.forget_parent()

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
        """Install came late: the blocks that are there and have no stack are older than it."""
        stats = self._stats
        if stats is None or not any(stats.allocated(stats.devices()).values()):
            return
        raw = self.recorder.snapshot(traces=False)
        self._before_install = set(_stackless_blocks(raw, _never))

    # Source

    def status(self) -> SourceStatus:
        """See `Source`."""
        stats = self._stats
        if stats is None:
            return SourceStatus(armed=False, supported=False, reason=self._why_not_armed())
        if self._pid != os.getpid():
            return SourceStatus(armed=False, supported=False, reason="forked")
        try:
            devices = stats.devices()
        except Exception:
            return SourceStatus(armed=True, supported=False, reason="error")
        return SourceStatus(
            armed=True, supported=not self._reason, reason=self._reason, devices=devices
        )

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
        try:
            return stats.full(stats.devices())
        except RuntimeError as error:
            raise CaptureError(f"stats: {error}; no values this time") from error

    def allocated(self) -> dict[int, int]:
        """Bytes allocated now, by device: 11 us each. {} where not armed; never raises."""
        stats = self._stats
        if stats is None or self._reason or self._pid != os.getpid():
            return {}
        try:
            return stats.allocated(stats.devices())
        except RuntimeError:
            return {}

    def read(self) -> Reading:
        """See `Source`."""
        stats = self._readable()
        self.recorder.keep_on()
        return self._read(stats, traces=False)

    def _readable(self) -> StatsReader:
        status = self.status()
        stats = self._stats
        if stats is None or not status.supported:
            raise CaptureError(f"read: not possible here ({status.reason or 'disabled'})")
        return stats

    def _read(self, stats: StatsReader, *, traces: bool) -> Reading:
        now = self._clock.monotonic
        try:
            started = now()
            devices = stats.devices()
            before = stats.counters(devices)
            time_ns = self._clock.time_ns()
            raw = self.recorder.snapshot(traces=traces)
            after = stats.counters(devices)
            stall_seconds = now() - started
        except RuntimeError as error:
            raise CaptureError(f"read: {error}; no profile this time") from error
        self._forget_what_is_gone(raw)
        if traces:
            self._count_overflow(raw)
        return Reading(
            snapshot=from_torch(raw, source="torch"),
            time_ns=time_ns,
            before=before,
            after=after,
            stall_seconds=stall_seconds,
            stackless=self._stackless_rule(),
        )

    # blocks without a stack

    def _stackless_rule(self) -> StacklessRule | None:
        if self.recorder.job_records:
            return None  # recorded with the job's settings: the snapshot says what it can
        before_install = self._before_install

        def rule(device: int, address: int | None) -> str:
            if address is not None and (device, address) in before_install:
                return BEFORE_INSTALL
            # Python stacks are recorded, and this block has none: the autograd engine's threads
            # allocate without any Python code running
            return BACKWARD

        return rule

    def _forget_what_is_gone(self, raw: Any) -> None:
        """An address that is free, or was given out again with a stack, is older no longer."""
        if self._before_install:
            self._before_install &= set(_stackless_blocks(raw, self._pause))

    # WindowSource

    def window(self, seconds: float, stop: threading.Event) -> Reading:
        """See `WindowSource`. Ends early when `max_window_events` are near."""
        stats = self._readable()
        if not self._window_lock.acquire(blocking=False):
            raise CaptureError("window: another one is open; try again when it is over")
        try:
            before = stats.counters(stats.devices())
            self.recorder.open_window(self._max_window_events)
            try:
                self._wait(stats, before, seconds, stop)
                reading = self._read(stats, traces=True)
            finally:
                undisturbed = self.recorder.close_window()
        except RuntimeError as error:
            raise CaptureError(f"window: {error}; no profile this time") from error
        finally:
            self._window_lock.release()
        if not undisturbed:
            raise CaptureError("window: the job switched memory history itself; events are its own")
        known = {s.device for s in before}
        fresh = tuple(
            DeviceStats(
                device=s.device, allocated_bytes=0, requested_bytes=0, active_bytes=0,
                reserved_bytes=0,
            )
            for s in reading.after
            if s.device not in known
        )  # fmt: skip
        return replace(reading, before=before + fresh)

    def _wait(
        self,
        stats: StatsReader,
        before: Sequence[DeviceStats],
        seconds: float,
        stop: threading.Event,
    ) -> None:
        clock = self._clock
        end = clock.monotonic() + seconds
        events_per_free = self.recorder.events_per_free
        first = {s.device: (s.allocations, s.frees) for s in before}
        room = self._max_window_events * 4 // 5  # what comes before the next look has room too
        while (left := end - clock.monotonic()) > 0:
            if clock.wait(stop, min(left, _WINDOW_TICK_SECONDS)):
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


class _RealTime:
    """The `Clock` of a running process."""

    def time_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.perf_counter()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)


def _never() -> None:
    """No pause."""


def _stackless_blocks(raw: Any, pause: Pause) -> Iterator[tuple[int, int]]:
    """(device, address) of every live block that carries no frames."""
    count = 0
    for segment in raw["segments"] if isinstance(raw, dict) else raw:
        for block in segment["blocks"]:
            count += 1
            if not count % _BLOCKS_PER_PAUSE:
                pause()
            if block["state"] == "active_allocated" and not block.get("frames"):
                address = block.get("address")
                if address is not None:
                    yield segment["device"], address
