"""A few daemon threads with a queue, for work that runs without the interpreter lock.

Not `concurrent.futures`, whose threads the interpreter waits for when it ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING

from gpumem_otel.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Workers"]

_log = named_logger("gpumem_otel.yielding")


class Workers:
    """Threads that begin with the first job and end with `finish`.

    Args:
        threads: at most so many.
        name: what they are called, with a number.
        first: called by each thread before its first job; what it raises is logged.
    """

    def __init__(self, threads: int, name: str, first: Callable[[], None] | None = None) -> None:
        self._most = max(threads, 1)
        self._name = name
        self._first = first
        self._threads: list[threading.Thread] = []
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._ends = False

    def do(self, job: Callable[[], None]) -> None:
        """Have it done; what it raises is logged.

        Raises:
            RuntimeError: there is no thread, and none can be started.
        """
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()
            if len(self._jobs) > self._idle and len(self._threads) < self._most:
                number = len(self._threads)
                thread = threading.Thread(
                    target=self._work, name=f"{self._name}-{number}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    if self._threads:
                        return  # those that there are do it
                    self._jobs.pop()
                    raise
                self._threads.append(thread)

    def anew(self) -> Workers:
        """The same without threads and jobs: for a forked child, which has none of them."""
        return Workers(self._most, self._name, self._first)

    def finish(self, *, drop: bool = False) -> int:
        """Wait until all jobs are done, and the threads have ended; then it can be used again.

        Args:
            drop: do none of those that wait.

        Returns:
            How many were dropped.
        """
        with self._changed:
            dropped = len(self._jobs) if drop else 0
            if drop:
                self._jobs.clear()
            self._ends = True
            self._changed.notify_all()
        try:
            for thread in self._threads:
                thread.join()
        finally:  # after an interrupt some are still at work: the next call waits for them
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._ends = False
        return dropped

    def _work(self) -> None:
        try:
            if self._first is not None:
                self._first()
        except Exception:  # it does its jobs all the same: somebody waits for them
            _log.warning("a thread of ours could not be set up", exc_info=True)
        while True:
            with self._changed:
                while not self._jobs:
                    if self._ends:
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                job = self._jobs.popleft()
            try:
                job()
            except BaseException as error:  # the next ones are waited for too
                with contextlib.suppress(Exception):  # the job's handlers and filters
                    _log.warning("a thread of ours: %r", error)
            del job  # holds what it was given
