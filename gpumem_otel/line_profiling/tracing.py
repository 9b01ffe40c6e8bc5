"""Reports lines of profiled functions: `sys.monitoring` from Python 3.12 on, else `sys.settrace`.

Both call a `Sink` when one of its functions is entered, reaches a line or is left. A sink never
raises, so that nothing is raised into the job.

`sys.monitoring`: with a tool id of our own, in every thread, for the code objects of the profiled
functions only. Two events cannot be limited to code objects: an exception leaves a function, or is
thrown into a generator. These are on for the whole process while something is profiled, and cost
time only where a Python frame is unwound.

`sys.settrace`: on in a thread only while a profiled function runs there (`scope`). A tracer that
is set already, of a debugger or of coverage, is called with every event as if it were alone, and is
put back afterwards. One that is set while a function runs takes over: the remaining lines of that
call are lost.
"""

from __future__ import annotations

import inspect
import opcode
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from gpumem_otel.base.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

_log = named_logger("gpumem_otel.capture")

_TOOL_NAME: Final = "gpumem_otel"
_TOOL_IDS: Final = (4, 3, 2)
"""Free ids first: 0, 1, 2 and 5 belong to debuggers, coverage, profilers and optimizers."""

_SUSPENDS: Final = (
    inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
)  # fmt: skip

_Trace: TypeAlias = "Callable[[FrameType, str, Any], Any]"


class Sink(Protocol):
    """Receives the events of the code objects that it has added, from any thread."""

    def entered(self, code: CodeType, line: int, *, call: bool) -> None:
        """A function begins (`call`), or continues after it was suspended."""
        ...

    def reached(self, code: CodeType, line: int) -> None:
        """A line begins."""
        ...

    def left(self, code: CodeType | None, *, finished: bool) -> None:
        """A function returns or raises (`finished`), or is suspended.

        None: the functions that run in this thread are followed no further.
        """
        ...


class Hook(Protocol):
    """Calls sinks; one per process."""

    def add(self, code: CodeType, sink: Sink) -> bool:
        """Report this code to the sink; returns False where there can be no events."""
        ...

    def remove(self, code: CodeType, sink: Sink) -> None:
        """Report it no more; with the last one everything is as before."""
        ...

    def scope(self) -> Any:
        """Context manager: until its end, functions that this thread runs are reported."""
        ...


class _Subscriptions:
    """Sinks by the identity of code objects: equal code in two places is two functions."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may run a profiled finalizer meanwhile
        self._codes: dict[int, CodeType] = {}
        self.sinks: dict[int, tuple[Sink, ...]] = {}

    def add(self, code: CodeType, sink: Sink) -> bool:
        """Add a sink; returns whether it is the first of this code."""
        with self._lock:
            sinks = self.sinks.get(id(code), ())
            if sink not in sinks:
                self._codes[id(code)] = code
                self.sinks[id(code)] = (*sinks, sink)
            return not sinks

    def remove(self, code: CodeType, sink: Sink) -> bool:
        """Remove a sink; returns whether it was the last of this code."""
        with self._lock:
            sinks = self.sinks.get(id(code), ())
            remaining = tuple(other for other in sinks if other is not sink)
            if remaining:
                self.sinks[id(code)] = remaining
            elif sinks:
                del self.sinks[id(code)], self._codes[id(code)]
            return bool(sinks) and not remaining


class MonitoringHook:
    """Events by `sys.monitoring` (PEP 669)."""

    def __init__(self) -> None:
        self._monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        self._subscriptions = _Subscriptions()
        self._tool: int | None = None
        self._lock = threading.RLock()  # the collector may run a profiled finalizer meanwhile

    def add(self, code: CodeType, sink: Sink) -> bool:
        """See `Hook`."""
        with self._lock:
            if not self._take_tool():
                return False
            if self._subscriptions.add(code, sink):
                events = self._monitoring.events
                wanted = (
                    events.PY_START
                    | events.PY_RESUME
                    | events.PY_RETURN
                    | events.PY_YIELD
                    | events.LINE
                )
                self._monitoring.set_local_events(self._tool, code, wanted)
        return True

    def remove(self, code: CodeType, sink: Sink) -> None:
        """See `Hook`."""
        with self._lock:
            if self._subscriptions.remove(code, sink):
                self._monitoring.set_local_events(self._tool, code, 0)
            if not self._subscriptions.sinks:
                self._give_tool_back()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Nothing to do: every thread is followed."""
        yield

    def _callbacks(self) -> dict[int, Callable[..., object]]:
        events = self._monitoring.events
        return {
            events.PY_START: self._started,
            events.PY_RESUME: self._resumed,
            events.PY_THROW: self._resumed,
            events.LINE: self._line,
            events.PY_YIELD: self._suspended,
            events.PY_RETURN: self._ended,
            events.PY_UNWIND: self._ended,
        }

    def _take_tool(self) -> bool:
        if self._tool is not None:
            return True
        for tool in _TOOL_IDS:
            try:
                self._monitoring.use_tool_id(tool, _TOOL_NAME)
            except ValueError:
                continue
            self._tool = tool
            break
        else:
            _log.warning("lines are not profiled: every tool id of sys.monitoring is taken")
            return False
        for event, callback in self._callbacks().items():
            self._monitoring.register_callback(self._tool, event, callback)
        events = self._monitoring.events
        self._monitoring.set_events(self._tool, events.PY_THROW | events.PY_UNWIND)
        return True

    def _give_tool_back(self) -> None:
        if self._tool is None:
            return
        self._monitoring.set_events(self._tool, 0)
        for event in self._callbacks():
            self._monitoring.register_callback(self._tool, event, None)
        self._monitoring.free_tool_id(self._tool)
        self._tool = None

    def _started(self, code: CodeType, _offset: int) -> None:
        for sink in self._subscriptions.sinks.get(id(code), ()):
            sink.entered(code, code.co_firstlineno, call=True)

    def _resumed(self, code: CodeType, _offset: int, _exception: object = None) -> None:
        sinks = self._subscriptions.sinks.get(id(code))
        if sinks is None:
            return
        line = sys._getframe(1).f_lineno  # noqa: SLF001 (the frame that continues; not kept)
        for sink in sinks:
            sink.entered(code, line, call=False)

    def _line(self, code: CodeType, line: int) -> None:
        for sink in self._subscriptions.sinks.get(id(code), ()):
            sink.reached(code, line)

    def _suspended(self, code: CodeType, _offset: int, _value: object) -> None:
        for sink in self._subscriptions.sinks.get(id(code), ()):
            sink.left(code, finished=False)

    def _ended(self, code: CodeType, _offset: int, _value: object) -> None:
        for sink in self._subscriptions.sinks.get(id(code), ()):
            sink.left(code, finished=True)


