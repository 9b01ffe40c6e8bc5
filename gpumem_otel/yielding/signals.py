"""Gives the memory back when the process is told to stop for a while, and takes it on its return.

Slurm and shells send SIGTSTP, and SIGCONT to go on; Slurm sends SIGSTOP two seconds after SIGTSTP
(slurm.conf, PreemptMode=SUSPEND). Within that grace the job reaches a safe point and is freed of
its memory, or it is refused and nothing was moved. Handlers are installed only when asked for, and
call those that were there.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = named_logger("gpumem_otel.yield")

GRACE_SECONDS: Final = 1.8
"""Slurm waits two seconds between SIGTSTP and SIGSTOP."""


class StopSignals:
    """Both handlers, and the one thread that does what they say.

    Args:
        stop: gives the memory back within the grace; on our thread. May raise.
        go_on: takes it again; likewise.
    """

    def __init__(self, stop: Callable[[], object], go_on: Callable[[], object]) -> None:
        self._actions = {signal.SIGTSTP: stop, signal.SIGCONT: go_on}
        self._before: dict[int, Any] = {}
        self._told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._pid = os.getpid()

    def start(self) -> None:
        """Install both.

        Raises:
            ConfigError: not on the main thread, where alone Python allows it.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("yield_on_stop_signal: call it on the main thread")
        threading.Thread(target=self._run, name="gpumem-otel-signals", daemon=True).start()
        for number in self._actions:
            self._before[number] = signal.signal(number, self._handle)

    def stop(self) -> None:
        """Put back what was there, where nobody else has changed it since."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}
        self._told.put(None)

    def _handle(self, number: int, frame: Any) -> None:
        # anywhere in the main thread: takes no lock, and starts nothing
        if self._pid == os.getpid():
            self._told.put(number)
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif self._pid != os.getpid() and number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)  # a forked child has no thread that does it

    def _run(self) -> None:
        while (number := self._told.get()) is not None:
            try:
                self._actions[signal.Signals(number)]()
            except Exception as error:
                _log.warning("%s: %s", signal.Signals(number).name, error)
            if number == signal.SIGTSTP and self._before.get(number) == signal.SIG_DFL:
                # what the signal would have done; to this thread, so that it returns only once the
                # process goes on: a main thread that sleeps may not hear of SIGCONT
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
                self._told.put(signal.SIGCONT)
