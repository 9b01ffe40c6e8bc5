"""The background thread that pushes profiles; `rounds.py` has what it does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gpumem_otel.base.logs import named_logger
from gpumem_otel.push.rounds import Rounds

if TYPE_CHECKING:
    from gpumem_otel.push.interfaces import PushDependencies

THREAD_NAME = "gpumem-otel-pusher"
MAX_WAIT_SECONDS = 60.0
"""The wall clock may be set while we wait: look again after this."""

_log = named_logger("gpumem_otel.push")


class Pusher:
    """Reads profiles at the cadence of the configuration and pushes them, in a daemon thread.

    Nothing here raises, and no call waits longer than its timeout.
    """

    def __init__(self, dependencies: PushDependencies) -> None:
        self._dependencies = dependencies
        self._counters = dependencies.counters
        self._clock = dependencies.clock
        self.abandon_after_fork()

    def abandon_after_fork(self) -> None:
        """In a forked child: forget the parent's thread and its profiles; `start` works again."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._stop_by = 0.0
        self._flushes: list[_Flush] = []
        self._logged: set[type[Exception]] = set()
        self._rounds = Rounds(self._dependencies, self._wake)
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def interval_seconds(self) -> float:
        """The interval as it is now, stretched by stall and budget."""
        return self._rounds.interval_seconds

    def start(self) -> None:
        """Start the thread; nothing if it runs already. Call it once the source is armed."""
        with self._lock:
            if self.running:
                return
            self._stop.clear()
            self._rounds = Rounds(self._dependencies, self._wake)
            self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads, or the interpreter is going down
                self._thread = None
                self._counters.add("exporter_errors", stage="push")
                _log.warning("no thread for profiles: %s", error)

    def stop(self, timeout: float = 5.0) -> bool:
        """Take and send one last live profile, then end; also from an exit handler.

        Args:
            timeout: seconds for all of it. A thread that still reads or waits for a server then
                is abandoned (it is a daemon), and its profiles count as dropped.

        Returns:
            Whether the thread has ended.
        """
        with self._lock:
            thread = self._thread
            if thread is None:
                return True
            self._stop_by = self._clock.monotonic() + timeout
            self._stop.set()
            self._wake.set()
        if thread is threading.current_thread():
            return False
        thread.join(timeout)
        if thread.is_alive():
            self._rounds.abandon()
            return False
        with self._lock:
            if self._thread is thread:
                self._thread = None
        return True

    def flush(self, timeout: float = 5.0) -> bool:
        """Take a live profile now and send it with all that waits.

        Args:
            timeout: seconds for all of it.

        Returns:
            Whether everything was stored in time.
        """
        request = _Flush(self._clock.monotonic() + timeout)
        with self._lock:
            if not self.running or self._thread is threading.current_thread():
                return False
            self._flushes.append(request)
            self._wake.set()
        request.done.wait(timeout)
        return request.stored

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            if self._stop.is_set():
                break  # set between the two lines above, so `wake` is clear again
            seconds = self._turn()
            # Both are set before `wake` is: a request that came meanwhile ends this wait at once.
            if not self._stop.is_set() and not self._flushes:
                self._clock.wait(self._wake, min(seconds, MAX_WAIT_SECONDS))
        try:
            self._rounds.finish(max(self._stop_by - self._clock.monotonic(), 0.0))
        except Exception as error:
            self._failed(error)
        for request in self._take_flushes():
            request.done.set()

    def _turn(self) -> float:
        try:
            for request in self._take_flushes():
                try:
                    request.stored = self._rounds.flush(request.end - self._clock.monotonic())
                finally:
                    request.done.set()
            return self._rounds.turn()
        except Exception as error:
            self._failed(error)
            return self._rounds.interval_seconds

    def _take_flushes(self) -> list[_Flush]:
        with self._lock:
            flushes, self._flushes = self._flushes, []
        return flushes

    def _failed(self, error: Exception) -> None:
        """Count a defect of ours: expected failures are handled where they occur."""
        self._counters.add("exporter_errors", stage="push")
        if type(error) not in self._logged:
            self._logged.add(type(error))
            _log.warning("profiles: %s: %s", type(error).__name__, error)


class _Flush:
    """A caller that waits for everything to be sent."""

    def __init__(self, end: float) -> None:
        self.end = end
        self.stored = False
        self.done = threading.Event()
