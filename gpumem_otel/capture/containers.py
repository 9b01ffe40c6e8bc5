"""Tensors inside containers and objects, without caring what those are."""

from __future__ import annotations

from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.capture.objects import instance_dict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["MOST_PARTS", "tensors_in"]

MOST_PARTS: Final = 200_000
_MOST_DEPTH: Final = 6


def tensors_in(item: Any, tensor_type: type, most: int = MOST_PARTS) -> Iterator[Any]:
    """Tensors in containers and in attributes of objects, which are not asked for them.

    Args:
        item: where to begin.
        tensor_type: what to look for.
        most: parts of any kind to look at, the numbers in a list too.
    """
    todo: list[tuple[Any, int]] = [(item, 0)]
    seen: set[int] = set()
    left = most
    while todo:
        part, depth = todo.pop()
        if isinstance(part, tensor_type):
            yield part
            continue
        if depth > _MOST_DEPTH or isinstance(
            part, str | bytes | int | float | type | ModuleType | None
        ):
            continue
        if id(part) in seen:
            continue
        seen.add(id(part))
        inside = list(islice(_parts_of(part), left))
        left -= len(inside)
        todo += [(inner, depth + 1) for inner in inside]


def _parts_of(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return list(item.values())  # in one go: another thread may add to it
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    return list(instance_dict(item).values())
