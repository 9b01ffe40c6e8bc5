"""Composition root: builds the parts from a Config; start, stop, fork and exit handling.

Nothing here may raise into the job: every action of ours is run by `_Guard`, which counts a
failure, logs it once and goes on. The order of life:

* `start()` in the job's thread: hooks that wait for torch and for CUDA; no thread, no socket;
* the job initialises CUDA (or a recording is played): `_arm()`, still in the job's thread, switches
  recording on and starts the background thread, the listener and the instruments. What those
  import is imported then, once, in the few processes that use a GPU, and not in all that import
  torch;
* `stop()`, or the end of the process: one last read-out and push within a bound, then everything
  is undone, last made first. An agent that was stopped stays so.

The agent's lock guards its own few fields and is never held while a part is started, stopped or
asked. A forked child is silent: it drops what it inherited and waits for a CUDA context of its own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

from gpumem_otel.answers import Answers
from gpumem_otel.capture.moments import not_between_steps
from gpumem_otel.capture.pacer import Pacer
from gpumem_otel.config import ServeConfig, process_environ
from gpumem_otel.core.counters import Counters
from gpumem_otel.core.quiet import QuietGate
from gpumem_otel.errors import CaptureError
from gpumem_otel.logs import named_logger
from gpumem_otel.ranks import in_notebook
from gpumem_otel.yielding.safepoint import SafePoints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpumem_otel.capture.beside import Beside
    from gpumem_otel.capture.marks import AllocationMarks
    from gpumem_otel.capture.oom import SnapshotSource
    from gpumem_otel.capture.readout import Reader
    from gpumem_otel.capture.steps import StepCounter
    from gpumem_otel.capture.tensors import TensorTable
    from gpumem_otel.config import Config
    from gpumem_otel.core.model import HeapProfile, Identity, Observation, ProfileKind
    from gpumem_otel.core.ports import FrameNamer, ProfileSink, Reading, Source, YieldControl
    from gpumem_otel.export.otel import OtelMetrics
    from gpumem_otel.export.pusher import Pusher
    from gpumem_otel.export.transport import Transport
    from gpumem_otel.ooms import OomDesk
    from gpumem_otel.serve.control import ControlListener
    from gpumem_otel.serve.server import Listener

__all__ = ["Agent", "ProfilesCallback"]

_log = named_logger("gpumem_otel.agent")

ProfilesCallback: TypeAlias = "Callable[[ProfileKind, tuple[HeapProfile, ...]], None]"

EXIT_FLUSH_SECONDS = 5.0
"""What the last read-out and push may take when the process ends."""

LISTENER_STOP_SECONDS = 1.0
GAVE_UP_SECONDS = 0.5
"""The same where the profile of an out-of-memory was waited for in vain: the server is gone."""

LEAST_STOP_SECONDS = 0.1
"""What each part is given to stop when the bound is used up."""


class _Guard:
    """Runs an action of ours so that its failure is counted and logged once, never raised.

    Attributes:
        failures: what the first one of each stage said; no exception, whose traceback would keep
            a whole reading alive.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.failures: dict[str, str] = {}

    def run(self, stage: str, action: Callable[[], object]) -> bool:
        """Whether the action went through."""
        try:
            action()
        except Exception as error:
            self._counters.add("exporter_errors", stage=stage)
            if stage not in self.failures:
                self.failures[stage] = str(error) or type(error).__name__
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
        answers: what the parts ask; None until armed.
        marks: torch's allocation metadata, for regions; None where nobody would see them.
        gate: closed while nothing of ours may call torch or CUDA.
        safe_points: where the job's thread can be stopped for a yield.
        yields: the engine of yields, once somebody has asked for it (`gpumem_otel.yields`).
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
        self.gate = QuietGate()
        self._given_source = source
        self._on_profiles = on_profiles
        self._environ = process_environ() if environ is None else environ
        self._guard = _Guard(self.counters)
        self._undo: list[tuple[str, Callable[[float], object]]] = []
        # rests between slices of our work, but not while the process waits for us to end
        self._pacer = Pacer(sleep=lambda seconds: time.sleep(0.0 if self._hurried else seconds))
        self._reset()

    def _reset(self) -> None:
        """Nothing is armed, in this process."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._stopped = False
        self._armed = False
        self._source = self._given_source
        self._step_counter: StepCounter | None = None
        self._listener: Listener | None = None
        self._control: ControlListener | None = None
        self._announced: Identity | None = None
        self._pusher: Pusher | None = None
        self._transport: Transport | None = None
        self._otel: OtelMetrics | None = None
        self._ooms: OomDesk | None = None
        self.marks: AllocationMarks | None = None
        self.reader: Reader | None = None
        self.answers: Answers | None = None
        self.safe_points = SafePoints(not_between_steps)
        self.yields: YieldControl | None = None

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
            pacer=self._pacer,
            classes=self.config.profiles.class_as != "off",
            pinned="pinned" in self.config.profiles.kinds,
            annotations=self.config.profiles.phases,
            gate=self.gate,
        )
        self._source = source
        arming = Arming(self._arm, on_import=source.prepare)
        self._defer("arm", lambda _: source.stop())
        self._begin("arm", arming.start, lambda _: arming.stop())

    def _arm(self) -> None:
        """CUDA is there: start the parts. Runs on the job's thread and never raises."""
        with self._lock:
            if self._armed or self._stopped or self._pid != os.getpid():
                return
            self._armed = True
        for stage, start in (
            ("record", self._start_reading),
            ("steps", self._start_steps),
            ("steps", self._start_regions),
            ("listen", self._start_listener),
            ("control", self._start_control),
            ("push", self._start_metrics),
            ("push", self._start_host_profiles),
            ("push", self._start_pusher),
            ("oom", self._start_ooms),
        ):
            if not self._guard.run(stage, start) and stage == "record":
                return  # nothing can be read, so there is nothing to export
            if self._stopped:
                return
        self._guard.run("arm", self._end_with_multiprocessing)

    def _end_with_multiprocessing(self) -> None:
        """A worker of multiprocessing may end without exit handlers, but runs its finalizers."""
        process = sys.modules.get("multiprocessing.process")
        util = sys.modules.get("multiprocessing.util")
        if process is None or util is None or process.parent_process() is None:
            return
        finalizer = util.Finalize(None, self.stop, exitpriority=10)
        self._defer("arm", lambda _: finalizer.cancel())

    def _begin(
        self, stage: str, start: Callable[[], object], undo: Callable[[float], object]
    ) -> None:
        """Start a part, and remember how to undo it; one that fails half way is undone at once."""
        try:
            start()
        except BaseException:
            self._guard.run(stage, partial(undo, LEAST_STOP_SECONDS))
            raise
        self._defer(stage, undo)

    def _defer(self, stage: str, undo: Callable[[float], object]) -> None:
        """Remember how to undo what was just done; `undo` is given the seconds that are left."""
        with self._lock:
            if not self._stopped:
                self._undo.append((stage, undo))
                return
        # stopped meanwhile by another thread, which undid all it knew of
        self._guard.run(stage, partial(undo, LEAST_STOP_SECONDS))

    def stop(self, timeout: float = EXIT_FLUSH_SECONDS) -> None:
        """Flush within the bound and undo everything, last made first; may be called twice."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._stopped = True
            undo, self._undo = self._undo, []
        ooms = self._ooms
        if ooms is not None and not ooms.wait(timeout):
            timeout = min(timeout, GAVE_UP_SECONDS)
        deadline = time.monotonic() + timeout
        for stage, action in reversed(undo):
            left = max(deadline - time.monotonic(), LEAST_STOP_SECONDS)
            self._guard.run(stage, partial(action, left))
        self._listener = self._control = None

    def after_fork_in_child(self) -> None:
        """Drop what was inherited, touching nothing of the parent's; wait for CUDA anew."""
        undo = self._undo
        self.counters.reset_lock_after_fork()
        self.gate.forget_parent()
        if self._listener is not None:
            self._guard.run("fork", self._listener.close_in_child)
        if self._control is not None:
            self._guard.run("fork", self._control.close_in_child)
        for part in (self._pusher, self._transport, self._ooms):
            if part is not None:
                self._guard.run("fork", part.abandon_after_fork)
        was_armed, was_stopped, source = self._armed, self._stopped, self._source
        for hooks in (self._step_counter, self.tensors) if was_armed else ():  # no CUDA here
            if hooks is not None:
                self._guard.run("fork", hooks.stop)
        self._reset()
        self._stopped = was_stopped
        if was_armed or self._given_source is not None:
            # the parent has a context or plays a recording: neither is this child's
            self._undo = []
        else:
            # the hooks that wait for CUDA were inherited and are this child's own now
            self._undo, self._source = undo, source

    # parts ----------------------------------------------------------------------------------

    def _start_reading(self) -> None:
        from gpumem_otel.capture.beside import Beside
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
        reader = Reader(
            source,
            namer=namer,
            clock=SystemClock(),
            counters=self.counters,
            config=self.config.profiles,
            pacer=self._pacer,
            describe=lambda: () if self.answers is None else self.answers.describe(),
        )
        reader.tap.append(self._note_reading)
        recorder = getattr(source, "recorder", None)
        beside = Beside(
            namer=namer,
            config=self.config.profiles,
            counters=self.counters,
            pacer=self._pacer,
            stats=source.stats,
            records_pinned=lambda: recorder is not None and recorder.records_pinned,
        )
        reader.tap.append(beside.note)
        self.reader = reader
        self.answers = Answers(
            self.config,
            environ=self._environ,
            source=source,
            reader=reader,
            counters=self.counters,
            pacer=self._pacer,
            beside=beside,
            live_process=self._given_source is None,
            gate=self.gate,
        )
        reader.windows.steps = self.answers.steps
        # asked anew each time: the engine comes with the first command
        self.answers.yield_status = lambda: None if self.yields is None else self.yields.wait(-1, 0)
        if self.config.record_path:
            self._guard.run("record", partial(self._start_recording, namer))

    def _start_recording(self, namer: FrameNamer) -> None:
        from gpumem_otel.capture.process import process_facts
        from gpumem_otel.export.recordfile import RecordingFile

        reader, answers = self._armed_parts()
        recording = RecordingFile(
            self.config.record_path,
            identity=answers.identity(),
            facts=process_facts(answers.devices()),
            namer=namer,
            counters=self.counters,
            pacer=self._pacer,
        )
        self._defer("record", lambda _: recording.close())
        reader.tap.append(
            lambda reading: self._guard.run(
                "record", partial(recording.add, reading, answers.step_stats())
            )
        )
        reader.window_tap.append(
            lambda reading, seconds: self._guard.run(
                "record", partial(recording.add_window, reading, seconds)
            )
        )

    def _start_steps(self) -> None:
        _, answers = self._armed_parts()
        recorded = getattr(self._given_source, "steps", None)
        if recorded is not None:
            answers.step_stats = recorded
            return
        tensors = self.tensors
        counted = self.config.capture.steps
        if self._given_source is not None or not (counted or tensors):
            return
        from gpumem_otel.capture.steps import StepCounter

        counter = StepCounter(
            allocated=getattr(self._source, "allocated", dict) if counted else None,
            on_optimizer=tensors.stepped if tensors else None,
            on_boundary=self.safe_points.reached,
        )
        if tensors is not None:
            tensors.on_forward = self.safe_points.reached
        self._begin("steps", counter.start, lambda _: counter.stop())
        self._step_counter = counter
        if counted:
            answers.step_stats = counter.stats

    def _start_regions(self) -> None:
        """Regions are labelled where somebody may ask for profiles that show them."""
        torch = sys.modules.get("torch")
        wanted = "allocated" in self.config.profiles.kinds or self.config.serve.enabled
        if self._given_source is not None or torch is None or not wanted:
            return
        from gpumem_otel.capture.marks import AllocationMarks

        self.marks = AllocationMarks(torch, gate=self.gate)
        self._defer("steps", lambda _: setattr(self, "marks", None))

    def _start_listener(self) -> None:
        if not self.config.serve.enabled:
            return
        from gpumem_otel.capture.lines import published_metrics
        from gpumem_otel.export.clock import SystemClock
        from gpumem_otel.export.prometheus import Exposition
        from gpumem_otel.serve.deps import AppDeps
        from gpumem_otel.serve.server import Listener

        _, answers = self._armed_parts()
        identity = answers.identity()
        exposition = Exposition(
            self.observe,
            self.config.metrics.level,
            clock=SystemClock(),
            counters=self.counters,
        )
        listener = Listener(
            AppDeps(
                metrics=exposition.render,
                profile=answers.profile,
                health=answers.health,
                service_name=identity.service_name,
                lines=lambda: published_metrics(answers.identity().rank),
            ),
            _for_notebooks(self.config.serve),
            local_rank=identity.local_rank,
            counters=self.counters,
            identity=answers.identity,
        )
        # daemons in any case: a profile that is being made does not hold up the exit
        self._begin(
            "listen",
            listener.start,
            lambda left: listener.stop(min(left, LISTENER_STOP_SECONDS)),
        )
        self._listener, self._announced = listener, identity

    def _start_control(self) -> None:
        """Take commands to yield and restore, where the job says so."""
        if not self.config.control.enabled:
            return
        from importlib import import_module

        from gpumem_otel.serve.control import ControlListener

        _, answers = self._armed_parts()
        # by name: that room stands above this one and is handed the agent
        control: YieldControl = import_module("gpumem_otel.yields").engine_of(self)
        listener = ControlListener(
            control,
            self.config.control,
            run_dir=self.config.serve.run_dir,
            identity=answers.identity(),
            counters=self.counters,
        )
        self._begin(
            "control",
            listener.start,
            lambda left: listener.stop(min(left, LISTENER_STOP_SECONDS)),
        )
        self._control = listener

    def _start_metrics(self) -> None:
        if not self.config.metrics.otlp:
            return
        from gpumem_otel.export.otel import OtelMetrics

        _, answers = self._armed_parts()
        otel = OtelMetrics(
            self.observe,
            self.config.metrics.level,
            answers.identity(),
            dict(self.config.metrics.otlp_environ),
            self.config.metrics.otlp_interval_seconds,
            self.counters,
        )
        self._begin("push", otel.start, otel.stop)
        self._otel = otel

    def _start_host_profiles(self) -> None:
        if not self.config.host_profiles or not self.config.pyroscope.url:
            return
        from gpumem_otel.export.hostprofiles import start_host_profiles, stop_host_profiles

        _, answers = self._armed_parts()
        if start_host_profiles(self.config.pyroscope, answers.identity()):
            self._defer("push", lambda _: stop_host_profiles())

    def _start_pusher(self) -> None:
        from gpumem_otel.export.pusher import Pusher

        reader, answers = self._armed_parts()
        source = self._source
        if source is None:
            return
        sinks: list[ProfileSink] = []
        if self.config.pyroscope.url:
            # without a sink read-outs still go on: for metrics, recordings and callbacks
            self._guard.run("push", lambda: sinks.append(self._make_sink(answers)))
        callbacks = () if self._on_profiles is None else (self._on_profiles,)
        pusher = Pusher(
            _ForPushes(reader, answers.beside),
            sinks[0] if sinks else None,
            config=self.config.profiles,
            identity=answers.identity,
            status=source.status,
            encode=answers.encode,
            counters=self.counters,
            stall_seconds=lambda: reader.last_stall_seconds,
            on_profiles=callbacks,
            push_timeout_seconds=self.config.pyroscope.timeout_seconds,
            final_read=bool(sinks or callbacks or self.config.record_path),
        )
        answers.interval_seconds = lambda: pusher.interval_seconds
        tensors = self.tensors
        if tensors is not None:
            reader.tap.append(lambda _: tensors.want(pusher.interval_seconds))
        self._begin("push", pusher.start, pusher.stop)
        self._pusher = pusher

    def _make_sink(self, answers: Answers) -> ProfileSink:
        from gpumem_otel.export.pyroscope import PyroscopeSink
        from gpumem_otel.export.transport import Transport

        transport = Transport(self.config.pyroscope, environ=self._environ)
        self._transport = transport
        self._defer("push", lambda _: transport.close())
        return PyroscopeSink(transport, self.config.pyroscope, answers.identity, self.counters)

    def _start_ooms(self) -> None:
        reader, answers = self._armed_parts()
        source = self._source
        if not self.config.oom.enabled or source is None or not source.status().supported:
            return
        if not hasattr(source, "read_at_once"):  # a recording
            return
        from gpumem_otel.ooms import OomDesk

        ooms = OomDesk(
            self.config,
            environ=self._environ,
            source=cast("SnapshotSource", source),
            reader=reader,
            answers=answers,
            counters=self.counters,
            listener=self._listener,
            otel=self._otel,
        )
        self._begin("oom", ooms.start, ooms.stop)
        self._ooms = ooms

    def _armed_parts(self) -> tuple[Reader, Answers]:
        if self.reader is None or self.answers is None:
            raise CaptureError("read: nothing is armed")
        return self.reader, self.answers

    # what the parts and the job ask ------------------------------------------------------------

    def observe(self) -> Observation | None:
        """Values of the METRICS table; None where nothing is armed in this process.

        Raises:
            CaptureError: the allocator could not be read.
        """
        answers = self.answers
        if answers is None or self._stopped or self._pid != os.getpid():
            return None
        return answers.observe()

    @property
    def _hurried(self) -> bool:
        """Whether somebody waits for our work: it takes no rest then."""
        ooms = self._ooms
        return self._stopped or (ooms is not None and ooms.hurried)

    def step(self) -> None:
        """One step of the job has ended; the job says so itself."""
        counter = self._step_counter
        if counter is not None:
            counter.step()
        elif self._pid == os.getpid():
            self.safe_points.reached()

    @property
    def why_not_now(self) -> str:
        """What a yield would disturb just now, "" where nothing."""
        ooms = self._ooms
        return "an out-of-memory is being handled" if ooms is not None and ooms.busy else ""

    @property
    def several_optimizers(self) -> bool:
        """Whether the steps of the first of several optimizers are taken for those of the job."""
        return self._step_counter is not None and self._step_counter.several

    @property
    def rank(self) -> int:
        """Of this process; 0 where nothing is armed."""
        return 0 if self.answers is None else self.answers.identity().rank

    @property
    def environ(self) -> Mapping[str, str]:
        """The process's environment as it was handed in."""
        return self._environ

    def defer(self, stage: str, undo: Callable[[float], object]) -> None:
        """Have something undone when this agent stops; `undo` is given the seconds left."""
        self._defer(stage, undo)

    def watch(self, name: str, item: object) -> None:
        """The job names what holds memory, see `TensorTable.watch`; never raises."""
        tensors = self.tensors
        if tensors is not None and not self._stopped and self._pid == os.getpid():
            self._guard.run("classes", partial(tensors.watch, name, item))

    @property
    def source(self) -> Source | None:
        """What is read; None before torch is waited for and after a fork."""
        return self._source

    @property
    def tensors(self) -> TensorTable | None:
        """The address table of this process's torch; None where there is none."""
        found: TensorTable | None = getattr(self._source, "tensors", None)
        return found

    @property
    def address(self) -> tuple[str, int] | None:
        """(host, port) of the listener once it is bound."""
        return self._listener.address if self._listener is not None else None

    def wait_listening(self, timeout: float) -> bool:
        """Wait until the port is bound."""
        return self._listener is not None and self._listener.bound.wait(timeout)

    @property
    def listen_error(self) -> OSError | str | None:
        """Why nothing listens, where that is known; a port that is taken is tried again."""
        if self._listener is not None:
            return self._listener.last_error
        failures = self._guard.failures
        unarmed = (failures.get("arm") or failures.get("record")) if self.reader is None else None
        return unarmed or failures.get("listen")

    def flush(self, timeout: float = EXIT_FLUSH_SECONDS) -> bool:
        """Read and send now; whether everything was stored in time."""
        return self._pusher is not None and self._pusher.flush(timeout)

    def _note_reading(self, reading: Reading) -> None:
        answers, listener, control = self.answers, self._listener, self._control
        if answers is None:
            return
        answers.last_read_ns = reading.time_ns
        identity = answers.identity()
        if identity != self._announced:
            self._announced = identity  # torch.distributed came up: the run file says the rank
            if listener is not None:
                listener.announce()
            if control is not None:
                control.announce(identity)


class _ForPushes:
    """The reader as pushes use it: nothing shared, and windows that tell of all since the last."""

    def __init__(self, reader: Reader, beside: Beside) -> None:
        self.live = reader.live_now
        self.windowed = reader.windows.pushed
        self.beside = beside.make


def _for_notebooks(config: ServeConfig) -> ServeConfig:
    """Several kernels run side by side on one machine: any free port, unless one was chosen."""
    if config.port == ServeConfig().port and in_notebook(sys.modules):
        return replace(config, port=0)
    return config
