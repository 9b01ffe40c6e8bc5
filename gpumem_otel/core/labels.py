"""What an allocation can be told apart by beside its stack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from gpumem_otel.core.rawform import DEFAULT_POOL
from gpumem_otel.core.spans import Spans

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.core.replay import Replay
    from gpumem_otel.core.snapshot import Snapshot
    from gpumem_otel.core.sums import Labels

__all__ = ["LABELS", "Label", "labeller", "pool_name"]

Label = Literal["pool", "compile_context", "annotation"]
"""`pool`: memory pool; `compile_context`: the region of `torch.compile`, torch 2.8 and newer;
`annotation`: the innermost annotated range in which it was allocated, torch 2.5 and newer."""

LABELS: tuple[str, ...] = get_args(Label)

_NONE = "[none]"
_UNKNOWN = "[unknown]"
_BEFORE = "[before the trace]"
_AFTER = "[after the trace]"


def pool_name(pool: tuple[int, int] | None) -> str:
    """A pool for people: `default`, or the two numbers of a private one."""
    if pool is None:
        return _UNKNOWN
    return "default" if pool == DEFAULT_POOL else f"{pool[0]},{pool[1]}"


def labeller(snapshot: Snapshot, replay: Replay, label: Label) -> Callable[[int], Labels]:
    """A function from the index of an allocation to its label.

    Raises:
        ValueError: there is no such label.
    """
    if label == "pool":
        pools = [((label, pool_name(pool)),) for pool in replay.pools]
        return lambda index: pools[replay.pool[index]]
    traced = replay.traced

    def outside(index: int) -> Labels:
        return ((label, _BEFORE if index < traced.start else _AFTER),)

    if label == "compile_context":
        contexts = [((label, context or _NONE),) for context in replay.contexts]
        return lambda index: contexts[replay.context[index]] if index in traced else outside(index)
    if label != "annotation":
        raise ValueError(f"label {label!r}: not one of {', '.join(LABELS)}")
    spans = Spans(snapshot.annotations_of(replay.device))
    unknown: Labels = ((label, _UNKNOWN),)

    def annotation(index: int) -> Labels:
        if index not in traced:
            return outside(index)
        time_us = replay.time_us[replay.born[index]]
        if time_us < 0:
            return unknown
        name = spans.innermost(time_us)
        return ((label, _NONE if name is None else name),)

    return annotation
