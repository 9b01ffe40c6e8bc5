"""The parts that read: the source, the reader of profiles, the recording, steps and regions."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gpumem_otel.errors import CaptureError
from gpumem_otel.runtime.queries import Queries
from gpumem_otel.settings.config import ServeConfig
from gpumem_otel.settings.identity import in_notebook

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.gate import QuietGate
    from gpumem_otel.base.profile import HeapProfile, Identity, ProfileKind
    from gpumem_otel.base.protocols import FrameNamer
    from gpumem_otel.capture.derived_profiles import DerivedProfiles
    from gpumem_otel.capture.gil_pacing import Pacer
    from gpumem_otel.capture.metadata import AllocationMarks
    from gpumem_otel.capture.profile_reader import LiveProfileReader
    from gpumem_otel.capture.steps import StepCounter
    from gpumem_otel.capture.tensor_table import TensorTable
    from gpumem_otel.metrics.observation import Observer
    from gpumem_otel.metrics.otlp import OtelMetrics
    from gpumem_otel.push.interfaces import ProfileSink
    from gpumem_otel.push.pusher import Pusher
    from gpumem_otel.push.transport import Transport
    from gpumem_otel.runtime.teardown import Teardown
    from gpumem_otel.serve.listener import Listener
    from gpumem_otel.settings.config import Config
    from gpumem_otel.snapshot.reading import Reading, Source
    from gpumem_otel.yielding.control.listener import ControlListener
    from gpumem_otel.yielding.protocols import YieldControl
    from gpumem_otel.yielding.values import YieldStatus

# The parts that send: metrics over OTLP, profiles of memory, profiles of the host's CPU.


class ExportComponents:
    """Starts what sends by itself.

    Args:
        config: everything resolved.
        environ: the process's environment, for proxies.
        counters: what the parts count about themselves.
        undoing: told of each part that starts.
        armed: what is read, once CUDA is there.
        observe: where the metrics get their values.
        on_profiles: called on the background thread with each set of profiles read.

    Attributes:
        otel: exports metrics; None where nobody wants them.
    """

    def __init__(
        self,
        config: Config,
        *,
        environ: Mapping[str, str],
        counters: Counters,
        undoing: Teardown,
        armed: Callable[[], Armed],
        observe: Observer,
        on_profiles: Sequence[Callable[[ProfileKind, tuple[HeapProfile, ...]], None]] = (),
    ) -> None:
        self._config = config
        self._environ = environ
        self._counters = counters
        self._undoing = undoing
        self._armed = armed
        self._observe = observe
        self._on_profiles = on_profiles
        self._pusher: Pusher | None = None
        self._transport: Transport | None = None
        self.otel: OtelMetrics | None = None

    def start_metrics(self) -> None:
        """Export over OTLP, where that is wanted."""
        if not self._config.metrics.otlp:
            return
        from gpumem_otel.metrics.otlp import OtelMetrics

        otel = OtelMetrics(
            self._observe,
            self._config.metrics.level,
            self._armed().answers.identity(),
            dict(self._config.metrics.otlp_environ),
            self._config.metrics.otlp_interval_seconds,
            self._counters,
        )
        self._undoing.begin("push", otel.start, otel.stop)
        self.otel = otel

    def start_host_profiles(self) -> None:
        """Push the host's CPU profiles, where that is wanted."""
        if not self._config.host_profiles or not self._config.pyroscope.url:
            return
        from gpumem_otel.push.host_profiles import start_host_profiles, stop_host_profiles

        if start_host_profiles(self._config.pyroscope, self._armed().answers.identity()):
            self._undoing.defer("push", lambda _: stop_host_profiles())

    def start_pusher(self) -> None:
        """Read at the cadence of the configuration, in the background, and push where to."""
        from gpumem_otel.push.interfaces import PushDependencies
        from gpumem_otel.push.pusher import Pusher

        armed = self._armed()
        source, reader, answers = armed
        sinks: list[ProfileSink] = []
        if self._config.pyroscope.url:
            # without a sink read-outs still go on: for metrics, recordings and callbacks
            self._undoing.guard.run("push", lambda: sinks.append(self._make_sink(answers)))
        dependencies = PushDependencies(
            reader=_ForPushes(reader, answers.beside),
            sink=sinks[0] if sinks else None,
            config=self._config.profiles,
            identity=answers.identity,
            status=source.status,
            encode=answers.encode,
            counters=self._counters,
            stall_seconds=lambda: reader.last_stall_seconds,
            on_profiles=self._on_profiles,
            push_timeout_seconds=self._config.pyroscope.timeout_seconds,
            final_read=bool(sinks or self._on_profiles or self._config.record_path),
        )
        pusher = Pusher(dependencies)
        answers.interval_seconds = lambda: pusher.interval_seconds
        tensors = armed.tensors
        if tensors is not None:
            reader.tap.append(lambda _: tensors.want(pusher.interval_seconds))
        self._undoing.begin("push", pusher.start, pusher.stop)
        self._pusher = pusher

    def _make_sink(self, answers: Queries) -> ProfileSink:
        from gpumem_otel.push.pyroscope import PyroscopeSink
        from gpumem_otel.push.transport import Transport

        transport = Transport(self._config.pyroscope, environ=self._environ)
        self._transport = transport
        self._undoing.defer("push", lambda _: transport.close())
        return PyroscopeSink(transport, self._config.pyroscope, answers.identity, self._counters)

    def flush(self, timeout: float) -> bool:
        """Read and send now; whether everything was stored in time."""
        return self._pusher is not None and self._pusher.flush(timeout)

    def abandon_after_fork(self) -> None:
        """In a forked child: thread and connections are the parent's."""
        for part in (self._pusher, self._transport):
            if part is not None:
                self._undoing.guard.run("fork", part.abandon_after_fork)


