"""The life of a listener: started, bound, stopped, and dropped in a forked child."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from gpumem_otel.core.counters import Counters
from gpumem_otel.errors import ServeError
from gpumem_otel.logs import named_logger

if TYPE_CHECKING:
    from gpumem_otel.serve.loop import ListenerLoop
    from gpumem_otel.serve.rundir import RunFile

__all__ = ["ListenerLife"]

_log = named_logger("gpumem_otel.serve")


class ListenerLife:
    """Owns one `ListenerLoop` at a time; what it serves and where is the subclass's.

    Attributes:
        bound: set while the address is held.
        last_error: why it could not be bound at the last attempt, None once it is.
    """

    what = "the listener"
    """For messages."""

    def __init__(self, counters: Counters | None = None) -> None:
        self._counters = counters or Counters()
        self._logged: set[str] = set()
        self._lock = threading.Lock()
        self._loop: ListenerLoop | None = None
        self._run_file: RunFile | None = None
        self._left_to_parent: ListenerLoop | None = None
        self.bound = threading.Event()
        self.last_error: OSError | None = None

    @property
    def address(self) -> tuple[str, int] | None:
        """(host, port), or (path, 0), once bound, else None."""
        loop = self._loop
        return loop.address if loop is not None and self.bound.is_set() else None

    def start(self) -> None:
        """Start the thread; returns before the port is bound. Does nothing where it runs.

        The imports happen here, on the caller's thread: in the background they would hold module
        locks that a forked child then inherits.

        Raises:
            ServeError: uvicorn or starlette can not be imported, or no thread be started.
        """
        with self._lock:
            if self._loop is not None:
                return
            try:
                self._loop = self._build()
                self._loop.start()
            except Exception as exc:
                self._loop = None
                raise ServeError(f"{self.what} can not be started: {exc}") from exc

    def _build(self) -> ListenerLoop:
        """A loop that is not started yet."""
        raise NotImplementedError

    def _register(self, loop: ListenerLoop) -> None:
        """It is bound: let others find it. From the thread of the loop; must not raise."""
        raise NotImplementedError

    def _where(self) -> str:
        """What is listened on, for messages."""
        raise NotImplementedError

    def stop(self, timeout: float = 1.0) -> None:
        """Close the port, every connection and every request; may be started again.

        Args:
            timeout: seconds to wait for the threads, which are daemons in any case.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is None:
                return
            loop.stop(deadline)
            self.bound.clear()
            run_file, self._run_file = self._run_file, None
        if run_file is not None:
            run_file.remove()

    def close_in_child(self) -> None:
        """In a forked child: close the inherited descriptors, leave the parent's loop alone.

        A child that outlives its parent would otherwise hold the port. Safe at any moment, also
        where the parent held a lock; afterwards the listener is as if never started.
        """
        loop, self._loop = self._loop, None
        self._lock = threading.Lock()
        self.bound = threading.Event()
        self._run_file = None  # it is the parent's
        if loop is not None:
            loop.abandon()
            self._left_to_parent = loop  # kept, so that no finalizer touches what is shared

    def _on_bound(self, loop: ListenerLoop) -> None:
        """From the thread of the loop, once."""
        if self._loop is not loop:
            return  # stopped meanwhile
        self._register(loop)
        self.last_error = None
        self.bound.set()

    def _on_taken(self, exc: OSError) -> None:
        """From the thread of the loop, at each attempt that failed."""
        self.last_error = exc.with_traceback(None)
        self._failed(
            "listen", f"can not listen on {self._where()} ({exc}): trying again until it is free"
        )

    def _failed(self, kind: str, message: str) -> None:
        self._counters.add("exporter_errors", stage="listen")
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("%s", message)
