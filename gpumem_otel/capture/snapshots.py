"""One snapshot of the allocator with the counters around it, and what taking it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.core.ports import Reading
from gpumem_otel.core.snapshot import from_torch
from gpumem_otel.errors import CaptureError
from gpumem_otel.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.capture.recorder import Recorder
    from gpumem_otel.capture.restored import Restored
    from gpumem_otel.capture.stats import StatsReader
    from gpumem_otel.core.model import DeviceStats
    from gpumem_otel.core.ports import Clock

__all__ = ["COPIES_HISTORY", "SnapshotTaker"]

COPIES_HISTORY: Final = (
    "the job records memory history, and this torch (before 2.11) copies all of it with each "
    "snapshot: no profiles until it stops recording"
)
"""Why there are no readings where `SnapshotTaker.too_slow`."""

_log = named_logger("gpumem_otel.capture")

_COPY_LIMIT_SECONDS: Final = 0.25
_BLOCK_SECONDS: Final = 3e-6
"""Of a snapshot, by live block, before one was taken: 2.6 us on an H200's host."""
_ENTRY_SECONDS: Final = 3e-7
"""Of an entry of the address table."""
_PACE_FROM_BLOCKS: Final = 1000
"""With fewer the time is not that of the blocks."""


class SnapshotTaker:
    """Takes snapshots, and knows by the last one what the next will take.

    Args:
        recorder: asked for them.
        restored: brings nothing back meanwhile.
        clock: time.

    Attributes:
        block_seconds: what a snapshot takes by live block, as of the last one.
    """

    def __init__(self, recorder: Recorder, restored: Restored, clock: Clock) -> None:
        self.block_seconds = _BLOCK_SECONDS
        self._recorder = recorder
        self._restored = restored
        self._clock = clock
        self._slow_copy_at = -1  # what `Recorder.gaps` was
        self._said_slow = False

    def take(self, stats: StatsReader, *, traces: bool) -> tuple[Any, Reading]:
        """The snapshot as torch gives it, and the reading that it makes.

        Args:
            stats: reads the counters.
            traces: whether events are wanted too.

        Raises:
            CaptureError: the allocator could not be read.
        """
        now = self._clock.monotonic
        try:
            started = now()
            devices = stats.devices()
            before = stats.counters(devices)
            time_ns = self._clock.time_ns()
            with self._restored.lock:
                raw = self._recorder.snapshot(traces=traces)
            after = stats.counters(devices)
            stall_seconds = now() - started
            if not traces:
                self._note_pace(before, stall_seconds)
        except RuntimeError as error:
            raise CaptureError(f"read: {error}; no profile this time") from error
        return raw, Reading(
            snapshot=from_torch(raw, source="torch"),
            time_ns=time_ns,
            before=before,
            after=after,
            stall_seconds=stall_seconds,
        )

    def expected_seconds(self, stats: StatsReader, entries: int) -> float:
        """What a snapshot would take now.

        Args:
            stats: reads the counters.
            entries: of the address table, each of which is looked at.
        """
        blocks = _live_blocks(stats.counters(stats.devices()))
        return blocks * self.block_seconds + entries * _ENTRY_SECONDS

    def _note_pace(self, before: Sequence[DeviceStats], seconds: float) -> None:
        blocks = _live_blocks(before)
        if blocks >= _PACE_FROM_BLOCKS:
            self.block_seconds = seconds / blocks

    # events that the job records, and torch before 2.11 copies with each snapshot

    @property
    def too_slow(self) -> bool:
        """Whether the job's events made a snapshot slow, and the job has not stopped since."""
        return self._slow_copy_at == self._recorder.gaps

    def note_copy(self, seconds: float) -> None:
        """A snapshot without events has taken so long; said once where that is too much."""
        if seconds <= _COPY_LIMIT_SECONDS or not self._recorder.copies_events:
            return
        self._slow_copy_at = self._recorder.gaps  # there is one more once the job stops
        if not self._said_slow:
            self._said_slow = True
            _log.warning("%s (a snapshot took %.2f s)", COPIES_HISTORY, seconds)

    def forget_copy(self) -> None:
        """Recording has begun anew."""
        self._slow_copy_at = -1


def _live_blocks(stats: Sequence[DeviceStats]) -> int:
    return sum(one.allocations - one.frees for one in stats)
