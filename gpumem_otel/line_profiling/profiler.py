"""Records the memory counters at every line of the profiled functions.

A `LineRecorder` connects a hook that reports lines (`line_profiling/tracing.py`), a reader of
counters (`line_profiling/peaks.py`) and the accounts (`line_profiling/accounts.py`). It is called
on the job's threads and never raises there: after a failure, which is logged, it stops.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Protocol

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import ConfigError
from gpumem_otel.line_profiling.accounts import (
    BASE_COLUMNS,
    FunctionLines,
    LineAccounts,
    line_profiles,
)
from gpumem_otel.line_profiling.peaks import TorchLineReader, process_lock
from gpumem_otel.line_profiling.render import lines_metrics
from gpumem_otel.line_profiling.tracing import SettraceHook, line_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType

    from gpumem_otel.base.profile import HeapProfile
    from gpumem_otel.line_profiling.accounts import Moment
    from gpumem_otel.line_profiling.tracing import Hook

_log = named_logger("gpumem_otel.capture")

MAX_FUNCTIONS: Final = 1000
"""Functions that one profiler may follow."""


class CounterReader(Protocol):
    """Reads the counters."""

    def read(self) -> Moment:
        """Counters of every device in use; peaks are those since the last reading."""
        ...

    def close(self) -> None:
        """Release what reading needs; a later `read` begins again."""
        ...


class _Function:
    """A followed function, or a notebook cell, whose code objects are the whole file."""

    def __init__(
        self,
        number: int,
        name: str,
        module: str,
        codes: tuple[CodeType, ...],
        *,
        whole_file: bool,
    ) -> None:
        self.number = number
        self.name = name
        self.module = module
        self.codes = codes
        self.first_line = 1 if whole_file else codes[0].co_firstlineno
        self.filename = codes[0].co_filename
        self.whole_file = whole_file

    def source(self) -> tuple[str, ...]:
        """Its text, as far as Python can find it."""
        code = self.codes[0]
        try:
            find = inspect.findsource if self.whole_file else inspect.getsourcelines
            lines, _ = find(code)
        except (OSError, TypeError, IndexError, SyntaxError):
            return ()
        return tuple(line.rstrip("\n") for line in lines)


def code_of(function: Any) -> CodeType | None:
    """The code object of a Python function, below its decorators; None for anything else."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if inspect.iscode(code) else None


