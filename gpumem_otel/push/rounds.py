"""What the background thread does, without the thread: read, encode, send, count.

A round begins with a read-out at a wall-clock multiple of the interval, the same moment on all
ranks, since each collective waits for the slowest rank. The profiles are encoded at once and sent
at the rank's own phase. Per kind and device at most one profile waits: the newest wins, and has the
place in line of the one before it, so that a slow server gets some of each kind. Where events are
wanted, a window is recorded between two read-outs, at a moment that all ranks share.

The interval is the smallest multiple of the configured one that holds the stall ratio and the
job's byte budget. The first read-out comes early, at the next multiple of at most 15 s, so that
a new job is seen soon.

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
    from collections.abc import Callable, Mapping, Sequence

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import HeapProfile, Identity, SourceStatus
    from gpumem_otel.base.protocols import Clock
    from gpumem_otel.push.interfaces import ProfileSink, PushReader
    from gpumem_otel.settings.config import ProfileConfig

FIRST_READ_SECONDS = 15.0
MAX_ATTEMPTS = 5
MAX_AGE_SECONDS = 3300.0
"""A server refuses what is older than 1 h (validation.reject-older-than)."""
MAX_THROTTLE = 8
SPREAD = 0.5
"""Part of the interval over which the ranks spread their sending."""
READ_MARGIN_SECONDS = 0.25
"""A push ends so long before the next read-out, or a tenth of a short interval before it."""
MIN_PUSH_SECONDS = 0.05

BESIDE_LIVE = (ProfileKind.GROWTH, ProfileKind.PINNED)
"""Kinds that a live read-out gives too."""
WINDOWED = (ProfileKind.PEAK, ProfileKind.ALLOCATED)
"""Kinds that need a window of events."""

_Made = TypeVar("_Made")
_NS = 1_000_000_000
_log = named_logger("gpumem_otel.push")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDependencies:
    """What the rounds are made of.

    Attributes:
        reader: takes the profiles.
        sink: where they go, None where they are only shown to `on_profiles`.
        encode: one profile -> uncompressed pprof; counts its own time.
        identity: asked each round, since the rank may be known late.
        status: nothing is read before it says armed.
        stall_seconds: how long the last read-out held the interpreter lock; what the counter
            `exporter_stall_seconds` rose by meanwhile (the encoding too) is seen anyway.
        on_profiles: called with what was read (a recording, a live table), on our thread.
        push_timeout_seconds: deadline of one push.
        final_read: read once more at the end also where there is neither a sink nor
            `on_profiles`: somebody else takes what is read, for instance a recording.
    """

    reader: PushReader
    sink: ProfileSink | None
    encode: Callable[[HeapProfile], bytes]
    config: ProfileConfig
    counters: Counters
    clock: Clock
    identity: Callable[[], Identity]
    status: Callable[[], SourceStatus]
    stall_seconds: Callable[[], float] = float
    on_profiles: Sequence[Callable[[ProfileKind, tuple[HeapProfile, ...]], None]] = ()
    push_timeout_seconds: float = 10.0
    final_read: bool = True


@dataclass(slots=True)
class _Waiting:
    """An encoded profile that was not stored yet.

    Attributes:
        since_ns: when the first one was read of those that it supersedes.
    """

    kind: ProfileKind
    device: int
    data: bytes
    read_ns: int
    since_ns: int
    attempts: int = 0


class Rounds:
    """The state between rounds; used by one thread, `abandon` excepted.

    Args:
        parts: what to read and where to send it.
        stop: ends a recorded window early: the end, or somebody who wants a flush.
    """

    def __init__(self, parts: PushDependencies, stop: threading.Event) -> None:
        self._parts = parts
        self._stop = stop
        self._notices = _Notices()
        self._waiting: dict[tuple[ProfileKind, int], _Waiting] = {}
        self._being_made = 0
        self._over = False
        self._over_lock = threading.Lock()
        kinds = parts.config.kinds
        self._beside = [kind for kind in BESIDE_LIVE if kind.value in kinds]
        self._windowed = [kind for kind in WINDOWED if kind.value in kinds]
        self._windows = WindowPlan(parts.config.max_stall_ratio)
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
        self._interval = parts.config.interval_seconds
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
        now = self._parts.clock.time_ns()
        step = self._first_interval() if self._first else self._interval
        if not 0 <= self._next_read_ns - now <= step * _NS and not self._is_due(now, step):
            self._next_read_ns = next_multiple_ns(now, step)  # the start, or the clock was set
            self._send_ns = min(self._send_ns, now)
        if now >= self._next_read_ns:
            due, self._first = self._next_read_ns, False
            self._read()
            self._plan(due)
        if self._windows.due(self._parts.clock.time_ns()):
            self._record()
        if self._waiting and self._parts.clock.time_ns() >= self._send_ns:
            self._send()
        now = self._parts.clock.time_ns()
        until = min(self._next_read_ns, self._send_ns) if self._waiting else self._next_read_ns
        if self._windows.begin_ns is not None:
            until = min(until, self._windows.begin_ns)
        return max(until - now, 0) / _NS

    def flush(self, deadline_seconds: float) -> bool:
        """Read what is alive and send all that waits, now; True where all of it was stored."""
        end = self._parts.clock.monotonic() + deadline_seconds
        stored = self._read()
        return self._send(end) and stored and not self._waiting

    def finish(self, deadline_seconds: float) -> None:
        """The last flush; what could not be sent is dropped and counted."""
        if self._over:
            return
        end = self._parts.clock.monotonic() + deadline_seconds
        parts = self._parts
        if parts.sink is not None or parts.on_profiles or parts.final_read:
            self._read()
        self._send(end)
        self.abandon()

    def abandon(self) -> None:
        """It ends here, whatever is under way: all that waits or is being made is dropped.

        May be called from another thread, when the end takes longer than it may. What is being
        sent just then counts as dropped: nobody will know.
        """
        with self._over_lock:
            if self._over:
                return
            self._over = True
            lost = len(self._waiting) + self._being_made
            self._waiting.clear()
        if lost:
            self._parts.counters.add("exporter_dropped", lost, reason="shutdown")

    def _first_interval(self) -> float:
        return min(self._parts.config.interval_seconds, FIRST_READ_SECONDS)

    def _is_due(self, now: int, step: float) -> bool:
        """Whether the planned read-out just passed, rather than the clock having been set."""
        return 0 < self._next_read_ns <= now <= self._next_read_ns + step * _NS

    # Reading ------------------------------------------------------------------------------------

    def _read(self) -> bool:
        """Read what is alive, and what goes with it; whether all of it could be encoded."""
        parts = self._parts
        count = self._readable()
        if count is None:
            return False
        self._round_bytes = 0
        self._stalled_before = parts.counters.get("exporter_stall_seconds")
        wanted = ProfileKind.LIVE.value in parts.config.kinds
        if not wanted and not self._beside:
            return True
        live = self._take("read", parts.reader.live, count if wanted else 0)
        if live is None:
            return False
        done = not wanted or self._pass_on({ProfileKind.LIVE: live})
        for kind in self._beside:
            made = self._take("read", partial(parts.reader.beside, kind, live), count)
            done &= made is not None and self._pass_on({kind: made})
        return done

    def _record(self) -> None:
        """Record a window of events and make of it what is wanted."""
        parts, clock = self._parts, self._parts.clock
        stalled_before = parts.counters.get("exporter_stall_seconds")
        round_bytes, self._round_bytes = self._round_bytes, 0
        limit_seconds = self._windows.limit_seconds(clock.time_ns())
        count = self._readable()
        made: Mapping[ProfileKind, tuple[HeapProfile, ...]] | None = None
        if count is not None:
            made = self._take(
                "window",
                lambda: parts.reader.windowed(self._windowed, limit_seconds, self._stop),
                count * len(self._windowed),
            )
        if made is not None:
            self._pass_on(made)
        self._window_bytes, self._round_bytes = self._round_bytes, round_bytes
        now = clock.time_ns()
        if made:  # what waits is sent at the rank's own phase of the time that is left
            self._send_ns = max(self._send_ns, now) + int(
                self._place * SPREAD * max(self._next_read_ns - max(self._send_ns, now), 0)
            )
        stalled = parts.counters.get("exporter_stall_seconds") - stalled_before
        self._windows.done(now, stalled)

    def _readable(self) -> int | None:
        """How many devices there are to read; None where that is not known."""
        try:
            status = self._parts.status()
        except Exception as error:
            self._failed("read", error)
            return None
        return len(status.devices) if status.armed and status.supported else None

    def _take(self, stage: str, read: Callable[[], _Made], count: int) -> _Made | None:
        """Read profiles, of which `count` are to be encoded; None where they can not be had."""
        self._being_made = count if self._parts.sink is not None else 0
        try:
            made = read()
        except BusyError as error:
            self._being_made = 0
            self._notices.waits(stage, str(error))
            return None
        except Exception as error:
            self._being_made = 0
            self._failed(stage, error)
            return None
        self._notices.recovered(stage)
        return made

    def _pass_on(self, made: Mapping[ProfileKind, tuple[HeapProfile, ...]]) -> bool:
        """Show what was read, and encode it; whether all of it could be encoded."""
        parts = self._parts
        for callback in parts.on_profiles:
            for kind, profiles in made.items():
                self._show(callback, kind, profiles)
        if parts.sink is None:
            return True
        profiles = tuple(profile for of_kind in made.values() for profile in of_kind)
        self._being_made = len(profiles)
        return all([self._encode(profile) for profile in profiles])  # noqa: C419 - encode each

    def _show(
        self,
        callback: Callable[[ProfileKind, tuple[HeapProfile, ...]], None],
        kind: ProfileKind,
        profiles: tuple[HeapProfile, ...],
    ) -> None:
        try:
            callback(kind, profiles)
        except Exception as error:
            self._failed("record", error)

    def _encode(self, profile: HeapProfile) -> bool:
        parts = self._parts
        key = (profile.kind, profile.device)
        try:
            data = parts.encode(profile)
        except Exception as error:
            self._failed("encode", error)
            self._made(None, key, "encode")
            return False
        self._notices.recovered("encode")
        now = parts.clock.time_ns()
        self._made(_Waiting(*key, data, now, now), key, "superseded")
        self._round_bytes += len(data)
        return True

    def _made(self, waiting: _Waiting | None, key: tuple[ProfileKind, int], reason: str) -> None:
        """A profile is no longer being made: it waits, or was lost itself."""
        with self._over_lock:
            self._being_made -= 1
            if self._over:
                return
            before = self._waiting.get(key)
            lost = waiting is None or before is not None
            if waiting is not None:
                if before is not None:
                    waiting.since_ns = before.since_ns
                self._waiting[key] = waiting
        if lost:
            self._parts.counters.add("exporter_dropped", reason=reason)

    # Planning -----------------------------------------------------------------------------------

    def _plan(self, due_ns: int) -> None:
        """Set the next read-out, and when this round's profiles are sent."""
        parts, config = self._parts, self._parts.config
        stall = budget = place = 0.0
        run_id = ""
        try:
            stalled = parts.counters.get("exporter_stall_seconds") - self._stalled_before
            stall = max(parts.stall_seconds(), stalled) / config.max_stall_ratio
            identity = parts.identity()
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
                "profiles every %g s (stall asks for %.0f s, byte budget for %.0f s, server for"
                " %.0f s)", interval, stall, budget, limit,
            )  # fmt: skip
            self._interval = interval
        self._place, self._backoff = place, Backoff(place)
        self._next_read_ns = next_multiple_ns(max(parts.clock.time_ns(), due_ns), interval)
        if self._windowed:
            self._windows.plan(run_id, due_ns, self._next_read_ns)
        self._send_ns = due_ns + int(place * SPREAD * (self._next_read_ns - due_ns))

    # Sending ------------------------------------------------------------------------------------

    def _send(self, end: float | None = None) -> bool:
        """Send what waits, until the next read-out, or until `end` whatever else is due.

        Returns:
            Whether all of it was stored.
        """
        clock = self._parts.clock
        stored = True
        order = sorted(
            self._waiting.values(), key=lambda w: (w.attempts, w.since_ns, w.kind.value, w.device)
        )
        for waiting in order:
            if self._over:
                return False
            if end is None:
                margin = min(READ_MARGIN_SECONDS, self._interval / 10)
                left = (self._next_read_ns - clock.time_ns()) / _NS - margin
            else:
                left = end - clock.monotonic()
            if left < MIN_PUSH_SECONDS:
                self._send_ns = self._next_read_ns
                return False
            error = self._push(waiting, min(left, self._parts.push_timeout_seconds))
            key = (waiting.kind, waiting.device)
            if error is None:
                self._waiting.pop(key, None)
                continue
            stored = False
            waiting.attempts += 1
            if not self._again(waiting, error):
                self._drop(key, error.reason)
            elif end is None:
                return False  # the others would meet the same server
        return stored

    def _push(self, waiting: _Waiting, deadline_seconds: float) -> PushError | None:
        parts = self._parts
        begin = parts.clock.monotonic()
        try:
            if parts.sink is not None:
                parts.sink.push(waiting.data, waiting.kind, waiting.device, deadline_seconds)
        except PushError as failure:
            error: PushError | None = failure
        except Exception as failure:
            error = PushError(_text(failure), reason="error")
        else:
            error = None
        finally:
            parts.counters.add("exporter_runs", stage="push")
            parts.counters.add("exporter_seconds", parts.clock.monotonic() - begin, stage="push")
        if error is None:
            self._failures = 0
            now = parts.clock.time_ns() / _NS
            parts.counters.set("last_push_timestamp_seconds", now, kind=waiting.kind.value)
            self._notices.recovered("push")
        else:
            self._failures += 1
            self._limited |= error.reason == "rate_limited"
            self._failed("push", error, error.reason)
        return error

    def _again(self, waiting: _Waiting, error: PushError) -> bool:
        """Whether this profile is tried once more, and from when on."""
        now = self._parts.clock.time_ns()
        delay = self._backoff.delay(self._failures, error.retry_after_seconds)
        then = now + int(delay * _NS)
        if (
            not error.retryable
            or waiting.attempts >= MAX_ATTEMPTS
            or then >= self._next_read_ns
            or then - waiting.read_ns > MAX_AGE_SECONDS * _NS
        ):
            return False
        self._send_ns = then
        return True

    def _drop(self, key: tuple[ProfileKind, int], reason: str) -> None:
        with self._over_lock:
            if self._waiting.pop(key, None) is None:
                return  # `abandon` has counted it
        self._parts.counters.add("exporter_dropped", reason=reason)

    def _failed(self, stage: str, error: Exception, reason: str = "") -> None:
        self._parts.counters.add("exporter_errors", stage=stage)
        self._notices.failed(stage, reason or type(error).__name__, _text(error))


class _Notices:
    """Logs the first, tenth, hundredth failure of a kind, and when it is over."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._failing: dict[str, int] = {}
        self._told: set[str] = set()

    def failed(self, stage: str, kind: str, text: str) -> None:
        count = self._counts[stage, kind] = self._counts.get((stage, kind), 0) + 1
        self._failing[stage] = self._failing.get(stage, 0) + 1
        if str(count).strip("0") == "1":
            self._told.add(stage)
            times = f" {count} times" if count > 1 else ""
            _log.warning("%s failed%s: %s (more like it are only counted)", stage, times, text)

    def waits(self, stage: str, text: str) -> None:
        """Something stands in the way that is no failure; said once."""
        if (stage, text) not in self._counts:
            self._counts[stage, text] = 0
            _log.info("%s", text)

    def recovered(self, stage: str) -> None:
        if stage in self._told:
            self._told.remove(stage)
            _log.info("%s works again after %d failures", stage, self._failing.pop(stage))


def _text(error: Exception) -> str:
    if isinstance(error, GpumemError):
        return str(error)
    return f"{type(error).__name__}: {error}"[:200]
