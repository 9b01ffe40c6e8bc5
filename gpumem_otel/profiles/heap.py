"""Heap profiles: built from snapshots, budgeted, merged, compared, and checked.

Memory that cannot be shown by its stack is shown under a named root, so that totals equal those of
the allocator, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpumem_otel.base.aggregate import add, order_key, samples_of, scale, sum_up
from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sizes
from gpumem_otel.snapshot.labels import labeller
from gpumem_otel.snapshot.roots import builder_for, recorded_root, stackless_root
from gpumem_otel.snapshot.stacks import (
    NOT_RECORDED,
    OTHER,
    StackBuilder,
)
from gpumem_otel.snapshot.tensor_classes import CLASS_LABEL, TensorClass, class_of_root, other_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpumem_otel.base.aggregate import Labels, Totals
    from gpumem_otel.base.profile import Sample, Stack
    from gpumem_otel.base.protocols import FrameNamer, Pause, StacklessRule
    from gpumem_otel.snapshot.labels import Label
    from gpumem_otel.snapshot.snapshot import TorchSnapshot
    from gpumem_otel.snapshot.tensor_classes import ClassAs, Classifier
    from gpumem_otel.snapshot.torch_format import RawEvent
    from gpumem_otel.snapshot.trace import Replay

_BYTES_COUNTER = "requested_bytes.all.allocated"
_OBJECTS_COUNTER = "allocation.all.allocated"
_BLOCKS_PER_PAUSE = 32
_MOST_NS = 2**63 - 1
_CLASS_FRAMES = {found: Frame(found.value) for found in TensorClass}
_CLASS_LABELS: dict[TensorClass, Labels] = {
    found: ((CLASS_LABEL, found.value),) for found in TensorClass
}
_REQUESTED = "sizes are requested bytes, before the allocator rounds them"
"""Comment of a profile whose sizes are not those of the allocator's blocks."""


@dataclass(frozen=True, slots=True)
class DiffEntry:
    """What a stack holds more (or, negative, less) in the second of two profiles.

    Attributes:
        frames: leaf first.
    """

    frames: Stack
    objects: int
    size_bytes: int
    labels: tuple[tuple[str, str], ...] = ()


def live_profile(
    snapshot: TorchSnapshot,
    device: int,
    *,
    namer: FrameNamer,
    stackless: StacklessRule | None = None,
    time_ns: int = 0,
    pause: Pause | None = None,
    max_depth: int = 512,
    label: Label | None = None,
    classifier: Classifier | None = None,
    class_as: ClassAs = "root",
) -> HeapProfile:
    """What is alive on a device, by stack. The total is the allocator's `allocated`.

    Args:
        snapshot: what to read.
        device: torch's index.
        namer: names Python frames; not asked where the snapshot's names are final.
        stackless: names the root of blocks without a stack; by default the snapshot's own trace
            decides (see `stackless_root`).
        time_ns: moment of the reading, nanoseconds since 1970.
        pause: called after every stack.
        max_depth: frames per stack; the middle is cut.
        label: an additional label of the samples; only for files, since it replays the trace.
        classifier: tells tensor classes; not together with `label`.
        class_as: where the class is shown: as the root frame, or as the label `tensor_class`.
    """
    as_root = classifier is not None and class_as == "root"
    builder = builder_for(snapshot, namer, max(max_depth - as_root, 1))
    if label is not None:
        replay = snapshot.replay(device)
        alive = replay.alive(replay.events)
        labels = labeller(snapshot, replay, label)
        labelled = _replayed(replay, alive, builder, labels, blocks=True)
        return HeapProfile(ProfileKind.LIVE, device, samples_of(labelled), time_ns)
    totals: Totals = {}
    for count, group in enumerate(snapshot.live_groups(device, pause, classifier), 1):
        found = group.tensor_class
        if group.frames:
            stack = builder.build(group.frames)
        else:
            root = (
                stackless_root(group.has_event)
                if stackless is None
                else stackless(device, group.address)
            )
            stack, found = builder.root(root), found or class_of_root(root)
        key: tuple[Stack, Labels] = (stack, ())
        if classifier is not None and found is not None:
            key = ((*stack, _CLASS_FRAMES[found]), ()) if as_root else (stack, _CLASS_LABELS[found])
        add(totals, key, group.objects, group.size_bytes)
        if pause is not None and (group.frames or not count % _BLOCKS_PER_PAUSE):
            pause()
    return HeapProfile(ProfileKind.LIVE, device, samples_of(totals, pause), time_ns)


