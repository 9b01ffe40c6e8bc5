"""Reads what autograd saved for backward from its graph, without unpacking anything.

Unpacking a saved tensor runs the job's hooks (offloading copies it back, checkpointing computes it
again). So only tensors without a hook are read, through `data` and `unpack_hook` of the raw saved
variable; older versions of torch lack these. Nodes are locked while they run: the caller makes sure
that no backward does.
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
    """(node and attribute, tensor) of everything that the graphs behind some nodes saved.

    Args:
        torch: the module.
        roots: `grad_fn` of tensors; None is skipped.
    """
    if not can_be_read(torch):
        return
    names: dict[type, tuple[str, ...]] = {}
    todo = list(roots)
    seen: dict[int, Any] = {}  # keeps the nodes alive, so that no id is reused
    while todo and len(seen) < _MOST_NODES:
        node = todo.pop()
        if node is None or id(node) in seen:  # a node has one wrapper as long as that lives
            continue
        seen[id(node)] = node
        kind = type(node)
        if kind not in names:
            names[kind] = tuple(name for name in dir(kind) if name.startswith(_RAW))
        for name in names[kind]:
            yield from _of_attribute(torch, node, name)
        try:
            todo += [following for following, _ in node.next_functions if following is not None]
        except Exception:  # noqa: S112 - a node of another library
            continue


def _of_attribute(torch: Any, node: Any, name: str) -> Iterator[tuple[str, Any]]:
    try:
        raw = getattr(node, name)
        variables = raw if isinstance(raw, tuple) else (raw,)
        label = f"{type(node).__name__}.{name.removeprefix(_RAW)}"
        for number, variable in enumerate(variables):
            if variable is None or variable.unpack_hook is not None:
                continue
            tensor = variable.data
            if isinstance(tensor, torch.Tensor):
                yield (label if len(variables) == 1 else f"{label}[{number}]"), tensor
    except Exception:  # released meanwhile
        return


def grad_fn(tensor: Any) -> Any:
    """Its `grad_fn`, None where a subclass does not give it."""
    try:
        return tensor.grad_fn
    except Exception:
        return None