class _ForPushes:
    """The reader as pushes use it: nothing shared, and windows that tell of all since the last."""

    def __init__(self, reader: LiveProfileReader, beside: DerivedProfiles) -> None:
        self.live = reader.live_now
        self.windowed = reader.windows.pushed
        self.derived = beside.make


# The parts that listen: for scrapes and pulls, and for commands to yield and restore.

LISTENER_STOP_SECONDS = 1.0
"""What a listener is given to stop, of what all have together."""


class ServeComponents:
    """Starts what others connect to.

    Args:
        config: everything resolved.
        counters: what the parts count about themselves.
        undoing: told of each part that starts.
        answers: what the parts ask, once CUDA is there.
        observe: where the metrics get their values.
        engine: the engine of yields, made when it is asked for.

    Attributes:
        listener: of scrapes and pulls; None where nothing listens.
        control: of commands; None where nothing listens.
    """

    def __init__(
        self,
        config: Config,
        *,
        counters: Counters,
        undoing: Teardown,
        answers: Callable[[], Queries],
        observe: Observer,
        engine: Callable[[], YieldControl],
    ) -> None:
        self._config = config
        self._counters = counters
        self._undoing = undoing
        self._answers = answers
        self._observe = observe
        self._engine = engine
        self._announced: Identity | None = None
        self.listener: Listener | None = None
        self.control: ControlListener | None = None

    def start_listener(self) -> None:
        """Serve /metrics and profiles, where that is wanted."""
        if not self._config.serve.enabled:
            return
        from gpumem_otel.base.clock import SystemClock
        from gpumem_otel.line_profiling.profiler import published_metrics
        from gpumem_otel.metrics.prometheus import Exposition
        from gpumem_otel.serve.dependencies import AppDeps
        from gpumem_otel.serve.listener import Listener

        answers = self._answers()
        identity = answers.identity()
        exposition = Exposition(
            self._observe,
            self._config.metrics.level,
            clock=SystemClock(),
            counters=self._counters,
        )
        listener = Listener(
            AppDeps(
                metrics=exposition.render,
                profile=answers.profile,
                health=answers.health,
                service_name=identity.service_name,
                lines=lambda: published_metrics(answers.identity().rank),
            ),
            _for_notebooks(self._config.serve),
            local_rank=identity.local_rank,
            counters=self._counters,
            identity=answers.identity,
        )
        # daemons in any case: a profile that is being made does not hold up the exit
        self._undoing.begin(
            "listen",
            listener.start,
            lambda left: listener.stop(min(left, LISTENER_STOP_SECONDS)),
        )
        self.listener, self._announced = listener, identity

    def start_control(self) -> None:
        """Take commands to yield and restore, where the job says so.

        Raises:
            ServeError: the listener can not be, or its port; the socket may be there all the same.
        """
        if not self._config.control.enabled:
            return
        from gpumem_otel.yielding.control.listener import ControlListener

        answers = self._answers()
        listener = ControlListener(
            self._engine(),
            self._config.control,
            run_dir=self._config.serve.run_dir,
            identity=answers.identity(),
            counters=self._counters,
        )
        self._undoing.begin(
            "control",
            listener.start,
            lambda left: listener.stop(min(left, LISTENER_STOP_SECONDS)),
        )
        self.control = listener
        listener.must_have_port()  # else counted and said as any failure: the socket is there

    def announce(self, identity: Identity) -> None:
        """This is who the process is now: torch.distributed may have come up meanwhile."""
        if identity == self._announced:
            return
        self._announced = identity  # the run file says the rank
        listener, control = self.listener, self.control
        if listener is not None:
            listener.announce()
        if control is not None:
            control.announce(identity)

    def stopped(self) -> None:
        """All was undone: nobody is asked for an address any more."""
        self.listener = self.control = None

    def close_in_child(self) -> None:
        """In a forked child: the sockets are the parent's."""
        for listener in (self.listener, self.control):
            if listener is not None:
                self._undoing.guard.run("fork", listener.close_in_child)


