"""Where the job's own thread stands still between two steps, so that its memory can be moved.

The job says where it is between two pieces of work: the end of an optimizer's step, of
`gpumem_otel.step()`, or of a forward without gradients of a watched model. `SafePoints.reached` is
called there, costs an attribute or two, and stops only where somebody asked for it.

A safe point speaks for one thread: the first that reached one. Others never stop, and whoever asks
looks after them (`gpumem_otel.yielding.stillness`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.logs import named_logger
from gpumem_otel.yielding.apart import graver
from gpumem_otel.yielding.aside import log_aside
from gpumem_otel.yielding.latch import Latch
from gpumem_otel.yielding.wording import WITHOUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.core.ports import Clock

__all__ = ["Parked", "SafePoints"]

_log = named_logger("gpumem_otel.yield")

_TICK_SECONDS: Final = 0.05


class Parked:
    """A request to stop, and the thread that did.

    Attributes:
        thread: that stands still; None while none does.
        here: it was its own command: it waits for nothing.
        device: that is current in that thread; None where it uses none.
        interrupted: what a signal handler raised in it meanwhile.
        stuck: bringing the memory back failed after it was interrupted: the next one gets through.
    """

    def __init__(self, on_interrupt: Callable[[], object] | None = None) -> None:
        self.thread: threading.Thread | None = None
        self.here = False
        self.device: int | None = None
        self.interrupted: BaseException | None = None
        self.stuck = False
        self.arrived = Latch()
        self.go = Latch()
        self.on_interrupt = on_interrupt

    def let_go(self) -> None:
        """The thread goes on."""
        self.go.set()


class SafePoints:
    """Stops the job's thread on request.

    Args:
        unsafe: asked on the job's thread before it stops: why this moment is none ("a stream
            captures"), "" where it is one.
    """

    def __init__(self, unsafe: Callable[[], str] | None = None) -> None:
        self._unsafe = unsafe
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None
        self._asked: Parked | None = None
        self._why_not = ""

    @property
    def owner(self) -> threading.Thread | None:
        """The thread that may stop; None before its first safe point and after its end."""
        owner = self._owner
        return owner if owner is not None and owner.is_alive() else None

    def reached(self) -> None:
        """The calling thread is between two pieces of work; it stops here where that is asked.

        Raises:
            BaseException: what a signal handler of the job raised meanwhile, once its memory is
                back.
        """
        asked = self._asked
        if asked is None:
            if self._owner is None:
                self._owner = threading.current_thread()
            return
        self._stop(asked)

    def here(self) -> Parked:
        """The calling thread says that it is between two pieces of work, and goes on by itself.

        It is not the job's thread by that alone, see `speaks`.

        Raises:
            YieldRefusedError: it is not.
        """
        why_not = self._unsafe() if self._unsafe is not None else ""
        if why_not:
            raise YieldRefusedError(f"safe point: {why_not}; try again between two steps")
        parked = Parked()
        parked.here, parked.thread = True, threading.current_thread()
        parked.device = _current_device()
        parked.arrived.set()
        return parked

    def speaks(self, parked: Parked | None) -> None:
        """Its own command has succeeded, so a thread that stood still `here` is the job's."""
        if parked is not None and parked.here and self.owner is None:
            self._owner = parked.thread

    def park(
        self,
        wait_seconds: float,
        *,
        clock: Clock,
        stop: Callable[[], bool],
        asked: Parked | None = None,
    ) -> Parked:
        """Wait until the job's thread has stopped; it stays so until `let_go`.

        Args:
            wait_seconds: for the next safe point.
            clock: time.
            stop: asked now and then: gives up once it is true.
            asked: to be used, for whoever has to know it before the thread has stopped.

        Raises:
            YieldRefusedError: no safe point was reached in time, or another request waits.
        """
        asked = asked or Parked()
        with self._lock:
            if self._asked is not None:
                raise YieldRefusedError("safe point: another request waits for one already")
            self._why_not = ""
            self._asked = asked
        ends = clock.monotonic() + wait_seconds
        try:
            while not asked.arrived.is_set():
                left = ends - clock.monotonic()
                if left <= 0 or stop():
                    break
                clock.wait(asked.arrived, min(left, _TICK_SECONDS))
        except BaseException:
            asked.let_go()  # it may stop at this very moment, and nobody else would know
            raise
        finally:
            with self._lock:
                self._asked = None
                arrived = asked.thread is not None
        if not arrived:
            raise YieldRefusedError(self._nobody(wait_seconds, gave_up=stop()))
        return asked

    def _nobody(self, wait_seconds: float, *, gave_up: bool) -> str:
        if gave_up:
            return (
                "safe point: none was reached before the request was given up, by its deadline or "
                "an interrupt; give it longer, or call gpumem_otel.step() in the job's loop"
            )
        why = f", since {self._why_not}" if self._why_not else ""
        if self._owner is None:
            why = why or ": the job has not reached one yet"
        return (
            f"safe point: none in {wait_seconds:g} s{why}; wait longer, or call "
            "gpumem_otel.step() in the job's loop"
        )

    # the job's thread

    def _stop(self, asked: Parked) -> None:
        me = threading.current_thread()
        if self._pid != os.getpid():
            return
        owner = self.owner
        if owner is not None and owner is not me:
            self._why_not = f"thread {me.name!r} reached one, and not {owner.name!r}"
            return
        why_not = self._unsafe() if self._unsafe is not None else ""
        if why_not:
            self._why_not = why_not
            return
        device = _current_device()
        try:
            try:
                with self._lock:
                    if self._asked is not asked or asked.thread is not None:
                        return
                    self._owner = asked.thread = me
                    asked.device = device
                asked.arrived.set()
                asked.go.wait()
            except BaseException as error:  # an interrupt, in whichever of these lines
                if asked.thread is not me:
                    raise
                self._wait_on(asked, error)
        except BaseException as error:  # the second, in whichever of those
            if asked.thread is not me or asked.stuck:
                raise
            self._wait_on(asked, error)
        if asked.interrupted is not None:
            raise asked.interrupted

    def _wait_on(self, asked: Parked, error: BaseException) -> None:
        """A signal handler raised: the memory comes first, the job's unwinding needs it."""
        asked.interrupted = graver(asked.interrupted, error)
        asked.arrived.set()
        first = "%s while yielded: bringing the memory back first"
        log_aside(_log, logging.WARNING, first, type(error).__name__)
        told, tried = asked.on_interrupt is None, False
        while not asked.go.is_set():
            try:
                if not told and asked.on_interrupt is not None:
                    if tried:  # there was no thread for it
                        asked.go.wait(_TICK_SECONDS)
                    tried = True
                    asked.on_interrupt()
                    told = True
                asked.go.wait()
            except BaseException as again:  # noqa: PERF203 - waits, and is seldom interrupted
                asked.interrupted = graver(asked.interrupted, again)
                if asked.stuck:
                    log_aside(_log, logging.ERROR, WITHOUT, type(again).__name__, wait_seconds=1.0)
                    raise


def _current_device() -> int | None:
    torch: Any = sys.modules.get("torch")
    try:
        return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else None
    except Exception:  # there is none, or torch is none that could tell
        return None
