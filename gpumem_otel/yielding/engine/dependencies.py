"""What an engine of yields is made of."""

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
    """What moves memory, and what is asked before.

    Attributes:
        checkpoint: None where there is none.
        gate: None where nothing of ours runs beside the job.
        world_size: ranks of the job, now.
        why_not_now: what is under way that a yield would disturb, "" where nothing is.
        usage: of the devices; raises nothing, () where it can not be read.
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
