"""Reads the peaks of lines without disturbing the peaks that the job reads.

The peak of one line is known only if the allocator's peak is reset when the line begins
(`torch._C._cuda_resetPeakMemoryStats`), and the old peak cannot be restored in the allocator. So
while lines are profiled, each reader, the job included, has a peak of its own here: the largest
value since that reader's last reset, however often others have reset the counter. For that the
four functions of `torch._C` that read and reset these counters are replaced. They stay replaced
after the last profiler has ended, until the allocator's own value is right again (the job has reset
its peak, or has exceeded it); then torch's functions are put back.

Limits: code that reads the counters in C++, without Python, gets the peak of the last line. A peak
that another thread reaches and leaves in the microseconds between reading and resetting is lost.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.capture.device_stats import StatsReader
from gpumem_otel.capture.patching import Patch
from gpumem_otel.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_READ: Final = "_cuda_memoryStats"
_RESET: Final = "_cuda_resetPeakMemoryStats"
_READERS: Final = (_READ, "_accelerator_getDeviceStats")
_RESETTERS: Final = (_RESET, "_accelerator_resetPeakStats")

_Path = tuple[str, ...]
_Peaks = dict[_Path, int]


def _peaks_of(raw: Any) -> _Peaks:
    """Every peak in the nested counters, by its path."""
    peaks: _Peaks = {}
    for name, entry in raw.items():
        if type(entry) is not dict:
            continue
        if "peak" in entry:  # the oversize counters have no pools
            peaks[(name,)] = entry["peak"]
            continue
        for pool, values in entry.items():
            if type(values) is dict and "peak" in values:
                peaks[(name, pool)] = values["peak"]
    return peaks


def _maxima(kept: _Peaks, peaks: _Peaks) -> _Peaks:
    return {path: max(peak, kept.get(path, peak)) for path, peak in peaks.items()}


def counter_at(raw: Any, path: Sequence[str]) -> int:
    """One of the nested counters.

    Args:
        raw: result of `torch._C._cuda_memoryStats`.
        path: the parts of its name in `torch.cuda.memory_stats()`.

    Raises:
        KeyError: there is no such counter.
    """
    for part in path:
        raw = raw[part]
    return int(raw)


_LOCKS: dict[int, threading.RLock] = {}


def process_lock() -> threading.RLock:
    """The one lock of line profiling in this process.

    One, since the collector may run a profiled finalizer in a thread that holds any lock of ours,
    and two could then be taken in either order. Reentrant for the same reason. One per process,
    since a forked child may inherit it held by a thread that does not exist there.
    """
    return _LOCKS.setdefault(os.getpid(), threading.RLock())


class SharedPeaks:
    """Keeps a peak for the job and for each view. One object per `torch._C`.

    Args:
        c: `torch._C`, or a substitute.
    """

    def __init__(self, c: Any) -> None:
        self._c = c
        self._lock = process_lock()
        self._pid = os.getpid()
        self._patches: list[Patch] = []
        self._read_raw: Callable[[int], Any] | None = None
        self._reset_raw: Callable[[int], Any] | None = None
        self._job: dict[int, _Peaks] = {}
        self._views: list[dict[int, _Peaks]] = []

    def open(self) -> dict[int, _Peaks]:
        """Begin to read peaks; pass the returned view to `read` and `close`."""
        view: dict[int, _Peaks] = {}
        with self._lock:
            self._views.append(view)
        return view

    def close(self, view: dict[int, _Peaks]) -> None:
        """End a view; torch's functions are put back as soon as their values are right."""
        with self._lock:
            self._views = [kept for kept in self._views if kept is not view]
            self._settle()

    def read(self, view: dict[int, _Peaks], device: int) -> dict[str, Any]:
        """The nested counters of a device, with the peaks since this view's last reading.

        Raises:
            CaptureError: this torch cannot reset its peaks.
        """
        with self._lock:
            self._patch()
            read, reset = self._read_raw, self._reset_raw
            if read is None or reset is None:
                raise CaptureError(f"lines: this torch has no {_RESET}")
            raw: dict[str, Any] = read(device)
            reset(device)
            self._note(device, _peaks_of(raw), view)
            own = view.pop(device, None)
        if own:
            _write(raw, own)
        return raw

    def _note(self, device: int, peaks: _Peaks, reader: dict[int, _Peaks] | None) -> None:
        """Before a reset, keep the peaks for the job and for every view but the reader's."""
        self._job[device] = _maxima(self._job.get(device, {}), peaks)
        for view in self._views:
            if view is not reader:
                view[device] = _maxima(view.get(device, {}), peaks)

    def _patch(self) -> None:
        if self._patches:
            return
        if self._read_raw is None:
            self._read_raw = getattr(self._c, _READ, None)
            self._reset_raw = getattr(self._c, _RESET, None)
        if self._read_raw is None or self._reset_raw is None:
            return
        self._patches = [
            Patch(self._c, name, wrap)
            for names, wrap in ((_READERS, self._wrap_read), (_RESETTERS, self._wrap_reset))
            for name in names
            if hasattr(self._c, name)
        ]

    def _wrap_read(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(device: int, *args: Any) -> Any:
            if self._pid != os.getpid():  # the lock may have been held when this child was forked
                return original(device, *args)
            with self._lock:
                raw = original(device, *args)
                kept = self._job.get(device)
                if kept and type(raw) is dict:
                    if not _write(raw, kept):
                        self._job.pop(device, None)
                    self._settle()
            return raw

        return read

    def _wrap_reset(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reset(device: int, *args: Any) -> Any:
            if self._pid != os.getpid():
                return original(device, *args)
            with self._lock:
                if self._views and self._read_raw is not None:
                    self._note(device, _peaks_of(self._read_raw(device)), None)
                done = original(device, *args)
                self._job.pop(device, None)
                self._settle()
            return done

        return reset

    def _settle(self) -> None:
        """Put torch's own functions back once ours are not needed."""
        if self._views or not self._patches:
            return
        for device, kept in list(self._job.items()):
            if self._read_raw is None or not _write(self._read_raw(device), kept):
                del self._job[device]
        if not self._job:
            reverted = [patch.revert() for patch in self._patches]
            self._patches = []
            # a function of ours that was wrapped stays in place: do not take it for torch's own
            if all(reverted):
                self._read_raw = self._reset_raw = None


def _write(raw: dict[str, Any], kept: _Peaks) -> bool:
    """Raise the peaks in the nested counters to those kept; returns whether any was below."""
    below = False
    for path, peak in kept.items():
        at: Any = raw
        for part in path:
            at = at.get(part) if type(at) is dict else None
        if type(at) is dict and at.get("peak", peak) < peak:
            at["peak"] = peak
            below = True
    return below


_SHARED: dict[int, SharedPeaks] = {}


def _shared(c: Any) -> SharedPeaks:
    """The one that all profilers of this process and module share."""
    shared = _SHARED.get(id(c))
    if shared is None or shared._c is not c or shared._pid != os.getpid():  # noqa: SLF001
        shared = _SHARED[id(c)] = SharedPeaks(c)
    return shared


class TorchLineReader:
    """Reads the columns of a line profiler from torch, of every device this process uses.

    Nothing is read before the job has initialised CUDA, nor on a device without a context.

    Args:
        columns: names of counters, as in `torch.cuda.memory_stats()`.
        find_torch: returns the module, None while it is not imported.
    """

    def __init__(
        self,
        columns: Sequence[str],
        find_torch: Callable[[], Any] = lambda: sys.modules.get("torch"),
    ) -> None:
        self._paths = [tuple(name.split(".")) for name in columns]
        self._find_torch = find_torch
        self._devices: StatsReader | None = None
        self._shared: SharedPeaks | None = None
        self._view: dict[int, _Peaks] = {}

    def read(self) -> dict[int, tuple[int, ...]]:
        """Device -> values in the order of the columns; peaks are those since the last reading.

        Raises:
            CaptureError: there is no such column, or this torch cannot reset its peaks.
        """
        torch = self._find_torch()
        cuda = getattr(torch, "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return {}
        if self._devices is None:
            self._devices = StatsReader(torch)
        if self._shared is None:
            self._shared = _shared(torch._C)  # noqa: SLF001
            self._view = self._shared.open()
        shared, view = self._shared, self._view
        return {
            device: self._values(shared.read(view, device)) for device in self._devices.devices()
        }

    def _values(self, raw: dict[str, Any]) -> tuple[int, ...]:
        values = []
        for path in self._paths:
            try:
                values.append(counter_at(raw, path))
            except (KeyError, TypeError):  # noqa: PERF203 - names the one that is missing
                raise CaptureError(
                    f"lines: {'.'.join(path)} is not a counter of this torch's memory_stats(); "
                    f"it begins with one of {', '.join(sorted(raw))}"
                ) from None
        return tuple(values)

    def close(self) -> None:
        """Release the counters; a later `read` begins again."""
        if self._shared is not None:
            self._shared.close(self._view)
            self._shared = None
