"""The one background thread of the package, around the rounds that it works off."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.base.logs import named_logger
from gpumem_otel.push.rounds import PushDependencies, Rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import HeapProfile, Identity, ProfileKind, SourceStatus
    from gpumem_otel.base.protocols import Clock
    from gpumem_otel.push.interfaces import ProfileSink, PushReader
    from gpumem_otel.settings.config import ProfileConfig

THREAD_NAME = "gpumem-otel-pusher"
MAX_WAIT_SECONDS = 60.0
"""The wall clock may be set while we wait; look again after this."""

_log = named_logger("gpumem_otel.push")


class Pusher:
    """Reads profiles at the cadence of the configuration and pushes them, in a daemon thread.

    Nothing here raises, and no call waits longer than its argument says.

    Args:
        reader: takes the profiles, on our thread.
        sink: where they are pushed; None: they are only shown to `on_profiles`.
        config: interval, kinds and budgets.
        identity: asked each round.
        status: nothing is read before it says armed.
        encode: one profile -> uncompressed pprof.
        counters: told of every push, drop and error.
        clock: the real one if None.
        stall_seconds: how long the last read-out held the interpreter lock.
        on_profiles: called on our thread with (kind, profiles) of each read-out.
        push_timeout_seconds: deadline of one push.
        final_read: see `PushDependencies`.
    """

    def __init__(
        self,
        reader: PushReader,
        sink: ProfileSink | None,
        *,
        config: ProfileConfig,
        identity: Callable[[], Identity],
        status: Callable[[], SourceStatus],
        encode: Callable[[HeapProfile], bytes],
        counters: Counters,
        clock: Clock | None = None,
        stall_seconds: Callable[[], float] = float,
        on_profiles: Sequence[Callable[[ProfileKind, tuple[HeapProfile, ...]], None]] = (),
        push_timeout_seconds: float = 10.0,
        final_read: bool = True,
    ) -> None:
        self._parts = PushDependencies(
            reader=reader,
            sink=sink,
            encode=encode,
            config=config,
            counters=counters,
            clock=clock or SystemClock(),
            identity=identity,
            status=status,
            stall_seconds=stall_seconds,
            on_profiles=tuple(on_profiles),
            push_timeout_seconds=push_timeout_seconds,
            final_read=final_read,
        )
        self._fresh()

    def _fresh(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._stop_by = 0.0
        self._flushes: list[_Flush] = []
        self._seen: set[type[Exception]] = set()
        self._rounds = Rounds(self._parts, self._wake)
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
            self._rounds = Rounds(self._parts, self._wake)
            self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads, or the interpreter is going down
                self._thread = None
                self._parts.counters.add("exporter_errors", stage="push")
                _log.warning("no thread for profiles: %s", error)

    def stop(self, timeout: float = 5.0) -> bool:
        """Take and send one last live profile, then end; also from an exit handler.

        Args:
            timeout: seconds for all of it; a thread that still reads or waits for a server then
                is left to itself (it is a daemon), and what it holds counts as dropped.

        Returns:
            Whether the thread has ended.
        """
        with self._lock:
            thread = self._thread
            if thread is None:
                return True
            self._stop_by = self._parts.clock.monotonic() + timeout
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
        request = _Flush(self._parts.clock.monotonic() + timeout)
        with self._lock:
            if not self.running or self._thread is threading.current_thread():
                return False
            self._flushes.append(request)
            self._wake.set()
        request.done.wait(timeout)
        return request.stored

    def abandon_after_fork(self) -> None:
        """In a forked child: forget the parent's thread and what it held; `start` works again."""
        self._fresh()

    def _run(self) -> None:
        clock = self._parts.clock
        while not self._stop.is_set():
            self._wake.clear()
            if self._stop.is_set():
                break  # it came between the two lines above, and `wake` tells it no more
            seconds = self._turn()
            # Both are set before `wake` is: a request that came meanwhile ends this wait at once.
            if not self._stop.is_set() and not self._flushes:
                clock.wait(self._wake, min(seconds, MAX_WAIT_SECONDS))
        try:
            self._rounds.finish(max(self._stop_by - clock.monotonic(), 0.0))
        except Exception as error:
            self._broken(error)
        for request in self._taken():
            request.done.set()

    def _turn(self) -> float:
        try:
            for request in self._taken():
                try:
                    left = request.end - self._parts.clock.monotonic()
                    request.stored = self._rounds.flush(left)
                finally:
                    request.done.set()
            return self._rounds.turn()
        except Exception as error:
            self._broken(error)
            return self._rounds.interval_seconds

    def _taken(self) -> list[_Flush]:
        with self._lock:
            taken, self._flushes = self._flushes, []
        return taken

    def _broken(self, error: Exception) -> None:
        """A defect of ours: what is expected to fail is dealt with where it does."""
        self._parts.counters.add("exporter_errors", stage="push")
        if type(error) not in self._seen:
            self._seen.add(type(error))
            _log.warning("profiles: %s: %s", type(error).__name__, error)


class _Flush:
    """A caller that waits for everything to be sent."""

    def __init__(self, end: float) -> None:
        self.end = end
        self.stored = False
        self.done = threading.Event()
