"""Pinned host memory by stack: it takes memory from the node while the GPU looks fine.

Format: `host_segments` of torch 2.14 and newer (`HostSegmentInfo` in
`c10/core/CachingDeviceAllocator.h`): address, size, whether it is allocated, whether it is active,
and the stack. A segment is never split. With `record_pinned_host_memory` on, stacks are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.aggregate import add, samples_of
from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind
from gpumem_otel.snapshot.grouping import Grouper
from gpumem_otel.snapshot.roots import builder_for
from gpumem_otel.snapshot.stacks import NOT_RECORDED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpumem_otel.base.aggregate import Totals
    from gpumem_otel.base.protocols import FrameNamer, Pause
    from gpumem_otel.snapshot.snapshot import TorchSnapshot

CACHED: Final = "[cached pinned memory]"
"""Root of memory that is not in use and stays pinned for the next allocation."""

_SIZE_KEYS: Final = ("size", "total_size")
_PAUSE_EVERY: Final = 32


def _size(segment: Mapping[str, Any]) -> int:
    for key in _SIZE_KEYS:
        size = segment.get(key)
        if isinstance(size, int):
            return size
    return 0


def _in_use(segment: Mapping[str, Any]) -> bool:
    """Whether a tensor holds it, or a copy still goes on."""
    if "active" in segment or "allocated" in segment:
        return bool(segment.get("active") or segment.get("allocated"))
    return not str(segment.get("state", "")).startswith("inactive")


def pinned_profile(
    snapshot: TorchSnapshot,
    device: int,
    *,
    namer: FrameNamer,
    time_ns: int = 0,
    pause: Pause | None = None,
    max_depth: int = 512,
) -> HeapProfile:
    """All pinned host memory of torch's allocator, by the stack that asked for it.

    The total is everything that is pinned, since what is cached is missing on the node too.

    Args:
        snapshot: what to read.
        device: the process's lowest: host memory belongs to none.
        namer: names Python frames.
        time_ns: moment of the reading, nanoseconds since 1970.
        pause: called every 32 segments, and after every stack.
        max_depth: frames per stack; the middle is cut.
    """
    builder = builder_for(snapshot, namer, max_depth)
    grouper = Grouper("address", pause, trusted=snapshot.trusted)
    cached: list[int] = []
    used: list[dict[str, Any]] = []
    for count, segment in enumerate(snapshot.host_segments):
        if pause is not None and not count % _PAUSE_EVERY:
            pause()
        if _in_use(segment):
            used.append({**segment, "size": _size(segment)})
        else:
            cached.append(_size(segment))
    grouper.add(used)
    totals: Totals = {}
    for frames, objects, size, _ in grouper.groups:
        add(totals, (builder.build(frames), ()), objects, size)
        if pause is not None:
            pause()
    if bare := grouper.bare:
        size = sum(segment["size"] for segment in bare)
        add(totals, (builder.root(NOT_RECORDED), ()), len(bare), size)
    if cached:
        add(totals, (builder.root(CACHED), ()), len(cached), sum(cached))
    return HeapProfile(
        ProfileKind.PINNED,
        device,
        samples_of(totals, pause),
        time_ns,
        comments=("pinned host memory of this process",),
    )


def pinned_total(total_bytes: int, device: int, time_ns: int, why: str) -> HeapProfile:
    """The same where only the total is known.

    Args:
        total_bytes: pinned host memory of this process.
        device: the process's lowest.
        time_ns: nanoseconds since 1970.
        why: there are no stacks, one sentence.
    """
    totals: Totals = {}
    if total_bytes:
        # the number of pieces is unknown: one, so that a server does not drop the sample
        add(totals, ((Frame(NOT_RECORDED),), ()), 1, total_bytes)
    return HeapProfile(
        ProfileKind.PINNED,
        device,
        samples_of(totals),
        time_ns,
        comments=("pinned host memory of this process", why),
    )
