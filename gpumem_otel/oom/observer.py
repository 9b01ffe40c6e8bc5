"""Observes allocations that fail, on the job's own thread, and takes the snapshot of that moment.

torch calls an observer between the failure and its exception. Observers cannot be detached, one
that is attached before CUDA is up crashes the process, and an exception in one replaces the job's
OutOfMemoryError. So there is one function for the whole life of a process, attached once CUDA is
up, which does nothing while no `OomWatch` runs and lets no error of ours out.

A job may survive thousands of failures (batch-size finders, algorithm searches), and waits for what
is done here. Per device, one failure a minute is read, if the snapshot is expected to take at most
200 ms; all others are only counted. The failure that ends the process is read in any case: by an
excepthook, while its traceback still holds the memory.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gpumem_otel.base.logs import named_logger
from gpumem_otel.capture.patching import Patch
from gpumem_otel.errors import BusyError
from gpumem_otel.oom.report import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.snapshot.reading import Reading

_log = named_logger("gpumem_otel.oom")


class ExceptHooks:
    """Chains `sys.excepthook` and `threading.excepthook` from `start` to `stop`.

    The hooks that were there are called afterwards with the same objects, whatever ours does.
    Chained only once there is a reason to: a job that never fails never has a hook of ours.

    Args:
        before: called with the exception and whether the process ends by it, or a thread does; it
            may wait, within a bound of its own.
    """

    def __init__(self, before: Callable[[BaseException | None, bool], object]) -> None:
        self._before = before
        self._pid = os.getpid()
        self._patches: list[Patch] = []

    @property
    def is_open(self) -> bool:
        """Whether the hooks are chained."""
        return bool(self._patches)

    def start(self) -> None:
        """Chain the present hooks, once."""
        if not self._patches:
            self._patches = [
                Patch(sys, "excepthook", self._wrap),
                Patch(threading, "excepthook", self._wrap),
            ]

    def stop(self) -> None:
        """Put the hooks back; if another hook was chained on ours, it only passes on."""
        patches, self._patches = self._patches, []
        for patch in reversed(patches):
            patch.revert()

    def _wrap(self, original: Callable[..., object]) -> Callable[..., object]:
        def excepthook(*arguments: Any) -> object:
            try:
                self._run(arguments)
            finally:  # a signal handler may raise while we wait: the job's own error is shown first
                shown = original(*arguments)
            return shown

        return excepthook

    def _run(self, arguments: tuple[Any, ...]) -> None:
        if not self._patches or self._pid != os.getpid():
            return
        ending = len(arguments) > 1  # (type, value, traceback); one object for a thread
        error = arguments[1] if ending else getattr(arguments[0], "exc_value", None)
        try:
            self._before(error, ending)
        except KeyboardInterrupt:
            pass  # the user does not want to wait: the job's own exception is shown now
        except Exception:
            _log.warning("waiting for the report of an out-of-memory failed", exc_info=True)


BUDGET_SECONDS = 0.2
"""What the snapshot may take of a thread that continues."""

LATE_BUDGET_SECONDS = 2.0
"""The same in an excepthook."""

REST_SECONDS = 60.0
"""On one device no second failure is read within this time."""

COUNTED_SECONDS = 1.0
"""How often failures that are only counted are reported."""

_ATTACH = "_cuda_attach_out_of_memory_observer"
_MOST_CAUSES = 16


class SnapshotSource(Protocol):
    """What is read at the moment of a failure."""

    def read_at_once(self, budget_seconds: float) -> Reading | None:
        """The snapshot, on the calling thread; None if it would take longer.

        Raises:
            CaptureError: the allocator could not be read.
        """
        ...

    def completed(self, reading: Reading) -> Reading:
        """The reading with the parts that took too long for that thread; called on ours."""
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    """An allocation that failed, and what the allocator held.

    Attributes:
        reading: None if it could not be taken in time.
        late: it was taken in an excepthook, after the stack had begun to unwind.
    """

    oom: OutOfMemory
    reading: Reading | None
    late: bool = False


class OomWatch:
    """Reads failures from `start` to `stop`.

    Args:
        source: read at the moment of a failure.
        counters: `exporter_errors` of stage `oom`, and `exporter_stall_seconds` of snapshots.
        on_failure: called with each failure that was read; must be quick and not wait.
        on_counted: called when failures were only counted, once a second at most; the same.
        monotonic: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        source: SnapshotSource,
        *,
        counters: Counters,
        on_failure: Callable[[Failure], object],
        on_counted: Callable[[], object],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._counters = counters
        self._on_failure = on_failure
        self._on_counted = on_counted
        self._monotonic = monotonic
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self._looked: dict[int, float] = {}
        self._unseen: dict[int, int] = {}
        self._reported = float("-inf")
        self._unread: tuple[int, int, int, int] | None = None
        self._logged = False

    @property
    def busy(self) -> bool:
        """Whether a failure is being read."""
        return self._busy.locked()

    def start(self) -> None:
        """Attach the observer, or take over the one that is attached. CUDA is up."""
        _SLOT.attach(sys.modules.get("torch"))
        _SLOT.watch = self

    def stop(self) -> None:
        """Observe nothing any more."""
        if _SLOT.watch is self:
            _SLOT.watch = None

    def failed(self, device: int, asked: int, limit: int, free: int) -> None:
        """An allocation failed; called by torch on the thread that asked. Never raises.

        An exception of a signal handler of the job is the job's own and is passed on.
        """
        try:
            if self._pid == os.getpid():
                self._failed(device, asked, limit, free)
        except Exception as error:
            self._log_error(error)

    def on_uncaught(self, error: BaseException | None) -> None:
        """The process or a thread ends by an exception: read a failure that was only counted.

        The frames of the traceback still hold the memory.
        """
        unread = self._unread
        if unread is None or self._pid != os.getpid() or not is_out_of_memory(error):
            return
        try:
            self._look(*unread, late=True)
        except Exception as failure:
            self._log_error(failure)

    def _failed(self, device: int, asked: int, limit: int, free: int) -> None:
        now = self._monotonic()
        last = self._looked.get(device)
        # counted without waiting while another thread's failure is being read
        if (last is not None and now - last < REST_SECONDS) or not self._busy.acquire(
            blocking=False
        ):
            self._unseen[device] = self._unseen.get(device, 0) + 1
            self._unread = (device, asked, limit, free)
            if now - self._reported >= COUNTED_SECONDS:
                self._reported = now
                self._on_counted()
            return
        try:
            self._looked[device] = now
            self._look(device, asked, limit, free, late=False)
        finally:
            self._busy.release()

    def _look(self, device: int, asked: int, limit: int, free: int, *, late: bool) -> None:
        self._unread = None
        reading = self._read(LATE_BUDGET_SECONDS if late else BUDGET_SECONDS)
        if reading is None and not late:
            self._unread = (device, asked, limit, free)
        self._reported = self._monotonic()
        # a failure that is read late was counted as unseen when it happened
        unseen = max(self._unseen.pop(device, 0) - late, 0)
        oom = OutOfMemory(
            oom_id=_new_id(),
            device=device,
            asked_bytes=asked,
            limit_bytes=limit,
            free_bytes=free,
            time_ns=time.time_ns(),
            thread=threading.current_thread().name,
            unseen=unseen,
        )
        self._on_failure(Failure(oom, reading, late))

    def _read(self, budget_seconds: float) -> Reading | None:
        try:
            reading = self._source.read_at_once(budget_seconds)
        except BusyError:  # the driver holds this process: counted, not read
            return None
        except Exception as error:
            self._log_error(error)
            return None
        if reading is not None:
            self._counters.add("exporter_stall_seconds", reading.stall_seconds)
        return reading

    def _log_error(self, error: Exception) -> None:
        self._counters.add("exporter_errors", stage="oom")
        if not self._logged:
            self._logged = True
            _log.warning("an out-of-memory could not be read: %s", error)


class _Slot:
    """The watch that observes failures now: the observer itself lives as long as the process."""

    def __init__(self) -> None:
        self.watch: OomWatch | None = None
        self.attached: Any = None

    def attach(self, torch: Any) -> None:
        attach = getattr(getattr(torch, "_C", None), _ATTACH, None)
        if attach is None or self.attached is attach:
            return
        attach(_observe)
        self.attached = attach


_SLOT = _Slot()


def _observe(device: int, asked: int, limit: int, free: int) -> None:
    """What torch calls: (device, bytes asked for, bytes the job may take, bytes free)."""
    watch = _SLOT.watch
    if watch is not None:
        watch.failed(device, asked, limit, free)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception is torch's OutOfMemoryError, or was raised because of one."""
    waiting, seen = [error], 0
    while waiting and seen < _MOST_CAUSES:
        cause = waiting.pop()
        if cause is None:
            continue
        if any(kind.__name__ == "OutOfMemoryError" for kind in type(cause).__mro__):
            return True
        seen += 1
        waiting += [cause.__context__, cause.__cause__]
    return False


def _new_id() -> str:
    """The time, for people, and a random part that no other process has."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.urandom(5).hex()}"
