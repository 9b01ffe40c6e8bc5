"""A tensor that is several tensors inside -> its parts by name.

The same taking apart as in `storages`, with the names that a report shows and without merging what
parts share.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["parts_of"]

_MOST_PARTS: Final = 256
_OF_COO: Final = ("_indices", "_values")
_OF_COMPRESSED: Final = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")


def parts_of(torch: Any, tensor: Any) -> list[tuple[str, Any]]:
    """(what to add to its name, tensor with one storage) of each part.

    A wrapper around one tensor (DTensor) adds nothing to the name.

    Args:
        torch: the module.
        tensor: any tensor. Call within `torch._C.DisableTorchFunctionSubclass()`.

    Raises:
        Exception: whatever a subclass raises.
    """
    found: list[tuple[str, Any]] = []
    todo: list[tuple[str, Any]] = [("", tensor)]
    while todo and len(found) < _MOST_PARTS:
        name, part = todo.pop(0)
        inner = _inside(torch, part)
        if not inner:
            found.append((name, part))
            continue
        if len(inner) == 1 and inner[0][1] is not part:
            todo.insert(0, (name, inner[0][1]))
            continue
        found += [(name, one) for _, one in inner if one is part]
        todo[:0] = [(f"{name}.{suffix}", one) for suffix, one in inner if one is not part]
    return found


def _inside(torch: Any, part: Any) -> list[tuple[str, Any]]:
    """(attribute, tensor) of each tensor inside, its own storage as itself; [] for a plain one."""
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
    found = []
    for name in names:
        try:
            found.append((name.lstrip("_"), getattr(part, name)()))
        except (AttributeError, RuntimeError):  # noqa: PERF203 - each layout has some of them
            continue
    return found
