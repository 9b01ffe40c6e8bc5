"""A hook of a watched model that is copied and saved with nothing of ours in it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ModelHook"]


class ModelHook:
    """A hook of a watched model, which goes into no copy and no file of it.

    There stands a function of the standard library in its place that does nothing.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """As torch calls a hook."""
        self._call(*args)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, (nullcontext, "__exit__")
