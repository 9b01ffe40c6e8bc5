"""A queue for work that cannot wait for the background thread, whose push may hang.

Its thread lives only while there is something to do: a process whose allocations never fail never
has it. It is a daemon, so that it blocks no exit; the end of the process waits within a bound.
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
"""More is dropped and reported, the oldest first; one failure a minute and device is normal."""

_Item = TypeVar("_Item")
_log = named_logger("gpumem_otel.oom")


class UrgentQueue(Generic[_Item]):
    """Gives items to `handle` one by one, in their order.

    Args:
        handle: called with an item and the seconds it may take.
        seconds: that time on the thread.
        on_dropped: called when an item was dropped; must be quick and never raise.
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
        # reentrant: a signal handler of the job may fail to allocate in the middle of `put`
        self._lock = threading.RLock()
        self._items: deque[_Item] = deque()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._idle.set()

    def put(self, item: _Item, *, once: bool = False) -> None:
        """Have an item handled; returns at once and never raises.

        Args:
            item: for `handle`.
            once: not if the same object waits already.
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
        except RuntimeError:  # no thread can start, or the interpreter ends: `wait` does it
            with self._lock:
                self._thread = None

    def wait(self, timeout: float) -> bool:
        """Wait until all is handled, within these seconds; whether it is.

        Without a thread, the calling one does the work.
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
        """Handle one item; False if there was none, and the thread ends."""
        with self._lock:
            if not self._items:
                self._thread = None
                self._idle.set()
                return False
            item = self._items.popleft()
        try:
            self._handle(item, seconds)
        except Exception:
            _log.warning("an out-of-memory was not reported", exc_info=True)
        return True
