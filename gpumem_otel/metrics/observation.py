"""Observation: the values from which all metrics are read at one moment."""

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
        totals: by device, from the last read-out; absent before the first.
        classes: bytes by tensor class, by device, of the same read-out.
        home_device: in the rows of the process as a whole, so it must not change while that
            lives; None: the lowest armed device, 0 where there is none.
        counters: our own counters: (name, attributes sorted by key) -> value.
        yields: the state between yield and restore; None where the process cannot be asked to
            yield its memory.
    """

    identity: Identity
    status: SourceStatus
    time_ns: int
    devices: tuple[DeviceStats, ...]
    totals: Mapping[int, DeviceTotals] = field(default_factory=lambda: MappingProxyType({}))
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
        """The present values (at most a second old), None where there is nothing to export."""
        ...