def allocated_profile(
    snapshot: TorchSnapshot,
    device: int,
    *,
    namer: FrameNamer,
    stackless: StacklessRule | None = None,
    requested_total_bytes: int | None = None,
    objects_total: int | None = None,
    time_ns: int,
    duration_ns: int,
    pause: Pause | None = None,
    max_depth: int = 512,
    label: Label | None = None,
    between_us: tuple[int, int] | None = None,
    labels_of: Callable[[RawEvent], Labels] | None = None,
) -> HeapProfile:
    """What was allocated, by stack: recorded events, scaled to the allocator's own counters.

    Sizes in a trace are requested bytes, so the counter to scale to is the growth of
    `requested_bytes.all.allocated`; the rounded `allocated_bytes` would mix units. The total is
    the counter's, exactly (largest remainder). What the counter saw and no event recorded is in
    `[not recorded]`.

    Args:
        snapshot: holds the events of the window, and no others.
        device: torch's index.
        namer: names Python frames; not asked where the snapshot's names are final.
        stackless: names the root of allocations without a stack.
        requested_total_bytes: growth of the counter over the interval; None: do not scale.
        objects_total: growth of `allocation.all.allocated`; None: do not scale.
        time_ns: end of the interval, nanoseconds since 1970.
        duration_ns: length of the interval.
        pause: called after every stack.
        max_depth: frames per stack; the middle is cut.
        label: an additional label of the samples; only for files, since it replays the trace.
        between_us: only events of this time, its end left out, microseconds since 1970; the
            counters are of more, and what was seen stands for all of it.
        labels_of: labels of an event, in place of `label`, without playing the trace through.
    """
    builder = builder_for(snapshot, namer, max_depth)
    totals: Totals = {}
    if label is None:
        since_us, until_us = between_us or (None, None)
        for group in snapshot.event_groups(
            device, since_us, until_us, pause=pause, labels_of=labels_of
        ):
            if group.frames:
                stack = builder.build(group.frames)
            else:
                stack = builder.root(recorded_root(stackless, device, group.address))
            add(totals, (stack, group.labels), group.objects, group.size_bytes)
            if pause is not None:
                pause()
    else:
        replay = snapshot.replay(device)
        totals = _replayed(replay, replay.traced, builder, labeller(snapshot, replay, label))
    recorded = samples_of(totals, pause)
    seen = sum(sample.objects for sample in recorded)
    sizes, missed_bytes, size_comment = scale(
        [s.size_bytes for s in recorded], requested_total_bytes, "bytes", _BYTES_COUNTER
    )
    objects, missed_objects, object_comment = scale(
        [s.objects for s in recorded], objects_total, "objects", _OBJECTS_COUNTER
    )
    scaled: Totals = {}
    for sample, number, size in zip(recorded, objects, sizes, strict=True):
        if number or size:
            add(scaled, (sample.frames, sample.labels), number, size)
    if missed_objects or missed_bytes:
        add(scaled, (builder.root(NOT_RECORDED), ()), missed_objects, missed_bytes)
    comments = (
        _REQUESTED,
        f"window of {duration_ns / 1e9:.3f} s with {seen} recorded allocations",
        size_comment,
        object_comment,
    )
    return HeapProfile(
        ProfileKind.ALLOCATED,
        device,
        samples_of(scaled, pause),
        time_ns,
        duration_ns,
        comments,
        Sizes.REQUESTED,
    )


def replayed_profile(
    snapshot: TorchSnapshot,
    device: int,
    *,
    namer: FrameNamer,
    moment: int | None = None,
    time_ns: int = 0,
    max_depth: int = 512,
    label: Label | None = None,
) -> HeapProfile:
    """What was alive at a moment of the trace, by stack, in requested bytes.

    The total is that of `snapshot.replay(device).allocated_bytes` at the moment. Memory from before
    the trace counts.

    Args:
        snapshot: what to read.
        device: torch's index.
        namer: names Python frames; not asked where the snapshot's names are final.
        moment: see `Replay`; None: that of the peak, and the profile is of that kind.
        time_ns: moment of the reading; by default that of the event, where it is known.
        max_depth: frames per stack; the middle is cut.
        label: an additional label of the samples.

    Raises:
        SnapshotError: sizes in the trace are invalid.
        ValueError: there is no such moment.
    """
    replay = snapshot.replay(device)
    at = replay.peak_moment if moment is None else moment
    labels = None if label is None else labeller(snapshot, replay, label)
    totals = _replayed(replay, replay.alive(at), builder_for(snapshot, namer, max_depth), labels)
    where = f"after event {at} of {replay.events}" if replay.events else "no events: the dump"
    return HeapProfile(
        ProfileKind.PEAK if moment is None else ProfileKind.LIVE,
        device,
        samples_of(totals),
        time_ns or _nanoseconds(replay.time_us[at]),
        comments=(_REQUESTED, where),
        sizes=Sizes.REQUESTED,
    )


def _nanoseconds(time_us: int) -> int:
    """0 where it is unknown, or no time that 64 bits hold: a file may say anything."""
    return time_us * 1000 if 0 <= time_us <= _MOST_NS // 1000 else 0


def _replayed(
    replay: Replay,
    indexes: Iterable[int],
    builder: StackBuilder,
    labels: Callable[[int], Labels] | None = None,
    *,
    blocks: bool = False,
) -> Totals:
    """Totals over allocations of a replay: of requested bytes, or of the blocks that they hold."""
    by_index: dict[tuple[int, bool, Labels], list[int]] = {}
    sizes = replay.block_bytes if blocks else replay.size_bytes
    stacks, traced = replay.stack, replay.traced
    for index in indexes:
        # what is older than the trace was not recorded; what came after it is where it had been
        key = (stacks[index], index >= traced.start, () if labels is None else labels(index))
        add(by_index, key, 1, sizes[index])
    totals: Totals = {}
    for (stack, has_event, tags), (objects, size) in by_index.items():
        if stack:
            shown = builder.build(replay.stacks[stack])
        else:
            shown = builder.root(stackless_root(has_event))
        add(totals, (shown, tags), objects, size)
    return totals


