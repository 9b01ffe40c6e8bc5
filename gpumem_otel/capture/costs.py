"""Counts the cost of read-outs, and adds comments to their profiles."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import HeapProfile
    from gpumem_otel.snapshot.reading import Reading


class Costs:
    """Counts the stall and the seconds of each stage.

    Args:
        counters: takes `exporter_stall_seconds`, `exporter_runs` and `exporter_seconds`.
        describe: more comments for every profile (rank, versions), called at each read-out.

    Attributes:
        last_stall_seconds: how long the last read-out held the interpreter lock.
    """

    def __init__(
        self, counters: Counters, describe: Callable[[], Sequence[str]] | None = None
    ) -> None:
        self.last_stall_seconds = 0.0
        self._counters = counters
        self._describe = describe

    def comments(self) -> tuple[str, ...]:
        """Comments about this process."""
        return tuple(self._describe()) if self._describe is not None else ()

    def stalled(self, seconds: float) -> None:
        """A read-out held the interpreter lock for this long."""
        self.last_stall_seconds = seconds
        self._counters.add("exporter_stall_seconds", seconds)

    def count(self, stage: str, seconds: float) -> None:
        """Count one run of a stage, and its seconds."""
        self._counters.add("exporter_runs", stage=stage)
        self._counters.add("exporter_seconds", seconds, stage=stage)


def with_comments(profile: HeapProfile, comments: Sequence[str]) -> HeapProfile:
    """The profile with these comments added."""
    return replace(profile, comments=(*profile.comments, *comments))


def devices_of(reading: Reading) -> list[int]:
    """The devices in use, including those with counters only.

    In a window, taking a snapshot leaves an event in the trace of every device: that alone does not
    count.
    """
    snapshot = reading.snapshot
    devices = {stats.device for stats in (*reading.before, *reading.after)}
    for device in snapshot.devices():
        if device not in devices and (
            snapshot.raw_segments(device)
            or any(event.get("action") != "snapshot" for event in snapshot.raw_events(device))
        ):
            devices.add(device)
    return sorted(devices)
