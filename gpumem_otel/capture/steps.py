"""Counts optimizer steps; a step is one iteration of the training loop.

torch calls its global optimizer hooks more often: twice for ZeroRedundancyOptimizer and for
subclasses that call `super().step`, once per parameter inside backward for
`_apply_optimizer_in_backward`, and while a compiled step is traced; and not at all when GradScaler
skips a step or the compiled step runs. So only the outermost step of a thread counts, never one
inside backward or a traced one; of several optimizers only the first counts. For anything else the
job calls `step()`, which turns the hooks off.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.base.profile import StepStats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

_log = named_logger("gpumem_otel.capture")

_MIN_FLOOR_SECONDS: Final = 0.05
_FLOOR_COST_FACTOR: Final = 500.0
_FLOOR_BOUNDARIES: Final = 16
_LEADER_IS_GONE_AFTER: Final = 10_000


class StepCounter:
    """Counts the steps of this process, and tracks the floor of memory at step boundaries.

    A boundary is the end of the optimizer's step, or a call of `step()`. Gradients, loss and
    outputs may still be alive there, so the allocated memory depends on the batch. The floor is
    therefore the lowest of the last 16 boundaries that were read: one small batch keeps it down,
    while leaked memory is in all of them. It falls at once and rises 16 boundaries late.

    The hooks take 1 to 2 us of the job's thread. Reading the allocated bytes takes 11 us per
    device, so it is done at most 20 times a second and for at most 1/500 of the time; other
    boundaries are not read.

    Args:
        allocated: returns bytes allocated now by device. If it raises, the floor is no longer read.
        time_ns: wall clock, nanoseconds since 1970.
        on_optimizer: called on the stepping thread with each optimizer that made an outermost step
            and whether it was inside backward, and with None at each `step()`. Must not raise.
        on_boundary: called last at each boundary, on the stepping thread: it may block there, and
            its errors are raised into the job.
    """

    def __init__(
        self,
        allocated: Callable[[], Mapping[int, int]] | None = None,
        *,
        on_optimizer: Callable[[object | None, bool], object] | None = None,
        on_boundary: Callable[[], object] | None = None,
        time_ns: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._allocated = allocated
        self._on_optimizer = on_optimizer
        self._on_boundary = on_boundary
        self._time_ns = time_ns
        self._monotonic = monotonic
        self._handles: list[Any] = []
        self._active = False
        self._explicit = False
        self._steps = 0
        self._last_step_time_ns = 0
        self._boundaries: tuple[Mapping[int, int], ...] = ()
        self._next_floor = float("-inf")
        self._leader: Callable[[], object] | None = None
        self._others = 0
        self._logged_several = False

    def start(self) -> None:
        """Register the hooks, if torch's optimizers are loaded. Call it on the job's thread."""
        optimizer = sys.modules.get("torch.optim.optimizer")
        torch: Any = sys.modules.get("torch")
        if self._active or optimizer is None or torch is None:
            return
        before, after = self._hooks(torch)
        self._active = True
        self._handles = [
            optimizer.register_optimizer_step_pre_hook(before),
            optimizer.register_optimizer_step_post_hook(after),
        ]

    def stop(self) -> None:
        """Remove the hooks."""
        self._active = False
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._leader = None

    def step(self) -> None:
        """Mark the end of a step by hand; after the first call the hooks no longer count."""
        self._explicit = True
        if self._on_optimizer is not None:
            self._on_optimizer(None, False)
        self._add()
        if self._on_boundary is not None:
            self._on_boundary()

    @property
    def several(self) -> bool:
        """Whether several optimizers step and the job never called `step()`."""
        return self._logged_several and not self._explicit

    def stats(self) -> StepStats:
        """Steps so far. From any thread, since boundaries are replaced as a whole."""
        floor: dict[int, int] = {}
        for boundary in self._boundaries:
            for device, size in boundary.items():
                floor[device] = min(size, floor.get(device, size))
        return StepStats(
            steps=self._steps,
            last_step_time_ns=self._last_step_time_ns,
            floor_bytes=MappingProxyType(floor),
        )

    def _hooks(self, torch: Any) -> tuple[Callable[..., None], Callable[..., None]]:
        # plain functions over local names: torch.compile traces them, and must see only the first
        # line
        is_compiling = torch.compiler.is_compiling
        graph_task_id = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # noqa: SLF001
        local = threading.local()

        def before(optimizer: object, args: object, kwargs: object) -> None:  # noqa: ARG001
            if is_compiling():
                return
            depth = getattr(local, "depth", 0)
            # a step that raised has left its depth behind: check whether one is really running
            if depth and not _within_step(sys._getframe(1)):  # noqa: SLF001
                depth = 0
            local.depth = depth + 1

        def after(optimizer: object, args: object, kwargs: object) -> None:  # noqa: ARG001
            if is_compiling():
                return
            depth = getattr(local, "depth", 0) - 1
            local.depth = max(depth, 0)
            if depth > 0 or not self._active:
                return
            in_backward = graph_task_id() != -1
            if self._on_optimizer is not None:
                self._on_optimizer(optimizer, in_backward)
            if self._explicit or in_backward:
                return
            if self._stepped(optimizer) and self._on_boundary is not None:
                self._on_boundary()

        return before, after

    def _stepped(self, optimizer: object) -> bool:
        """Whether this is a boundary."""
        try:
            leader = self._leader() if self._leader is not None else None
            if leader is None:
                self._leader = weakref.ref(optimizer)
            elif leader is not optimizer:
                self._another(optimizer)
                return False
            self._others = 0
            self._add()
        except Exception:
            self._active = False
            _log.warning("steps are no longer counted", exc_info=True)
            return False
        return True

    def _another(self, optimizer: object) -> None:
        self._others += 1
        if not self._logged_several:
            self._logged_several = True
            _log.info(
                "several optimizers step: only steps of the first one are counted; "
                "call gpumem_otel.step() once per iteration to count something else"
            )
        if self._others >= _LEADER_IS_GONE_AFTER:
            self._others = 0
            self._leader = weakref.ref(optimizer)

    def _add(self) -> None:
        self._steps += 1
        self._last_step_time_ns = self._time_ns()
        if self._allocated is None:
            return
        started = self._monotonic()
        if started < self._next_floor:
            return
        try:
            now = self._allocated()
        except Exception:  # on the job's own thread
            self._allocated, self._boundaries = None, ()
            _log.warning("memory at step boundaries is no longer read", exc_info=True)
            return
        if now:
            self._boundaries = (*self._boundaries[1 - _FLOOR_BOUNDARIES :], now)
        ended = self._monotonic()
        self._next_floor = ended + max(_MIN_FLOOR_SECONDS, (ended - started) * _FLOOR_COST_FACTOR)


def _within_step(wrapper: FrameType) -> bool:
    """Whether a frame further out runs the same code as this one: torch's wrapper of `step`."""
    code = wrapper.f_code
    frame = wrapper.f_back
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
