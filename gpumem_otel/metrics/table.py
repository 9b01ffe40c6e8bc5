"""METRICS: the one table of all metrics. Both expositions and the docs page derive from it.

Every data point carries `rank` and `device` besides the attributes of its row; rows of the whole
process carry its home device (see metrics/values.py). The names in Prometheus are written out so
that they can be searched for; a test checks that a Prometheus or a Collector makes the same of the
OpenTelemetry name, unit and kind (UnderscoreEscapingWithSuffixes). Gauges of unit 1 end in `ratio`,
since only then all translations agree.

Series per rank and device, at most, every feature on:

| level | limit | now | of them where the job can yield |
| --- | --- | --- | --- |
| minimal | 12 | 12 | 1 |
| standard | 25 | 25 | 1 |
| full | 80, and 16 of yield and restore | 91 | 16 |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.metrics import values as v

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpumem_otel.metrics.observation import Observation

TIMED_STAGES = ("read", "encode", "push")
"""Stages whose time is shown separately; the rest is `other`."""

ERROR_STAGES = ("read", "push", "listen", "control")
DROP_REASONS = ("connect", "timeout", "rate_limited", "rejected")
PUSHED_KINDS = tuple(kind.value for kind in ProfileKind)


class Kind(str, Enum):
    """How a value moves."""

    GAUGE = "gauge"
    SUM = "up_down_counter"
    """A gauge in Prometheus, for names that the conventions define as up-down counters."""
    COUNTER = "counter"


class Level(str, Enum):
    """How many metrics are exported; each level holds those before it."""

    MINIMAL = "minimal"
    STANDARD = "standard"
    FULL = "full"

    def holds(self, other: Level) -> bool:
        """Whether what is marked `other` is exported at this level."""
        return _ORDER[other] <= _ORDER[self]


_ORDER = {level: place for place, level in enumerate(Level)}


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        name: OpenTelemetry name, without unit and `total`.
        prometheus: name in Prometheus, with both.
        unit: UCUM, as in OpenTelemetry; `{things}` and "" do not appear in Prometheus.
        level: the lowest level that exports it.
        attributes: names besides `rank` and `device`, in OpenTelemetry's form.
        detail: the lowest level that shows `attributes`; below it they are summed.
        kept: values of the one attribute that are shown below `detail` too; the rest is summed
            in `other`.
    """

    name: str
    prometheus: str
    kind: Kind
    unit: str
    level: Level
    help: str
    values: v.Values
    attributes: tuple[str, ...] = ()
    detail: Level = Level.MINIMAL
    kept: tuple[str, ...] = ()


_GAUGE, _SUM, _COUNTER = Kind
_MINIMAL, _STANDARD, _FULL = Level

