"""Finds the storages of tensors of every kind, and tensors inside containers and objects.

Reading a storage's address costs 0.3 us of the caller's thread and touches nothing else. Tensors
made of several tensors (DTensor, jagged, sparse, quantized per channel, other wrappers) are taken
apart; meta, fake and uninitialised tensors have no storage.
"""

from __future__ import annotations

import sys
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.capture.objects.python_objects import instance_dict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MOST_PARTS: Final = 200_000
_MOST_DEPTH: Final = 6


def tensors_in(item: Any, tensor_type: type, most: int = MOST_PARTS) -> Iterator[Any]:
    """Tensors in containers and in attributes of objects, without running their code.

    Args:
        item: where to start.
        tensor_type: type to search for.
        most: limit for visited parts of any kind, numbers in a list included.
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
        return list(item.values())  # in one step: another thread may add to it
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    return list(instance_dict(item).values())


_MOST_PARTS: Final = 256
_OF_COO: Final = ("_indices", "_values")
_OF_COMPRESSED: Final = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")


def parts_of(torch: Any, tensor: Any) -> list[tuple[str, Any]]:
    """(suffix of its name, tensor with one storage) of each part, for reports.

    A wrapper around one tensor (DTensor) has no suffix. Storages shared by parts are not merged.

    Args:
        torch: the module.
        tensor: any tensor. Call within `torch._C.DisableTorchFunctionSubclass()`.

    Raises:
        Exception: whatever a subclass raises.
    """
    parts: list[tuple[str, Any]] = []
    todo: list[tuple[str, Any]] = [("", tensor)]
    while todo and len(parts) < _MOST_PARTS:
        name, part = todo.pop(0)
        inner = _inside(torch, part)
        if not inner:
            parts.append((name, part))
            continue
        if len(inner) == 1 and inner[0][1] is not part:
            todo.insert(0, (name, inner[0][1]))
            continue
        parts += [(name, one) for _, one in inner if one is part]
        todo[:0] = [(f"{name}.{suffix}", one) for suffix, one in inner if one is not part]
    return parts


def _inside(torch: Any, part: Any) -> list[tuple[str, Any]]:
    """(attribute, tensor) of each inner tensor, itself for its own storage; [] if it is plain."""
    flatten = getattr(type(part), "__tensor_flatten__", None)
    if flatten is not None:
        inner = [(name.lstrip("_"), getattr(part, name, None)) for name in flatten(part)[0]]
        return [(name, one) for name, one in inner if isinstance(one, torch.Tensor)]
    if part.layout is not torch.strided:
        return _of_layout(part, _OF_COO if part.layout is torch.sparse_coo else _OF_COMPRESSED)
    if part.is_quantized and "channel" in str(part.qscheme()):
        return [
            ("", part),
            ("scales", part.q_per_channel_scales()),
            ("zero_points", part.q_per_channel_zero_points()),
        ]
    return []


def _of_layout(part: Any, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    inner = []
    for name in names:
        try:
            inner.append((name.lstrip("_"), getattr(part, name)()))
        except (AttributeError, RuntimeError):  # noqa: PERF203 - each layout has some of them
            continue
    return inner


_SPARSE_PARTS = {
    "torch.sparse_coo": ("_indices", "_values"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
    "torch.jagged": ("values", "offsets"),
}


def storages_of(tensor: Any) -> list[Any]:
    """The distinct storages of a tensor; [] if it has none. Never raises.

    Args:
        tensor: a `torch.Tensor` or a subclass; anything else gives [].

    Returns:
        `torch.UntypedStorage` objects.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found: dict[int, Any] = {}
    try:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - public in torch.overrides' docs
            _collect(torch, tensor, found)
    except Exception:  # a subclass may run any code
        return list(found.values())
    return list(found.values())


def address_of(storage: Any) -> int:
    """The address of a storage, 0 if it has no memory. Never raises."""
    try:
        return int(storage.data_ptr())
    except Exception:
        return 0


def _collect(torch: Any, tensor: Any, found: dict[int, Any]) -> None:
    todo = [tensor]
    for _ in range(_MOST_PARTS):
        if not todo:
            return
        part = todo.pop()
        if not isinstance(part, torch.Tensor):
            continue
        flatten = getattr(type(part), "__tensor_flatten__", None)
        if flatten is not None:
            todo += [getattr(part, name, None) for name in flatten(part)[0]]
            continue
        if part.layout is not torch.strided:
            names = _SPARSE_PARTS.get(str(part.layout), ())
            todo += [getattr(part, name)() for name in names]
            continue
        if part.is_quantized and "channel" in str(part.qscheme()):
            todo += [part.q_per_channel_scales(), part.q_per_channel_zero_points()]
        storage = part.untyped_storage()
        found.setdefault(storage._cdata, storage)  # noqa: SLF001 - the identity of a storage


def storage_again(torch: Any, weak: WeakStorage) -> Any | None:
    """The storage of a weak reference; None if it is gone, or torch cannot return it."""
    again = getattr(torch.UntypedStorage, "_new_with_weak_ptr", None)
    return None if again is None or weak.expired() else again(weak.identity)


class WeakStorage:
    """Torch's weak reference to a storage; keeps no device memory.

    While it lives, torch does not reuse the storage's identity.

    Args:
        storage: a `torch.UntypedStorage`.
        expired: its `_expired`; `free` its `_free_weak_ref`.

    Attributes:
        identity: equal to the `_cdata` of the same storage.
    """

    __slots__ = ("_expired", "_free", "identity")

    @classmethod
    def of(cls, storage: Any) -> WeakStorage:
        """With the functions of its type; for many storages take them from the type once."""
        kind = type(storage)
        return cls(storage, kind._expired, kind._free_weak_ref)  # noqa: SLF001 - as torch.multiprocessing does

    def __init__(
        self, storage: Any, expired: Callable[[int], bool], free: Callable[[int], None]
    ) -> None:
        self.identity = storage._weak_ref()  # noqa: SLF001 - what torch.multiprocessing builds on
        self._expired = expired
        self._free = free

    def expired(self) -> bool:
        """Whether the storage is gone."""
        return self._expired(self.identity)

    def __del__(self) -> None:
        self._free(self.identity)
