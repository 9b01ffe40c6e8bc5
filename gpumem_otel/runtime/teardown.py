"""Undoes what was started in this process; counts and logs our own failures instead of raising."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import GpumemError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from gpumem_otel.base.counters import Counters

    Step: TypeAlias = "tuple[str, Callable[[float], object]]"
    """A stage, and what undoes it within the seconds it is given."""

LEAST_STOP_SECONDS = 0.1
"""What each component gets to stop once the time for all of them is used up."""

_log = named_logger("gpumem_otel.agent")


class FailureGuard:
    """Runs an action of ours; a failure is counted and logged once, never raised.

    Attributes:
        failures: the first message of each stage; not the exception, whose traceback would keep a
            whole reading alive.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.failures: dict[str, str] = {}

    def run(self, stage: str, action: Callable[[], object]) -> bool:
        """Whether the action succeeded."""
        try:
            action()
        except Exception as error:
            self._counters.add("exporter_errors", stage=stage)
            if stage not in self.failures:
                self.failures[stage] = str(error) or type(error).__name__
                # messages of our own name the reason and the way out: they need no traceback
                known = isinstance(error, GpumemError)
                _log.warning("%s failed, the job goes on: %s", stage, error, exc_info=not known)
            return False
        return True


class Teardown:
    """What is to be undone within a deadline, filled from any thread.

    Each `undo` is called with the seconds that it may take.

    Attributes:
        guard: runs what undoes.
        lock: guards the fields; never held while a component is started, stopped or asked.
        over: everything was undone, or is being undone: what starts now is undone at once.
    """

    def __init__(self, guard: FailureGuard) -> None:
        self.guard = guard
        self.lock = threading.Lock()
        self.over = False
        self._steps: list[Step] = []

    def begin(
        self, stage: str, start: Callable[[], object], undo: Callable[[float], object]
    ) -> None:
        """Start a component and remember how to undo it; undone at once if it fails half way."""
        try:
            start()
        except BaseException:
            self.guard.run(stage, partial(undo, LEAST_STOP_SECONDS))
            raise
        self.defer(stage, undo)

    def defer(self, stage: str, undo: Callable[[float], object]) -> None:
        """Remember how to undo what was just done."""
        with self.lock:
            if not self.over:
                self._steps.append((stage, undo))
                return
        # another thread has ended all meanwhile, without knowing of this
        self.guard.run(stage, partial(undo, LEAST_STOP_SECONDS))

    def end(self) -> list[Step]:
        """From now on nothing starts any more; what is to be undone."""
        with self.lock:
            self.over = True
            steps, self._steps = self._steps, []
            return steps

    def undo(self, steps: Sequence[Step], timeout: float) -> None:
        """Undo all of it, the newest first, within these seconds; after an interrupt too."""
        deadline = time.monotonic() + timeout
        with ExitStack() as stack:
            for stage, undo in steps:
                stack.callback(self._undo, stage, undo, deadline)

    def _undo(self, stage: str, undo: Callable[[float], object], deadline: float) -> None:
        left = max(deadline - time.monotonic(), LEAST_STOP_SECONDS)
        self.guard.run(stage, partial(undo, left))

    def forget_parent(self, *, keep: bool) -> None:
        """In a forked child: do not undo what the parent did.

        Args:
            keep: all of it was inherited and is this child's own now.
        """
        self.lock = threading.Lock()
        if not keep:
            self._steps = []
