"""The line profiler for a job: decorators, a context manager, reports.

    @gpumem_otel.profile
    def step(batch): ...

Independent of `install()`: a decorated function is profiled from its first call on, and its lines
are printed when the process ends. docs/line-profiler.md has examples with their output.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from gpumem_otel.errors import ConfigError
from gpumem_otel.line_profiling.decorators import decorate, functions_of, traced
from gpumem_otel.line_profiling.profiler import LineRecorder, publish
from gpumem_otel.line_profiling.render import LineReport

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from typing import TextIO

    from typing_extensions import Self

    from gpumem_otel.line_profiling.profiler import CounterReader

    Decorated = TypeVar("Decorated")


class LineProfiler:
    """Profiles functions line by line, while it is on.

        with gpumem_otel.LineProfiler(forward, loss) as lines:
            train_one_step()
        print(lines.display())

    Before Python 3.12 it profiles the thread that switched it on and threads started meanwhile;
    from 3.12 on every thread.

    Args:
        functions: functions, methods or classes.
        columns: counters to read besides the usual ones, named as in `torch.cuda.memory_stats()`.
        target_gpu: the device to show; all are read anyway.
        reader: makes the reader of counters, by default that of torch.
    """

    def __init__(
        self,
        *functions: Any,
        columns: Sequence[str] = (),
        target_gpu: Any = None,
        reader: Callable[[tuple[str, ...]], CounterReader] | None = None,
    ) -> None:
        _check_columns(columns)
        columns = tuple(columns)
        self.recorder = (
            LineRecorder(columns) if reader is None else LineRecorder(columns, reader=reader)
        )
        target = _device_index(target_gpu)
        self.recorder.target = lambda: _STATE.target if target is None else target
        self.recorder.finished = self._finished
        self._every: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._scope: ExitStack | None = None
        for function in functions:
            self.add_function(function)

    def __enter__(self) -> Self:
        self.enable()
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()

    def add_function(self, function: Any) -> None:
        """Profile one more function, or every function of a class.

        Raises:
            ConfigError: it has no Python code.
        """
        for each in functions_of(function):
            self.recorder.add(each)

    def enable(self) -> None:
        """Profile the functions from now on."""
        self.recorder.start()
        if self._scope is None:
            self._scope = self.recorder.scope(threads=True)

    def disable(self) -> None:
        """Stop profiling; the functions run as before."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.close()
        self.recorder.stop()

    def clear(self) -> None:
        """Delete what was counted so far."""
        self.recorder.clear()

    def display(
        self, func: Any = None, columns: Sequence[str] = (), device: Any = None
    ) -> LineReport:
        """A report of the lines so far; `print` and notebooks show it.

        Args:
            func: a function, its qualified name, or a list of either; None: all.
            columns: names of counters to show instead of the usual columns.
            device: the one to show.

        Raises:
            ConfigError: a function that is not profiled, or a column that was not read.
        """
        missing = [name for name in columns if name not in self.recorder.columns]
        if missing:
            raise ConfigError(
                f"display: {missing[0]!r} was not read; give it to LineProfiler(columns=...) or "
                f"profile(columns=...). There are: {', '.join(self.recorder.columns)}"
            )
        numbers = None if func is None else self._numbers(func)
        return LineReport(
            self.recorder.functions(numbers),
            self.recorder.profiles(),
            columns=columns,
            device=_device_index(device),
        )

    def print_stats(
        self, func: Any = None, columns: Sequence[str] = (), stream: TextIO | None = None
    ) -> None:
        """Write `display(func, columns)` as text, to standard output by default."""
        print(self.display(func, columns), file=stream or sys.stdout, end="")

    def _numbers(self, func: Any) -> list[int]:
        numbers: list[int] = []
        for function in func if isinstance(func, (list, tuple)) else [func]:
            if isinstance(function, str):
                matching = self.recorder.numbers_named(function)
            else:
                number = self.recorder.number_of(function)
                matching = [] if number is None else [number]
            if not matching:
                raise ConfigError(f"display: {function!r} is not profiled")
            numbers += matching
        return numbers

    def every(self, number: int, calls: int, columns: tuple[str, ...]) -> None:
        """Print a function's lines after each of so many calls."""
        self._every[number] = (calls, columns)

    def _finished(self, number: int, calls: int) -> None:
        interval, columns = self._every.get(number, (0, ()))
        if interval and calls % interval == 0:
            functions = self.recorder.functions([number])
            print(LineReport(functions, columns=columns), flush=True)  # noqa: T201