def _for_notebooks(config: ServeConfig) -> ServeConfig:
    """Several kernels run side by side on one machine: any free port, unless one was chosen."""
    if config.port == ServeConfig().port and in_notebook(sys.modules):
        return replace(config, port=0)
    return config


class Armed(NamedTuple):
    """What is there once CUDA is; the other parts stand on it."""

    source: Source
    reader: LiveProfileReader
    answers: Queries

    @property
    def tensors(self) -> TensorTable | None:
        """The address table of this process's torch; None where there is none."""
        return _tensors_of(self.source)


class ReadComponents:
    """Starts what reads the memory of this process.

    Args:
        config: everything resolved.
        given: the source that is read; None for the torch of this process.
        environ: the process's environment.
        counters: what the parts count about themselves.
        undoing: told of each part that starts.
        pacer: rests between slices of our work.
        gate: closed while nothing of ours may call torch or CUDA.
        on_boundary: called on the job's thread between two pieces of its work.

    Attributes:
        source: what is read; None before torch is waited for.
        reader: profiles on demand; None until armed.
        answers: what the parts ask; None until armed.
        steps: counts those of the job; None where nobody would see them.
        marks: torch's allocation metadata, for regions; None where nobody would see them.
    """

    def __init__(
        self,
        config: Config,
        *,
        given: Source | None,
        environ: Mapping[str, str],
        counters: Counters,
        undoing: Teardown,
        pacer: Pacer,
        gate: QuietGate,
        on_boundary: Callable[[], object],
    ) -> None:
        self._config = config
        self._given = given
        self._environ = environ
        self._counters = counters
        self._undoing = undoing
        self._pacer = pacer
        self._gate = gate
        self._on_boundary = on_boundary
        self.source = given
        self.reader: LiveProfileReader | None = None
        self.answers: Queries | None = None
        self.steps: StepCounter | None = None
        self.marks: AllocationMarks | None = None

    @property
    def tensors(self) -> TensorTable | None:
        """The address table of this process's torch; None where there is none."""
        return _tensors_of(self.source)

    def armed(self) -> Armed:
        """What the other parts stand on.

        Raises:
            CaptureError: `start_reading` has not gone through.
        """
        if self.source is None or self.reader is None or self.answers is None:
            raise CaptureError("read: nothing is armed")
        return Armed(self.source, self.reader, self.answers)

    def await_cuda(self, on_cuda: Callable[[], object]) -> None:
        """Have that called, on the job's thread, once it initialises CUDA; hooks only."""
        from gpumem_otel.capture.arming import Arming
        from gpumem_otel.capture.source import TorchSource

        source = TorchSource(
            stacks=self._config.capture.stacks,
            max_window_events=self._config.capture.max_window_events,
            counters=self._counters,
            environ=self._environ,
            pacer=self._pacer,
            classes=self._config.profiles.class_as != "off",
            pinned="pinned" in self._config.profiles.kinds,
            annotations=self._config.profiles.phases,
            gate=self._gate,
        )
        self.source = source
        arming = Arming(on_cuda, on_import=source.prepare)
        self._undoing.defer("arm", lambda _: source.stop())
        self._undoing.begin("arm", arming.start, lambda _: arming.stop())

    def start_reading(
        self,
        *,
        on_reading: Callable[[Reading], object],
        yield_status: Callable[[], YieldStatus | None],
    ) -> None:
        """Switch recording on; CUDA is there.

        Args:
            on_reading: told of each, before the other parts are.
            yield_status: asked for what the engine of yields says; None where there is none.

        Raises:
            CaptureError: there is nothing to read.
        """
        from gpumem_otel.base.clock import SystemClock
        from gpumem_otel.capture.derived_profiles import DerivedProfiles
        from gpumem_otel.capture.frame_names import QualifiedNamer
        from gpumem_otel.capture.profile_reader import LiveProfileReader
        from gpumem_otel.snapshot.stacks import with_basename_paths

        source = self.source
        if source is None:
            raise CaptureError("read: there is no source")
        start = getattr(source, "start", None)
        if start is not None:
            start()
        namer: FrameNamer = QualifiedNamer(pause=self._pacer.pause)
        if self._config.profiles.redact_paths:
            namer = with_basename_paths(namer)
        reader = LiveProfileReader(
            source,
            namer=namer,
            clock=SystemClock(),
            counters=self._counters,
            config=self._config.profiles,
            pacer=self._pacer,
            describe=lambda: () if self.answers is None else self.answers.describe(),
        )
        reader.tap.append(on_reading)
        recorder = getattr(source, "recorder", None)
        beside = DerivedProfiles(
            namer=namer,
            config=self._config.profiles,
            counters=self._counters,
            pacer=self._pacer,
            stats=source.stats,
            records_pinned=lambda: recorder is not None and recorder.records_pinned,
        )
        reader.tap.append(beside.note)
        self.reader = reader
        self.answers = Queries(
            self._config,
            environ=self._environ,
            source=source,
            reader=reader,
            counters=self._counters,
            pacer=self._pacer,
            beside=beside,
            live_process=self._given is None,
            gate=self._gate,
        )
        reader.windows.steps = self.answers.steps
        self.answers.yield_status = yield_status
        if self._config.record_path:
            self._undoing.guard.run("record", partial(self._start_recording, namer))

    def _start_recording(self, namer: FrameNamer) -> None:
        from gpumem_otel.capture.process_facts import process_facts
        from gpumem_otel.recording.file import RecordingFile

        _, reader, answers = self.armed()
        guard = self._undoing.guard
        recording = RecordingFile(
            self._config.record_path,
            identity=answers.identity(),
            facts=process_facts(answers.devices()),
            namer=namer,
            counters=self._counters,
            pacer=self._pacer,
        )
        self._undoing.defer("record", lambda _: recording.close())
        reader.tap.append(
            lambda reading: guard.run(
                "record", partial(recording.add, reading, answers.step_stats())
            )
        )
        reader.window_tap.append(
            lambda reading, seconds: guard.run(
                "record", partial(recording.add_window, reading, seconds)
            )
        )

    def start_steps(self) -> None:
        """Hear of the job's steps; those of a recording are in it."""
        answers = self.armed().answers
        recorded = getattr(self._given, "steps", None)
        if recorded is not None:
            answers.step_stats = recorded
            return
        tensors = self.tensors
        counted = self._config.capture.steps
        if self._given is not None or not (counted or tensors):
            return
        from gpumem_otel.capture.steps import StepCounter

        counter = StepCounter(
            allocated=getattr(self.source, "allocated", dict) if counted else None,
            on_optimizer=tensors.stepped if tensors else None,
            on_boundary=self._on_boundary,
        )
        if tensors is not None:
            tensors.on_forward = self._on_boundary
        self._undoing.begin("steps", counter.start, lambda _: counter.stop())
        self.steps = counter
        if counted:
            answers.step_stats = counter.stats

    def start_regions(self) -> None:
        """Regions are labelled where somebody may ask for profiles that show them."""
        torch = sys.modules.get("torch")
        wanted = "allocated" in self._config.profiles.kinds or self._config.serve.enabled
        if self._given is not None or torch is None or not wanted:
            return
        from gpumem_otel.capture.metadata import AllocationMarks

        self.marks = AllocationMarks(torch, gate=self._gate)
        self._undoing.defer("steps", lambda _: setattr(self, "marks", None))

    def stop_hooks_in_child(self) -> None:
        """In a forked child, which has no CUDA."""
        for hooks in (self.steps, self.tensors):
            if hooks is not None:
                self._undoing.guard.run("fork", hooks.stop)


def _tensors_of(source: Source | None) -> TensorTable | None:
    found: TensorTable | None = getattr(source, "tensors", None)
    return found
