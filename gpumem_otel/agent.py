"""Composition root: builds the parts from a Config; start, stop, flush, fork and exit handling.

Nothing here may raise into the job: every step of ours is run by `_Guard`, which counts a failure,
logs it once and goes on. The order of life:

* `install()` in the job's thread: hooks that wait for torch and for CUDA; no thread, no socket;
* the job initialises CUDA (or a recording is played): `_arm()`, still in the job's thread, switches
  recording on and starts the background thread, the listener and the instruments;
* `uninstall()`, or the end of the process: one last read-out and push within a bound, then
  everything is undone, last made first.

A forked child is silent: it drops what it inherited and waits for a CUDA context of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

from gpumem_otel import ranks
from gpumem_otel.capture.pacer import Pacer
from gpumem_otel.config import process_environ
from gpumem_otel.core.counters import Counters
from gpumem_otel.core.model import Observation, ProfileKind, StepStats
from gpumem_otel.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpumem_otel.capture.readout import Reader
    from gpumem_otel.config import Config
    from gpumem_otel.core.model import HeapProfile, Identity
    from gpumem_otel.core.ports import FrameNamer, Reading, Source
    from gpumem_otel.export.pusher import Pusher
    from gpumem_otel.export.transport import Transport
    from gpumem_otel.serve.deps import Health
    from gpumem_otel.serve.server import Listener

__all__ = ["Agent", "ProfilesCallback", "StepSource"]

_log = logging.getLogger("gpumem_otel.agent")

ProfilesCallback: TypeAlias = "Callable[[ProfileKind, tuple[HeapProfile, ...]], None]"

EXIT_FLUSH_SECONDS = 5.0
"""What the last read-out and push may take when the process ends."""

LISTENER_STOP_SECONDS = 1.0

OBSERVE_SECONDS = 1.0
"""Metrics are answered from values at most this old."""


class StepSource(Protocol):
    """Counts optimizer steps: hooks in a job, the recorded numbers in a replay."""

    def stats(self) -> StepStats:
        """Steps so far."""
        ...


class _Guard:
    """Runs an action of ours so that its failure is counted and logged once, never raised."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._logged: set[str] = set()

    def run(self, stage: str, action: Callable[[], object]) -> bool:
        """Whether the action went through."""
        try:
            action()
        except Exception as error:
            self._counters.add("exporter_errors", stage=stage)
            if stage not in self._logged:
                self._logged.add(stage)
                _log.warning("%s failed, the job goes on: %s", stage, error, exc_info=True)
            return False
        return True


