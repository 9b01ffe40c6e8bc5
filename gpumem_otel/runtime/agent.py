"""The agent of one process: start, stop, fork and exit of its components.

Nothing may raise into the job: `FailureGuard` runs every action of ours, counts a failure, logs it
once and goes on. The order of life:

* `start()` on the job's thread: hooks that wait for torch and for CUDA; no thread, no socket;
* the job initialises CUDA (or a recording is played): `_arm()`, still on the job's thread, starts
  the components of `components.py`. Their imports happen then, in the few processes that use a
  GPU, and not in all that import torch;
* `stop()`, or the end of the process: one last read-out and push within a bound, then everything
  is undone, the newest first. An agent that was stopped stays so.

The lock of `Teardown` guards a few fields and is never held while a component is started, stopped
or asked. A forked child is silent: it drops what it inherited and waits for a CUDA context of its
own.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.gate import QuietGate
from gpumem_otel.base.logs import named_logger
from gpumem_otel.capture.gil_pacing import Pacer
from gpumem_otel.errors import CaptureError, YieldRefusedError
from gpumem_otel.runtime.components import Components, source_of_torch, tensors_of
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
    from gpumem_otel.runtime.queries import Queries
    from gpumem_otel.settings.config import Config
    from gpumem_otel.snapshot.reading import Source
    from gpumem_otel.yielding.protocols import YieldControl
    from gpumem_otel.yielding.values import YieldStatus

_log = named_logger("gpumem_otel.agent")

ProfilesCallback: TypeAlias = "Callable[[ProfileKind, tuple[HeapProfile, ...]], None]"

EXIT_FLUSH_SECONDS = 5.0
"""What the last read-out and push may take when the process ends."""

GAVE_UP_SECONDS = 0.5
"""The same after a wait in vain for the profile of an out-of-memory: the server is gone."""


class Agent:
    """The components of one process, wired together.

    Args:
        config: everything resolved.
        source: what is read; None for the torch of this process, armed by its first use of CUDA.
        on_profiles: called on the background thread with each set of profiles read.
        environ: the process's environment, for the launcher's variables.

    Attributes:
        counters: what the components count about themselves.
        gate: closed while nothing of ours may call torch or CUDA.
        pacer: rests between slices of our work, but not while the process waits for us to end.
        safe_points: where the job's thread can be stopped for a yield.
        source: what is read; None before torch is waited for and after a fork.
        components: None until armed.
        build_engine: makes the engine of yields of an armed agent; set by who adopts this one.
        yields: the engine of yields, once it was asked for (`gpumem_otel.api.yields`).
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
        self.environ = process_environ() if environ is None else environ
        self.build_engine: Callable[[Agent], YieldControl] | None = None
        self.on_profiles: tuple[ProfilesCallback, ...] = (on_profiles,) if on_profiles else ()
        self.counters = Counters()
        self.gate = QuietGate()
        self.pacer = Pacer(sleep=lambda seconds: time.sleep(0.0 if self._hurried else seconds))
        self._guard = FailureGuard(self.counters)
        self.teardown = Teardown(self._guard)
        self._given_source = source
        self._reset(source)

    def _reset(self, source: Source | None) -> None:
        """Nothing is armed in this process."""
        self._pid = os.getpid()
        self._armed = False
        self.source = source
        self.safe_points = SafePoints(not_between_steps)
        self.yields: YieldControl | None = None
        self.components: Components | None = None

    # life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait for CUDA (hooks only, no thread); start at once if a source was given."""
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

        source = self.source = source_of_torch(self)
        arming = Arming(self._arm, on_import=source.prepare)
        self.teardown.defer("arm", lambda _: source.stop())
        self.teardown.begin("arm", arming.start, lambda _: arming.stop())

    def _arm(self) -> None:
        """CUDA is there: start the components. Runs on the job's thread and never raises."""
        with self.teardown.lock:
            if self._armed or self.teardown.over or self._pid != os.getpid():
                return
            self._armed = True
        self._guard.run("record", self._start_reading)
        if self.components is None:
            return  # nothing can be read, so there is nothing to export
        for stage, start in self.components.starts():
            if self.teardown.over:
                return
            self._guard.run(stage, start)
        if not self.teardown.over:
            self._guard.run("arm", self._end_with_multiprocessing)

    def _start_reading(self) -> None:
        if self.source is None:
            raise CaptureError("read: there is no source")
        self.components = Components(self, self.source, live=self._given_source is None)

    def _end_with_multiprocessing(self) -> None:
        """A worker of multiprocessing may end without exit handlers, but runs its finalizers."""
        process = sys.modules.get("multiprocessing.process")
        util = sys.modules.get("multiprocessing.util")
        if process is None or util is None or process.parent_process() is None:
            return
        finalizer = util.Finalize(None, self.stop, exitpriority=10)
        self.defer("arm", lambda _: finalizer.cancel())

    def stop(self, timeout: float = EXIT_FLUSH_SECONDS) -> None:
        """Flush within the bound and undo everything, the newest first; may be called twice."""
        if self._pid != os.getpid():
            return
        steps = self.teardown.end()
        if self.ooms is not None and not self.ooms.wait(timeout):
            timeout = min(timeout, GAVE_UP_SECONDS)
        self.teardown.undo(steps, timeout)
        if self.components is not None:
            self.components.stopped()

    def after_fork_in_child(self) -> None:
        """Drop what was inherited, touching nothing of the parent's; wait for CUDA again."""
        self.counters.reset_lock_after_fork()
        self.gate.forget_parent()
        if self.components is not None:
            self.components.abandon_after_fork()
        if self._armed and self.tensors is not None:
            self._guard.run("fork", self.tensors.stop)
        # the parent's context, or the recording that it plays, is not this child's; hooks that
        # wait for CUDA were inherited and are its own now
        waits = not self._armed and self._given_source is None
        self.teardown.forget_parent(keep=waits)
        self._reset(self.source if waits else self._given_source)

    def defer(self, stage: str, undo: Callable[[float], object]) -> None:
        """Have something undone when this agent stops; `undo` is given the seconds left."""
        self.teardown.defer(stage, undo)

    def flush(self, timeout: float = EXIT_FLUSH_SECONDS) -> bool:
        """Read and send now; whether everything was stored in time."""
        return self.components is not None and self.components.flush(timeout)

    # what the job says ------------------------------------------------------------------------

    def step(self) -> None:
        """One step of the job has ended; the job says so itself."""
        counter = None if self.components is None else self.components.steps
        if counter is not None:
            counter.step()
        elif self._pid == os.getpid():
            self.safe_points.reached()

    def watch(self, name: str, item: object) -> None:
        """The job names what holds memory, see `TensorTable.watch`; never raises."""
        tensors = self.tensors
        if tensors is not None and not self.teardown.over and self._pid == os.getpid():
            self._guard.run("classes", partial(tensors.watch, name, item))

    # what the components and the job ask --------------------------------------------------------

    def observe(self) -> Observation | None:
        """Values of the METRICS table; None if nothing is armed in this process.

        Raises:
            CaptureError: the allocator could not be read.
        """
        queries = self.queries
        if queries is None or self.teardown.over or self._pid != os.getpid():
            return None
        return queries.observe()

    def yield_status(self) -> YieldStatus | None:
        """Where the process stands between yield and restore; None without an engine."""
        return None if self.yields is None else self.yields.wait(-1, 0)

    def engine_of_yields(self) -> YieldControl:
        """The engine of yields, made when it is first asked for.

        Raises:
            YieldRefusedError: this process has none.
        """
        if self.yields is not None:
            return self.yields
        if self.build_engine is None:
            raise YieldRefusedError("yield: this process has no engine of yields")
        return self.build_engine(self)

    @property
    def _hurried(self) -> bool:
        """Whether the job waits for our work: it takes no rest then."""
        return self.teardown.over or (self.ooms is not None and self.ooms.hurried)

    @property
    def why_not_now(self) -> str:
        """What a yield would disturb at this moment; "" if nothing."""
        busy = self.ooms is not None and self.ooms.busy
        return "an out-of-memory is being handled" if busy else ""

    @property
    def several_optimizers(self) -> bool:
        """Whether the steps of the first of several optimizers are counted as those of the job."""
        counter = None if self.components is None else self.components.steps
        return counter is not None and counter.several

    @property
    def rank(self) -> int:
        """Rank of this process; 0 until armed."""
        return 0 if self.queries is None else self.queries.identity().rank

    @property
    def reader(self) -> LiveProfileReader | None:
        """Profiles on demand; None until armed."""
        return None if self.components is None else self.components.reader

    @property
    def queries(self) -> Queries | None:
        """Identity, metrics, profiles and health; None until armed."""
        return None if self.components is None else self.components.queries

    @property
    def ooms(self) -> OomHandler | None:
        """Handles failed allocations; None until armed, and if that is off."""
        return None if self.components is None else self.components.ooms

    @property
    def marks(self) -> AllocationMarks | None:
        """Torch's allocation metadata, for regions; None if no profile shows it."""
        return None if self.components is None else self.components.marks

    @property
    def tensors(self) -> TensorTable | None:
        """The address table of this process's torch; None without one."""
        return tensors_of(self.source)

    @property
    def address(self) -> tuple[str, int] | None:
        """(host, port) of the listener once it is bound."""
        listener = None if self.components is None else self.components.listener
        return listener.address if listener is not None else None

    def wait_listening(self, timeout: float) -> bool:
        """Wait until the port is bound."""
        listener = None if self.components is None else self.components.listener
        return listener is not None and listener.bound.wait(timeout)

    @property
    def listen_error(self) -> OSError | str | None:
        """Why nothing listens, if that is known; a port that is taken is tried again."""
        listener = None if self.components is None else self.components.listener
        if listener is not None:
            return listener.last_error
        failures = self._guard.failures
        unarmed = failures.get("arm") or failures.get("record")
        return (unarmed if self.components is None else None) or failures.get("listen")