class LineRecorder:
    """Follows functions line by line while it is on. A `Sink`, safe from any thread.

    Args:
        columns: counters to read in addition, named as in `torch.cuda.memory_stats()`.
        reader: makes the reader of these columns.
        hook: reports the lines, by default that of this process.

    Attributes:
        target: returns the device to show, None for all.
        finished: called with number and calls when a function has returned or raised.
        failure: why nothing is recorded, "" where it is.
        on: whether functions are followed.
    """

    def __init__(
        self,
        columns: Sequence[str] = (),
        *,
        reader: Callable[[tuple[str, ...]], CounterReader] = TorchLineReader,
        hook: Hook | None = None,
    ) -> None:
        self.columns = (
            *BASE_COLUMNS,
            *(c for c in dict.fromkeys(columns) if c not in BASE_COLUMNS),
        )
        self.target: Callable[[], int | None] = lambda: None
        self.finished: Callable[[int, int], None] | None = None
        self.failure = ""
        self.on = False
        self._reader = reader(self.columns)
        self._hook = hook or line_hook()
        self._accounts = LineAccounts(self.columns)
        self._lock = process_lock()
        self._pid = os.getpid()
        self._functions: list[_Function] = []
        self._numbers: dict[int, int] = {}

    # The functions.

    def add(self, function: Any) -> int | None:
        """Follow a function; returns its number, None where there are too many.

        Raises:
            ConfigError: it is not written in Python.
        """
        code = code_of(function)
        if code is None:
            raise ConfigError(
                f"profile: {function!r} has no Python code; "
                "give a function, a method or a class with some"
            )
        inner = inspect.unwrap(getattr(function, "__func__", function))
        name = getattr(inner, "__qualname__", code.co_name)
        return self.add_code(name, getattr(inner, "__module__", "") or "", (code,))

    def add_code(
        self, name: str, module: str, codes: tuple[CodeType, ...], *, whole_file: bool = False
    ) -> int | None:
        """Follow code objects as one function of this name; `whole_file`: from its line 1 on."""
        with self._lock:
            known = self._numbers.get(id(codes[0]))
            if known is not None:
                return known
            if len(self._functions) >= MAX_FUNCTIONS:
                _log.warning("%s is not profiled: %d functions are the limit", name, MAX_FUNCTIONS)
                return None
            number = len(self._functions)
            function = _Function(number, name, module, codes, whole_file=whole_file)
            self._functions.append(function)
            self._numbers.update((id(code), number) for code in codes)
            if self.on:
                self._subscribe(codes)
            return number

    def start(self) -> None:
        """Record from now on."""
        with self._lock:
            if self.on or self._pid != os.getpid():
                return
            self.on, self.failure = True, ""
            for function in self._functions:
                self._subscribe(function.codes)

    def stop(self) -> None:
        """Record no more; what was counted stays."""
        with self._lock:
            self.on = False
            for function in self._functions:
                for code in function.codes:
                    self._hook.remove(code, self)
            if self._pid != os.getpid():
                return
            try:
                self._drop_all()
                self._reader.close()
            except Exception:
                _log.warning("the counters of profiled lines were not released", exc_info=True)

    def clear(self) -> None:
        """Forget what was counted; functions stay."""
        with self._lock:
            self._accounts.clear()

    def scope(self, *, threads: bool = False) -> ExitStack:
        """Until its end, functions are followed in this thread; `threads`: in new ones too."""
        stack = ExitStack()
        if threads and isinstance(self._hook, SettraceHook):
            stack.enter_context(self._hook.new_threads())
        stack.enter_context(self._hook.scope())
        return stack

    def _subscribe(self, codes: tuple[CodeType, ...]) -> None:
        if not all(self._hook.add(code, self) for code in codes):
            self.failure = "every tool id of sys.monitoring is taken"

    def _drop_all(self) -> None:
        threads = self._accounts.open_threads()
        if threads:
            now = self._reader.read()
            for thread in threads:
                self._accounts.drop(thread, now)

    # The events of the hook.

    def entered(self, code: CodeType, line: int, *, call: bool) -> None:
        """See `Sink`."""
        self._record(
            lambda now, number: self._accounts.enter(
                threading.get_ident(),
                number,
                line,
                now,
                # the call of a whole file has no line
                call=call and not self._functions[number].whole_file,
            ),
            code,
        )

    def reached(self, code: CodeType, line: int) -> None:
        """See `Sink`."""
        self._record(
            lambda now, number: self._accounts.line(threading.get_ident(), number, line, now), code
        )

    def left(self, code: CodeType | None, *, finished: bool) -> None:
        """See `Sink`."""
        if code is None:
            self._record(lambda now, _: self._accounts.drop(threading.get_ident(), now), None)
            return
        number = self._record(
            lambda now, number: self._accounts.leave(threading.get_ident(), number, now), code
        )
        if finished and number is not None and self.finished is not None:
            try:
                self.finished(number, self._accounts.calls(number))
            except Exception:
                _log.warning("the lines of %s were not printed", code.co_name, exc_info=True)

    def _record(self, entry: Callable[[Moment, int], None], code: CodeType | None) -> int | None:
        if not self.on or self._pid != os.getpid():
            return None
        try:
            with self._lock:
                number = -1 if code is None else self._numbers[id(code)]
                if code is None and threading.get_ident() not in self._accounts.open_threads():
                    return None
                self._accounts.target = self.target()
                entry(self._reader.read(), number)
            return number
        except Exception as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        self.on = False
        self.failure = str(error) or type(error).__name__
        _log.warning("line profiling has stopped, the job goes on: %s", self.failure, exc_info=True)
        self.stop()

    # The results.

    def functions(
        self, numbers: Sequence[int] | None = None, *, source: bool = True
    ) -> tuple[FunctionLines, ...]:
        """The functions with the lines that ran, in the order in which they were added."""
        with self._lock:
            chosen = [f for f in self._functions if numbers is None or f.number in numbers]
            counted = [
                (f, self._accounts.calls(f.number), self._accounts.rows(f.number)) for f in chosen
            ]
        return tuple(
            FunctionLines(
                name=function.name,
                module=function.module,
                filename=function.filename,
                first_line=function.first_line,
                calls=calls or int(function.whole_file),
                rows=tuple(r for r in rows if r.hits) if function.whole_file else rows,
                source=function.source() if rows and source else (),
            )
            for function, calls, rows in counted
        )

    def profiles(self) -> tuple[HeapProfile, ...]:
        """What the lines allocated, by chain of profiled lines; one profile per device."""
        with self._lock:
            chains = self._accounts.chains()
            names = {
                f.number: FunctionLines(f.name, f.module, f.filename, f.first_line, 0, ())
                for f in self._functions
            }
        return line_profiles(names, chains, time.time_ns())

    def numbers_named(self, name: str) -> list[int]:
        """The numbers of the functions of this name, qualified or with their module before it."""
        return [f.number for f in self._functions if name in {f.name, f"{f.module}.{f.name}"}]

    def number_of(self, function: Any) -> int | None:
        """The number of a function that is followed."""
        code = code_of(function)
        return None if code is None else self._numbers.get(id(code))


_PUBLISHED: list[LineRecorder] = []


def publish(recorder: LineRecorder) -> None:
    """Let the metrics endpoint show what this recorder counts, until the process ends."""
    _PUBLISHED.append(recorder)


def published_metrics(rank: int) -> str:
    """Prometheus text of the lines of all published recorders."""
    functions = [f for recorder in list(_PUBLISHED) for f in recorder.functions(source=False)]
    return lines_metrics(functions, rank)
