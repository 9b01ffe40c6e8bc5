"""The components of one process that uses a GPU: what reads its memory, sends, and listens.

Each `start_*` method starts one of them if the settings want it, and tells `Teardown` how to undo
that. What a component imports is imported here, in the few processes that start it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gpumem_otel.runtime.queries import AgentView, Queries
from gpumem_otel.settings.config import ServeConfig
from gpumem_otel.settings.identity import in_notebook

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.base.profile import Identity
    from gpumem_otel.base.protocols import FrameNamer
    from gpumem_otel.capture.metadata import AllocationMarks
    from gpumem_otel.capture.steps import StepCounter
    from gpumem_otel.capture.tensor_table import TensorTable
    from gpumem_otel.metrics.otlp import OtelMetrics
    from gpumem_otel.oom.handler import OomHandler
    from gpumem_otel.push.interfaces import ProfileSink
    from gpumem_otel.push.pusher import Pusher
    from gpumem_otel.push.transport import Transport
    from gpumem_otel.serve.listener import Listener
    from gpumem_otel.snapshot.reading import Reading, Source
    from gpumem_otel.yielding.control.listener import ControlListener

LISTENER_STOP_SECONDS = 1.0
"""What a listener gets of the time that all components have together to stop."""


def source_of_torch(agent: AgentView) -> Any:
    """What reads the torch of this process; a `capture.source.TorchSource`."""
    from gpumem_otel.capture.source import TorchSource

    config = agent.config
    return TorchSource(
        stacks=config.capture.stacks,
        max_window_events=config.capture.max_window_events,
        counters=agent.counters,
        environ=agent.environ,
        pacer=agent.pacer,
        classes=config.profiles.class_as != "off",
        pinned="pinned" in config.profiles.kinds,
        annotations=config.profiles.phases,
        gate=agent.gate,
    )


def tensors_of(source: Source | None) -> TensorTable | None:
    """The address table of this process's torch; None for a recording."""
    tensors: TensorTable | None = getattr(source, "tensors", None)
    return tensors


