"""Switches the allocator's recording of stacks on and off, and takes its snapshots.

The only user of torch's private memory-history API, and the only place that knows how its
positional C calls changed between versions. The job's own use of that API has priority:

* its calls are observed (all of torch's Python callers reach the wrapped C functions) and passed on
  unchanged;
* once the job has switched recording on, the mode is never changed here until it switches it off;
* then `state` recording starts again, and a log line reports it.

Limits: a caller that took the C function out of `torch._C` before us, or C++ code (Kineto), is not
observed. It is detected before a window would clear its events, by a trace longer than `state`
recording leaves.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.capture.patching import InductorGuard, Patch
from gpumem_otel.capture.window_queue import ANOTHER_IS_OPEN
from gpumem_otel.errors import BusyError, CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_log = named_logger("gpumem_otel.capture")

_RECORD: Final = "_cuda_record_memory_history"
_WRAPPED: Final = (_RECORD, "_cuda_record_memory_history_legacy")

_PARAMETERS: Final = (
    "enabled",
    "context",
    "stacks",
    "max_entries",
    "clear_history",  # torch 2.8
    "compile_context",
    "global_record_annotations",
    "skip_actions",  # torch 2.11
    "record_pinned_host_memory",  # torch 2.14
    "record_cuda",
)
_CLEAR_HISTORY: Final = _PARAMETERS.index("clear_history") + 1
_SKIP_ACTIONS: Final = _PARAMETERS.index("skip_actions") + 1
_PINNED: Final = _PARAMETERS.index("record_pinned_host_memory") + 1
_ARITY_SINCE: Final = (((2, 14), 10), ((2, 11), 8), ((2, 8), 7), ((0, 0), 4))

_ALL_POOLS_NO_TRACES: Final = (0, 0, False)  # torch 2.11; (0, 0) stands for all pools
_SNAPSHOT_ARGUMENTS: Final[tuple[tuple[Any, ...], ...]] = ((_ALL_POOLS_NO_TRACES,), (None,), ())
_ONLY_ALLOCATIONS: Final = ("free_requested", "free_completed", "segment_alloc", "segment_free")
_AND_FREES: Final = ("free_completed", "segment_alloc", "segment_free")


def torch_version(torch: Any) -> tuple[int, int]:
    """Major and minor version of torch, (0, 0) if unknown."""
    match = re.match(r"(\d+)\.(\d+)", str(getattr(torch, "__version__", "")))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def known_arity(function: object, version: tuple[int, int]) -> int:
    """The number of positional arguments of the C function.

    pybind11 writes the signature into the docstring; without one, the version decides.
    """
    first_line = (getattr(function, "__doc__", None) or "").partition("\n")[0]
    written = len(re.findall(r"[(,] ?\w+: ", first_line))
    return written or next(arity for since, arity in _ARITY_SINCE if version >= since)


class Recorder:
    """Recording of one process.

    `prepare` once torch is imported, `start` once CUDA is initialised, `stop` undoes both.
    Thread-safe. In a forked child nothing here calls torch until `start` runs there.

    Args:
        stacks: `python`, or `all` for C++ frames too.
        pinned: record stacks of pinned host memory too, if torch can (2.14).
        annotations: record annotated ranges of all threads, not only of the one that calls
            `start` (torch 2.8).
    """

    def __init__(
        self, *, stacks: str = "python", pinned: bool = False, annotations: bool = False
    ) -> None:
        self.stacks = stacks
        self.pinned = pinned
        self.annotations = annotations
        self.guard = InductorGuard()
        self._torch: Any = None
        self._patches: list[Patch] = []
        self._record: Callable[..., Any] | None = None
        self._arity = 0
        self._snapshot_calls = _SNAPSHOT_ARGUMENTS
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._own_thread = 0
        self._watching = False
        self._started = False
        self._theirs = False
        self._window: str = ""
        self._gaps = 0
        self._logged: set[str] = set()

    # life

    def prepare(self, torch: Any) -> None:
        """Watch the job's own recording calls from now on. Initialises nothing."""
        with self._lock:
            if self._watching:
                return
            self._torch = torch
            version = torch_version(torch)
            record = getattr(torch._C, _RECORD, None)  # noqa: SLF001 - the private API
            if record is None:  # a build without CUDA
                return
            self._arity = known_arity(record, version)
            self._record = record
            self._snapshot_calls = _SNAPSHOT_ARGUMENTS[0 if version >= (2, 11) else 1 :]
            self._watching = True
            self._patches = [
                Patch(torch._C, name, self._wrap)  # noqa: SLF001
                for name in _WRAPPED
                if hasattr(torch._C, name)  # noqa: SLF001
            ]
            self.guard.install(torch)

    def start(self) -> None:
        """Record stacks of live memory, unless the job records already. CUDA is initialised.

        Raises:
            CaptureError: this torch cannot record.
        """
        with self._lock:
            if self._record is None:
                raise CaptureError("recording: this torch has no allocator history; nothing to do")
            self._pid = os.getpid()
            self._started = True
            self.guard.install(self._torch)  # in `prepare` torch may still have been importing
            if not self._theirs and self._is_enabled():
                self._theirs = True
                self._log_once(
                    "the job records memory history itself: its settings stay as they are"
                )
            if not self._theirs:
                self._switch("state")

    def stop(self, *, quiet: bool = False) -> None:
        """Undo everything; the job's own recording continues.

        Args:
            quiet: torch must not be called now, so recording stays on.
        """
        with self._lock:
            here = self._pid == os.getpid() and not quiet
            off = self._started and not self._theirs and here
            self._started = self._watching = False
            self._window = ""
            try:
                if off:
                    self._switch(None)
            finally:
                for patch in reversed(self._patches):
                    patch.revert()
                self._patches = []
                self.guard.uninstall()

    def forget_parent(self) -> None:
        """In a forked child: recording starts again with `start`."""
        self._lock = threading.RLock()
        self._started = self._theirs = False
        self._window = ""
        self._own_thread = 0

    # state

    @property
    def job_records(self) -> bool:
        """Whether the job itself has switched recording on."""
        return self._theirs

    @property
    def copies_events(self) -> bool:
        """Whether a snapshot without events copies the job's events nevertheless."""
        return self._theirs and self._snapshot_calls[0] != (_ALL_POOLS_NO_TRACES,)

    @property
    def gaps(self) -> int:
        """How often recording was off or the job's, and became ours again."""
        return self._gaps

    @property
    def events_per_free(self) -> int:
        """Events per free in a window: 0 if torch can skip them (2.11)."""
        return 0 if self._arity >= _SKIP_ACTIONS else 2

    @property
    def records_pinned(self) -> bool:
        """Whether stacks of pinned host memory are requested, and this torch can record them."""
        return self.pinned and self._arity >= _PINNED

    def keep_on(self) -> None:
        """Switch recording on again if it was switched off unobserved."""
        with self._lock:
            if not self._started or self._theirs or self._window or self._is_enabled():
                return
            self._log_once("memory history was switched off from outside: recording stacks again")
            self._switch("state")
            self._gaps += 1

    # snapshots

    def snapshot(self, *, traces: bool) -> Any:
        """The allocator's snapshot, as torch's own dict or list.

        Args:
            traces: include the recorded events; without them it is much faster if torch can leave
                them out (2.11 and newer).

        Raises:
            CaptureError: the allocator could not be read.
        """
        take = getattr(self._torch._C, "_cuda_memorySnapshot", None)  # noqa: SLF001
        if take is None:
            raise CaptureError("snapshot: this torch was built without CUDA; nothing to read")
        calls = self._snapshot_calls
        while True:
            args = calls[1] if traces and calls[0] == (_ALL_POOLS_NO_TRACES,) else calls[0]
            try:
                with self.guard.ours():
                    raw = take(*args)
            except (TypeError, RuntimeError) as error:
                # an argument that this build does not know, or a transient error
                if args == calls[-1] or args != calls[0]:
                    raise CaptureError(f"snapshot: {error}; no profile this time") from error
                calls = calls[1:]
            else:
                self._snapshot_calls = calls  # what this build accepts
                return raw

    # windows

    def open_window(self, max_events: int, *, frees: bool = False) -> None:
        """Record allocation events; beyond the limit the oldest are dropped.

        Args:
            max_events: per device.
            frees: record frees too: one event each if torch can skip the second (2.11).

        Raises:
            BusyError: the job records itself, or another window is open.
            CaptureError: recording is off.
        """
        if self._started and not self._theirs and self._records_more_than_state():
            with self._lock:
                self._theirs = True
            self._log_once("something else records memory events: its recording is left alone")
        with self._lock:
            if not self._started:
                raise CaptureError("window: recording is off; call install() first")
            if self._theirs:
                raise BusyError("window: the job records memory history itself; stop that first")
            if self._window:
                raise BusyError(ANOTHER_IS_OPEN)
            skip = _AND_FREES if frees else _ONLY_ALLOCATIONS
            self._switch("all", max_entries=max_events, clear=True, skip=skip)
            self._window = "open"

    def close_window(self) -> bool:
        """Drop the events and record live memory only.

        Returns:
            False if the job changed the mode meanwhile: then the mode and the events are its own.
        """
        with self._lock:
            if self._window == "open":
                self._window = ""
                self._switch("state", clear=True)
                return True
            self._window = ""
            return False

    def _records_more_than_state(self) -> bool:
        raw = self.snapshot(traces=True)
        traces: Sequence[Any] = raw.get("device_traces", ()) if isinstance(raw, dict) else ()
        return any(len(trace) > 1 for trace in traces)

    # the C call

    def _is_enabled(self) -> bool:
        ask = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)  # noqa: SLF001
        return bool(ask()) if ask is not None else False

    def _switch(
        self,
        mode: str | None,
        *,
        max_entries: int = 1,
        clear: bool = False,
        skip: Sequence[str] = (),
    ) -> None:
        if clear and self._arity < _CLEAR_HISTORY:
            self._call(
                None, 1, clear=False
            )  # older torch clears the trace only when recording ends
        self._call(mode, max_entries, clear=clear, skip=skip)

    def _call(
        self, mode: str | None, max_entries: int, *, clear: bool, skip: Sequence[str] = ()
    ) -> None:
        values: dict[str, Any] = {
            "enabled": mode,
            "context": "alloc" if mode == "all" else "state",
            "stacks": self.stacks,
            "max_entries": max_entries,
            "clear_history": clear,
            "compile_context": False,
            "global_record_annotations": self.annotations,
            "skip_actions": list(skip),
            "record_pinned_host_memory": self.pinned,
            "record_cuda": True,
        }
        record = self._record
        if record is None:
            return
        try:
            if self._arity <= len(_PARAMETERS):
                record(*(values[name] for name in _PARAMETERS[: self._arity]))
            else:
                self._call_in_python(values)
        except (TypeError, RuntimeError) as error:
            raise CaptureError(f"recording: {error}; only metrics from here on") from error

    def _call_in_python(self, values: dict[str, Any]) -> None:
        """For a C function newer than the table: torch's Python function knows the defaults."""
        self._own_thread = threading.get_ident()
        try:
            record = self._torch.cuda.memory._record_memory_history  # noqa: SLF001
            names = {"enabled", *_PARAMETERS[1:5]}
            if self.pinned:
                names.add("record_pinned_host_memory")
            if self.annotations:
                names.add("global_record_annotations")
            record(**{name: values[name] for name in names})
        finally:
            self._own_thread = 0

    # the job's calls

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def record(*args: Any, **kwargs: Any) -> Any:
            if (
                not self._watching
                or self._pid != os.getpid()
                or self._own_thread == threading.get_ident()
            ):
                return original(*args, **kwargs)
            with self._lock:
                result = original(*args, **kwargs)
                try:
                    self._job_called(args[0] if args else next(iter(kwargs.values()), None))
                except Exception:
                    _log.warning("recording of stacks could not continue", exc_info=True)
            return result

        return record

    def _job_called(self, enabled: object) -> None:
        if self._window:
            self._window = "lost"
        self._theirs = enabled is not None and enabled is not False
        if not self._theirs and self._started:
            self._log_once(
                "the job switched memory history off: recording stacks of live memory again"
            )
            self._switch("state")
            self._gaps += 1

    def _log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            _log.info("%s", message)
