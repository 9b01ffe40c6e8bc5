"""Plays a recording as a `Source` and a `WindowSource`, as if the job ran now."""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from gpumem_otel.base.profile import DeviceStats, SourceStatus, StepStats
from gpumem_otel.errors import BusyError, CaptureError
from gpumem_otel.snapshot.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpumem_otel.base.protocols import Clock
    from gpumem_otel.recording.recorded import RecordedWindow, Recording

_LONE_READING_NS = 1_000_000_000
"""How long a recording of a single reading lasts."""

_COUNTERS = (
    "allocations",
    "frees",
    "allocation_bytes",
    "requested_allocation_bytes",
    "ooms",
    "alloc_retries",
)
"""Fields of DeviceStats that only grow; the others are states."""


class _Moment(NamedTuple):
    """A position in the recording, which is played over and over."""

    turn: int
    position_ns: int
    reading: int


class ReplaySource:
    """Plays a recording from the moment it is made; safe to use from any thread.

    It has no state but the recording: every result follows from the time that has passed. Between
    two readings the earlier one is valid. After the end it begins again, and counters continue as
    if the job had allocated or freed the difference between the last state and the first.

    Args:
        recording: at least one reading.
        clock: tells the time of all time stamps.
        speed: seconds of the recording per second.
        loop: begin again at the end; otherwise the last reading stays.

    Raises:
        CaptureError: the recording holds no reading.
    """

    def __init__(
        self, recording: Recording, clock: Clock, *, speed: float = 1.0, loop: bool = True
    ) -> None:
        if not recording.readings:
            raise CaptureError(f"{recording.source}: holds no readings; record for longer")
        if not speed > 0:
            raise CaptureError(f"speed {speed:g}: must be above 0")
        self._recording = recording
        self._clock = clock
        self._speed = speed
        self._loop = loop
        self._readings = sorted(recording.readings, key=lambda reading: reading.time_ns)
        self._windows = sorted(recording.windows, key=lambda window: window.time_ns)
        first_ns = self._readings[0].time_ns
        self._offsets_ns = [reading.time_ns - first_ns for reading in self._readings]
        self._window_ends_ns = [window.time_ns - first_ns for window in self._windows]
        last_ns = self._offsets_ns[-1]
        # the last reading lasts as long as those before it did on average
        self._period_ns = last_ns + max(last_ns // max(len(self._readings) - 1, 1), 0)
        self._period_ns = self._period_ns or _LONE_READING_NS
        self._growth = _growth_per_turn([reading.after for reading in self._readings])
        self._peaks = {stats.device: stats for stats in self._readings[-1].after}
        devices = {stats.device for reading in self._readings for stats in reading.after}
        self._devices = tuple(sorted(devices or self._readings[0].snapshot.devices()))
        self._window_lock = threading.Lock()
        self._started = clock.monotonic()

    # Source

    def status(self) -> SourceStatus:
        """See `Source`; a recording is always armed."""
        return SourceStatus(armed=True, supported=True, devices=self._devices)

    def stats(self) -> tuple[DeviceStats, ...]:
        """See `Source`."""
        now = self._now()
        return self._shifted(self._readings[now.reading].after, now.turn)

    def read(self) -> Reading:
        """See `Source`."""
        now = self._now()
        recorded = self._readings[now.reading]
        return Reading(
            snapshot=recorded.snapshot,
            time_ns=self._clock.time_ns(),
            before=self._shifted(recorded.before, now.turn),
            after=self._shifted(recorded.after, now.turn),
            stall_seconds=0.0,  # the recorded job was stalled, not this one
            classifier=recorded.classifier(),
        )

    # WindowSource

    def window(
        self,
        seconds: float,
        stop: threading.Event,
        *,
        frees: bool = False,
        enough: Callable[[], bool] | None = None,  # noqa: ARG002 - its length is recorded
    ) -> Reading:
        """See `WindowSource`: waits as long as requested, then returns the last recorded window.

        Its length and its counters are those of the recorded window.

        Raises:
            BusyError: frees are asked for, which no recording holds, or another window is open.
            CaptureError: the recording holds no windows.
        """
        if frees:
            raise BusyError(
                f"{self._recording.source}: recordings hold no frees; ask for live or allocated"
            )
        if not self._windows:
            raise CaptureError(
                f"{self._recording.source}: holds no windows of events; "
                "record with the profile kind 'allocated'"
            )
        if not self._window_lock.acquire(blocking=False):
            raise BusyError("another window is open; try again when it is over")
        try:
            self._clock.wait(stop, seconds)
        finally:
            self._window_lock.release()
        window, turn = self._last_window(self._now())
        recorded = window.reading()
        return Reading(
            snapshot=recorded.snapshot,
            time_ns=self._clock.time_ns(),
            before=self._shifted(recorded.before, turn),
            after=self._shifted(recorded.after, turn),
            stall_seconds=0.0,
        )

    @property
    def facts(self) -> Mapping[str, str]:
        """The recording's facts about its surroundings, for instance `devices`."""
        return self._recording.header.facts

    @property
    def has_windows(self) -> bool:
        """Whether there can be `allocated` profiles."""
        return bool(self._windows)

    def _last_window(self, now: _Moment) -> tuple[RecordedWindow, int]:
        """The window that ended last; before any did, the first one."""
        index = bisect_right(self._window_ends_ns, now.position_ns) - 1
        if index >= 0:
            return self._windows[index], now.turn
        if now.turn:
            return self._windows[-1], now.turn - 1
        return self._windows[0], 0

    # steps

    def steps(self) -> StepStats:
        """Steps counted by now; they continue over the end of the recording."""
        now = self._now()
        recorded = self._readings[now.reading].steps
        per_turn = self._readings[-1].steps.steps - self._readings[0].steps.steps
        last_ns = 0
        if recorded.last_step_time_ns:
            age_ns = now.position_ns - (recorded.last_step_time_ns - self._readings[0].time_ns)
            last_ns = self._clock.time_ns() - max(int(age_ns / self._speed), 0)
        return StepStats(
            steps=recorded.steps + now.turn * max(per_turn, 0),
            last_step_time_ns=last_ns,
            floor_bytes=MappingProxyType(dict(recorded.floor_bytes)),
        )

    # time

    def _now(self) -> _Moment:
        passed_ns = int((self._clock.monotonic() - self._started) * self._speed * 1e9)
        passed_ns = max(passed_ns, 0)
        turn, position_ns = divmod(passed_ns, self._period_ns)
        if turn and not self._loop:
            turn, position_ns = 0, self._period_ns
        return _Moment(turn, position_ns, bisect_right(self._offsets_ns, position_ns) - 1)

    def _shifted(self, stats: Sequence[DeviceStats], turn: int) -> tuple[DeviceStats, ...]:
        """Counters as they are after so many turns."""
        if not turn:
            return tuple(stats)
        shifted = []
        for device in stats:
            growth = self._growth.get(device.device, {})
            last = self._peaks.get(device.device, device)
            values = {name: getattr(device, name) + turn * size for name, size in growth.items()}
            for name in ("allocated_peak_bytes", "reserved_peak_bytes"):
                values[name] = max(getattr(device, name), getattr(last, name))
            shifted.append(replace(device, **values))
        return tuple(shifted)


def _growth_per_turn(states: Iterable[Sequence[DeviceStats]]) -> dict[int, dict[str, int]]:
    """By device, how much each counter grows from one beginning of the recording to the next."""
    first: dict[int, DeviceStats] = {}
    last: dict[int, DeviceStats] = {}
    for state in states:
        for stats in state:
            first.setdefault(stats.device, stats)
            last[stats.device] = stats
    growth = {}
    for device, end in last.items():
        start = first[device]
        gains = {name: max(getattr(end, name) - getattr(start, name), 0) for name in _COUNTERS}
        # the jump back to the first state takes frees or allocations
        jump = (end.allocations - end.frees) - (start.allocations - start.frees)
        gains["frees"] += max(jump, 0)
        gains["allocations"] += max(-jump, 0)
        growth[device] = gains
    return growth
