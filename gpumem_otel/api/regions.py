"""Code regions: allocations in them carry their name in `allocated` profiles.

As a decorator a region is also a frame of its own in every flame graph, named after it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gpumem_otel.api import lifecycle
from gpumem_otel.errors import ConfigError
from gpumem_otel.snapshot.labels import region_metadata
from gpumem_otel.snapshot.stacks import REGION_FILE

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gpumem_otel.capture.metadata import AllocationMarks, OpenMark

    AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])


def _never() -> bool:
    return False


def _compiling() -> Callable[[], bool]:
    """`torch.compiler.is_compiling`: true while the compiler traces."""
    torch: Any = sys.modules.get("torch")
    return getattr(getattr(torch, "compiler", None), "is_compiling", _never)


class Region:
    """One use of a region, as context manager or decorator; `region` makes it."""

    __slots__ = ("_is_compiling", "_mark", "_marks", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_compiling = _compiling()
        self._marks: AllocationMarks | None = None
        self._mark: OpenMark | None = None

    def __enter__(self) -> None:
        """Allocations of this thread carry the name from here on."""
        if self._is_compiling():
            return
        agent = lifecycle.current()
        marks = agent.marks if agent is not None else None
        if marks is not None:
            self._marks, self._mark = marks, marks.enter(region_metadata(self._name))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put back the label that was there before."""
        if self._mark is not None and self._marks is not None:
            self._marks.exit(self._mark)
            self._mark = None

    def __call__(self, function: AnyCallable) -> AnyCallable:
        """The function within the region, in a frame of that name.

        Coroutines and generators only get the frame: the label would also cover what runs while
        they are suspended.
        """
        if inspect.iscoroutinefunction(function):
            return _named(function, _coroutine(function), self._name)
        if inspect.isgeneratorfunction(function):
            return _named(function, _generator(function), self._name)
        if inspect.isasyncgenfunction(function):
            return function  # a wrapper would lose what is sent into it
        return _named(function, _plain(function, self._name), self._name)


def region(name: str) -> Region:
    """Name a part of the job: `with gpumem_otel.region("loss"):`, or `@gpumem_otel.region("loss")`.

    Allocations in it carry the label `region` in `allocated` profiles, if this torch can record it
    (2.10 and newer): those of this thread from torch 2.14 on, of all threads before. Allocations of
    backward are not part of it. As a decorator it is a frame in live and peak profiles as well.
    Under `torch.compile` it changes nothing; torch 2.3 breaks the graph there.

    Args:
        name: use few different names, without running numbers: it becomes a label of a series.

    Raises:
        ConfigError: the name is not a text, or empty.
    """
    given: object = name
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(f"region: its name must be a text, not {name!r}")
    return Region(given.strip())


def _plain(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with Region(name):
            return function(*args, **kwargs)

    return wrapper


def _coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return wrapper


def _generator(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return (yield from function(*args, **kwargs))

    return wrapper


def _named(function: AnyCallable, wrapper: Any, name: str) -> AnyCallable:
    # with "::" readers of the recording would take it for a C++ symbol
    shown = name.replace("::", ":")
    code = wrapper.__code__.replace(co_name=shown, co_filename=REGION_FILE)
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=shown)
    wrapper.__code__ = code
    return cast("AnyCallable", functools.wraps(function)(wrapper))
