"""Yields on SIGTSTP and restores on SIGCONT.

Slurm and shells send SIGTSTP to suspend a job, and SIGCONT to resume it; Slurm sends SIGSTOP two
seconds after SIGTSTP (slurm.conf, PreemptMode=SUSPEND). Within that time the job reaches a safe
point and gives its memory back, or the yield is refused and nothing is moved. Handlers are
installed only on request, and call the previous ones.
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
    """Both handlers, and the thread that does the work.

    Args:
        stop: gives the memory back; runs on our thread, may raise.
        go_on: takes it again; runs on our thread, may raise.
    """

    def __init__(self, stop: Callable[[], object], go_on: Callable[[], object]) -> None:
        self._actions = {signal.SIGTSTP: stop, signal.SIGCONT: go_on}
        self._before: dict[int, Any] = {}
        self._numbers: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._pid = os.getpid()

    def start(self) -> None:
        """Install both.

        Raises:
            ConfigError: not on the main thread; Python allows it only there.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("yield_on_stop_signal: call it on the main thread")
        threading.Thread(target=self._run, name="gpumem-otel-signals", daemon=True).start()
        for number in self._actions:
            self._before[number] = signal.signal(number, self._handle)

    def stop(self) -> None:
        """Restore the previous handlers, where nothing else has changed them since."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}
        self._numbers.put(None)

    def _handle(self, number: int, frame: Any) -> None:
        # runs between any two lines of the main thread: takes no lock, and starts nothing
        if self._pid == os.getpid():
            self._numbers.put(number)
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif self._pid != os.getpid() and number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)  # a forked child has no thread that does it

    def _run(self) -> None:
        while (number := self._numbers.get()) is not None:
            try:
                self._actions[signal.Signals(number)]()
            except Exception as error:
                _log.warning("%s: %s", signal.Signals(number).name, error)
            if number == signal.SIGTSTP and self._before.get(number) == signal.SIG_DFL:
                # what SIGTSTP would have done; sent to this thread, so that it returns when the
                # process is resumed: a main thread that sleeps may not handle SIGCONT
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
                self._numbers.put(signal.SIGCONT)
