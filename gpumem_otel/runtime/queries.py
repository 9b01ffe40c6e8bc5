"""Answers questions about this process: its identity, metrics, profiles and health.

It starts nothing. Its lock is never held while another lock is wanted: the job's own MeterProvider
may ask from within a lock of the SDK.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from gpumem_otel.base.profile import ProfileKind, StepStats
from gpumem_otel.errors import BusyError, CaptureError
from gpumem_otel.metrics.observation import Observation
from gpumem_otel.settings import identity as ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.gate import QuietGate
    from gpumem_otel.base.profile import HeapProfile, Identity
    from gpumem_otel.capture.derived_profiles import DerivedProfiles
    from gpumem_otel.capture.gil_pacing import Pacer
    from gpumem_otel.capture.profile_reader import LiveProfileReader
    from gpumem_otel.runtime.teardown import Teardown
    from gpumem_otel.serve.dependencies import Health
    from gpumem_otel.settings.config import Config
    from gpumem_otel.snapshot.reading import Source
    from gpumem_otel.yielding.engine.safepoint import SafePoints
    from gpumem_otel.yielding.protocols import YieldControl
    from gpumem_otel.yielding.values import YieldStatus

OBSERVE_SECONDS = 1.0
"""Metrics are made from values at most this old."""

WAIT_SECONDS = 1.0
"""How long one question waits for another, before it takes the last answer: a driver that hangs
must block neither a scrape nor the end of the process."""

LATE_INTERVALS = 3
"""A push is late after so many intervals."""


class AgentView(Protocol):
    """What queries and components use of their agent; see `agent.Agent`."""

    config: Config
    environ: Mapping[str, str]
    counters: Counters
    gate: QuietGate
    pacer: Pacer
    teardown: Teardown
    safe_points: SafePoints
    on_profiles: tuple[Callable[[ProfileKind, tuple[HeapProfile, ...]], None], ...]

    def observe(self) -> Observation | None:
        """Values of all metrics."""
        ...

    def yield_status(self) -> YieldStatus | None:
        """Where the process stands between yield and restore; None without an engine."""
        ...

    def engine_of_yields(self) -> YieldControl:
        """The engine of yields, made when it is first asked for."""
        ...


class Queries:
    """Answers from a source, its reader and our own counters; safe from any thread.

    Args:
        agent: whose process it is.
        source: what is read.
        reader: profiles of it.
        derived: profiles that are made from a live read-out.
        live: whether the source is this process's own torch, not a recording.

    Attributes:
        step_stats: asks for the steps so far.
        interval_seconds: asks for the present interval between pushes.
        last_read_ns: time of the last live read-out, 0 before the first.
    """

    def __init__(
        self,
        agent: AgentView,
        source: Source,
        *,
        reader: LiveProfileReader,
        derived: DerivedProfiles,
        live: bool,
    ) -> None:
        config = agent.config
        self.step_stats: Callable[[], StepStats] = StepStats
        self.interval_seconds: Callable[[], float] = lambda: config.profiles.interval_seconds
        self.last_read_ns = 0
        self.derived = derived
        self._config = config
        self._source = source
        self._reader = reader
        self._counters = agent.counters
        self._pacer = agent.pacer
        self._gate = agent.gate
        self._yield_status = agent.yield_status
        self._live = live
        self._values_ns = 0  # of the values that metrics were last made from
        self._lock = threading.Lock()
        self._observed: tuple[float, Observation | None] = (float("-inf"), None)
        self._started = time.monotonic()
        self._home_device = self._first_device()
        self._identity = ranks.identify(
            agent.environ,
            service_name=config.service_name,
            namespace=config.namespace,
            run_id=config.run_id,
            tags=config.tags,
        )

    def _first_device(self) -> int:
        from gpumem_otel.capture.process_facts import current_device

        devices = self.devices()
        if devices:
            return devices[0]
        return current_device() if self._live else 0

    def devices(self) -> tuple[int, ...]:
        """Devices that are read, sorted; () if none is used yet."""
        return self._source.status().devices

    def steps(self) -> StepStats:
        """The steps so far; `step_stats` may be replaced meanwhile."""
        return self.step_stats()

    def identity(self) -> Identity:
        """Who this process is; completed once torch.distributed and its devices are known."""
        from gpumem_otel.capture.process_facts import device_uuids, distributed_rank

        identity = self._identity
        if not self._live:
            return identity
        known = distributed_rank()
        if known is not None and known != (identity.rank, identity.world_size):
            identity = replace(identity, rank=known[0], world_size=known[1])
        missing = [d for d in self.devices() if d not in identity.device_uuids]
        if missing and self._gate.enter():
            try:
                uuids = device_uuids(missing)
            finally:
                self._gate.leave()
            identity = replace(identity, device_uuids={**identity.device_uuids, **uuids})
        self._identity = identity
        return identity

    def observe(self) -> Observation | None:
        """Everything that the METRICS table reads, at most a second old; None if nothing is armed.

        While the driver holds this process, the values of the allocator and the driver are the last
        ones, with their time; all others are current.

        Raises:
            CaptureError: the allocator could not be read.
        """
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            return self._observed[1]
        try:
            observed_at, last = self._observed
            started = time.monotonic()
            if started - observed_at < OBSERVE_SECONDS:
                return last
            try:
                observation = self._observe(last)
            except Exception:
                self._counters.add("exporter_errors", stage="read")
                raise
            self._counters.add("exporter_runs", stage="stats")
            self._counters.add("exporter_seconds", time.monotonic() - started, stage="stats")
            self._observed = (time.monotonic(), observation)
            return observation
        finally:
            self._lock.release()

    def forget(self) -> None:
        """Read the values again at the next question for metrics: something has happened."""
        if self._lock.acquire(timeout=WAIT_SECONDS):
            try:
                self._observed = (float("-inf"), self._observed[1])
            finally:
                self._lock.release()

    def _observe(self, last: Observation | None) -> Observation | None:
        status = self._source.status()
        if not status.armed:
            return None
        time_ns = time.time_ns()
        try:
            # the status reports a driver that fails; the last counters would be wrong
            devices = () if status.reason == "error" else self._source.stats()
        except BusyError:
            # without earlier values there are no rows of the allocator; none end
            devices = () if last is None else last.devices
            time_ns = time_ns if last is None else last.time_ns
        if devices:
            self._values_ns = time_ns
        return Observation(
            identity=self.identity(),
            status=status,
            time_ns=time_ns,
            devices=devices,
            home_device=self._home_device,
            totals=self._reader.totals(),
            classes=self._reader.classes(),
            steps=self.step_stats(),
            counters=self._counters.snapshot(),
            yields=self._yield_status(),
        )

    def profile(
        self,
        kind: ProfileKind,
        device: int | None,
        seconds: float | None,
        stop: threading.Event,
    ) -> bytes:
        """Gzipped pprof for the listener: all devices (or one) in one profile.

        Raises:
            CaptureError: this process has no such profile.
            ValueError: there is no such device.
        """
        from gpumem_otel.profiles.pprof import gzip_bytes

        if device is not None and device not in self.devices():
            used = ", ".join(str(known) for known in self.devices()) or "none"
            raise ValueError(f"device {device} is not used by this process; used: {used}")
        if kind is ProfileKind.LIVE:
            profiles = self._read_live()
        elif kind is ProfileKind.PINNED:
            self._read_live()
            profiles = self.derived.pinned(time.time_ns())
            device = None  # host memory belongs to none
        elif kind is ProfileKind.GROWTH:
            profiles = self.derived.growth()
        else:
            window = seconds or self._config.profiles.allocated_window_seconds
            windows = self._reader.windows
            record = windows.allocated if kind is ProfileKind.ALLOCATED else windows.peak
            profiles = record(window, stop)
        if device is not None:
            profiles = tuple(profile for profile in profiles if profile.device == device)
            if not profiles:
                raise CaptureError(f"read: device {device} has no such profile now")
        return gzip_bytes(self._encode(profiles, kind, {"rank": str(self.identity().rank)}))

    def _read_live(self) -> tuple[HeapProfile, ...]:
        """What is alive; while the driver holds this process the last such profile, with a comment.

        Raises:
            BusyError: nothing was read before.
        """
        from gpumem_otel.capture.costs import with_comments

        try:
            return self._reader.live()
        except BusyError as error:
            last = self._reader.last()
            if last is None:
                raise
            age_seconds, profiles = last
            comment = f"read {age_seconds:.0f} s before it was asked for: {error}"
            return tuple(with_comments(profile, (comment,)) for profile in profiles)

    def encode(self, profile: HeapProfile) -> bytes:
        """One profile of one device as uncompressed pprof within the budget."""
        return self._encode((profile,), profile.kind, None)

    def _encode(
        self,
        profiles: tuple[HeapProfile, ...],
        kind: ProfileKind,
        device_labels: Mapping[str, str] | None,
    ) -> bytes:
        from gpumem_otel.profiles.pprof import encode

        started = time.monotonic()
        self._pacer.begin()
        data = encode(
            profiles,
            device_labels=device_labels,
            max_bytes=self._config.profiles.max_bytes,
            kind=kind,
            pause=self._pacer.pause,
        )
        self._counters.add("exporter_stall_seconds", self._pacer.end())
        self._counters.add("exporter_runs", stage="encode")
        self._counters.add("exporter_seconds", time.monotonic() - started, stage="encode")
        return data

    def health(self) -> Health:
        """The exporter's own health, for /healthz; it says nothing about the job."""
        from gpumem_otel.serve.dependencies import Health

        status = self._source.status()
        reasons = []
        if not status.armed:
            reasons.append("nothing is armed")
        elif not status.supported:
            reasons.append(f"no profiles in this process: {status.reason}")
        ages = {}
        if self.last_read_ns:
            ages["read"] = (time.time_ns() - self.last_read_ns) / 1e9
        if self._values_ns:
            ages["values"] = (time.time_ns() - self._values_ns) / 1e9
        if self._config.pyroscope.url:
            late_seconds = LATE_INTERVALS * self.interval_seconds()
            pushed = max(
                self._counters.get("last_push_timestamp_seconds", kind=kind)
                for kind in self._config.profiles.kinds
            )
            age = time.time() - pushed if pushed else time.monotonic() - self._started
            if pushed:
                ages["push"] = age
            if age > late_seconds:
                reasons.append(
                    f"the last push was {age:.0f} s ago" if pushed else "no profile was pushed yet"
                )
        return Health(ok=not reasons, reasons=tuple(reasons), ages=ages)

    def describe(self) -> tuple[str, ...]:
        """Facts about this process, for the comments of each profile."""
        from gpumem_otel.capture.process_facts import process_facts

        identity = self.identity()
        facts: dict[str, str] = {}
        if self._gate.enter():
            try:
                facts = process_facts(self.devices())
            finally:
                self._gate.leave()
        rank = f"rank {identity.rank} of {identity.world_size}, restart {identity.restart}"
        where = f"node {identity.node}, process {identity.pid}"
        uuids = [f"device {d}: {uuid}" for d, uuid in sorted(identity.device_uuids.items())]
        return (rank, where, *uuids, *(f"{name} {value}" for name, value in facts.items()))
