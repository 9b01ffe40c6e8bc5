"""Applies a decorator to functions and classes, and wraps functions to trace them while they run.

Functions are wrapped where Python has no `sys.monitoring`. A wrapper is of the same kind as what it
wraps (function, generator, coroutine, asynchronous generator), since frameworks check that. Each
stretch of a generator or coroutine between two suspensions is traced in the thread that runs it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.line_profiling.profiler import LineRecorder


def traced(function: Callable[..., Any], recorder: LineRecorder) -> Callable[..., Any]:
    """The function, followed by the recorder while it is on."""
    if inspect.isasyncgenfunction(function):
        return _async_generator(function, recorder)
    if inspect.iscoroutinefunction(function):
        return _coroutine(function, recorder)
    if inspect.isgeneratorfunction(function):
        return _generator(function, recorder)
    return _plain(function, recorder)


def _is_compiling() -> Callable[[], bool]:
    """A function that `torch.compile` takes for True, so that it compiles none of the wrapper."""
    compiler: Any = getattr(sys.modules.get("torch"), "compiler", None)
    is_compiling: Callable[[], bool] = getattr(compiler, "is_compiling", lambda: False)
    return is_compiling


def _plain(function: Callable[..., Any], recorder: LineRecorder) -> Callable[..., Any]:
    is_compiling = _is_compiling()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not recorder.on:
            return function(*args, **kwargs)
        with recorder.scope():
            return function(*args, **kwargs)

    return call


def _generator(function: Callable[..., Any], recorder: LineRecorder) -> Callable[..., Any]:
    is_compiling = _is_compiling()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return (yield from function(*args, **kwargs))
        return (yield from _Stretches(function(*args, **kwargs), recorder))

    return call


def _coroutine(function: Callable[..., Any], recorder: LineRecorder) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await _Stretches(function(*args, **kwargs), recorder)

    return call


def _async_generator(function: Callable[..., Any], recorder: LineRecorder) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        items = function(*args, **kwargs)
        step = items.__anext__()
        while True:
            try:
                value = await _Stretches(step, recorder)
            except StopAsyncIteration:
                return
            try:
                sent = yield value
            except GeneratorExit:
                await _Stretches(items.aclose(), recorder)
                raise
            except BaseException as error:  # what is thrown in is passed to the generator
                step = items.athrow(error)
            else:
                step = items.asend(sent)

    return call


class _Stretches:
    """Traces each stretch of a generator, a coroutine or a step of one.

    `yield from` and `await` pass on everything: values, exceptions, the end.
    """

    def __init__(self, inner: Any, recorder: LineRecorder) -> None:
        self._inner = inner if hasattr(inner, "send") else inner.__await__()
        self._recorder = recorder

    def __iter__(self) -> _Stretches:
        return self

    __await__ = __iter__

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        with self._recorder.scope():
            return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        with self._recorder.scope():
            return self._inner.throw(*error)

    def close(self) -> None:
        with self._recorder.scope():
            self._inner.close()


def decorate(target: Any, follow: Callable[[Any], Any]) -> Any:
    """The target with its functions replaced.

    Args:
        target: function, method, `staticmethod`, `classmethod`, `property` or class.
        follow: takes a function and returns its replacement.
    """
    if inspect.isclass(target):
        for name, member in _members(target):
            changed = decorate(member, follow)
            if changed is not member:
                setattr(target, name, changed)
        return target
    if isinstance(target, (staticmethod, classmethod)):
        inner = target.__func__
        changed = follow(inner)
        return target if changed is inner else type(target)(changed)
    if isinstance(target, property):
        accessors = (target.fget, target.fset, target.fdel)
        changed = tuple(None if part is None else follow(part) for part in accessors)
        if changed == accessors:
            return target
        property_type: Any = type(target)
        return property_type(*changed, target.__doc__)
    if isinstance(target, functools.cached_property):
        target.func = follow(target.func)
        return target
    return follow(target)


def _members(owner: type) -> list[tuple[str, Any]]:
    """The members of a class body that have Python code."""
    return [
        (name, member)
        for name, member in list(vars(owner).items())
        if isinstance(member, (staticmethod, classmethod, property, functools.cached_property))
        or inspect.isfunction(member)
    ]


def functions_of(target: Any) -> list[Any]:
    """The function itself, or all functions of a class body or a property."""
    if inspect.isclass(target):
        return [part for _, member in _members(target) for part in functions_of(member)]
    if isinstance(target, property):
        return [part for part in (target.fget, target.fset, target.fdel) if part is not None]
    return [target.func if isinstance(target, functools.cached_property) else target]