class _State:
    """The decorators' profilers of this process: one for each set of extra columns."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.target: int | None = None
        self.profilers: dict[tuple[str, ...], LineProfiler] = {}
        self.shown: list[tuple[LineProfiler, int, tuple[str, ...]]] = []


_STATE = _State()


def line_profiler(columns: Sequence[str] = ()) -> LineProfiler:
    """The profiler of `@profile` and `@profile_every`: display, clear, disable.

    Args:
        columns: those of the decorator.
    """
    key = tuple(columns)
    profiler = _STATE.profilers.get(key)
    if profiler is None:
        profiler = _STATE.profilers[key] = LineProfiler(columns=key)
        publish(profiler.recorder)
    return profiler


def set_target_gpu(gpu: Any) -> None:
    """Show only this device for the lines that run from now on, in all profilers.

    All devices are read anyway; JSON, pprof and metrics hold them all.

    Args:
        gpu: index, `torch.device` or "cuda:1"; None: all devices.

    Raises:
        ConfigError: it is none of these.
    """
    _STATE.target = _device_index(gpu)


@overload
def profile(
    target: Decorated, /, *, columns: Sequence[str] = ..., enable: bool = ..., show: bool = ...
) -> Decorated: ...
@overload
def profile(
    *, columns: Sequence[str] = ..., enable: bool = ..., show: bool = ...
) -> Callable[[Decorated], Decorated]: ...
def profile(
    target: Any = None, /, *, columns: Sequence[str] = (), enable: bool = True, show: bool = True
) -> Any:
    """Profile GPU memory line by line; printed when the process ends.

    For functions, methods, generators, coroutines and classes (all their functions), below or
    above `staticmethod`, `classmethod` and `property`. From Python 3.12 on the function itself is
    returned; before, a wrapper that traces it while it runs.

    Args:
        target: what is decorated.
        columns: counters to show instead of the usual columns, by their names in
            `torch.cuda.memory_stats()`.
        enable: False leaves the function as it is.
        show: print the lines at the end of the process.

    Raises:
        ConfigError: it has no Python code.
    """
    _check_columns(columns)
    if target is None:
        return functools.partial(_profile, columns=tuple(columns), enable=enable, show=show)
    return _profile(target, columns=tuple(columns), enable=enable, show=show)


def profile_every(
    output_interval: int = 1, enable: bool = True, columns: Sequence[str] = ()
) -> Callable[[Decorated], Decorated]:
    """Profile a function, and print its lines after every so many calls.

    Args:
        output_interval: calls between two prints; the numbers count from the first call on.
        enable: False leaves the function as it is.
        columns: as of `profile`.

    Raises:
        ConfigError: the interval is not a whole number of at least 1.
    """
    if type(output_interval) is not int or output_interval < 1:
        raise ConfigError(f"profile_every({output_interval!r}): give a whole number from 1 on")
    _check_columns(columns)
    return functools.partial(
        _profile, columns=tuple(columns), enable=enable, show=False, every=output_interval
    )


def _profile(
    target: Any, *, columns: tuple[str, ...], enable: bool, show: bool, every: int = 0
) -> Any:
    if not enable:
        return target
    _check_columns(columns)
    profiler = line_profiler(columns)

    def follow(function: Any) -> Any:
        number = profiler.recorder.add(function)
        if number is None:
            return function
        if every:
            profiler.every(number, every, columns)
        if show:
            _show_at_exit(profiler, number, columns)
        # with sys.monitoring the function itself is profiled, without a wrapper
        return function if hasattr(sys, "monitoring") else traced(function, profiler.recorder)

    decorated = decorate(target, follow)
    profiler.recorder.start()
    return decorated


def _show_at_exit(profiler: LineProfiler, number: int, columns: tuple[str, ...]) -> None:
    if not _STATE.shown:
        atexit.register(_print_at_exit)
    if all((profiler, number) != shown[:2] for shown in _STATE.shown):
        _STATE.shown.append((profiler, number, columns))


def _print_at_exit() -> None:
    if _STATE.pid != os.getpid():
        return
    parts = []
    for profiler, number, columns in _STATE.shown:
        functions = [f for f in profiler.recorder.functions([number]) if f.rows]
        if functions:
            parts.append(str(LineReport(functions, columns=columns)))
        elif profiler.recorder.failure:
            parts.append(f"lines were not profiled: {profiler.recorder.failure}\n")
    if parts:
        try:
            print("\n".join(dict.fromkeys(parts)), end="", flush=True)  # noqa: T201
        except (OSError, ValueError):
            return  # standard output is closed


def _check_columns(columns: Sequence[object]) -> None:
    """Check that these can be names of counters.

    Raises:
        ConfigError: one cannot.
    """
    if isinstance(columns, str) or not isinstance(columns, Sequence):
        raise ConfigError(f"columns: {columns!r} is not a tuple of names, such as ('...',)")
    for name in columns:
        if not isinstance(name, str) or len(name.split(".")) not in {1, 3}:
            raise ConfigError(
                f"columns: {name!r} is no name of torch.cuda.memory_stats(), "
                "such as 'active_bytes.all.peak'"
            )


def _device_index(device: Any) -> int | None:
    """The index of a device given as number, `torch.device` or text.

    Raises:
        ConfigError: it is none of these.
    """
    if device is None or (isinstance(device, int) and not isinstance(device, bool)):
        return device
    kind, _, number = str(device).partition(":")
    if kind == "cuda" and number.isdigit():
        return int(number)
    raise ConfigError(f"device {device!r}: give an index, a torch.device with one, or 'cuda:0'")
