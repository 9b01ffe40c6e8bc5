"""Observations for tests of the METRICS table, and readers of what the expositions make of them."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.profile import DeviceStats, DeviceTotals, Identity, SourceStatus, StepStats
from gpumem_otel.metrics.observation import Observation
from gpumem_otel.snapshot.tensor_classes import TensorClass
from gpumem_otel.yielding.values import RESIDUAL_CAUSES, Phase, YieldState, YieldStatus

UUID = "GPU-5d3c1e2f-0a1b-4c2d-8e3f-a1b2c3d4e5f6"

COUNTED = {
    "exporter_dropped": [("reason", "connect", 2), ("reason", "too_large", 3)],
    "exporter_errors": [("stage", "read", 1), ("stage", "listen", 4), ("stage", "window", 1)],
    "exporter_runs": [("stage", "read", 7), ("stage", "push", 7), ("stage", "scrape", 11)],
    "exporter_seconds": [("stage", "read", 0.25), ("stage", "scrape", 0.5), ("stage", "stats", 1)],
}

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""(name in Prometheus, labels that are not empty) -> value."""


def stats(device: int = 0, **changes) -> DeviceStats:
    """A device whose numbers all differ."""
    values = DeviceStats(
        device=device,
        allocated_bytes=6_000_000_000 + device,
        requested_bytes=5_900_000_001,
        active_bytes=6_300_000_000,
        reserved_bytes=8_000_000_000,
        allocated_peak_bytes=7_123_456_789,
        reserved_peak_bytes=8_100_000_000,
        inactive_split_bytes=300_000_000,
        allocations=123_456_789,
        frees=123_450_000,
        allocation_bytes=(1 << 53) - 1,
        requested_allocation_bytes=(1 << 53) - 3,
        segments=321,
        ooms=1,
        alloc_retries=2,
        limit_bytes=140_000_000_000,
        device_total_bytes=150_000_000_000,
        device_used_bytes=9_000_000_000,
        process_used_bytes=8_600_000_000,
        host_pinned_bytes=65_536,
    )
    return replace(values, **changes)


def totals(device: int = 0, **changes) -> DeviceTotals:
    """What a read-out a moment ago said about that device."""
    values = DeviceTotals(
        device=device,
        reserved_bytes=8_000_000_000,
        allocated_bytes=6_000_000_000,
        active_bytes=6_300_000_000,
        requested_bytes=5_900_000_000,
        segments=320,
        blocks=4_321,
        free_segment_bytes=900_000_000,
        split_remainder_bytes=400_000_000,
        pending_free_bytes=300_000_000,
        private_pool_free_bytes=100_000_000,
        bytes_without_stack=2_048,
        history=True,
        pool_reserved_bytes={
            (0, 0): 5_000_000_000,
            (0, 1): 1_500_000_000,
            (0, 2): 1_000_000_000,
            (0, 3): 400_000_000,
            (1, 0): 100_000_000,
        },
    )
    return replace(values, **changes)


def identity(**changes) -> Identity:
    """Rank 3 of 8 on the first GPU that it sees."""
    values = Identity(
        service_name="train",
        run_id="run-7",
        restart=2,
        rank=3,
        local_rank=0,
        world_size=8,
        node="node-a",
        pid=4242,
        device_uuids={0: UUID},
    )
    return replace(values, **changes)


def counters() -> Counters:
    """Every counter about ourselves."""
    made = Counters()
    for name, entries in COUNTED.items():
        for attribute, value, amount in entries:
            made.add(name, amount, **{attribute: value})
    made.add("exporter_stall_seconds", 0.125)
    made.add("exporter_pushed_bytes", 1_234_567)
    made.add("exporter_history_overflow", 1)
    made.add("readouts_raced", 2)
    made.add("readouts_breached", 1)
    for kind in ("live", "allocated", "peak", "growth", "pinned"):
        made.set("last_push_timestamp_seconds", 1_790_000_000.5, kind=kind)
    return made


