"""When to read and when to send: arithmetic on times, without a clock."""

from __future__ import annotations

import hashlib
import math
from typing import Final

MAX_INTERVAL_SECONDS = 3600.0
"""No stretching goes beyond: one freak measurement must not blind a job for good."""

_NS = 1_000_000_000


def next_multiple_ns(now_ns: int, interval_seconds: float) -> int:
    """The next wall-clock multiple of an interval, later than now; the same on every rank."""
    step = max(round(interval_seconds * _NS), 1)
    return (now_ns // step + 1) * step


def phase(run_id: str, rank: int) -> float:
    """A rank's own place in [0, 1): ranks read together and send one after the other."""
    digest = hashlib.blake2b(f"{run_id}/{rank}".encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / (1 << 64)


def stretch(configured_seconds: float, *needed_seconds: float) -> float:
    """The smallest multiple of the configured interval that is as long as each need.

    A multiple, so that ranks which stretch by different factors still read at moments that
    others read at.
    """
    longest = max((need for need in needed_seconds if math.isfinite(need)), default=0.0)
    factor = math.ceil(round(longest / configured_seconds, 6))
    most = max(int(MAX_INTERVAL_SECONDS // configured_seconds), 1)
    return configured_seconds * min(max(factor, 1), most)


class Backoff:
    """Delays between attempts: 1, 2, 4 ... 30 s, each moved by the rank's phase.

    Args:
        phase: in [0, 1), takes up to half of each delay away, so that ranks do not try together.
    """

    FIRST_SECONDS = 1.0
    MAX_SECONDS = 30.0

    def __init__(self, phase: float) -> None:
        self._keep = 1.0 - phase / 2

    def delay(self, failures: int, asked_seconds: float | None = None) -> float:
        """Seconds to wait after so many failures in a row, at least what the server asked for."""
        seconds = min(
            self.FIRST_SECONDS * float(1 << min(max(failures, 1) - 1, 16)), self.MAX_SECONDS
        )
        return max(seconds * self._keep, asked_seconds or 0.0)


# When the next window of events is recorded: arithmetic on times, without a clock.
#
# Windows begin at moments that nobody can foresee but all ranks share, since a read-out stalls each
# rank and a collective waits for the slowest. A moment that stood fixed in the interval could meet
# the same part of a job again and again: each evaluation, or none.

FIRST_PART: Final = 0.5
"""Of the interval: by then this round's profiles are sent."""
LAST_PART: Final = 0.75
"""A window that begins so late has room for steps of a quarter of the interval."""
MARGIN_PART: Final = 0.05
"""A window ends so long before the next read-out."""


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