class SettraceHook:
    """Events by `sys.settrace`, in a thread within its `scope`."""

    def __init__(self) -> None:
        self._subscriptions = _Subscriptions()
        self._before = threading.local()
        # always the same object: `sys.gettrace() is self.entry` where our tracer is set
        self.entry: _Trace = self._global_event

    def add(self, code: CodeType, sink: Sink) -> bool:
        """See `Hook`."""
        self._subscriptions.add(code, sink)
        return True

    def remove(self, code: CodeType, sink: Sink) -> None:
        """See `Hook`; a running call is reported to its end."""
        self._subscriptions.remove(code, sink)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Trace this thread, then put the tracer before back."""
        before = sys.gettrace()
        if before is self.entry or not self._subscriptions.sinks:
            yield
            return
        self._before.trace = before
        sys.settrace(self.entry)
        try:
            yield
        finally:
            if sys.gettrace() is self.entry:
                sys.settrace(self._before.trace)
            self._before.trace = None
            for sink in {
                sink for sinks in list(self._subscriptions.sinks.values()) for sink in sinks
            }:
                sink.left(None, finished=False)

    @contextmanager
    def new_threads(self) -> Iterator[None]:
        """Trace threads that are started meanwhile."""
        before = threading.gettrace()

        def begin(frame: FrameType, event: str, arg: object) -> Any:
            # the first event of a new thread; the hook itself takes the others
            self._before.trace = before
            sys.settrace(self.entry)
            return self.entry(frame, event, arg)

        threading.settrace(begin)
        try:
            yield
        finally:
            if threading.gettrace() is begin:
                threading.settrace(before)

    def _global_event(self, frame: FrameType, event: str, arg: Any) -> Any:
        before = getattr(self._before, "trace", None)
        chained = self._call(before, frame, event, arg) if before is not None else None
        code = frame.f_code
        sinks = self._subscriptions.sinks.get(id(code))
        if sinks is None or event != "call":
            return chained
        call = not code.co_flags & _SUSPENDS or _is_first_entry(frame)
        line = code.co_firstlineno if call else frame.f_lineno
        for sink in sinks:
            sink.entered(code, line, call=call)
        return self._frame_tracer(sinks, chained)

    def _call(self, trace: _Trace, frame: FrameType, event: str, arg: Any) -> Any:
        """Call another tracer; one that it sets instead of ours is called from then on."""
        result = trace(frame, event, arg)
        current = sys.gettrace()
        if current is not self.entry:
            self._before.trace = current
            sys.settrace(self.entry)
        return result

    def _frame_tracer(self, sinks: tuple[Sink, ...], chained: _Trace | None) -> _Trace:
        raising = False

        def trace(frame: FrameType, event: str, arg: Any) -> _Trace:
            nonlocal chained, raising
            if chained is not None:
                chained = self._call(chained, frame, event, arg) or chained
            if event == "line":
                raising = False
                for sink in sinks:
                    sink.reached(frame.f_code, frame.f_lineno)
            elif event == "exception":
                # an awaited coroutine that returns shows as StopIteration without a traceback
                raising = not (arg[0] is StopIteration and arg[2] is None)
            elif event == "return":
                finished = raising or not frame.f_code.co_flags & _SUSPENDS or not _suspends(frame)
                for sink in sinks:
                    sink.left(frame.f_code, finished=finished)
            return trace

        return trace


def _is_first_entry(frame: FrameType) -> bool:
    """Whether a generator's frame that is entered has not run before."""
    at = frame.f_lasti
    if at < 0:
        return True  # Python 3.10
    code = frame.f_code.co_code
    # Python 3.11: the argument of RESUME is 0 at the beginning
    return opcode.opname[code[at]] == "RESUME" and code[at + 1] & 3 == 0


def _suspends(frame: FrameType) -> bool:
    """Whether a generator's frame that is left without an exception will continue."""
    at, code = frame.f_lasti, frame.f_code.co_code
    if opcode.opname[code[at]] == "YIELD_VALUE":
        return True
    # Python 3.10 is before the instruction that it will repeat
    return at + 2 < len(code) and opcode.opname[code[at + 2]] == "YIELD_FROM"


_HOOKS: dict[str, Hook] = {}


def line_hook() -> Hook:
    """The hook of this process."""
    hook = _HOOKS.get("")
    if hook is None:
        made: Hook = MonitoringHook() if hasattr(sys, "monitoring") else SettraceHook()
        hook = _HOOKS.setdefault("", made)
    return hook