class Components:
    """Begins to read the memory of this process; CUDA is up, or a recording is played.

    Args:
        agent: whose process it is.
        source: what is read.
        live: whether the source is the torch of this process, not a recording.

    Attributes:
        reader: profiles on demand.
        queries: what the other components ask.
        steps: counts the steps of the job; None if no component uses them.
        marks: torch's allocation metadata, for regions; None if no profile shows it.
        listener: serves metrics and profiles; None if it is off.
        control: takes commands; None if it is off.
        ooms: handles failed allocations; None if it is off.

    Raises:
        CaptureError: there is nothing to read.
    """

    def __init__(self, agent: AgentView, source: Source, *, live: bool) -> None:
        from gpumem_otel.base.clock import SystemClock
        from gpumem_otel.capture.derived_profiles import DerivedProfiles
        from gpumem_otel.capture.frame_names import QualifiedNamer
        from gpumem_otel.capture.profile_reader import LiveProfileReader
        from gpumem_otel.snapshot.stacks import with_basename_paths

        self._agent = agent
        self._config = agent.config
        self._counters = agent.counters
        self._teardown = agent.teardown
        self._live = live
        self.source = source
        self.steps: StepCounter | None = None
        self.marks: AllocationMarks | None = None
        self.listener: Listener | None = None
        self.control: ControlListener | None = None
        self.ooms: OomHandler | None = None
        self._otel: OtelMetrics | None = None
        self._pusher: Pusher | None = None
        self._transport: Transport | None = None
        self._announced: Identity | None = None

        start = getattr(source, "start", None)
        if start is not None:
            start()
        pacer = agent.pacer
        namer: FrameNamer = QualifiedNamer(pause=pacer.pause)
        if self._config.profiles.redact_paths:
            namer = with_basename_paths(namer)
        self.reader = LiveProfileReader(
            source,
            namer=namer,
            clock=SystemClock(),
            counters=self._counters,
            config=self._config.profiles,
            pacer=pacer,
            describe=lambda: self.queries.describe(),  # noqa: PLW0108 - `queries` comes later
        )
        recorder = getattr(source, "recorder", None)
        derived = DerivedProfiles(
            namer=namer,
            config=self._config.profiles,
            counters=self._counters,
            pacer=pacer,
            stats=source.stats,
            records_pinned=lambda: recorder is not None and recorder.records_pinned,
        )
        self.queries = Queries(agent, source, reader=self.reader, derived=derived, live=live)
        self.reader.tap += [self._note_reading, derived.note]
        self.reader.windows.steps = self.queries.steps
        if self._config.record_path:
            self._teardown.guard.run("record", partial(self._start_recording, namer))

    def starts(self) -> tuple[tuple[str, Callable[[], object]], ...]:
        """(stage, how it starts) of the other components, in their order."""
        return (
            ("steps", self.start_steps),
            ("steps", self.start_regions),
            ("listen", self.start_listener),
            ("control", self.start_control),
            ("push", self.start_metrics),
            ("push", self.start_host_profiles),
            ("push", self.start_pusher),
            ("oom", self.start_ooms),
        )

    # reading

    def _note_reading(self, reading: Reading) -> None:
        self.queries.last_read_ns = reading.time_ns
        identity = self.queries.identity()
        if identity == self._announced:
            return
        self._announced = identity  # torch.distributed may have come up: the run file has the rank
        listener, control = self.listener, self.control
        if listener is not None:
            listener.announce()
        if control is not None:
            control.announce(identity)

    def _start_recording(self, namer: FrameNamer) -> None:
        from gpumem_otel.capture.process_facts import process_facts
        from gpumem_otel.recording.file import RecordingFile

        queries, guard = self.queries, self._teardown.guard
        recording = RecordingFile(
            self._config.record_path,
            identity=queries.identity(),
            facts=process_facts(queries.devices()),
            namer=namer,
            counters=self._counters,
            pacer=self._agent.pacer,
        )
        self._teardown.defer("record", lambda _: recording.close())
        self.reader.tap.append(
            lambda reading: guard.run(
                "record", partial(recording.add, reading, queries.step_stats())
            )
        )
        self.reader.window_tap.append(
            lambda reading, seconds: guard.run(
                "record", partial(recording.add_window, reading, seconds)
            )
        )

    def start_steps(self) -> None:
        """Count the job's steps; a recording holds those of its job."""
        recorded = getattr(self.source, "steps", None)
        if not self._live and recorded is not None:
            self.queries.step_stats = recorded
            return
        tensors = tensors_of(self.source)
        counted = self._config.capture.steps
        if not self._live or not (counted or tensors):
            return
        from gpumem_otel.capture.steps import StepCounter

        on_boundary = self._agent.safe_points.reached
        counter = StepCounter(
            allocated=getattr(self.source, "allocated", dict) if counted else None,
            on_optimizer=tensors.stepped if tensors else None,
            on_boundary=on_boundary,
        )
        if tensors is not None:
            tensors.on_forward = on_boundary
        self._teardown.begin("steps", counter.start, lambda _: counter.stop())
        self.steps = counter
        if counted:
            self.queries.step_stats = counter.stats

    def start_regions(self) -> None:
        """Label regions where profiles that show them may be asked for."""
        torch = sys.modules.get("torch")
        wanted = "allocated" in self._config.profiles.kinds or self._config.serve.enabled
        if not self._live or torch is None or not wanted:
            return
        from gpumem_otel.capture.metadata import AllocationMarks

        self.marks = AllocationMarks(torch, gate=self._agent.gate)
        self._teardown.defer("steps", lambda _: setattr(self, "marks", None))

    # listening

    def start_listener(self) -> None:
        """Serve /metrics and profiles."""
        if not self._config.serve.enabled:
            return
        from gpumem_otel.base.clock import SystemClock
        from gpumem_otel.line_profiling.profiler import published_metrics
        from gpumem_otel.metrics.prometheus import Exposition
        from gpumem_otel.serve.dependencies import AppDeps
        from gpumem_otel.serve.listener import Listener

        queries = self.queries
        identity = queries.identity()
        exposition = Exposition(
            self._agent.observe,
            self._config.metrics.level,
            clock=SystemClock(),
            counters=self._counters,
        )
        listener = Listener(
            AppDeps(
                metrics=exposition.render,
                profile=queries.profile,
                health=queries.health,
                service_name=identity.service_name,
                lines=lambda: published_metrics(queries.identity().rank),
            ),
            _for_notebooks(self._config.serve),
            local_rank=identity.local_rank,
            counters=self._counters,
            identity=queries.identity,
        )
        self._begin_listener("listen", listener)
        self.listener, self._announced = listener, identity

    def start_control(self) -> None:
        """Take commands to yield and restore.

        Raises:
            ServeError: the listener or its TCP port is not there; the Unix socket may be.
        """
        if not self._config.control.enabled:
            return
        from gpumem_otel.yielding.control.listener import ControlListener

        listener = ControlListener(
            self._agent.engine_of_yields(),
            self._config.control,
            run_dir=self._config.serve.run_dir,
            identity=self.queries.identity(),
            counters=self._counters,
        )
        self._begin_listener("control", listener)
        self.control = listener
        listener.must_have_port()  # counted and logged like any failure: the Unix socket stays

    def _begin_listener(self, stage: str, listener: Listener | ControlListener) -> None:
        # its threads are daemons: a profile that is being made does not hold up the exit
        self._teardown.begin(
            stage, listener.start, lambda left: listener.stop(min(left, LISTENER_STOP_SECONDS))
        )

    # sending

    def start_metrics(self) -> None:
        """Export metrics over OTLP."""
        if not self._config.metrics.otlp:
            return
        from gpumem_otel.metrics.otlp import OtelMetrics

        otel = OtelMetrics(
            self._agent.observe,
            self._config.metrics.level,
            self.queries.identity(),
            dict(self._config.metrics.otlp_environ),
            self._config.metrics.otlp_interval_seconds,
            self._counters,
        )
        self._teardown.begin("push", otel.start, otel.stop)
        self._otel = otel

    def start_host_profiles(self) -> None:
        """Push the host's CPU profiles."""
        if not self._config.host_profiles or not self._config.pyroscope.url:
            return
        from gpumem_otel.push.host_profiles import start_host_profiles, stop_host_profiles

        if start_host_profiles(self._config.pyroscope, self.queries.identity()):
            self._teardown.defer("push", lambda _: stop_host_profiles())

    def start_pusher(self) -> None:
        """Read in the background at the configured cadence, and push if there is a server."""
        from gpumem_otel.push.interfaces import PushDependencies
        from gpumem_otel.push.pusher import Pusher

        queries, reader, on_profiles = self.queries, self.reader, self._agent.on_profiles
        sinks: list[ProfileSink] = []
        if self._config.pyroscope.url:
            # without a sink read-outs still go on: for metrics, recordings and callbacks
            self._teardown.guard.run("push", lambda: sinks.append(self._make_sink()))
        dependencies = PushDependencies(
            reader=_ReaderOfPushes(self.reader, queries),
            sink=sinks[0] if sinks else None,
            config=self._config.profiles,
            identity=queries.identity,
            status=self.source.status,
            encode=queries.encode,
            counters=self._counters,
            stall_seconds=lambda: reader.last_stall_seconds,
            on_profiles=on_profiles,
            push_timeout_seconds=self._config.pyroscope.timeout_seconds,
            final_read=bool(sinks or on_profiles or self._config.record_path),
        )
        pusher = Pusher(dependencies)
        queries.interval_seconds = lambda: pusher.interval_seconds
        tensors = tensors_of(self.source)
        if tensors is not None:
            reader.tap.append(lambda _: tensors.want(pusher.interval_seconds))
        self._teardown.begin("push", pusher.start, pusher.stop)
        self._pusher = pusher

    def _make_sink(self) -> ProfileSink:
        from gpumem_otel.push.pyroscope import PyroscopeSink
        from gpumem_otel.push.transport import Transport

        transport = Transport(self._config.pyroscope, environ=self._agent.environ)
        self._transport = transport
        self._teardown.defer("push", lambda _: transport.close())
        return PyroscopeSink(
            transport, self._config.pyroscope, self.queries.identity, self._counters
        )

    def start_ooms(self) -> None:
        """Report allocations that fail."""
        source: Any = self.source
        of_torch = hasattr(source, "read_at_once")
        if not self._config.oom.enabled or not source.status().supported or not of_torch:
            return
        from gpumem_otel.oom.handler import OomHandler

        ooms = OomHandler(
            self._config,
            environ=self._agent.environ,
            source=source,
            reader=self.reader,
            queries=self.queries,
            counters=self._counters,
            listener=self.listener,
            otel=self._otel,
        )
        self._teardown.begin("oom", ooms.start, ooms.stop)
        self.ooms = ooms

    # life

    def flush(self, timeout: float) -> bool:
        """Read and send now; whether everything was stored in time."""
        return self._pusher is not None and self._pusher.flush(timeout)

    def stopped(self) -> None:
        """All was undone: there is no address any more."""
        self.listener = self.control = None

    def abandon_after_fork(self) -> None:
        """In a forked child: sockets, threads and connections are the parent's."""
        listeners = (self.listener, self.control)
        senders = (self._pusher, self._transport, self.ooms)
        abandon = [each.close_in_child for each in listeners if each is not None]
        abandon += [each.abandon_after_fork for each in senders if each is not None]
        if self.steps is not None:
            abandon.append(self.steps.stop)
        for action in abandon:
            self._teardown.guard.run("fork", action)


class _ReaderOfPushes:
    """The reader as pushes use it: nothing shared, and windows cover all since the last push."""

    def __init__(self, reader: Any, queries: Queries) -> None:
        self.live = reader.live_now
        self.windowed = reader.windows.pushed
        self.derived = queries.derived.make


def _for_notebooks(config: ServeConfig) -> ServeConfig:
    """Several kernels run on one machine: they take any free port, unless one was chosen."""
    if config.port == ServeConfig().port and in_notebook(sys.modules):
        return replace(config, port=0)
    return config
