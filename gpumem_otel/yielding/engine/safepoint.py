"""Stops the job's own thread between two steps, and checks that no other thread uses the GPU.

`SafePoints.reached` is called where the job is between two pieces of work: at the end of an
optimizer's step, of `gpumem_otel.step()`, or of a forward without gradients of a watched model. It
costs an attribute or two, and stops only where that was asked for. It stops one thread, the first
that reached it; `Quiescence` looks for others.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.engine.interrupts import graver
from gpumem_otel.yielding.engine.messages import WITHOUT
from gpumem_otel.yielding.signal_safe import SafeEvent, log_on_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from gpumem_otel.base.protocols import Clock

WhoElse: TypeAlias = "Callable[[threading.Thread, Collection[int], bool], str]"
"""(the thread that stopped, identities of threads to leave out, whether a quick look is enough) ->
the thread that works, "" for none."""

AllocatorCounters: TypeAlias = "Callable[[], Mapping[int, tuple[int, int]]]"
"""Device -> (allocations, frees) so far."""

_AGAIN_SECONDS: Final = 0.1
_TRIES: Final = 10
"""A thread that pins the next batches is soon done, one that trains is not."""
_WAY_OUT: Final = (
    "stop it before the yield (yield_callbacks), or call gpumem_otel.participant() in it if it "
    "leaves the GPU alone while the training thread is stopped"
)


class Quiescence:
    """Looks for other threads that use the GPU while the job's thread is stopped.

    A prefetcher, a checkpoint written in the background or a thread that averages weights would go
    on with storages that are about to be emptied. Three signs: a thread runs code that knows torch,
    such a thread allocated memory on the device, or counters of the allocator move.

    Args:
        participants: threads that the job registered.
        who_else: names a thread at work, "" where there is none.
        counters: of the allocator; {} where they cannot be read.
        clock: time.
    """

    def __init__(
        self,
        *,
        participants: Callable[[], Collection[threading.Thread]],
        who_else: WhoElse,
        counters: AllocatorCounters,
        clock: Clock,
    ) -> None:
        self._participants = participants
        self._who_else = who_else
        self._counters = counters
        self._clock = clock

    def check(self, parked: threading.Thread) -> None:
        """Look, while this thread is stopped.

        Raises:
            YieldRefusedError: another thread uses the GPU, or may.
        """
        why = ""
        for _ in range(_TRIES):
            why = self._activity(parked)
            if not why:
                return
            self._clock.wait(threading.Event(), _AGAIN_SECONDS)
        raise YieldRefusedError(f"yield: {why}; {_WAY_OUT}")

    def look(self, parked: threading.Thread) -> None:
        """Look once more, without the counters: our own copies may have moved them.

        Raises:
            YieldRefusedError: another thread works by now.
        """
        working = self._working_thread(parked, glance=True)
        if working:
            raise YieldRefusedError(f"yield: {working}; {_WAY_OUT}")

    def _working_thread(self, parked: threading.Thread, *, glance: bool) -> str:
        known = {thread.ident for thread in self._participants() if thread.ident is not None}
        return self._who_else(parked, known | {threading.get_ident()}, glance)

    def _activity(self, parked: threading.Thread) -> str:
        working = self._working_thread(parked, glance=True)
        if working:
            return working
        before = self._counters()
        # takes some ten milliseconds: a thread that was woken a moment ago still seems to wait, and
        # one that allocates does so meanwhile
        working = self._working_thread(parked, glance=False)
        after = self._counters()
        moved = sorted(device for device, count in after.items() if before.get(device) != count)
        if working or not (before and moved):
            return working
        return (
            f"memory of device {moved[0]} is allocated or freed while the job's thread stands "
            "still, so another thread uses it"
        )


_log = named_logger("gpumem_otel.yield")

_TICK_SECONDS: Final = 0.05


class StopRequest:
    """A request to stop, and the thread that stopped.

    Attributes:
        thread: the stopped one; None while none is.
        here: that thread asked for the yield itself, and waits for nothing.
        device: the current device of that thread; None where it uses none.
        interrupted: what a signal handler raised in it meanwhile.
        stuck: the memory could not be brought back after an interrupt: the next one is raised.
    """

    def __init__(self, on_interrupt: Callable[[], object] | None = None) -> None:
        self.thread: threading.Thread | None = None
        self.here = False
        self.device: int | None = None
        self.interrupted: BaseException | None = None
        self.stuck = False
        self.arrived = SafeEvent()
        self.go = SafeEvent()
        self.on_interrupt = on_interrupt

    def let_go(self) -> None:
        """Let the thread go on."""
        self.go.set()


class SafePoints:
    """Stops the job's thread on request.

    Args:
        unsafe: called on the job's thread before it stops: why this moment is no safe point ("a
            stream captures"), "" where it is one.
    """

    def __init__(self, unsafe: Callable[[], str] | None = None) -> None:
        self._unsafe = unsafe
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None
        self._asked: StopRequest | None = None
        self._why_not = ""

    @property
    def owner(self) -> threading.Thread | None:
        """The job's thread; None before its first safe point and after its end."""
        owner = self._owner
        return owner if owner is not None and owner.is_alive() else None

    def reached(self) -> None:
        """Stop the calling thread where that was asked for: it is between two pieces of work.

        Raises:
            BaseException: what a signal handler of the job raised meanwhile, once the memory is
                back.
        """
        asked = self._asked
        if asked is None:
            if self._owner is None:
                self._owner = threading.current_thread()
            return
        self._stop(asked)

    def here(self) -> StopRequest:
        """The safe point of a thread that asks for the yield itself, and is not stopped.

        Raises:
            YieldRefusedError: it is not between two pieces of work.
        """
        why_not = self._unsafe() if self._unsafe is not None else ""
        if why_not:
            raise YieldRefusedError(f"safe point: {why_not}; try again between two steps")
        parked = StopRequest()
        parked.here, parked.thread = True, threading.current_thread()
        parked.device = _current_device()
        parked.arrived.set()
        return parked

    def set_owner(self, parked: StopRequest | None) -> None:
        """A yield that this thread asked for `here` has succeeded: it is the job's thread."""
        if parked is not None and parked.here and self.owner is None:
            self._owner = parked.thread

    def park(
        self,
        wait_seconds: float,
        *,
        clock: Clock,
        stop: Callable[[], bool],
        asked: StopRequest | None = None,
    ) -> StopRequest:
        """Wait until the job's thread has stopped; it stays so until `let_go`.

        Args:
            wait_seconds: for the next safe point.
            clock: time.
            stop: called now and then: gives up once it returns True.
            asked: the request to use, where the caller must know it before the thread has stopped.

        Raises:
            YieldRefusedError: no safe point was reached in time, or another request waits.
        """
        asked = asked or StopRequest()
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
            asked.let_go()  # it may stop at this very moment, and nothing else would let it go
            raise
        finally:
            with self._lock:
                self._asked = None
                arrived = asked.thread is not None
        if not arrived:
            raise YieldRefusedError(self._none_reached(wait_seconds, gave_up=stop()))
        return asked

    def _none_reached(self, wait_seconds: float, *, gave_up: bool) -> str:
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

    def _stop(self, asked: StopRequest) -> None:
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
            except BaseException as error:  # an interrupt, in any of these lines
                if asked.thread is not me:
                    raise
                self._wait_on(asked, error)
        except BaseException as error:  # the second interrupt, in any of those
            if asked.thread is not me or asked.stuck:
                raise
            self._wait_on(asked, error)
        if asked.interrupted is not None:
            raise asked.interrupted

    def _wait_on(self, asked: StopRequest, error: BaseException) -> None:
        """A signal handler raised: wait for the memory, which the job needs to unwind."""
        asked.interrupted = graver(asked.interrupted, error)
        asked.arrived.set()
        first = "%s while yielded: bringing the memory back first"
        log_on_thread(_log, logging.WARNING, first, type(error).__name__)
        reported, tried = asked.on_interrupt is None, False
        while not asked.go.is_set():
            try:
                if not reported and asked.on_interrupt is not None:
                    if tried:  # no thread could be started
                        asked.go.wait(_TICK_SECONDS)
                    tried = True
                    asked.on_interrupt()
                    reported = True
                asked.go.wait()
            except BaseException as again:  # noqa: PERF203 - waits, and is seldom interrupted
                asked.interrupted = graver(asked.interrupted, again)
                if asked.stuck:
                    log_on_thread(
                        _log, logging.ERROR, WITHOUT, type(again).__name__, wait_seconds=1.0
                    )
                    raise


def _current_device() -> int | None:
    torch: Any = sys.modules.get("torch")
    try:
        return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else None
    except Exception:  # there is none, or torch cannot tell
        return None
