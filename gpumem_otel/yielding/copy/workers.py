"""Daemon threads with a queue, for work that runs without the interpreter lock.

`concurrent.futures` does not fit: the interpreter waits for its threads when it ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from gpumem_otel.base.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_THREADS: Final = 16
_log = named_logger("gpumem_otel.yielding")


def threads_of_process() -> int:
    """One for each CPU of this process, at most 16."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))))


class WorkerThreads:
    """Threads that begin with the first job and end with `finish`.

    Args:
        threads: at most this many.
        name: of the threads, followed by a number.
        first: called by each thread before its first job; its errors are logged.
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
        """Queue a job; its errors are logged.

        Raises:
            RuntimeError: there is no thread and none can be started.
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
                        return  # the running threads do it
                    self._jobs.pop()
                    raise
                self._threads.append(thread)

    def renewed(self) -> WorkerThreads:
        """The same without threads and jobs, for a forked child."""
        return WorkerThreads(self._most, self._name, self._first)

    def finish(self, *, drop: bool = False) -> int:
        """Wait until all jobs are done and the threads have ended; it can be used again.

        Args:
            drop: drop the jobs that have not started.

        Returns:
            How many jobs were dropped.
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
        finally:  # after an interrupt some still run: the next call waits for them
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._ends = False
        return dropped

    def _work(self) -> None:
        try:
            if self._first is not None:
                self._first()
        except Exception:  # its jobs run all the same, since callers wait for them
            _log.warning("%s: thread setup failed", self._name, exc_info=True)
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
            except BaseException as error:  # the next jobs must run too
                with contextlib.suppress(Exception):  # the job's handlers and filters
                    _log.warning("%s: job failed: %r", self._name, error)
            del job  # it may hold large objects