METRICS: tuple[Metric, ...] = (
    # identity
    Metric("gpumem.target.info", "gpumem_target_info", _GAUGE, "", _MINIMAL,
           "Constant 1; join on (rank, device) for what is no label of the other series.",
           v.target_info,
           ("local_rank", "world_size", "run_id", "restart", "gpu_uuid", "node")),
    # memory
    Metric("gpumem.allocated", "gpumem_allocated_bytes", _GAUGE, "By", _MINIMAL,
           "Held by live tensors, the allocator's rounding included.",
           v.from_stats(lambda s: s.allocated_bytes)),
    Metric("gpumem.requested", "gpumem_requested_bytes", _GAUGE, "By", _FULL,
           "What the live tensors asked for, without rounding.",
           v.from_stats(lambda s: s.requested_bytes)),
    Metric("gpumem.active", "gpumem_active_bytes", _GAUGE, "By", _FULL,
           "Allocated, and freed but waiting for another stream.",
           v.from_stats(lambda s: s.active_bytes)),
    Metric("gpumem.reserved", "gpumem_reserved_bytes", _GAUGE, "By", _MINIMAL,
           "Taken from the device by the allocator: allocated and cached.",
           v.from_stats(lambda s: s.reserved_bytes)),
    Metric("gpumem.limit", "gpumem_limit_bytes", _GAUGE, "By", _MINIMAL,
           "The smaller of the device's memory and the fraction the job may take.",
           v.from_stats(lambda s: s.limit_bytes)),
    Metric("gpumem.allocated.peak", "gpumem_allocated_peak_bytes", _GAUGE, "By", _STANDARD,
           "Highest allocated since the start, or since the job reset it.",
           v.from_stats(lambda s: s.allocated_peak_bytes)),
    Metric("gpumem.reserved.peak", "gpumem_reserved_peak_bytes", _GAUGE, "By", _FULL,
           "Highest reserved since the start, or since the job reset it.",
           v.from_stats(lambda s: s.reserved_peak_bytes)),
    Metric("gpumem.class", "gpumem_class_bytes", _GAUGE, "By", _STANDARD,
           "Allocated by kind of tensor at the last read-out; the classes add up to what was "
           "allocated then. A class appears once it holds something; below level full the rare "
           "ones are in `other`.",
           v.class_bytes, ("tensor_class",), _FULL, v.COMMON_CLASSES),
    Metric("gpumem.cached", "gpumem_cached_bytes", _GAUGE, "By", _STANDARD,
           "Reserved but not allocated, by cause; the causes add up to reserved - allocated. "
           "Split remainders and private pools are those of the last read-out.",
           v.cached, ("cause",)),
    Metric("gpumem.pool.reserved", "gpumem_pool_reserved_bytes", _GAUGE, "By", _FULL,
           "Reserved by pool at the last read-out: the default pool, the two largest private "
           "ones (CUDA graphs, MemPool), and the rest.",
           v.pool_reserved, ("pool",)),
    Metric("gpumem.outside", "gpumem_outside_bytes", _GAUGE, "By", _STANDARD,
           "Used on the device but not reserved by this allocator: contexts, libraries, other "
           "processes; at level full by cause, where NVML tells.",
           v.outside, ("cause",), _FULL),
    Metric("gpumem.fragmentation.ratio", "gpumem_fragmentation_ratio", _GAUGE, "1", _FULL,
           "Split remainders (free pieces beside live ones) over reserved, 0 to 1.",
           v.fragmentation_ratio),
    Metric("gpumem.segments", "gpumem_segments", _GAUGE, "{segment}", _FULL,
           "Ranges reserved from the device.",
           v.from_stats(lambda s: s.segments)),
    Metric("gpumem.blocks", "gpumem_blocks", _GAUGE, "{block}", _FULL,
           "Pieces of the segments, live and free, at the last read-out.",
           v.from_totals(lambda t: t.blocks)),
    Metric("gpumem.stackless", "gpumem_stackless_bytes", _GAUGE, "By", _FULL,
           "Allocated without a recorded stack, at the last read-out.",
           v.from_totals(lambda t: t.bytes_without_stack)),
    Metric("gpumem.host.pinned", "gpumem_host_pinned_bytes", _GAUGE, "By", _FULL,
           "Pinned host memory of this process.",
           v.of_process(v.host_pinned)),
    Metric("hw.gpu.memory.limit", "hw_gpu_memory_limit_bytes", _SUM, "By", _FULL,
           "Memory of the device, from one rank per device.",
           v.device_memory(lambda s: s.device_total_bytes), ("hw.id",)),
    Metric("hw.gpu.memory.usage", "hw_gpu_memory_usage_bytes", _SUM, "By", _FULL,
           "Used on the device by everybody, from one rank per device.",
           v.device_memory(lambda s: s.device_used_bytes), ("hw.id",)),
    # events
    Metric("gpumem.ooms", "gpumem_ooms_total", _COUNTER, "{oom}", _MINIMAL,
           "Allocations that failed for good, caught by the job or not.",
           v.events(lambda s: s.ooms)),
    Metric("gpumem.alloc_retries", "gpumem_alloc_retries_total", _COUNTER, "{retry}", _MINIMAL,
           "Times the allocator had to empty its cache to find room.",
           v.events(lambda s: s.alloc_retries)),
    Metric("gpumem.allocations", "gpumem_allocations_total", _COUNTER, "{allocation}", _FULL,
           "Allocations made.",
           v.events(lambda s: s.allocations)),
    Metric("gpumem.allocation", "gpumem_allocation_bytes_total", _COUNTER, "By", _FULL,
           "Bytes allocated, rounding included.",
           v.events(lambda s: s.allocation_bytes)),
    # steps
    Metric("gpumem.steps", "gpumem_steps_total", _COUNTER, "{step}", _MINIMAL,
           "Optimizer steps, or calls of step().",
           v.of_process(lambda o: o.steps.steps)),
    Metric("gpumem.last_step.timestamp", "gpumem_last_step_timestamp_seconds", _GAUGE, "s",
           _MINIMAL,
           "When the last step ended, seconds since 1970; absent before the first.",
           v.of_process(lambda o: v.seconds_of(o.steps.last_step_time_ns))),
    Metric("gpumem.step.floor", "gpumem_step_floor_bytes", _GAUGE, "By", _MINIMAL,
           "Lowest allocated at recent step boundaries; it rises with a leak.",
           v.step_floor),
    # yield and restore, where control is on or the job has asked for it
    Metric("gpumem.yield.state", "gpumem_yield_state", _GAUGE, "", _MINIMAL,
           "1, with the state: running, yielding, yielded, restoring, failed; overdue once a "
           "restore or the end of a lease has found the device taken.",
           v.yield_state, ("state",)),
    Metric("gpumem.yield.moved", "gpumem_yield_moved_bytes", _GAUGE, "By", _FULL,
           "Away from the devices now: in host memory or on disk.",
           v.from_yields(lambda y: y.moved_bytes)),
    Metric("gpumem.yield.residual", "gpumem_yield_residual_bytes", _GAUGE, "By", _FULL,
           "Left on the devices by the last yield, by cause; absent while nothing is yielded.",
           v.yield_residual, ("cause",)),
    Metric("gpumem.yield", "gpumem_yield_seconds_total", _COUNTER, "s", _FULL,
           "Time spent in yields and restores, by phase.",
           v.yield_phases, ("phase",)),
    Metric("gpumem.yield.lease_expiry.timestamp", "gpumem_yield_lease_expiry_timestamp_seconds",
           _GAUGE, "s", _FULL,
           "When the lease ends and the memory comes back by itself, seconds since 1970; absent "
           "without a lease.",
           v.from_yields(lambda y: v.seconds_of(y.lease_expiry_ns))),
    # about ourselves
    Metric("gpumem.supported", "gpumem_supported", _GAUGE, "", _MINIMAL,
           "1 where profiles can be had, else 0 with the reason.",
           v.supported, ("reason",)),
    Metric("gpumem.values.timestamp", "gpumem_values_timestamp_seconds", _GAUGE, "s", _FULL,
           "When the allocator was asked for these values, seconds since 1970; it stays the same "
           "while the driver holds the process.",
           v.of_process(lambda o: o.time_ns / 1_000_000_000)),
    Metric("gpumem.exporter", "gpumem_exporter_seconds_total", _COUNTER, "s", _FULL,
           "Time spent by this tool's own work, by stage.",
           v.counter_by("exporter_seconds", "stage", TIMED_STAGES), ("stage",)),
    Metric("gpumem.exporter.runs", "gpumem_exporter_runs_total", _COUNTER, "{run}", _FULL,
           "How often that work was done, by stage.",
           v.counter_by("exporter_runs", "stage", TIMED_STAGES), ("stage",)),
    Metric("gpumem.exporter.stall", "gpumem_exporter_stall_seconds_total", _COUNTER, "s", _FULL,
           "Time for which this tool's calls held the interpreter lock: what the job may feel.",
           v.counter("exporter_stall_seconds")),
    Metric("gpumem.exporter.pushed", "gpumem_exporter_pushed_bytes_total", _COUNTER, "By", _FULL,
           "Bytes of profiles sent.",
           v.counter("exporter_pushed_bytes")),
    Metric("gpumem.last_push.timestamp", "gpumem_last_push_timestamp_seconds", _GAUGE, "s", _FULL,
           "When a profile of this kind was last stored, seconds since 1970; absent before.",
           v.gauge_by("last_push_timestamp_seconds", "kind", PUSHED_KINDS), ("kind",)),
    Metric("gpumem.exporter.dropped", "gpumem_exporter_dropped_total", _COUNTER, "{profile}",
           _MINIMAL,
           "Profiles that did not arrive, at level full by reason.",
           v.counter_by("exporter_dropped", "reason", DROP_REASONS), ("reason",), _FULL),
    Metric("gpumem.exporter.errors", "gpumem_exporter_errors_total", _COUNTER, "{error}", _FULL,
           "Failures of this tool's own work, by stage.",
           v.counter_by("exporter_errors", "stage", ERROR_STAGES), ("stage",)),
    Metric("gpumem.exporter.history_overflow", "gpumem_exporter_history_overflow_total", _COUNTER,
           "{window}", _FULL,
           "Recorded windows that held more events than fit.",
           v.counter("exporter_history_overflow")),
    Metric("gpumem.exporter.readouts_raced", "gpumem_exporter_readouts_raced_total", _COUNTER,
           "{readout}", _FULL,
           "Read-outs during which the job allocated or freed: their totals could not be compared.",
           v.counter("readouts_raced")),
    Metric("gpumem.exporter.readouts_breached", "gpumem_exporter_readouts_breached_total",
           _COUNTER, "{readout}", _FULL,
           "Read-outs whose bytes differed from the allocator's own counter: a defect of this "
           "tool.",
           v.counter("readouts_breached")),
)  # fmt: skip


@cache
def shown(level: Level) -> tuple[Metric, ...]:
    """The metrics of a level, in the order of the table."""
    return tuple(metric for metric in METRICS if level.holds(metric.level))


def values_of(metric: Metric, observation: Observation, level: Level) -> Iterator[v.Row]:
    """The rows of one metric: (attributes with `rank` and `device`, value)."""
    if level.holds(metric.detail):
        yield from metric.values(observation)
        return
    totals: dict[tuple[str, str, str], float] = {}
    for attributes, value in metric.values(observation):
        shown_value = ""
        if metric.kept:
            shown_value = attributes[metric.attributes[0]]
            shown_value = shown_value if shown_value in metric.kept else v.OTHER
        key = attributes["rank"], attributes["device"], shown_value
        totals[key] = totals.get(key, 0) + value
    for (rank, device, shown_value), value in totals.items():
        own = {metric.attributes[0]: shown_value} if shown_value else {}
        yield {"rank": rank, "device": device, **own}, value


def rows(observation: Observation, level: Level) -> Iterator[tuple[Metric, v.Attributes, float]]:
    """Every row that a level exports for this observation, metric by metric."""
    for metric in shown(level):
        for attributes, value in values_of(metric, observation, level):
            yield metric, attributes, value
