"""When to read and when to send: arithmetic on times, without a clock."""

from __future__ import annotations

import hashlib
import math
from typing import Final

MAX_INTERVAL_SECONDS = 3600.0
"""Longest stretched interval: one wrong measurement must not stop a job's profiles for good."""

_NS = 1_000_000_000


def next_multiple_ns(now_ns: int, interval_seconds: float) -> int:
    """The next wall-clock multiple of an interval after now; the same on every rank."""
    step = max(round(interval_seconds * _NS), 1)
    return (now_ns // step + 1) * step


def phase(run_id: str, rank: int) -> float:
    """A rank's own place in [0, 1): ranks read together and send one after the other."""
    digest = hashlib.blake2b(f"{run_id}/{rank}".encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / (1 << 64)


def stretch(configured_seconds: float, *needed_seconds: float) -> float:
    """The smallest multiple of the configured interval that is as long as each need.

    A multiple, so that ranks with different factors still read at shared moments.
    """
    longest = max((need for need in needed_seconds if math.isfinite(need)), default=0.0)
    factor = math.ceil(round(longest / configured_seconds, 6))
    most = max(int(MAX_INTERVAL_SECONDS // configured_seconds), 1)
    return configured_seconds * min(max(factor, 1), most)


class Backoff:
    """Delays between attempts: 1, 2, 4 ... 30 s, each moved by the rank's phase.

    Args:
        phase: in [0, 1), shortens each delay by up to half, so that ranks do not retry together.
    """

    FIRST_SECONDS = 1.0
    MAX_SECONDS = 30.0

    def __init__(self, phase: float) -> None:
        self._keep = 1.0 - phase / 2

    def delay(self, failures: int, asked_seconds: float | None = None) -> float:
        """Seconds to wait after `failures` in a row, at least what the server asked for."""
        seconds = min(
            self.FIRST_SECONDS * float(1 << min(max(failures, 1) - 1, 16)), self.MAX_SECONDS
        )
        return max(seconds * self._keep, asked_seconds or 0.0)


# Windows of events begin at pseudo-random moments that all ranks share, since a read-out stalls its
# rank and a collective waits for the slowest. At a fixed place of the interval they could meet the
# same part of a job each time: every evaluation, or none.

FIRST_PART: Final = 0.5
"""Earliest begin, as a part of the interval: this round's profiles are sent by then."""
LAST_PART: Final = 0.75
"""Latest begin: it leaves room for steps of a quarter of the interval."""
MARGIN_PART: Final = 0.05
"""From the end of a window to the next read-out."""


class WindowPlan:
    """One window per interval, fewer where they stall the job too long.

    Args:
        max_stall_ratio: share of the job's time for which windows may hold the interpreter lock.
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
            to_ns: of the next read-out.
        """
        length_ns = to_ns - from_ns
        place = phase(f"window of {run_id}", from_ns)
        begin_ns = from_ns + int(length_ns * (FIRST_PART + (LAST_PART - FIRST_PART) * place))
        self._end_ns = to_ns - int(length_ns * MARGIN_PART)
        self.begin_ns = begin_ns if begin_ns >= self._rest_until_ns else None

    def due(self, now_ns: int) -> bool:
        """Whether it is time; a window that sending has made too late is given up."""
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
        """Note that it was recorded, and for how long it held the interpreter lock."""
        self.begin_ns = None
        self._rest_until_ns = now_ns + int(stall_seconds / self._max_stall_ratio * _NS)