def classes(device: int = 0) -> dict[str, int]:
    """Every class, which add up to the allocated bytes of the totals."""
    sizes = {found.value: 1_000 * place for place, found in enumerate(TensorClass, 1)}
    rest = totals(device).allocated_bytes - sum(sizes.values())
    return {**sizes, TensorClass.PARAMETER.value: sizes["parameter"] + rest}


def full(on: tuple[int, ...] = (0,), **changes) -> Observation:
    """Everything known about the devices `on`."""
    values = Observation(
        identity=identity(device_uuids={d: UUID[:-1] + str(d) for d in on}),
        status=SourceStatus(armed=True, supported=True, devices=on),
        time_ns=1_790_000_000_000_000_000,
        devices=tuple(stats(device) for device in on),
        totals={device: totals(device) for device in on},
        classes={device: classes(device) for device in on},
        steps=StepStats(
            steps=99,
            last_step_time_ns=1_790_000_000_250_000_000,
            floor_bytes={device: 5_000_000_000 + device for device in on},
        ),
        counters=counters().snapshot(),
        yields=yields(),
    )
    return replace(values, **changes)


def yields(**changes) -> YieldStatus:
    """Yielded, with a lease, and something of every cause is left."""
    values = YieldStatus(
        version=7,
        state=YieldState.YIELDED,
        since_ns=1_790_000_000_000_000_000,
        lease_expiry_ns=1_790_000_060_500_000_000,
        moved_bytes=5_000_000_000,
        residual_bytes={cause: 1_000 * n for n, cause in enumerate(RESIDUAL_CAUSES, 1)},
        phase_seconds={phase.value: n / 4 for n, phase in enumerate(Phase, 1)},
    )
    return replace(values, **changes)


def bare(**changes) -> Observation:
    """The first moment: a device is armed, nothing was read out, counted or stepped."""
    values = Observation(
        identity=identity(device_uuids={}),
        status=SourceStatus(armed=True, supported=True, devices=(0,)),
        time_ns=1,
        devices=(DeviceStats(
            device=0, allocated_bytes=0, requested_bytes=0, active_bytes=0, reserved_bytes=0
        ),),
    )  # fmt: skip
    return replace(values, **changes)


def parsed(text: bytes) -> Series:
    """The series of a text exposition."""
    found: Series = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = frozenset((k, v) for k, v in sample.labels.items() if v)
            assert (sample.name, labels) not in found, f"{sample.name} {labels} twice"
            found[sample.name, labels] = sample.value
    return found


def translated(name: str, unit: str, *, monotonic: bool, gauge: bool) -> str:
    """An OpenTelemetry name as Prometheus' and the Collector's otlptranslator write it.

    UnderscoreEscapingWithSuffixes, for the units that the table uses: the word of a unit is
    added unless it is there already, an annotation in braces is dropped, `ratio` belongs to
    gauges of unit 1 and `total` to monotonic sums.
    """
    words = [word for word in name.replace(".", "_").split("_") if word]
    unit_word = {"By": "bytes", "s": "seconds"}.get(unit, "")
    if unit_word and unit_word not in words:
        words.append(unit_word)
    if monotonic:
        words = [word for word in words if word != "total"] + ["total"]
    if gauge and unit == "1":
        words = [word for word in words if word != "ratio"] + ["ratio"]
    return "_".join(words)


def collected(metrics_data) -> Series:
    """The series of an OpenTelemetry collection, named as Prometheus would name them."""
    found: Series = {}
    for resource in metrics_data.resource_metrics if metrics_data else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                monotonic = getattr(metric.data, "is_monotonic", False)
                is_gauge = type(metric.data).__name__ == "Gauge"
                name = translated(metric.name, metric.unit, monotonic=monotonic, gauge=is_gauge)
                for point in metric.data.data_points:
                    labels = frozenset(
                        (key.replace(".", "_"), value)
                        for key, value in point.attributes.items()
                        if value
                    )
                    assert (name, labels) not in found, f"{name} {labels} twice"
                    found[name, labels] = point.value
    return found
