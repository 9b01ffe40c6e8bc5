"""When the next window of events is recorded: arithmetic on times, without a clock.

Windows begin at moments that nobody can foresee but all ranks share, since a read-out stalls each
rank and a collective waits for the slowest. A moment that stood fixed in the interval could meet
the same part of a job again and again: each evaluation, or none.
"""

from __future__ import annotations

from typing import Final

from gpumem_otel.export.schedule import phase

__all__ = ["WindowPlan"]

FIRST_PART: Final = 0.5
"""Of the interval: by then this round's profiles are sent."""
LAST_PART: Final = 0.75
"""A window that begins so late has room for steps of a quarter of the interval."""
MARGIN_PART: Final = 0.05
"""A window ends so long before the next read-out."""

_NS: Final = 1_000_000_000


class WindowPlan:
    """One window per interval, fewer where they stall the job too long.

    Args:
        max_stall_ratio: share of the job's time that windows may hold the interpreter lock.
    """

    def __init__(self, max_stall_ratio: float) -> None:
        self._max_stall_ratio = max_stall_ratio
        self._rest_until_ns = 0
        self._end_ns = 0
        self.begin_ns: int | None = None
        """When the next one begins; None: not in this interval."""

    def plan(self, run_id: str, from_ns: int, to_ns: int) -> None:
        """Choose the moment between a read-out and the next one.

        Args:
            run_id: the same on all ranks, so that they choose the same moment.
            from_ns: of the read-out, nanoseconds since 1970.
            to_ns: of the next one.
        """
        length_ns = to_ns - from_ns
        place = phase(f"window of {run_id}", from_ns)
        begin_ns = from_ns + int(length_ns * (FIRST_PART + (LAST_PART - FIRST_PART) * place))
        self._end_ns = to_ns - int(length_ns * MARGIN_PART)
        self.begin_ns = begin_ns if begin_ns >= self._rest_until_ns else None

    def due(self, now_ns: int) -> bool:
        """Whether it is time; where a sending took so long that it is too late, none is due."""
        if self.begin_ns is None or now_ns < self.begin_ns:
            return False
        if now_ns >= self._end_ns:
            self.begin_ns = None
            return False
        return True

    def limit_seconds(self, now_ns: int) -> float:
        """How long a window that begins now may take."""
        return max(self._end_ns - now_ns, 0) / _NS

    def done(self, now_ns: int, stall_seconds: float) -> None:
        """It was recorded, and held the interpreter lock for so long."""
        self.begin_ns = None
        self._rest_until_ns = now_ns + int(stall_seconds / self._max_stall_ratio * _NS)
