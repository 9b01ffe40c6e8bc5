"""Work that can not wait for the background thread, which may be inside a push that hangs.

The thread lives only while there is something to do: a process whose allocations never fail never
has it. A daemon, so that it holds up nothing; whoever ends the process waits, within a bound.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from gpumem_otel.base.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Callable

THREAD_NAME = "gpumem-otel-oom"
MAX_WAITING = 32
"""More is dropped, the oldest first, and told: a failure a minute and device is all that comes."""

_Item = TypeVar("_Item")
_log = named_logger("gpumem_otel.oom")


class UrgentQueue(Generic[_Item]):
    """Hands items to `handle` one by one, in the order in which they came.

    Args:
        handle: called with an item and the seconds it may take.
        seconds: what that is on the thread.
        on_dropped: called where an item was dropped; must be quick and never raise.
    """

    def __init__(
        self,
        handle: Callable[[_Item, float], object],
        *,
        seconds: float,
        on_dropped: Callable[[], object] = lambda: None,
    ) -> None:
        self._handle = handle
        self._seconds = seconds
        self._on_dropped = on_dropped
        # a signal handler of the job may fail to allocate in the midst of `put`
        self._lock = threading.RLock()
        self._items: deque[_Item] = deque()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._idle.set()

    def put(self, item: _Item, *, once: bool = False) -> None:
        """Have an item handled; returns at once and never raises.

        Args:
            item: handed on.
            once: not where the very same waits already.
        """
        with self._lock:
            if not (once and any(waiting is item for waiting in self._items)):
                if len(self._items) >= MAX_WAITING:
                    self._items.popleft()
                    self._on_dropped()
                self._items.append(item)
            self._idle.clear()
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            self._thread = thread
        try:
            thread.start()
        except RuntimeError:  # no thread is to be had, or the interpreter ends: `wait` does it
            with self._lock:
                self._thread = None

    def wait(self, timeout: float) -> bool:
        """Wait until all is handled, within so many seconds; whether it is.

        Where there is no thread, the caller's own does the work.
        """
        if self._idle.is_set():
            return True
        deadline = time.monotonic() + timeout
        with self._lock:
            alone = self._thread is None
        if alone:
            while (left := deadline - time.monotonic()) > 0 and self._next(left):
                pass
        return self._idle.wait(max(deadline - time.monotonic(), 0.0))

    def _run(self) -> None:
        while self._next(self._seconds):
            pass

    def _next(self, seconds: float) -> bool:
        """Handle one item; False where there was none, and the thread is over."""
        with self._lock:
            if not self._items:
                self._thread = None
                self._idle.set()
                return False
            item = self._items.popleft()
        try:
            self._handle(item, seconds)
        except Exception:
            _log.warning("an out-of-memory was not told of", exc_info=True)
        return True