def apply_budget(profile: HeapProfile, *, max_samples: int) -> HeapProfile:
    """The profile in at most so many samples (at least 1): the smallest become `[other]`.

    Totals of bytes and objects stay as they are, those of each tensor class too.
    """
    limit = max(1, max_samples)
    if len(profile.samples) <= limit:
        return profile
    totals = sum_up(profile.samples)
    if len(totals) > limit:
        ordered = samples_of(totals)
        rests = {_rest_of(sample) for sample in ordered}
        kept = [s for s in ordered if (s.frames, s.labels) not in rests]
        del kept[max(limit - len(rests), 0) :]
        whole = len(rests) > limit  # no room for each class
        of_kept = {(sample.frames, sample.labels): sample for sample in kept}
        totals = sum_up(kept)
        for sample in ordered:
            if (sample.frames, sample.labels) not in of_kept:
                key = ((Frame(OTHER),), ()) if whole else _rest_of(sample)
                add(totals, key, sample.objects, sample.size_bytes)
    return replace(profile, samples=samples_of(totals))


def _rest_of(sample: Sample) -> tuple[Stack, Labels]:
    """Where a sample goes that is merged away."""
    return other_stack(sample.frames), tuple(s for s in sample.labels if s[0] == CLASS_LABEL)


def merge(profiles: Iterable[HeapProfile]) -> HeapProfile:
    """One profile that holds what several of one kind hold: of devices, ranks or files.

    The order does not matter. Device is -1 where they differ; time and duration are the largest,
    so the profiles are taken to be of the same moment or interval.

    Raises:
        ValueError: no profile, or profiles of several kinds or sizes.
    """
    parts = list(profiles)
    if not parts:
        raise ValueError("nothing to merge")
    kind = parts[0].kind
    if any(part.kind is not kind for part in parts):
        raise ValueError("profiles of different kinds do not add up")
    sizes = common_sizes(parts)
    devices = {part.device for part in parts}
    return HeapProfile(
        kind,
        devices.pop() if len(devices) == 1 else -1,
        samples_of(sum_up(sample for part in parts for sample in part.samples)),
        max(part.time_ns for part in parts),
        max(part.duration_ns for part in parts),
        tuple(sorted({comment for part in parts for comment in part.comments})),
        sizes,
    )


def common_sizes(profiles: Iterable[HeapProfile]) -> Sizes:
    """What kind of bytes all the profiles have; empty ones fit any.

    Raises:
        ValueError: some are requested bytes, some those of the allocator.
    """
    parts = list(profiles)
    sizes = {part.sizes for part in parts if part.samples} or {parts[-1].sizes}
    if len(sizes) > 1:
        raise ValueError(
            "requested bytes (of a trace) and bytes of the allocator's blocks do not compare"
        )
    return sizes.pop()


def diff(before: HeapProfile, after: HeapProfile) -> tuple[DiffEntry, ...]:
    """What changed from one profile to another, the largest change first; () where nothing did.

    The entries add up to the difference of the totals.

    Raises:
        ValueError: one is in requested bytes, the other in those of the allocator.
    """
    common_sizes((before, after))
    changes = sum_up(after.samples)
    for sample in before.samples:
        add(changes, (sample.frames, sample.labels), -sample.objects, -sample.size_bytes)
    entries = [
        DiffEntry(frames, objects, size, labels)
        for (frames, labels), (objects, size) in changes.items()
        if objects or size
    ]
    entries.sort(
        key=lambda e: (-abs(e.size_bytes), -e.size_bytes, -e.objects, order_key(e.frames), e.labels)
    )
    return tuple(entries)


def check(profile: HeapProfile, allocated_bytes: int | None = None) -> tuple[str, ...]:
    """What is wrong with a profile, one sentence each; () where the totals match.

    Args:
        profile: the profile.
        allocated_bytes: what the total has to be, for a live profile `totals.allocated_bytes`.
    """
    problems = []
    if allocated_bytes is not None and profile.total_bytes != allocated_bytes:
        problems.append(
            f"{profile.kind.value} profile of device {profile.device} holds "
            f"{profile.total_bytes} bytes, the allocator {allocated_bytes}"
        )
    if any(not sample.frames for sample in profile.samples):
        problems.append("a sample has no frame")
    if any(not frame.name for sample in profile.samples for frame in sample.frames):
        problems.append("a frame has no name")
    if any(not 0 <= f.line < 2**63 for sample in profile.samples for f in sample.frames):
        problems.append("a line number does not fit a signed 64-bit integer")
    if any(sample.objects < 0 or sample.size_bytes < 0 for sample in profile.samples):
        problems.append("a sample is negative")
    if len({(s.frames, s.labels) for s in profile.samples}) != len(profile.samples):
        problems.append("two samples have the same stack")
    return tuple(problems)
