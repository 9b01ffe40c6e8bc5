"""What the engine of yields needs from other parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpumem_otel.base.profile import DeviceStats
    from gpumem_otel.base.protocols import Clock
    from gpumem_otel.yielding.callbacks import Callbacks
    from gpumem_otel.yielding.engine.safepoint import Quiescence, SafePoints
    from gpumem_otel.yielding.protocols import Checkpointing, Finding, Gate, Offloading


@dataclass(kw_only=True)
class YieldDependencies:
    """The parts that move memory or are asked before.

    Attributes:
        checkpoint: of the driver; None where there is none.
        gate: None where no thread of ours reads the GPU.
        world_size: current number of ranks of the job.
        why_not_now: what a yield would disturb at the moment, "" for nothing.
        usage: of the devices; raises nothing, () where it cannot be read.
        hints: what the job could do better, one line each.
    """

    finder: Finding
    offload: Offloading
    safe_points: SafePoints
    quiescence: Quiescence
    callbacks: Callbacks
    clock: Clock
    checkpoint: Checkpointing | None = None
    gate: Gate | None = None
    world_size: Callable[[], int] = field(default=lambda: 1)
    why_not_now: Callable[[], str] = field(default=lambda: "")
    usage: Callable[[], Sequence[DeviceStats]] = field(default=tuple)
    hints: Callable[[], Sequence[str]] = field(default=tuple)
