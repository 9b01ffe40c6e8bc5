"""What the parts ask of a running process: who it is, its metrics, its profiles, its health.

An `Queries` lives from arming to stopping. It starts nothing and holds no lock but its own, which
is never held while a lock of anybody else is wanted: the job's own MeterProvider may ask from
within a lock of the SDK.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpumem_otel.base.gate import QuietGate
from gpumem_otel.base.profile import ProfileKind, StepStats
from gpumem_otel.errors import BusyError, CaptureError
from gpumem_otel.metrics.observation import Observation
from gpumem_otel.settings import identity as ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import HeapProfile, Identity
    from gpumem_otel.capture.derived_profiles import DerivedProfiles
    from gpumem_otel.capture.gil_pacing import Pacer
    from gpumem_otel.capture.profile_reader import LiveProfileReader
    from gpumem_otel.serve.dependencies import Health
    from gpumem_otel.settings.config import Config
    from gpumem_otel.snapshot.reading import Source
    from gpumem_otel.yielding.values import YieldStatus

OBSERVE_SECONDS = 1.0
"""Metrics are answered from values at most this old."""

WAIT_SECONDS = 1.0
"""How long a question waits for one before it, then takes the last answer: a driver that hangs
must hold neither a scrape nor the end of the process."""

LATE_INTERVALS = 3
"""A push is late after so many intervals."""


class Queries:
    """Answers out of a source, its reader and our own counters; safe from any thread.

    Args:
        config: everything resolved.
        environ: the process's environment, for the launcher's variables.
        source: what is read.
        reader: profiles of it.
        counters: what the parts count about themselves.
        pacer: gives up the interpreter lock between slices of encoding.
        beside: profiles that go with a live read-out.
        live_process: whether the source is this process's own torch, not a recording.
        gate: while it is closed torch is asked nothing, and the last values are given.

    Attributes:
        yield_status: asks where the process stands between yield and restore; None where nobody
            can ask it to give its memory back.
        step_stats: asks for the steps so far, of who counts or has recorded them.
        interval_seconds: asks for the interval between pushes as it is now.
        beside: profiles that go with a live read-out.
        last_read_ns: when the last live read-out was made, 0 before.
    """

    def __init__(
        self,
        config: Config,
        *,
        environ: Mapping[str, str],
        source: Source,
        reader: LiveProfileReader,
        counters: Counters,
        pacer: Pacer,
        beside: DerivedProfiles,
        live_process: bool,
        gate: QuietGate | None = None,
    ) -> None:
        self._gate = gate or QuietGate()
        self.step_stats: Callable[[], StepStats] = StepStats
        self.yield_status: Callable[[], YieldStatus | None] = lambda: None
        self.interval_seconds: Callable[[], float] = lambda: config.profiles.interval_seconds
        self.last_read_ns = 0
        self._values_ns = 0  # of what the metrics were last answered from
        self._config = config
        self._source = source
        self._reader = reader
        self._counters = counters
        self._pacer = pacer
        self.beside = beside
        self._live_process = live_process
        self._lock = threading.Lock()
        self._observed: tuple[float, Observation | None] = (float("-inf"), None)
        self._started = time.monotonic()
        self._home_device = self._first_device()
        self._identity = ranks.identify(
            environ,
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
        return current_device() if self._live_process else 0

    def devices(self) -> tuple[int, ...]:
        """Devices that are read, sorted; () where none is used yet."""
        return self._source.status().devices

    def steps(self) -> StepStats:
        """The steps so far, of who counts them by now."""
        return self.step_stats()

    def identity(self) -> Identity:
        """Who this process is, read again once torch.distributed and its devices are known."""
        from gpumem_otel.capture.process_facts import device_uuids, distributed_rank

        identity = self._identity
        if not self._live_process:
            return identity
        known = distributed_rank()
        if known is not None and known != (identity.rank, identity.world_size):
            identity = replace(identity, rank=known[0], world_size=known[1])
        missing = [d for d in self.devices() if d not in identity.device_uuids]
        if missing and self._gate.enter():
            try:
                found = device_uuids(missing)
            finally:
                self._gate.leave()
            identity = replace(identity, device_uuids={**identity.device_uuids, **found})
        self._identity = identity
        return identity

    def observe(self) -> Observation | None:
        """Everything the METRICS table reads from, at most a second old; None: nothing is armed.

        While the driver holds this process, what the allocator and the driver said last, with the
        time of it; all else is of now.

        Raises:
            CaptureError: the allocator could not be read.
        """
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            return self._observed[1]
        try:
            taken, last = self._observed
            if time.monotonic() - taken < OBSERVE_SECONDS:
                return last
            started = time.monotonic()
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
        """Answer the next question for metrics from values of now: something has happened."""
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
            # a driver that fails is said by the status; the counters of before would be a lie
            devices = () if status.reason == "error" else self._source.stats()
        except BusyError:
            # without values of before there are no rows of the allocator, and none end
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
            totals=self._reader.books(),
            classes=self._reader.classes(),
            steps=self.step_stats(),
            counters=self._counters.snapshot(),
            yields=self.yield_status(),
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
            CaptureError: it can not be had here.
            ValueError: there is no such device.
        """
        from gpumem_otel.profiles.pprof import gzip_bytes

        if device is not None and device not in self.devices():
            used = ", ".join(str(known) for known in self.devices()) or "none"
            raise ValueError(f"device {device} is not used by this process; used: {used}")
        if kind is ProfileKind.LIVE:
            profiles = self._live()
        elif kind is ProfileKind.PINNED:
            self._live()
            profiles = self.beside.pinned(time.time_ns())
            device = None  # host memory is of none
        elif kind is ProfileKind.GROWTH:
            profiles = self.beside.growth()
        else:
            window = seconds or self._config.profiles.allocated_window_seconds
            windows = self._reader.windows
            record = windows.allocated if kind is ProfileKind.ALLOCATED else windows.peak
            profiles = record(window, stop)
        if device is not None:
            profiles = tuple(profile for profile in profiles if profile.device == device)
            if not profiles:
                raise CaptureError(f"read: nothing is known of device {device} just now")
        return gzip_bytes(self._encode(profiles, kind, {"rank": str(self.identity().rank)}))

    def _live(self) -> tuple[HeapProfile, ...]:
        """What is alive; while the driver holds this process what was alive before, and it says so.

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
            told = f"read {age_seconds:.0f} s before it was asked for: {error}"
            return tuple(with_comments(profile, (told,)) for profile in profiles)

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
        """How the exporter is, for /healthz: says nothing about the job."""
        from gpumem_otel.serve.dependencies import Health

        status = self._source.status()
        reasons = []
        if not status.armed:
            reasons.append("nothing is armed")
        elif not status.supported:
            reasons.append(f"profiles can not be had here: {status.reason}")
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
        """Sentences about this process, for the comments of each profile."""
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
