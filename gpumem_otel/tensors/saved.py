"""What autograd saved for backward, read from its graph without unpacking anything.

Unpacking a saved tensor runs the job's hooks (offloading copies it back, checkpointing computes it
again), so only tensors that have no hook are looked at, through the attributes that torch gives the
raw saved variable (`data` and `unpack_hook`); a torch that lacks them tells nothing. Nodes lock
while they run: the caller makes sure that no backward does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_RAW: Final = "_raw_saved_"
_MOST_NODES: Final = 100_000


def can_be_read(torch: Any) -> bool:
    """Whether this torch shows what a saved variable holds, and whether a hook packed it."""
    try:
        kind = torch._C._autograd.SavedTensor  # noqa: SLF001
    except AttributeError:
        return False
    return hasattr(kind, "data") and hasattr(kind, "unpack_hook")


def saved_tensors(torch: Any, roots: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """(node and what it is to it, tensor) of all that the graphs behind some nodes saved.

    Args:
        torch: the module.
        roots: `grad_fn` of tensors; a node that several reach is looked at once.
    """
    if not can_be_read(torch):
        return
    names: dict[type, tuple[str, ...]] = {}
    todo = list(roots)
    seen: dict[int, Any] = {}  # alive, so that no id is given out again
    while todo and len(seen) < _MOST_NODES:
        node = todo.pop()
        if node is None or id(node) in seen:  # torch gives a node one wrapper while that lives
            continue
        seen[id(node)] = node
        kind = type(node)
        raw = names.get(kind)
        if raw is None:
            raw = names[kind] = tuple(name for name in dir(kind) if name.startswith(_RAW))
        for name in raw:
            yield from _of_attribute(torch, node, name)
        try:
            todo += [following for following, _ in node.next_functions if following is not None]
        except Exception:  # noqa: S112 - a node of a stranger
            continue


def _of_attribute(torch: Any, node: Any, name: str) -> Iterator[tuple[str, Any]]:
    try:
        raw = getattr(node, name)
        several = raw if isinstance(raw, tuple) else (raw,)
        label = f"{type(node).__name__}.{name.removeprefix(_RAW)}"
        for number, one in enumerate(several):
            if one is None or one.unpack_hook is not None:
                continue
            tensor = one.data
            if isinstance(tensor, torch.Tensor):
                yield (label if len(several) == 1 else f"{label}[{number}]"), tensor
    except Exception:  # released meanwhile
        return
