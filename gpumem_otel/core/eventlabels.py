"""Labels of recorded allocations: the code region that was marked, and the phase of the step.

Both become labels of a series at a server, so their values are few and hold no running number.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.core.frames import BACKWARD
from gpumem_otel.core.spans import Spans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpumem_otel.core.model import Annotation
    from gpumem_otel.core.ports import StacklessRule
    from gpumem_otel.core.rawform import RawEvent, RawFrame
    from gpumem_otel.core.sums import Labels

__all__ = [
    "MAX_REGIONS",
    "PHASE_LABEL",
    "REGION_LABEL",
    "phase_of_annotation",
    "region_labels",
    "region_metadata",
    "region_of",
    "with_phases",
]

REGION_LABEL: Final = "region"
PHASE_LABEL: Final = "phase"
MAX_REGIONS: Final = 50
"""Distinct regions of one profile, and distinct phases; all others are `[other]`."""

_PREFIX: Final = "gpumem_otel.region="
_MAX_NAME: Final = 100
_REST: Final = "[other]"
_NONE: Final = "[none]"
_NUMBER: Final = re.compile(r"[\s#_:.\-]*\d+$")
_FORWARD: Final = re.compile(r"_(wrapped_)?call_impl")
_BACKWARD: Final = re.compile(r"_engine_run_backward|backward")


def region_metadata(name: str) -> str:
    """What torch is told to write beside each allocation of a region."""
    return f"{_PREFIX}{name[:_MAX_NAME]}"


def region_of(metadata: object) -> str:
    """Name of the region that an event carries, "" where none of ours is in it."""
    if not isinstance(metadata, str) or not metadata.startswith(_PREFIX):
        return ""
    return metadata[len(_PREFIX) :][:_MAX_NAME]


class _Few:
    """Values up to a number of distinct ones, then `[other]`."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._seen:
            if len(self._seen) >= MAX_REGIONS:
                return _REST
            self._seen.add(value)
        return value


def region_labels() -> Callable[[RawEvent], Labels]:
    """The label `region` of events allocated in one; what is in none has no label."""
    few = _Few()
    known: dict[object, Labels] = {"": (), None: ()}

    def labels_of(event: RawEvent) -> Labels:
        metadata: Any = event.get("user_metadata")
        found = known.get(metadata)
        if found is None:
            name = region_of(metadata)
            found = ((REGION_LABEL, few(name)),) if name else ()
            if len(known) < 2 * MAX_REGIONS:
                known[metadata] = found
        return found

    return labels_of


def phase_of_annotation(name: str) -> str:
    """`Optimizer.step#AdamW.step` is `optimizer.step`; a number at the end is no part of a phase.

    Names of torch's own ranges: `Optimizer.step#<class>.step` and `Optimizer.zero_grad#...` in
    `torch/optim/optimizer.py`, `DistributedDataParallel.forward`.
    """
    head = name.partition("#")[0]
    if head in {"Optimizer.step", "Optimizer.zero_grad"}:
        return "optimizer.step" if head == "Optimizer.step" else "zero_grad"
    if head == "DistributedDataParallel.forward":
        return "forward"
    if head.startswith("enumerate(DataLoader)"):
        return "data"
    return _NUMBER.sub("", name[:_MAX_NAME]).strip() or _NONE


def with_phases(
    labels_of: Callable[[RawEvent], Labels],
    annotations: Sequence[Annotation],
    stackless: StacklessRule | None,
    device: int,
) -> Callable[[RawEvent], Labels]:
    """The labels, and `phase`.

    The innermost annotated range that the event lies in; where there is none, what the stack says:
    `backward` where autograd's engine allocated, or was called from, `forward` inside a module;
    else `[none]`.

    Args:
        labels_of: other labels of an event.
        annotations: of the device, see `Spans`.
        stackless: names the root of allocations without a stack.
        device: torch's index.
    """
    spans, few = Spans(annotations), _Few()
    by_stack: dict[int, tuple[Any, str]] = {}

    def phase(event: RawEvent) -> str:
        time_us = event.get("time_us")
        name = spans.innermost(time_us) if time_us is not None else None
        if name is not None:
            return few(phase_of_annotation(name))
        frames = event.get("frames")
        if not frames:
            root = "" if stackless is None else stackless(device, event.get("addr"))
            return "backward" if root == BACKWARD else _NONE
        known = by_stack.get(id(frames))
        if known is None:
            known = by_stack[id(frames)] = (frames, _phase_of_stack(frames))
        return known[1]

    def both(event: RawEvent) -> Labels:
        return tuple(sorted((*labels_of(event), (PHASE_LABEL, phase(event)))))

    return both


def _phase_of_stack(frames: Sequence[RawFrame]) -> str:
    for frame in frames:
        filename, name = str(frame.get("filename", "")), str(frame.get("name", ""))
        if "torch" not in filename:
            continue
        path = filename.replace("\\", "/")
        if path.endswith("/torch/nn/modules/module.py") and _FORWARD.fullmatch(name):
            return "forward"
        if "/torch/autograd/" in path and _BACKWARD.fullmatch(name):
            return "backward"
    return _NONE
