"""What is known of an allocation that failed, as a log entry and as a line of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_otel.base.text import human_bytes, percent, table
from gpumem_otel.profiles.stack_text import count_of, short_frame, short_line, shown_frames
from gpumem_otel.snapshot.tensor_classes import CLASS_LABEL, TensorClass

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpumem_otel.base.profile import DeviceTotals, HeapProfile, Sample, Stack

OOM_EVENT = "gpumem_oom"
"""Value of `event` in the JSON line, for filters of log pipelines."""

TOP_HOLDERS = 5
_JSON_FRAMES = 4
_CLASSES = frozenset(each.value for each in TensorClass)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """What torch says about an allocation that failed.

    Attributes:
        oom_id: unique over all ranks; label of its profile.
        limit_bytes: what the job may take of the device, as in the exception.
        free_bytes: free on the device.
        time_ns: nanoseconds since 1970.
        thread: name of the thread that allocated.
        unseen: failures on this device before it, since the last one that was read.
    """

    oom_id: str
    device: int
    asked_bytes: int
    limit_bytes: int
    free_bytes: int
    time_ns: int
    thread: str = ""
    unseen: int = 0


@dataclass(frozen=True, slots=True)
class HoldingStack:
    """One stack and what it holds; its tensor class is separate, "" if unknown."""

    stack: Stack
    objects: int
    size_bytes: int
    tensor_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Everything that is reported about one failure.

    Attributes:
        profile: of its device; None if there is none.
        totals: of the same snapshot; None if there is none.
        note: when the profile was taken, one clause; "" for the moment of the failure itself.
    """

    oom: OutOfMemory
    rank: int
    profile: HeapProfile | None = None
    totals: DeviceTotals | None = None
    steps: int = 0
    note: str = ""


def cached_by_cause(totals: DeviceTotals) -> dict[str, int]:
    """Reserved but not allocated, by the causes of `gpumem_cached_bytes`; without zeros."""
    parts = {
        "waiting_for_stream": totals.pending_free_bytes,
        "split_remainders": totals.split_remainder_bytes,
        "private_pools": totals.private_pool_free_bytes,
        "free_segments": totals.free_segment_bytes,
    }
    return {cause: size for cause, size in parts.items() if size}


def split_class(sample: Sample) -> tuple[Stack, str]:
    """A sample's stack and its tensor class, from the label or the root frame; "" without one."""
    for name, value in sample.labels:
        if name == CLASS_LABEL:
            return sample.frames, value
    root = sample.frames[-1]
    if len(sample.frames) > 1 and not root.filename and root.name in _CLASSES:
        return sample.frames[:-1], root.name
    return sample.frames, ""


def holders(profile: HeapProfile, number: int = TOP_HOLDERS) -> list[HoldingStack]:
    """The stacks that hold most, the largest first."""
    largest = sorted(profile.samples, key=lambda sample: -sample.size_bytes)[:number]
    stacks = []
    for sample in largest:
        stack, tensor_class = split_class(sample)
        stacks.append(HoldingStack(stack, sample.objects, sample.size_bytes, tensor_class))
    return stacks


def class_totals(profile: HeapProfile) -> dict[str, int]:
    """Bytes of each tensor class, the largest first; {} if no class is known."""
    totals: dict[str, int] = {}
    for sample in profile.samples:
        tensor_class = split_class(sample)[1]
        if tensor_class:
            totals[tensor_class] = totals.get(tensor_class, 0) + sample.size_bytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def json_line(account: Account) -> str:
    """The failure as one line of JSON, without a line end; keys are stable."""
    oom, totals, profile = account.oom, account.totals, account.profile
    line: dict[str, object] = {
        "event": OOM_EVENT,
        "rank": account.rank,
        "device": oom.device,
        "oom_id": oom.oom_id,
        "time": oom.time_ns / 1e9,
        "asked_bytes": oom.asked_bytes,
        "free_bytes": oom.free_bytes,
        "limit_bytes": oom.limit_bytes,
        "allocated_bytes": totals.allocated_bytes if totals else None,
        "cached_bytes": totals.reserved_bytes - totals.allocated_bytes if totals else None,
        "cached": cached_by_cause(totals) if totals else {},
        "classes": class_totals(profile) if profile else {},
        "top": [_as_json(holder) for holder in holders(profile)] if profile else [],
    }
    if oom.unseen:
        line["unseen"] = oom.unseen
    if account.note:
        line["note"] = account.note
    return json.dumps(line, separators=(",", ":"))


def _as_json(holder: HoldingStack) -> dict[str, object]:
    stack = holder.stack
    return {
        "bytes": holder.size_bytes,
        "objects": holder.objects,
        "class": holder.tensor_class or None,
        "stack": [short_frame(stack[index]) for index in shown_frames(stack, _JSON_FRAMES)],
    }


def log_block(account: Account) -> str:
    """The failure for people: the request, the free memory, and what holds the rest."""
    oom, totals, profile = account.oom, account.totals, account.profile
    failure = (
        f"out of memory on device {oom.device} of rank {account.rank}: asked for "
        f"{human_bytes(oom.asked_bytes)}, {human_bytes(oom.free_bytes)} of the device are free, "
        f"the job may take {human_bytes(oom.limit_bytes)}"
    )
    lines = [failure, _circumstances(account)]
    if totals is not None:
        cached = totals.reserved_bytes - totals.allocated_bytes
        line = f"  allocated {human_bytes(totals.allocated_bytes)}, cached {human_bytes(cached)}"
        lines.append(line + _in_brackets(cached_by_cause(totals)))
    if profile is None:
        lines.append(f"  no profile: {account.note or 'it could not be made'}")
        return "\n".join(lines)
    if account.note:
        lines.append(f"  {account.note}")
    classes = class_totals(profile)
    if classes:
        lines.append(f"  by class: {_listed(classes)}")
    lines += _rows(profile, holders(profile))
    return "\n".join(lines)


def _circumstances(account: Account) -> str:
    oom = account.oom
    parts = [f"oom_id {oom.oom_id}"]
    if account.steps:
        parts.append(f"after step {account.steps}")
    if oom.thread:
        parts.append(f"thread {oom.thread}")
    if oom.unseen:
        parts.append(f"{count_of(oom.unseen, 'more')} since the last report")
    return "  " + ", ".join(parts)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {human_bytes(size)}" for name, size in sizes.items())


def _in_brackets(sizes: Mapping[str, int]) -> str:
    return f" ({_listed(sizes)})" if sizes else ""


def _rows(profile: HeapProfile, top: Sequence[HoldingStack]) -> list[str]:
    total = profile.total_bytes
    rows = [
        (
            human_bytes(holder.size_bytes),
            percent(holder.size_bytes, total),
            f"{holder.objects:,}",
            holder.tensor_class or "-",
            short_line(holder.stack),
        )
        for holder in top
    ]
    headers = ("held", "share", "count", "class", "stack, innermost first")
    text = table(headers, rows, left=frozenset({3, 4}))
    left = len(profile.samples) - len(top)
    lines = [f"  {line}" for line in text.splitlines()]
    return [*lines, f"  ... {count_of(left, 'more stack')}"] if left > 0 else lines
