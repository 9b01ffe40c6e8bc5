"""Tensors inside containers and objects, without caring what those are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["tensors_in"]

_MOST_OBJECTS: Final = 200_000
_MOST_DEPTH: Final = 6


def tensors_in(item: Any, tensor_type: type) -> Iterator[Any]:
    """Tensors in containers and in attributes of objects, bounded in depth and number."""
    todo: list[tuple[Any, int]] = [(item, 0)]
    seen: set[int] = set()
    while todo and len(seen) < _MOST_OBJECTS:
        part, depth = todo.pop()
        if isinstance(part, tensor_type):
            yield part
            continue
        if depth > _MOST_DEPTH or isinstance(part, str | bytes | int | float | type | None):
            continue
        if id(part) in seen:
            continue
        seen.add(id(part))
        todo += [(inner, depth + 1) for inner in _parts_of(part)]


def _parts_of(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    return list(vars(item).values()) if hasattr(item, "__dict__") else ()
