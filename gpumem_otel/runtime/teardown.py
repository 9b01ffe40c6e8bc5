"""What was done to this process, and how to undo it; a failure of ours is counted, never raised."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import GpumemError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpumem_otel.base.counters import Counters

LEAST_STOP_SECONDS = 0.1
"""What each part is given to stop when the bound is used up."""

_log = named_logger("gpumem_otel.agent")

Step: TypeAlias = "tuple[str, Callable[[float], object]]"
"""The stage that failures are counted under, and the undoing, which is given the seconds left."""


class FailureGuard:
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
                # what we say ourselves names the reason and the way out
                known = isinstance(error, GpumemError)
                _log.warning("%s failed, the job goes on: %s", stage, error, exc_info=not known)
            return False
        return True


class Teardown:
    """Remembers how to undo what was started, from any thread.

    Args:
        guard: runs what undoes.

    Attributes:
        guard: as it was given.
        lock: guards the two below; never held while a part is started, stopped or asked.
        over: whether all was undone, or is being: what starts now is undone at once.
        steps: what is to be undone, the oldest first.
    """

    def __init__(self, guard: FailureGuard) -> None:
        self.guard = guard
        self.lock = threading.Lock()
        self.over = False
        self.steps: list[Step] = []

    def begin(
        self, stage: str, start: Callable[[], object], undo: Callable[[float], object]
    ) -> None:
        """Start a part, and remember how to undo it; one that fails half way is undone at once."""
        try:
            start()
        except BaseException:
            self.guard.run(stage, partial(undo, LEAST_STOP_SECONDS))
            raise
        self.defer(stage, undo)

    def defer(self, stage: str, undo: Callable[[float], object]) -> None:
        """Remember how to undo what was just done; `undo` is given the seconds that are left."""
        with self.lock:
            if not self.over:
                self.steps.append((stage, undo))
                return
        # ended meanwhile by another thread, which undid all it knew of
        self.guard.run(stage, partial(undo, LEAST_STOP_SECONDS))

    def end(self) -> list[Step]:
        """Nothing is started any more; what is to be undone, the newest first."""
        with self.lock:
            self.over = True
            steps, self.steps = self.steps, []
        return steps[::-1]

    def undo(self, steps: Iterable[Step], timeout: float) -> None:
        """Undo all of it within the bound, in this order."""
        deadline = time.monotonic() + timeout
        for stage, action in steps:
            left = max(deadline - time.monotonic(), LEAST_STOP_SECONDS)
            self.guard.run(stage, partial(action, left))

    def forget_parent(self, *, keep: bool) -> None:
        """In a forked child: nothing is undone here that the parent did.

        Args:
            keep: what is to be undone was inherited as a whole, and is this child's own now.
        """
        self.lock = threading.Lock()
        if not keep:
            self.steps = []
