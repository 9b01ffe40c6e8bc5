"""Labels of allocations: pool, compile context, annotated range, region and phase."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from gpumem_otel.snapshot.stacks import BACKWARD
from gpumem_otel.snapshot.torch_format import DEFAULT_POOL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gpumem_otel.base.aggregate import Labels
    from gpumem_otel.base.profile import Annotation
    from gpumem_otel.base.protocols import StacklessRule
    from gpumem_otel.snapshot.snapshot import TorchSnapshot
    from gpumem_otel.snapshot.torch_format import RawEvent, RawFrame
    from gpumem_otel.snapshot.trace import Replay

# Annotated ranges of time: `external_annotations` of a snapshot (torch 2.5 and newer).
#
# Format: `[{name, stage: START or END, device, time_us}]`, START and END in pairs, nested, from
# `record_function` under `_record_memory_history(global_record_annotations=True)`. Real files have
# a lone END too.


class AnnotatedRanges:
    """The ranges of one device.

    Attributes:
        ranges: (name, start_us, end_us), in order of their start; end is None where it is not in
            the file.
    """

    def __init__(self, annotations: Iterable[Annotation]) -> None:
        """Pair starts with ends: an end closes the innermost open range of its name.

        However deep they nest, a mark takes a constant time and keeps two numbers.

        Args:
            annotations: of the device, in any order.
        """
        self.ranges: list[tuple[str, int, int | None]] = []
        self._times: list[int] = []
        self._innermost: list[int] = []  # from each mark on; -1: none
        opened: list[int] = []  # some of them ended before what they hold did
        by_name: dict[str, list[int]] = {}
        for mark in sorted(annotations, key=_time):
            of_name = by_name.setdefault(mark.name, [])
            if mark.stage == "START":
                opened.append(len(self.ranges))
                of_name.append(len(self.ranges))
                self.ranges.append((mark.name, mark.time_us, None))
            elif of_name:
                place = of_name.pop()
                self.ranges[place] = (mark.name, self.ranges[place][1], mark.time_us)
                while opened and self.ranges[opened[-1]][2] is not None:
                    opened.pop()
            else:
                continue
            self._times.append(mark.time_us)
            self._innermost.append(opened[-1] if opened else -1)

    def innermost(self, time_us: int) -> str | None:
        """Name of the range that is open at a time and began last; None: no range is.

        A range holds its start and not its end.
        """
        index = bisect_right(self._times, time_us) - 1
        place = self._innermost[index] if index >= 0 else -1
        return self.ranges[place][0] if place >= 0 else None


def _time(mark: Annotation) -> int:
    return mark.time_us


# Labels of recorded allocations: the code region that was marked, and the phase of the step.
#
# Both become labels of a series at a server, so their values are few and hold no running number.

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
    """What torch writes next to each allocation of a region."""
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
        labels = known.get(metadata)
        if labels is None:
            name = region_of(metadata)
            labels = ((REGION_LABEL, few(name)),) if name else ()
            if len(known) < 2 * MAX_REGIONS:
                known[metadata] = labels
        return labels

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
        annotations: of the device, see `AnnotatedRanges`.
        stackless: names the root of allocations without a stack.
        device: torch's index.
    """
    spans, few = AnnotatedRanges(annotations), _Few()
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


Label = Literal["pool", "compile_context", "annotation"]
"""`pool`: memory pool; `compile_context`: the region of `torch.compile`, torch 2.8 and newer;
`annotation`: the innermost annotated range in which it was allocated, torch 2.5 and newer."""

LABELS: tuple[str, ...] = get_args(Label)

_UNKNOWN = "[unknown]"
_BEFORE = "[before the trace]"
_AFTER = "[after the trace]"


def pool_name(pool: tuple[int, int] | None) -> str:
    """A pool for people: `default`, or the two numbers of a private one."""
    if pool is None:
        return _UNKNOWN
    return "default" if pool == DEFAULT_POOL else f"{pool[0]},{pool[1]}"


def labeller(snapshot: TorchSnapshot, replay: Replay, label: Label) -> Callable[[int], Labels]:
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
    spans = AnnotatedRanges(snapshot.annotations_of(replay.device))
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
