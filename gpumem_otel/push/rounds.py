"""What the background thread does, without the thread: read, encode, send, count.

A round begins with a read-out at a wall-clock multiple of the interval, at the same moment on all
ranks, since each collective waits for the slowest rank. The profiles are encoded at once and sent
at the rank's own phase. Per kind and device at most one profile waits: a newer one replaces it but
keeps its place in the order, so that a slow server gets some of each kind. A window of events is
recorded between two read-outs, at a moment that all ranks share.

The interval is the smallest multiple of the configured one that keeps the stall ratio and the
job's byte budget. The first read-out is at the next multiple of at most 15 s, so that a new job
is visible soon.

Nothing is raised: every failure is counted, and logged once per kind until it is over.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from gpumem_otel.base.logs import named_logger
from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.errors import BusyError, GpumemError, PushError
from gpumem_otel.push.schedule import Backoff, WindowPlan, next_multiple_ns, phase, stretch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpumem_otel.base.profile import HeapProfile
    from gpumem_otel.push.interfaces import PushDependencies

FIRST_READ_SECONDS = 15.0
MAX_ATTEMPTS = 5
MAX_AGE_SECONDS = 3300.0
"""A server refuses what is older than 1 h (validation.reject-older-than)."""
MAX_THROTTLE = 8
SPREAD = 0.5
"""Part of the interval over which the ranks spread their sending."""
READ_MARGIN_SECONDS = 0.25
"""From the end of a push to the next read-out; a tenth of a short interval."""
MIN_PUSH_SECONDS = 0.05

DERIVED = (ProfileKind.GROWTH, ProfileKind.PINNED)
"""Kinds that a live read-out gives too."""
WINDOWED = (ProfileKind.PEAK, ProfileKind.ALLOCATED)
"""Kinds that need a window of events."""

_Made = TypeVar("_Made")
_NS = 1_000_000_000
_log = named_logger("gpumem_otel.push")


@dataclass(slots=True)
class _Waiting:
    """An encoded profile that was not stored yet.

    Attributes:
        since_ns: when the first of the profiles that it replaces was read.
    """

    kind: ProfileKind
    device: int
    data: bytes
    read_ns: int
    since_ns: int
    attempts: int = 0

    @property
    def key(self) -> tuple[ProfileKind, int]:
        return self.kind, self.device


class Rounds:
    """The state between rounds; used by one thread, `abandon` excepted.

    Args:
        dependencies: what to read and where to send it.
        stop: ends a recorded window early, for the end of the job or a flush.
    """

    def __init__(self, dependencies: PushDependencies, stop: threading.Event) -> None:
        self._deps = dependencies
        self._config = dependencies.config
        self._clock = dependencies.clock
        self._counters = dependencies.counters
        self._stop = stop
        self._notices = _Notices()
        self._waiting: dict[tuple[ProfileKind, int], _Waiting] = {}
        self._being_made = 0
        self._over = False
        self._over_lock = threading.Lock()
        self._derived = [kind for kind in DERIVED if kind.value in self._config.kinds]
        self._windowed = [kind for kind in WINDOWED if kind.value in self._config.kinds]
        self._windows = WindowPlan(self._config.max_stall_ratio)
        self._window_bytes = 0
        self._round_bytes = 0
        self._stalled_before = 0.0
        self._throttle = 1
        self._limited = False
        self._place = 0.0
        self._backoff = Backoff(0.0)
        self._failures = 0
        self._next_read_ns = 0
        self._send_ns = 0
        self._interval = self._config.interval_seconds
        self._first = True

    @property
    def interval_seconds(self) -> float:
        """The interval as it is now, stretched."""
        return self._interval

    @property
    def waiting(self) -> int:
        """Profiles that wait to be sent."""
        return len(self._waiting)

    def turn(self) -> float:
        """Do what is due; returns seconds until something is."""
        now = self._clock.time_ns()
        step = min(self._interval, FIRST_READ_SECONDS) if self._first else self._interval
        planned = self._next_read_ns
        if not (planned and abs(planned - now) <= step * _NS):
            planned = next_multiple_ns(now, step)  # the start, or the clock was set
            self._next_read_ns, self._send_ns = planned, min(self._send_ns, now)
        if now >= planned:
            self._first = False
            self._read()
            self._plan(planned)
        if self._windows.due(self._clock.time_ns()):
            self._record()
        if self._waiting and self._clock.time_ns() >= self._send_ns:
            self._send()
        now = self._clock.time_ns()
        until = min(self._next_read_ns, self._send_ns) if self._waiting else self._next_read_ns
        if self._windows.begin_ns is not None:
            until = min(until, self._windows.begin_ns)
        return max(until - now, 0) / _NS

    def flush(self, deadline_seconds: float) -> bool:
        """Read what is alive and send all that waits, now; True where all of it was stored."""
        end = self._clock.monotonic() + deadline_seconds
        stored = self._read()
        return self._send(end) and stored and not self._waiting

    def finish(self, deadline_seconds: float) -> None:
        """The last flush; what could not be sent is dropped and counted."""
        if self._over:
            return
        end = self._clock.monotonic() + deadline_seconds
        if self._deps.sink is not None or self._deps.on_profiles or self._deps.final_read:
            self._read()
        self._send(end)
        self.abandon()

    def abandon(self) -> None:
        """End here, whatever is under way: all that waits or is being made is dropped.

        May be called from another thread, when the end takes longer than it may. What is being
        sent just then counts as dropped, since its outcome stays unknown.
        """
        with self._over_lock:
            if self._over:
                return
            self._over = True
            lost = len(self._waiting) + self._being_made
            self._waiting.clear()
        if lost:
            self._counters.add("exporter_dropped", lost, reason="shutdown")

    # Reading ------------------------------------------------------------------------------------

    def _read(self) -> bool:
        """Read what is alive, and what derives from it; whether all of it could be encoded."""
        count = self._readable()
        if count is None:
            return False
        self._round_bytes = 0
        self._stalled_before = self._counters.get("exporter_stall_seconds")
        wanted = ProfileKind.LIVE.value in self._config.kinds
        if not wanted and not self._derived:
            return True
        live = self._take("read", self._deps.reader.live, count if wanted else 0)
        if live is None:
            return False
        done = not wanted or self._pass_on({ProfileKind.LIVE: live})
        for kind in self._derived:
            made = self._take("read", partial(self._deps.reader.derived, kind, live), count)
            done &= made is not None and self._pass_on({kind: made})
        return done

    def _record(self) -> None:
        """Record a window of events, and make and encode the profiles of it."""
        stalled_before = self._counters.get("exporter_stall_seconds")
        round_bytes, self._round_bytes = self._round_bytes, 0
        limit_seconds = self._windows.limit_seconds(self._clock.time_ns())
        count = self._readable()
        made: Mapping[ProfileKind, tuple[HeapProfile, ...]] | None = None
        if count is not None:
            made = self._take(
                "window",
                lambda: self._deps.reader.windowed(self._windowed, limit_seconds, self._stop),
                count * len(self._windowed),
            )
        if made is not None:
            self._pass_on(made)
        self._window_bytes, self._round_bytes = self._round_bytes, round_bytes
        now = self._clock.time_ns()
        if made:  # what waits is sent at the rank's own phase of the time that is left
            earliest = max(self._send_ns, now)
            left = max(self._next_read_ns - earliest, 0)
            self._send_ns = earliest + int(self._place * SPREAD * left)
        self._windows.done(now, self._counters.get("exporter_stall_seconds") - stalled_before)

    def _readable(self) -> int | None:
        """How many devices there are to read; None where that is not known."""
        try:
            status = self._deps.status()
        except Exception as error:
            self._failed("read", error)
            return None
        return len(status.devices) if status.armed and status.supported else None

    def _take(self, stage: str, read: Callable[[], _Made], count: int) -> _Made | None:
        """Read profiles, of which `count` are to be encoded; None where that failed."""
        self._being_made = count if self._deps.sink is not None else 0
        try:
            made = read()
        except Exception as error:
            self._being_made = 0
            if isinstance(error, BusyError):
                self._notices.waits(stage, str(error))
            else:
                self._failed(stage, error)
            return None
        self._notices.recovered(stage)
        return made

    def _pass_on(self, made: Mapping[ProfileKind, tuple[HeapProfile, ...]]) -> bool:
        """Show what was read, and encode it; whether all of it could be encoded."""
        for callback in self._deps.on_profiles:
            for kind, profiles in made.items():
                try:
                    callback(kind, profiles)
                except Exception as error:  # noqa: PERF203 - each has its own
                    self._failed("record", error)
        if self._deps.sink is None:
            return True
        profiles = tuple(profile for of_kind in made.values() for profile in of_kind)
        self._being_made = len(profiles)
        return all([self._encode(profile) for profile in profiles])  # noqa: C419 - encode each

    def _encode(self, profile: HeapProfile) -> bool:
        waiting: _Waiting | None = None
        try:
            data = self._deps.encode(profile)
        except Exception as error:
            self._failed("encode", error)
        else:
            self._notices.recovered("encode")
            now = self._clock.time_ns()
            waiting = _Waiting(profile.kind, profile.device, data, now, now)
        with self._over_lock:
            self._being_made -= 1
            if not self._over:
                self._keep(waiting)
        if waiting is not None:
            self._round_bytes += len(waiting.data)
        return waiting is not None

    def _keep(self, waiting: _Waiting | None) -> None:
        """Let an encoded profile wait in place of the one before it."""
        if waiting is None:
            self._counters.add("exporter_dropped", reason="encode")
            return
        before = self._waiting.get(waiting.key)
        if before is not None:
            waiting.since_ns = before.since_ns
            self._counters.add("exporter_dropped", reason="superseded")
        self._waiting[waiting.key] = waiting

    # Planning -----------------------------------------------------------------------------------

    def _plan(self, due_ns: int) -> None:
        """Set the next read-out, and when this round's profiles are sent."""
        config = self._config
        stall = budget = place = 0.0
        run_id = ""
        try:
            stalled = self._counters.get("exporter_stall_seconds") - self._stalled_before
            stall = max(self._deps.stall_seconds(), stalled) / config.max_stall_ratio
            identity = self._deps.identity()
            made_bytes = self._round_bytes + self._window_bytes
            budget = made_bytes * identity.world_size / config.job_push_bytes_per_second
            place = phase(identity.run_id, identity.rank)
            run_id = identity.run_id
        except Exception as error:
            self._failed("push", error)
        self._throttle = (
            min(self._throttle * 2, MAX_THROTTLE) if self._limited else max(self._throttle // 2, 1)
        )
        self._limited = False
        limit = config.interval_seconds * self._throttle
        interval = stretch(config.interval_seconds, stall, budget, limit)
        if interval != self._interval:
            _log.info(
                "profiles every %g s (needed for stall %.0f s, for byte budget %.0f s, for server"
                " %.0f s)", interval, stall, budget, limit,
            )  # fmt: skip
            self._interval = interval
        self._place, self._backoff = place, Backoff(place)
        self._next_read_ns = next_multiple_ns(max(self._clock.time_ns(), due_ns), interval)
        if self._windowed:
            self._windows.plan(run_id, due_ns, self._next_read_ns)
        self._send_ns = due_ns + int(place * SPREAD * (self._next_read_ns - due_ns))

    # Sending ------------------------------------------------------------------------------------

    def _send(self, end: float | None = None) -> bool:
        """Send what waits, until the next read-out, or until `end` whatever else is due.

        Returns:
            Whether all of it was stored.
        """
        stored = True
        order = sorted(
            self._waiting.values(), key=lambda w: (w.attempts, w.since_ns, w.kind.value, w.device)
        )
        for waiting in order:
            if self._over:
                return False
            if end is None:
                margin = min(READ_MARGIN_SECONDS, self._interval / 10)
                left = (self._next_read_ns - self._clock.time_ns()) / _NS - margin
            else:
                left = end - self._clock.monotonic()
            if left < MIN_PUSH_SECONDS:
                self._send_ns = self._next_read_ns
                return False
            error = self._push(waiting, min(left, self._deps.push_timeout_seconds))
            if error is None:
                self._waiting.pop(waiting.key, None)
                continue
            stored = False
            waiting.attempts += 1
            if not self._again(waiting, error):
                self._drop(waiting, error.reason)
            elif end is None:
                return False  # the others would meet the same server
        return stored

    def _push(self, waiting: _Waiting, deadline_seconds: float) -> PushError | None:
        begin = self._clock.monotonic()
        error: PushError | None = None
        try:
            if self._deps.sink is not None:
                self._deps.sink.push(waiting.data, waiting.kind, waiting.device, deadline_seconds)
        except PushError as failure:
            error = failure
        except Exception as failure:
            error = PushError(_text(failure), reason="error")
        finally:
            self._counters.add("exporter_runs", stage="push")
            self._counters.add("exporter_seconds", self._clock.monotonic() - begin, stage="push")
        if error is None:
            self._failures = 0
            now = self._clock.time_ns() / _NS
            self._counters.set("last_push_timestamp_seconds", now, kind=waiting.kind.value)
            self._notices.recovered("push")
        else:
            self._failures += 1
            self._limited |= error.reason == "rate_limited"
            self._failed("push", error, error.reason)
        return error

    def _again(self, waiting: _Waiting, error: PushError) -> bool:
        """Whether this profile is tried once more; sets when."""
        delay = self._backoff.delay(self._failures, error.retry_after_seconds)
        then = self._clock.time_ns() + int(delay * _NS)
        if (
            not error.retryable
            or waiting.attempts >= MAX_ATTEMPTS
            or then >= self._next_read_ns
            or then - waiting.read_ns > MAX_AGE_SECONDS * _NS
        ):
            return False
        self._send_ns = then
        return True

    def _drop(self, waiting: _Waiting, reason: str) -> None:
        with self._over_lock:
            if self._waiting.pop(waiting.key, None) is None:
                return  # `abandon` has counted it
        self._counters.add("exporter_dropped", reason=reason)

    def _failed(self, stage: str, error: Exception, reason: str = "") -> None:
        self._counters.add("exporter_errors", stage=stage)
        self._notices.failed(stage, reason or type(error).__name__, _text(error))


class _Notices:
    """Logs the first, tenth, hundredth failure of a kind, and when it is over."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._failing: dict[str, int] = {}
        self._logged: set[str] = set()

    def failed(self, stage: str, kind: str, text: str) -> None:
        count = self._counts[stage, kind] = self._counts.get((stage, kind), 0) + 1
        self._failing[stage] = self._failing.get(stage, 0) + 1
        if str(count).strip("0") == "1":
            self._logged.add(stage)
            times = f" {count} times" if count > 1 else ""
            _log.warning("%s failed%s: %s (more like it are only counted)", stage, times, text)

    def waits(self, stage: str, text: str) -> None:
        """Log once what delays a stage and is no failure."""
        if (stage, text) not in self._counts:
            self._counts[stage, text] = 0
            _log.info("%s", text)

    def recovered(self, stage: str) -> None:
        if stage in self._logged:
            self._logged.remove(stage)
            _log.info("%s works again after %d failures", stage, self._failing.pop(stage))


def _text(error: Exception) -> str:
    if isinstance(error, GpumemError):
        return str(error)
    return f"{type(error).__name__}: {error}"[:200]
