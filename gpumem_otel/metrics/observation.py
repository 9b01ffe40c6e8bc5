"""What one reading of all metrics saw."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from gpumem_otel.base.profile import StepStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpumem_otel.base.profile import DeviceStats, DeviceTotals, Identity, SourceStatus
    from gpumem_otel.yielding.values import YieldStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything the METRICS table reads from, taken at one moment.

    Attributes:
        books: by device, from the last read-out; absent before the first.
        classes: bytes by tensor class, by device, of the same read-out.
        home_device: carries the rows of the process as a whole, and must not change while it
            lives; None: the lowest armed device, 0 where there is none.
        counters: our own counters: (name, attributes sorted by key) -> value.
        yields: where the process stands between yield and restore; None where nobody can ask it
            to give its memory back.
    """

    identity: Identity
    status: SourceStatus
    time_ns: int
    devices: tuple[DeviceStats, ...]
    books: Mapping[int, DeviceTotals] = field(default_factory=lambda: MappingProxyType({}))
    classes: Mapping[int, Mapping[str, int]] = field(default_factory=lambda: MappingProxyType({}))
    steps: StepStats = field(default_factory=StepStats)
    home_device: int | None = None
    counters: Mapping[tuple[str, tuple[tuple[str, str], ...]], float] = field(
        default_factory=lambda: MappingProxyType({})
    )
    yields: YieldStatus | None = None


class Observer(Protocol):
    """Where the METRICS table gets its values."""

    def __call__(self) -> Observation | None:
        """The values of now (at most a second old), None where there is nothing to export."""
        ...
