"""Composition root: builds the parts from a Config; start, stop, fork and exit handling.

The parts are started by `readparts.py`, `serveparts.py` and `exportparts.py`; here is their order.
Nothing may raise into the job: every action of ours is run by `FailureGuard`, which counts a
failure, logs it once and goes on. The order of life:

* `start()` in the job's thread: hooks that wait for torch and for CUDA; no thread, no socket;
* the job initialises CUDA (or a recording is played): `_arm()`, still in the job's thread, switches
  recording on and starts the background thread, the listener and the instruments. What those
  import is imported then, once, in the few processes that use a GPU, and not in all that import
  torch;
* `stop()`, or the end of the process: one last read-out and push within a bound, then everything
  is undone, last made first. An agent that was stopped stays so.

The lock of `Teardown` guards a few fields and is never held while a part is started, stopped or
asked. A forked child is silent: it drops what it inherited and waits for a CUDA context of its own.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.gate import QuietGate
from gpumem_otel.base.logs import named_logger
from gpumem_otel.capture.gil_pacing import Pacer
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.runtime.components import ExportComponents, ReadComponents, ServeComponents
from gpumem_otel.runtime.teardown import FailureGuard, Teardown
from gpumem_otel.settings.config import process_environ
from gpumem_otel.yielding.engine.safepoint import SafePoints
from gpumem_otel.yielding.scan.torch_state import not_between_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpumem_otel.base.profile import HeapProfile, ProfileKind
    from gpumem_otel.capture.metadata import AllocationMarks
    from gpumem_otel.capture.profile_reader import LiveProfileReader
    from gpumem_otel.capture.tensor_table import TensorTable
    from gpumem_otel.metrics.observation import Observation
    from gpumem_otel.oom.handler import OomHandler
    from gpumem_otel.oom.observer import SnapshotSource
    from gpumem_otel.runtime.queries import Queries
    from gpumem_otel.settings.config import Config
    from gpumem_otel.snapshot.reading import Reading, Source
    from gpumem_otel.yielding.protocols import YieldControl
    from gpumem_otel.yielding.values import YieldStatus

_log = named_logger("gpumem_otel.agent")

ProfilesCallback: TypeAlias = "Callable[[ProfileKind, tuple[HeapProfile, ...]], None]"

EXIT_FLUSH_SECONDS = 5.0
"""What the last read-out and push may take when the process ends."""

GAVE_UP_SECONDS = 0.5
"""The same where the profile of an out-of-memory was waited for in vain: the server is gone."""


class Agent:
    """The parts of one process, wired together.

    Args:
        config: everything resolved.
        source: what is read; None for the torch of this process, armed by its first use of CUDA.
        on_profiles: called on the background thread with each set of profiles read.
        environ: the process's environment, for the launcher's variables.
        build_engine: makes the engine of yields of an agent that is armed.

    Attributes:
        counters: what the parts count about themselves.
        gate: closed while nothing of ours may call torch or CUDA.
        safe_points: where the job's thread can be stopped for a yield.
        yields: the engine of yields, once somebody has asked for it (`gpumem_otel.api.yields`).
    """

    def __init__(
        self,
        config: Config,
        *,
        source: Source | None = None,
        on_profiles: ProfilesCallback | None = None,
        environ: Mapping[str, str] | None = None,
        build_engine: Callable[[Agent], YieldControl] | None = None,
    ) -> None:
        self.config = config
        self.build_engine = build_engine
        self.counters = Counters()
        self.gate = QuietGate()
        self._given_source = source
        self._callbacks = () if on_profiles is None else (on_profiles,)
        self._environ = process_environ() if environ is None else environ
        self._guard = FailureGuard(self.counters)
        self._undoing = Teardown(self._guard)
        # rests between slices of our work, but not while the process waits for us to end
        self._pacer = Pacer(sleep=lambda seconds: time.sleep(0.0 if self._hurried else seconds))
        self._reset()

    def _reset(self) -> None:
        """Nothing is armed, in this process."""
        self._pid = os.getpid()
        self._armed = False
        self.safe_points = SafePoints(not_between_steps)
        self.yields: YieldControl | None = None
        self._reads = ReadComponents(
            self.config,
            given=self._given_source,
            environ=self._environ,
            counters=self.counters,
            undoing=self._undoing,
            pacer=self._pacer,
            gate=self.gate,
            on_boundary=self.safe_points.reached,
        )
        self._serves = ServeComponents(
            self.config,
            counters=self.counters,
            undoing=self._undoing,
            answers=lambda: self._reads.armed().answers,
            observe=self.observe,
            engine=self._engine_of_yields,
        )
        self._exports = ExportComponents(
            self.config,
            environ=self._environ,
            counters=self.counters,
            undoing=self._undoing,
            armed=self._reads.armed,
            observe=self.observe,
            on_profiles=self._callbacks,
        )
        self._ooms: OomHandler | None = None

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
        self._reads.await_cuda(self._arm)

    def _arm(self) -> None:
        """CUDA is there: start the parts. Runs on the job's thread and never raises."""
        with self._undoing.lock:
            if self._armed or self._undoing.over or self._pid != os.getpid():
                return
            self._armed = True
        for stage, start in (
            ("record", self._start_reading),
            ("steps", self._reads.start_steps),
            ("steps", self._reads.start_regions),
            ("listen", self._serves.start_listener),
            ("control", self._serves.start_control),
            ("push", self._exports.start_metrics),
            ("push", self._exports.start_host_profiles),
            ("push", self._exports.start_pusher),
            ("oom", self._start_ooms),
        ):
            if not self._guard.run(stage, start) and stage == "record":
                return  # nothing can be read, so there is nothing to export
            if self._undoing.over:
                return
        self._guard.run("arm", self._end_with_multiprocessing)

    def _end_with_multiprocessing(self) -> None:
        """A worker of multiprocessing may end without exit handlers, but runs its finalizers."""
        process = sys.modules.get("multiprocessing.process")
        util = sys.modules.get("multiprocessing.util")
        if process is None or util is None or process.parent_process() is None:
            return
        finalizer = util.Finalize(None, self.stop, exitpriority=10)
        self.defer("arm", lambda _: finalizer.cancel())

    def stop(self, timeout: float = EXIT_FLUSH_SECONDS) -> None:
        """Flush within the bound and undo everything, last made first; may be called twice."""
        if self._pid != os.getpid():
            return
        steps = self._undoing.end()
        ooms = self._ooms
        if ooms is not None and not ooms.wait(timeout):
            timeout = min(timeout, GAVE_UP_SECONDS)
        self._undoing.undo(steps, timeout)
        self._serves.stopped()

    def after_fork_in_child(self) -> None:
        """Drop what was inherited, touching nothing of the parent's; wait for CUDA anew."""
        self.counters.reset_lock_after_fork()
        self.gate.forget_parent()
        self._serves.close_in_child()
        self._exports.abandon_after_fork()
        if self._ooms is not None:
            self._guard.run("fork", self._ooms.abandon_after_fork)
        if self._armed:
            self._reads.stop_hooks_in_child()
        # the parent's context, or the recording that it plays, is not this child's; hooks that
        # wait for CUDA were inherited and are its own now
        waits = not self._armed and self._given_source is None
        source = self.source
        self._undoing.forget_parent(keep=waits)
        self._reset()
        if waits:
            self._reads.source = source

    # parts ----------------------------------------------------------------------------------

    def _start_reading(self) -> None:
        self._reads.start_reading(on_reading=self._note_reading, yield_status=self._yield_status)

    def _note_reading(self, reading: Reading) -> None:
        answers = self.answers
        if answers is None:
            return
        answers.last_read_ns = reading.time_ns
        self._serves.announce(answers.identity())

    def _yield_status(self) -> YieldStatus | None:
        # asked anew each time: the engine comes with the first command
        return None if self.yields is None else self.yields.wait(-1, 0)

    def _engine_of_yields(self) -> YieldControl:
        if self.yields is not None:
            return self.yields
        if self.build_engine is None:
            raise YieldRefusedError("yield: this process has no engine of yields")
        return self.build_engine(self)

    def _start_ooms(self) -> None:
        source, reader, answers = self._reads.armed()
        if not self.config.oom.enabled or not source.status().supported:
            return
        if not hasattr(source, "read_at_once"):  # a recording
            return
        from gpumem_otel.oom.handler import OomHandler

        ooms = OomHandler(
            self.config,
            environ=self._environ,
            source=cast("SnapshotSource", source),
            reader=reader,
            answers=answers,
            counters=self.counters,
            listener=self._serves.listener,
            otel=self._exports.otel,
        )
        self._undoing.begin("oom", ooms.start, ooms.stop)
        self._ooms = ooms

    # what the parts and the job ask ------------------------------------------------------------

    def observe(self) -> Observation | None:
        """Values of the METRICS table; None where nothing is armed in this process.

        Raises:
            CaptureError: the allocator could not be read.
        """
        answers = self.answers
        if answers is None or self._undoing.over or self._pid != os.getpid():
            return None
        return answers.observe()

    @property
    def _hurried(self) -> bool:
        """Whether somebody waits for our work: it takes no rest then."""
        ooms = self._ooms
        return self._undoing.over or (ooms is not None and ooms.hurried)

    def step(self) -> None:
        """One step of the job has ended; the job says so itself."""
        counter = self._reads.steps
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
        counter = self._reads.steps
        return counter is not None and counter.several

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
        self._undoing.defer(stage, undo)

    def watch(self, name: str, item: object) -> None:
        """The job names what holds memory, see `TensorTable.watch`; never raises."""
        tensors = self.tensors
        if tensors is not None and not self._undoing.over and self._pid == os.getpid():
            self._guard.run("classes", partial(tensors.watch, name, item))

    @property
    def source(self) -> Source | None:
        """What is read; None before torch is waited for and after a fork."""
        return self._reads.source

    @property
    def reader(self) -> LiveProfileReader | None:
        """Profiles on demand; None until armed."""
        return self._reads.reader

    @property
    def answers(self) -> Queries | None:
        """What the parts ask; None until armed."""
        return self._reads.answers

    @property
    def marks(self) -> AllocationMarks | None:
        """Torch's allocation metadata, for regions; None where nobody would see them."""
        return self._reads.marks

    @property
    def tensors(self) -> TensorTable | None:
        """The address table of this process's torch; None where there is none."""
        return self._reads.tensors

    @property
    def address(self) -> tuple[str, int] | None:
        """(host, port) of the listener once it is bound."""
        listener = self._serves.listener
        return listener.address if listener is not None else None

    def wait_listening(self, timeout: float) -> bool:
        """Wait until the port is bound."""
        listener = self._serves.listener
        return listener is not None and listener.bound.wait(timeout)

    @property
    def listen_error(self) -> OSError | str | None:
        """Why nothing listens, where that is known; a port that is taken is tried again."""
        listener = self._serves.listener
        if listener is not None:
            return listener.last_error
        failures = self._guard.failures
        unarmed = (failures.get("arm") or failures.get("record")) if self.reader is None else None
        return unarmed or failures.get("listen")

    def flush(self, timeout: float = EXIT_FLUSH_SECONDS) -> bool:
        """Read and send now; whether everything was stored in time."""
        return self._exports.flush(timeout)
