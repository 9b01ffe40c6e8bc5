"""Blocking calls of the event loop, on daemon threads of our own.

asyncio's executor, `concurrent.futures` pools and anyio's worker threads are joined when the
interpreter exits, so that one request could hold the end of a training job. These threads are
daemons, one per call; the callers bound how many there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class StoppedError(RuntimeError):
    """Nothing is started any more: the listener stops."""


class RequestThreads:
    """Starts one daemon thread per call and brings its outcome back to the event loop.

    All methods but `stop` and `join` belong to the thread of the event loop.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._stops: list[threading.Event] = []
        self._stopped = False

    def start(
        self, call: Callable[[], _T], stop: threading.Event | None = None
    ) -> asyncio.Future[_T]:
        """Run a call on its own thread.

        Args:
            call: may block.
            stop: an event the call watches; `stop()` sets it.

        Returns:
            A future of the running loop; cancelling it does not end the thread.

        Raises:
            StoppedError: the listener stops.
            RuntimeError: no thread can be started.
        """
        if self._stopped:
            raise StoppedError("the listener stops")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def settle(result: _T | None, error: Exception | None) -> None:
            self._stops = [other for other in self._stops if other is not stop]
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        thread = threading.Thread(
            target=_run, args=(call, loop, settle), name="gpumem-otel-request", daemon=True
        )
        thread.start()
        # Both lists are replaced, never changed in place: other threads read them.
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        if stop is not None:
            self._stops = [*self._stops, stop]
        return future

    def stop(self) -> None:
        """Make every running call end; from any thread."""
        self._stopped = True
        for stop in self._stops:
            stop.set()

    def join(self, deadline: float) -> bool:
        """Wait for the threads until a moment of `time.monotonic()`; whether all have ended."""
        threads = self._threads
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def _run(
    call: Callable[[], _T],
    loop: asyncio.AbstractEventLoop,
    settle: Callable[[_T | None, Exception | None], None],
) -> None:
    """Body of a thread."""
    result, error = _outcome(call)
    # The loop may be closed by now; then nothing waits for the outcome.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(settle, result, error)
    # An exception keeps this frame: without the line below it would form a cycle with its future,
    # left to a garbage collector that training jobs often switch off.
    del settle, result, error


def _outcome(call: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Result or exception, never raised."""
    try:
        return call(), None
    except BaseException as exc:
        # A future takes no StopIteration, and SystemExit in a request must not end our loop.
        if isinstance(exc, Exception) and not isinstance(exc, StopIteration):
            return None, exc
        return None, RuntimeError(f"{type(exc).__name__} in a request")
