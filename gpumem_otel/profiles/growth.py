"""What has grown between live profiles some pushes apart, by stack: the view of a leak."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from gpumem_otel.base.aggregate import samples_of
from gpumem_otel.base.profile import HeapProfile, ProfileKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.base.aggregate import Totals
    from gpumem_otel.base.protocols import Pause

_EVERY = 16

_Sizes = dict[int, tuple[int, int]]


class _Kept:
    """Numbers of one profile by the hash of stack and labels: no frame is kept alive for them.

    Two stacks of 15,000 share a hash of 64 bits once in a hundred billion profiles.
    """

    __slots__ = ("sizes", "time_ns", "total_bytes")

    def __init__(self, profile: HeapProfile, pause: Pause | None) -> None:
        self.time_ns = profile.time_ns
        self.total_bytes = profile.total_bytes
        self.sizes: _Sizes = {}
        for count, sample in enumerate(profile.samples):
            key = hash((sample.frames, sample.labels))
            self.sizes[key] = (sample.objects, sample.size_bytes)
            if pause is not None and not count % _EVERY:
                pause()


class Growth:
    """Remembers live profiles, in three numbers per stack, and compares. For one thread.

    Args:
        pushes: how many profiles lie between the two that are compared.
    """

    def __init__(self, pushes: int) -> None:
        self._pushes = max(pushes, 1)
        self._kept: dict[int, deque[_Kept]] = {}

    def add(
        self, live: Sequence[HeapProfile], pause: Pause | None = None
    ) -> tuple[HeapProfile, ...]:
        """Take the newest live profiles, one per device, and return what has grown.

        Only what has grown is in the profile, since no server takes negative numbers; what has
        shrunk is one number in the comments. Grown minus shrunk is the difference of
        the two totals, exactly.

        Args:
            live: one per device.
            pause: called every 16 stacks.

        Returns:
            One profile per device that has been seen for long enough.
        """
        made = []
        for profile in live:
            kept = self._kept.setdefault(profile.device, deque())
            newest = _Kept(profile, pause)
            if len(kept) == self._pushes:
                made.append(_grown(kept.popleft(), newest, profile, pause))
            kept.append(newest)
        return tuple(made)


def _grown(before: _Kept, newest: _Kept, profile: HeapProfile, pause: Pause | None) -> HeapProfile:
    totals: Totals = {}
    shrunk = grown = 0
    gone = dict(before.sizes)
    for count, sample in enumerate(profile.samples):
        key = hash((sample.frames, sample.labels))
        objects, size = gone.pop(key, (0, 0))
        more_objects, more_bytes = sample.objects - objects, sample.size_bytes - size
        grown += max(more_bytes, 0)
        shrunk += max(-more_bytes, 0)
        if more_objects > 0 or more_bytes > 0:
            totals[sample.frames, sample.labels] = [max(more_objects, 0), max(more_bytes, 0)]
        if pause is not None and not count % _EVERY:
            pause()
    shrunk += sum(size for _, size in gone.values())
    sentence = (
        f"{grown} bytes more in stacks that have grown, {shrunk} fewer in stacks that have "
        f"shrunk; in all {newest.total_bytes - before.total_bytes:+d}"
    )
    seconds = max(newest.time_ns - before.time_ns, 0) / 1e9
    return HeapProfile(
        ProfileKind.GROWTH,
        profile.device,
        samples_of(totals, pause),
        profile.time_ns,
        comments=(f"growth of live memory over {seconds:.3f} s, by stack", sentence),
        sizes=profile.sizes,
    )
