"""When to read and when to send: arithmetic on times, without a clock."""

from __future__ import annotations

import hashlib
import math

__all__ = ["Backoff", "next_multiple_ns", "phase", "stretch"]

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