class Agent:
    """The parts of one process, wired together.

    Args:
        config: everything resolved.
        source: what is read; None for the torch of this process, armed by its first use of CUDA.
        on_profiles: called on the background thread with each set of profiles read.
        environ: the process's environment, for the launcher's variables.

    Attributes:
        counters: what the parts count about themselves.
        reader: profiles on demand; None until armed.
    """

    def __init__(
        self,
        config: Config,
        *,
        source: Source | None = None,
        on_profiles: ProfilesCallback | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.counters = Counters()
        self.reader: Reader | None = None
        self._given_source = source
        self._on_profiles = on_profiles
        self._environ = process_environ() if environ is None else environ
        self._guard = _Guard(self.counters)
        self._undo: list[tuple[str, Callable[[float], object]]] = []
        self._pacer = Pacer()  # one for all that works under the reader's lock
        self._reset()

    def _reset(self) -> None:
        """Nothing is armed, in this process."""
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._armed = False
        self._source = self._given_source
        self._steps: StepSource | None = None
        self._listener: Listener | None = None
        self._pusher: Pusher | None = None
        self._transport: Transport | None = None
        self._identity: Identity | None = None
        self._announced: Identity | None = None
        self._observed: tuple[float, Observation | None] = (float("-inf"), None)
        self._last_read_ns = 0
        self.reader = None

    # life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait for CUDA (hooks only, no thread); with a source of one's own, start at once."""
        for warning in self.config.warnings:
            _log.warning("%s", warning)
        if not self.config.enabled:
            return
        if self._given_source is not None:
            self._arm()
        else:
            self._guard.run("arm", self._await_cuda)

    def _await_cuda(self) -> None:
        from gpumem_otel.capture.arming import Arming
        from gpumem_otel.capture.sources import TorchSource

        source = TorchSource(
            stacks=self.config.capture.stacks,
            max_window_events=self.config.capture.max_window_events,
            counters=self.counters,
            environ=self._environ,
            pause=self._pacer.pause,
        )
        self._source = source
        arming = Arming(self._arm, on_import=source.prepare)
        self._defer("arm", lambda _: source.stop())
        self._defer("arm", lambda _: arming.stop())
        arming.start()

    def _defer(self, stage: str, undo: Callable[[float], object]) -> None:
        """Remember how to undo what was just done; `undo` is given the seconds that are left."""
        self._undo.append((stage, undo))

    def _arm(self) -> None:
        """CUDA is there: start the parts. Runs on the job's thread and never raises."""
        with self._lock:
            if self._armed or self._pid != os.getpid():
                return
            self._armed = True
            for stage, start in (
                ("record", self._start_reading),
                ("steps", self._start_steps),
                ("listen", self._start_listener),
                ("push", self._start_metrics),
                ("push", self._start_host_profiles),
                ("push", self._start_pusher),
            ):
                if not self._guard.run(stage, start) and stage == "record":
                    return

    def stop(self, timeout: float = EXIT_FLUSH_SECONDS) -> None:
        """Flush within the bound and undo everything, last made first; may be called twice."""
        if self._pid != os.getpid():
            return
        with self._lock:
            undo, self._undo = self._undo, []
        deadline = time.monotonic() + timeout
        for stage, action in reversed(undo):
            self._guard.run(stage, partial(action, max(deadline - time.monotonic(), 0.1)))
        self._reset()

    def after_fork_in_child(self) -> None:
        """Drop what was inherited, touching nothing of the parent's; wait for CUDA anew."""
        undo = self._undo
        self.counters.reset_lock_after_fork()
        if self._listener is not None:
            self._guard.run("fork", self._listener.close_in_child)
        if self._pusher is not None:
            self._guard.run("fork", self._pusher.abandon_after_fork)
        if self._transport is not None:
            self._guard.run("fork", self._transport.abandon_after_fork)
        was_armed = self._armed
        source = self._source
        self._reset()
        if was_armed or self._given_source is not None:
            # the parent has a context or plays a recording: neither is this child's
            self._undo = []
        else:
            # the hooks that wait for CUDA were inherited and are this child's own now
            self._undo, self._source = undo, source

    # parts ----------------------------------------------------------------------------------

    def _start_reading(self) -> None:
        from gpumem_otel.capture.names import QualifiedNamer
        from gpumem_otel.capture.readout import Reader
        from gpumem_otel.core.frames import with_basename_paths
        from gpumem_otel.export.clock import SystemClock

        source = self._source
        if source is None:
            raise CaptureError("read: there is no source")
        start = getattr(source, "start", None)
        if start is not None:
            start()
        namer: FrameNamer = QualifiedNamer(pause=self._pacer.pause)
        if self.config.profiles.redact_paths:
            namer = with_basename_paths(namer)
        self.reader = Reader(
            source,
            namer=namer,
            clock=SystemClock(),
            counters=self.counters,
            config=self.config.profiles,
            pacer=self._pacer,
            describe=self._describe,
        )
        self.reader.tap.append(self._note_reading)
        if self.config.record_path:
            self._guard.run("record", partial(self._start_recording, namer))

    def _start_recording(self, namer: FrameNamer) -> None:
        from gpumem_otel.capture.process import process_facts
        from gpumem_otel.export.recordfile import RecordingFile

        recording = RecordingFile(
            self.config.record_path,
            identity=self.identity(),
            facts=process_facts(self._devices()),
            namer=namer,
        )
        self._defer("record", lambda _: recording.close())
        reader = self.reader
        if reader is not None:
            reader.tap.append(
                lambda reading: self._guard.run(
                    "record", partial(recording.add, reading, self._step_stats())
                )
            )
            reader.window_tap.append(
                lambda reading, seconds: self._guard.run(
                    "record", partial(recording.add_window, reading, seconds)
                )
            )

    def _start_steps(self) -> None:
        stats = getattr(self._given_source, "steps", None)
        if stats is not None:
            self._steps = _RecordedSteps(stats)
            return
        if self._given_source is not None or not self.config.capture.steps:
            return
        from gpumem_otel.capture.steps import StepCounter

        counter = StepCounter(allocated=getattr(self._source, "allocated", dict))
        self._defer("steps", lambda _: counter.stop())
        counter.start()
        self._steps = counter

    def _start_listener(self) -> None:
        if not self.config.serve.enabled:
            return
        from gpumem_otel.export.clock import SystemClock
        from gpumem_otel.export.prometheus import Exposition
        from gpumem_otel.serve.deps import AppDeps
        from gpumem_otel.serve.server import Listener

        identity = self.identity()
        exposition = Exposition(
            self.observe,
            self.config.metrics.level,
            clock=SystemClock(),
            counters=self.counters,
        )
        listener = Listener(
            AppDeps(
                metrics=exposition.render,
                profile=self.profile,
                health=self.health,
                service_name=identity.service_name,
            ),
            self.config.serve,
            local_rank=identity.local_rank,
            counters=self.counters,
            identity=self.identity,
        )
        # daemons in any case: a profile that is being made does not hold up the exit
        self._defer("listen", lambda left: listener.stop(min(left, LISTENER_STOP_SECONDS)))
        listener.start()
        self._listener, self._announced = listener, identity

    def _start_metrics(self) -> None:
        if not self.config.metrics.otlp:
            return
        from gpumem_otel.export.otel import OtelMetrics

        otel = OtelMetrics(
            self.observe,
            self.config.metrics.level,
            self.identity(),
            dict(self.config.metrics.otlp_environ),
            self.config.metrics.otlp_interval_seconds,
            self.counters,
        )
        self._defer("push", otel.stop)
        otel.start()

    def _start_host_profiles(self) -> None:
        if not self.config.host_profiles or not self.config.pyroscope.url:
            return
        from gpumem_otel.export.hostprofiles import start_host_profiles, stop_host_profiles

        if start_host_profiles(self.config.pyroscope, self.identity()):
            self._defer("push", lambda _: stop_host_profiles())

    def _start_pusher(self) -> None:
        from gpumem_otel.export.pusher import Pusher

        reader, source = self.reader, self._source
        if reader is None or source is None:
            return
        sink = None
        if self.config.pyroscope.url:
            from gpumem_otel.export.pyroscope import PyroscopeSink
            from gpumem_otel.export.transport import Transport

            transport = Transport(self.config.pyroscope, environ=self._environ)
            self._transport = transport
            self._defer("push", lambda _: transport.close())
            sink = PyroscopeSink(transport, self.config.pyroscope, self.identity, self.counters)
        pusher = Pusher(
            _SinceLast(reader),
            sink,
            config=self.config.profiles,
            identity=self.identity,
            status=source.status,
            encode=self.encode,
            counters=self.counters,
            stall_seconds=lambda: reader.last_stall_seconds,
            on_profiles=() if self._on_profiles is None else (self._on_profiles,),
            push_timeout_seconds=self.config.pyroscope.timeout_seconds,
        )
        self._defer("push", pusher.stop)
        pusher.start()
        self._pusher = pusher

    # what the parts ask -----------------------------------------------------------------------

    def identity(self) -> Identity:
        """Who this process is, read again once torch.distributed and its devices are known."""
        from gpumem_otel.capture.process import device_uuids, distributed_rank

        identity = self._identity
        if identity is None:
            identity = ranks.identify(
                self._environ,
                service_name=self.config.service_name,
                namespace=self.config.namespace,
                tags=self.config.tags,
            )
        known = distributed_rank() if self._given_source is None else None
        if known is not None and known != (identity.rank, identity.world_size):
            identity = replace(identity, rank=known[0], world_size=known[1])
        missing = [d for d in self._devices() if d not in identity.device_uuids]
        if missing and self._given_source is None and (found := device_uuids(missing)):
            identity = replace(identity, device_uuids={**identity.device_uuids, **found})
        self._identity = identity
        return identity

    def observe(self) -> Observation | None:
        """Everything the METRICS table reads from, at most a second old; None: nothing yet."""
        source, reader = self._source, self.reader
        if source is None or reader is None or self._pid != os.getpid():
            return None
        with self._lock:
            taken, last = self._observed
            if time.monotonic() - taken < OBSERVE_SECONDS:
                return last
            started = time.monotonic()
            status = source.status()
            observation = (
                Observation(
                    identity=self.identity(),
                    status=status,
                    time_ns=time.time_ns(),
                    devices=source.stats(),
                    books=reader.books(),
                    steps=self._step_stats(),
                    counters=self.counters.snapshot(),
                )
                if status.armed
                else None
            )
            self.counters.add("exporter_runs", stage="stats")
            self.counters.add("exporter_seconds", time.monotonic() - started, stage="stats")
            self._observed = (time.monotonic(), observation)
            return observation

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
            ValueError: there is no such device or kind.
        """
        from gpumem_otel.core.pprof import gzip_bytes

        reader = self.reader
        if reader is None:
            raise CaptureError("read: nothing is armed")
        if kind is ProfileKind.LIVE:
            profiles = reader.live()
        elif kind is ProfileKind.ALLOCATED:
            window = seconds or self.config.profiles.allocated_window_seconds
            profiles = reader.allocated(window, stop)
        else:
            raise ValueError(f"kind {kind.value} is not recorded here; ask for live or allocated")
        if device is not None:
            here = ", ".join(str(profile.device) for profile in profiles) or "none"
            profiles = tuple(profile for profile in profiles if profile.device == device)
            if not profiles:
                raise ValueError(f"device {device} is not used by this process; used: {here}")
        return gzip_bytes(self._encode(profiles, kind, {"rank": str(self.identity().rank)}))

    def encode(self, profile: HeapProfile) -> bytes:
        """One profile of one device as uncompressed pprof within the budget."""
        return self._encode((profile,), profile.kind, None)

    def _encode(
        self,
        profiles: tuple[HeapProfile, ...],
        kind: ProfileKind,
        device_labels: Mapping[str, str] | None,
    ) -> bytes:
        from gpumem_otel.core.pprof import encode

        started = time.monotonic()
        pacer = Pacer()  # one per call: pulls and pushes may encode at the same time
        pacer.begin()
        data = encode(
            profiles,
            device_labels=device_labels,
            max_bytes=self.config.profiles.max_bytes,
            kind=kind,
            pause=pacer.pause,
        )
        self.counters.add("exporter_stall_seconds", pacer.end())
        self.counters.add("exporter_runs", stage="encode")
        self.counters.add("exporter_seconds", time.monotonic() - started, stage="encode")
        return data

    def health(self) -> Health:
        """How the exporter is, for /healthz."""
        from gpumem_otel.serve.deps import Health

        source = self._source
        status = source.status() if source is not None else None
        reasons = []
        if status is None or not status.armed:
            reasons.append("nothing is armed")
        elif not status.supported:
            reasons.append(f"profiles can not be had here: {status.reason}")
        ages = {}
        if self._last_read_ns:
            ages["read"] = (time.time_ns() - self._last_read_ns) / 1e9
        pushed = self.counters.get("last_push_timestamp_seconds", kind="live")
        if pushed:
            ages["push"] = time.time() - pushed
        elif self.config.pyroscope.url and self.counters.get("exporter_errors", stage="push"):
            reasons.append("no profile was pushed yet, and pushes failed")
        return Health(ok=not reasons, reasons=tuple(reasons), ages=ages)

    def step(self) -> None:
        """One step of the job has ended; the job says so itself."""
        counter = self._steps
        explicit = getattr(counter, "step", None)
        if explicit is not None:
            explicit()

    @property
    def address(self) -> tuple[str, int] | None:
        """(host, port) of the listener once it is bound."""
        return self._listener.address if self._listener is not None else None

    def wait_listening(self, timeout: float) -> bool:
        """Wait until the port is bound."""
        return self._listener is not None and self._listener.bound.wait(timeout)

    def flush(self, timeout: float = EXIT_FLUSH_SECONDS) -> bool:
        """Read and send now; whether everything was stored in time."""
        return self._pusher is not None and self._pusher.flush(timeout)

    def _devices(self) -> tuple[int, ...]:
        source = self._source
        return source.status().devices if source is not None else ()

    def _step_stats(self) -> StepStats:
        return self._steps.stats() if self._steps is not None else StepStats()

    def _note_reading(self, reading: Reading) -> None:
        self._last_read_ns = reading.time_ns
        known, identity = self._announced, self.identity()
        if self._listener is not None and identity != known:
            self._announced = identity  # torch.distributed came up: the run file says the rank
            self._listener.announce()

    def _describe(self) -> tuple[str, ...]:
        from gpumem_otel.capture.process import process_facts

        identity = self.identity()
        facts = process_facts(self._devices())
        rank = f"rank {identity.rank} of {identity.world_size}, restart {identity.restart}"
        where = f"node {identity.node}, process {identity.pid}"
        uuids = [f"device {d}: {uuid}" for d, uuid in sorted(identity.device_uuids.items())]
        return (rank, where, *uuids, *(f"{name} {value}" for name, value in facts.items()))


class _SinceLast:
    """The reader as pushes use it: nothing shared, and `allocated` since the last push."""

    def __init__(self, reader: Reader) -> None:
        self.live = reader.live_now
        self.allocated = reader.allocated_since_last


class _RecordedSteps:
    """The steps that a recording knows."""

    def __init__(self, stats: Callable[[], StepStats]) -> None:
        self._stats = stats

    def stats(self) -> StepStats:
        return self._stats()
