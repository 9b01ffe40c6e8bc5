"""The line profiler as a job uses it: decorators, a context manager, reports.

    @gpumem_otel.profile
    def step(batch): ...

Independent of `install()`: a decorated function is followed from its first call on, and what its
lines did is printed when the process ends. docs/line-profiler.md has examples with their output.
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
    """Follows functions line by line, while it is on.

        with gpumem_otel.LineProfiler(forward, loss) as lines:
            train_one_step()
        print(lines.display())

    Before Python 3.12 it sees the thread that switched it on and threads started meanwhile; from
    3.12 on every thread.

    Args:
        functions: functions, methods or classes.
        columns: counters to read beside the usual ones, named as in `torch.cuda.memory_stats()`.
        target_gpu: the device to show; all are read in any case.
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
        """Follow one more function, or every function of a class.

        Raises:
            ConfigError: there is no Python code in it.
        """
        for one in functions_of(function):
            self.recorder.add(one)

    def enable(self) -> None:
        """Follow the functions from now on."""
        self.recorder.start()
        if self._scope is None:
            self._scope = self.recorder.scope(threads=True)

    def disable(self) -> None:
        """Follow them no more; functions are as if they had never been followed."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.close()
        self.recorder.stop()

    def clear(self) -> None:
        """Forget what was counted so far."""
        self.recorder.clear()

    def display(
        self, func: Any = None, columns: Sequence[str] = (), device: Any = None
    ) -> LineReport:
        """What the lines did so far; prints itself, and shows itself in a notebook.

        Args:
            func: a function, its qualified name, or a list of either; None: all.
            columns: names of counters to show in place of the usual columns.
            device: the one to show.

        Raises:
            ConfigError: a function that is not followed, or a column that was not read.
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
        found: list[int] = []
        for one in func if isinstance(func, (list, tuple)) else [func]:
            if isinstance(one, str):
                numbers = self.recorder.numbers_named(one)
            else:
                number = self.recorder.number_of(one)
                numbers = [] if number is None else [number]
            if not numbers:
                raise ConfigError(f"display: {one!r} is not profiled")
            found += numbers
        return found

    def every(self, number: int, calls: int, columns: tuple[str, ...]) -> None:
        """Print a function's lines at the end of every so many calls."""
        self._every[number] = (calls, columns)

    def _finished(self, number: int, calls: int) -> None:
        interval, columns = self._every.get(number, (0, ()))
        if interval and calls % interval == 0:
            functions = self.recorder.functions([number])
            print(LineReport(functions, columns=columns), flush=True)  # noqa: T201


class _State:
    """The decorators' profilers of this process: one for each set of further columns."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.target: int | None = None
        self.profilers: dict[tuple[str, ...], LineProfiler] = {}
        self.shown: list[tuple[LineProfiler, int, tuple[str, ...]]] = []


_STATE = _State()


def line_profiler(columns: Sequence[str] = ()) -> LineProfiler:
    """What `@profile` and `@profile_every` of this process count: display, clear, disable.

    Args:
        columns: those that the decorator was given, if it was.
    """
    key = tuple(columns)
    found = _STATE.profilers.get(key)
    if found is None:
        found = _STATE.profilers[key] = LineProfiler(columns=key)
        publish(found.recorder)
    return found


def set_target_gpu(gpu: Any) -> None:
    """Show this device for the lines that run from now on, in whatever profiler.

    All devices are read in any case; JSON, pprof and metrics hold them all.

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
    returned; before, one that traces it while it runs.

    Args:
        target: what is decorated.
        columns: counters to show in place of the usual columns, by their names in
            `torch.cuda.memory_stats()`.
        enable: False leaves the function as it is.
        show: print the lines at the end of the process.

    Raises:
        ConfigError: there is no Python code in it.
    """
    _check_columns(columns)
    if target is None:
        return functools.partial(_profile, columns=tuple(columns), enable=enable, show=show)
    return _profile(target, columns=tuple(columns), enable=enable, show=show)


def profile_every(
    output_interval: int = 1, enable: bool = True, columns: Sequence[str] = ()
) -> Callable[[Decorated], Decorated]:
    """Profile, and print a function's lines at the end of every so many calls.

    Args:
        output_interval: calls between two prints; what is printed counts from the first call on.
        enable: False leaves the function as it is.
        columns: as of `profile`.

    Raises:
        ConfigError: the interval is no whole number from 1 on.
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
        # with sys.monitoring the function itself is followed, and nothing is put around it
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
            return  # nobody reads it any more


def _check_columns(columns: Sequence[object]) -> None:
    """Whether these can be names of counters.

    Raises:
        ConfigError: one can not.
    """
    if isinstance(columns, str) or not isinstance(columns, Sequence):
        raise ConfigError(f"columns: {columns!r} is no tuple of names, such as ('...',)")
    for name in columns:
        if not isinstance(name, str) or len(name.split(".")) not in {1, 3}:
            raise ConfigError(
                f"columns: {name!r} is no name of torch.cuda.memory_stats(), "
                "such as 'active_bytes.all.peak'"
            )


def _device_index(device: Any) -> int | None:
    """Torch's index of a device given as number, `torch.device` or text.

    Raises:
        ConfigError: it is none of these.
    """
    if device is None or (isinstance(device, int) and not isinstance(device, bool)):
        return device
    kind, _, number = str(device).partition(":")
    if kind == "cuda" and number.isdigit():
        return int(number)
    raise ConfigError(f"device {device!r}: give an index, a torch.device with one, or 'cuda:0'")
