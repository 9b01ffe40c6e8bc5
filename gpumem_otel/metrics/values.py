"""The values of the METRICS table, read from an Observation: no I/O, no clock, no state.

A `Values` returns (attributes, value) pairs, each with `rank` and `device`. What belongs to the
process as a whole (steps, our own counters, pinned host memory) carries its home device, so that
every series joins the others on (rank, device) and a sum over devices counts it once. These rows
exist from the first moment of an armed process, whatever can be read.

A value that is not known has no row; before the first read-out that holds for all that only the
totals of a read-out contain. An event that would be noticed and did not happen is known: it is 0
from the first moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from gpumem_otel.snapshot.tensor_classes import TensorClass
from gpumem_otel.yielding.values import Phase, YieldState

if TYPE_CHECKING:
    from gpumem_otel.base.profile import DeviceStats, DeviceTotals
    from gpumem_otel.metrics.observation import Observation
    from gpumem_otel.yielding.values import YieldStatus

Attributes: TypeAlias = dict[str, str]
Row: TypeAlias = tuple[Attributes, float]
Values: TypeAlias = Callable[["Observation"], Iterable[Row]]

OTHER = "other"
"""Attribute value for everything beyond a fixed list, so that the number of series is bounded."""

CACHED_CAUSES = ("waiting_for_stream", "split_remainders", "private_pools", "free_segments")
COMMON_CLASSES = tuple(
    tensor_class.value
    for tensor_class in (
        TensorClass.PARAMETER,
        TensorClass.GRADIENT,
        TensorClass.OPTIMIZER_STATE,
        TensorClass.ACTIVATION,
        TensorClass.KV_CACHE,
        TensorClass.UNATTRIBUTED,
    )
)
"""Separate at level standard: a fixed list, so that no series comes and goes with its size."""
DEFAULT_POOL = (0, 0)
PRIVATE_POOLS_SHOWN = 2
"""Named besides the default pool; the rest is `other`."""
OVERDUE = "overdue"
"""State of a process that is yielded though it should not be: a restore, or the end of a lease,
found the device taken."""

_NO_ALLOCATOR = frozenset({"allocator_backend", "no_caching"})
"""Reasons with which torch's caching allocator is not in use: its numbers would be false zeros."""


def _armed(observation: Observation) -> list[int]:
    return sorted({*observation.status.devices, *(s.device for s in observation.devices)})


def _at(observation: Observation, device: int) -> Attributes:
    return {"rank": str(observation.identity.rank), "device": str(device)}


def _home(observation: Observation) -> Attributes | None:
    """Attributes of the rows of the whole process, None where nothing is armed."""
    if not observation.status.armed:
        return None
    device = observation.home_device
    if device is None:
        device = next(iter(_armed(observation)), 0)
    return _at(observation, device)


def _allocators(observation: Observation) -> tuple[DeviceStats, ...]:
    return () if observation.status.reason in _NO_ALLOCATOR else observation.devices


# One row, or one row for each value of an attribute.


def of_device(read: Callable[[Observation, DeviceStats], float | None]) -> Values:
    """One row per device; none where `read` gives None."""

    def values(observation: Observation) -> Iterator[Row]:
        for stats in _allocators(observation):
            value = read(observation, stats)
            if value is not None:
                yield _at(observation, stats.device), value

    return values


def of_device_by(
    attribute: str,
) -> Callable[[Callable[[Observation, DeviceStats], Mapping[str, float]]], Values]:
    """Decorates a function that gives a device's values by an attribute."""

    def decorate(read: Callable[[Observation, DeviceStats], Mapping[str, float]]) -> Values:
        def values(observation: Observation) -> Iterator[Row]:
            for stats in _allocators(observation):
                for key, value in read(observation, stats).items():
                    yield {**_at(observation, stats.device), attribute: key}, value

        return values

    return decorate


def of_process(read: Callable[[Observation], float | None]) -> Values:
    """One row of the process as a whole; none where `read` gives None."""

    def values(observation: Observation) -> Iterator[Row]:
        home = _home(observation)
        value = None if home is None else read(observation)
        if home is not None and value is not None:
            yield home, value

    return values


def of_process_by(
    attribute: str,
) -> Callable[[Callable[[Observation], Mapping[str, float]]], Values]:
    """Decorates a function that gives the process's values by an attribute."""

    def decorate(read: Callable[[Observation], Mapping[str, float]]) -> Values:
        def values(observation: Observation) -> Iterator[Row]:
            home = _home(observation)
            if home is not None:
                for key, value in read(observation).items():
                    yield {**home, attribute: key}, value

        return values

    return decorate


# Memory.


def from_stats(read: Callable[[DeviceStats], float | None]) -> Values:
    """One row per device, from its counters; none where `read` gives None."""
    return of_device(lambda _, stats: read(stats))


def from_totals(read: Callable[[DeviceTotals], float]) -> Values:
    """One row per device, from the totals of its last read-out."""

    def value(observation: Observation, stats: DeviceStats) -> float | None:
        totals = observation.totals.get(stats.device)
        return None if totals is None else read(totals)

    return of_device(value)


def events(read: Callable[[DeviceStats], int]) -> Values:
    """One row per device, from a counter of events; the home device has one before its first use.

    Where the allocator cannot be read there is no row: a 0 would deny what cannot be seen, or
    look like a restart of the counter.
    """

    def values(observation: Observation) -> Iterator[Row]:
        allocators = _allocators(observation)
        for stats in allocators:
            yield _at(observation, stats.device), read(stats)
        home = _home(observation)
        used = {str(stats.device) for stats in allocators}
        if home is not None and observation.status.supported and home["device"] not in used:
            yield home, 0

    return values


@of_device_by("cause")
def cached(observation: Observation, stats: DeviceStats) -> Mapping[str, float]:
    """Bytes reserved but not allocated, by cause; they add up to reserved - allocated of `stats`.

    The totals may be of an older read-out, so their values are cut to what is left now, and whole
    free segments are the remainder. Without totals torch's own counter stands in for split
    remainders (0 under expandable segments).
    """
    totals = observation.totals.get(stats.device)
    left = max(stats.reserved_bytes - stats.allocated_bytes, 0)
    sizes = []
    for size in (
        stats.active_bytes - stats.allocated_bytes,
        stats.inactive_split_bytes if totals is None else totals.split_remainder_bytes,
        0 if totals is None else totals.private_pool_free_bytes,
    ):
        sizes.append(min(max(size, 0), left))
        left -= sizes[-1]
    return dict(zip(CACHED_CAUSES, (*sizes, left), strict=True))


def fragmentation_ratio(observation: Observation) -> Iterator[Row]:
    """Split remainders over reserved; 0 where nothing is reserved."""
    reserved = {str(stats.device): stats.reserved_bytes for stats in _allocators(observation)}
    for attributes, size in cached(observation):
        if attributes.pop("cause") == "split_remainders":
            yield attributes, size / max(reserved[attributes["device"]], 1)


@of_device_by("tensor_class")
def class_bytes(observation: Observation, stats: DeviceStats) -> Mapping[str, float]:
    """Allocated by tensor class, as of the last read-out; `unattributed` always has a row."""
    classes = observation.classes.get(stats.device)
    return {} if classes is None else {TensorClass.UNATTRIBUTED.value: 0, **classes}


@of_device_by("pool")
def pool_reserved(observation: Observation, stats: DeviceStats) -> Mapping[str, float]:
    """Reserved by pool, as of the last read-out; the parts add up to its reserved bytes."""
    totals = observation.totals.get(stats.device)
    if totals is None:
        return {}
    private = sorted(
        ((size, pool) for pool, size in totals.pool_reserved_bytes.items() if any(pool)),
        key=lambda entry: (-entry[0], entry[1]),
    )
    shown = {"default": totals.pool_reserved_bytes.get(DEFAULT_POOL, 0)}
    shown |= {f"private_{a}_{b}": size for size, (a, b) in private[:PRIVATE_POOLS_SHOWN]}
    rest = sum(size for size, _ in private[PRIVATE_POOLS_SHOWN:])
    return {**shown, OTHER: rest} if rest else shown


@of_device_by("cause")
def outside(_observation: Observation, stats: DeviceStats) -> Mapping[str, float]:
    """Used on the device but not reserved by this process's allocator, by cause.

    `context` is this process's context with its libraries (cuBLAS, NCCL), `other_process` what the
    others use; both only where the driver counts by process. The rest is `unknown`: the driver's
    own on each device (123 MiB of an H200), or everything where it does not count. The numbers are
    read one after the other; a difference below zero is shown as 0.
    """
    if stats.device_used_bytes is None:
        return {}
    left = max(stats.device_used_bytes - stats.reserved_bytes, 0)
    causes = {}
    if stats.process_used_bytes is not None:
        own = min(max(stats.process_used_bytes - stats.reserved_bytes, 0), left)
        left -= own
        others = left
        if stats.others_used_bytes is not None:
            others = min(stats.others_used_bytes, left)
        causes = {"context": own, "other_process": others}
        left -= others
    return {**causes, "unknown": left}


def host_pinned(observation: Observation) -> float | None:
    """Pinned host memory of this process, whichever device's counters have it."""
    sizes = (stats.host_pinned_bytes for stats in observation.devices)
    return max((size for size in sizes if size is not None), default=None)


def device_memory(read: Callable[[DeviceStats], int | None]) -> Values:
    """A number of the device as a whole, with `hw.id`, from one rank per GPU.

    The rank that reports a device is the one whose local rank is the device's index; a process
    that is alone in its job, or that uses one GPU only, reports all it has.

    Limits: ranks that share one GPU and use no other all report it. Take `max by (hw_id)`.
    """

    def values(observation: Observation) -> Iterator[Row]:
        identity = observation.identity
        alone = identity.world_size == 1 or len(identity.device_uuids) == 1
        for stats in observation.devices:
            uuid = identity.device_uuids.get(stats.device, "")
            value = read(stats)
            if uuid and value is not None and (alone or identity.local_rank == stats.device):
                yield {**_at(observation, stats.device), "hw.id": uuid}, value

    return values


# Identity and steps.


def target_info(observation: Observation) -> Iterator[Row]:
    """Constant 1 per device, with everything about identity that is no label of the other rows."""
    identity = observation.identity
    home = _home(observation)
    if home is None:
        return
    for device in sorted({int(home["device"]), *_armed(observation)}):
        attributes = {
            **_at(observation, device),
            "local_rank": str(identity.local_rank),
            "world_size": str(identity.world_size),
            "run_id": identity.run_id,
            "restart": str(identity.restart),
            "gpu_uuid": identity.device_uuids.get(device, ""),
            "node": identity.node,
        }
        yield attributes, 1


def seconds_of(time_ns: int) -> float | None:
    """Seconds since 1970, None for what has not happened: 0 would look like 1970."""
    return time_ns / 1_000_000_000 if time_ns > 0 else None


def step_floor(observation: Observation) -> Iterator[Row]:
    """Lowest allocated at recent step boundaries, by device."""
    armed = _armed(observation)
    for device, value in sorted(observation.steps.floor_bytes.items()):
        if device in armed:
            yield _at(observation, device), value


# Yield and restore.


def from_yields(read: Callable[[YieldStatus], float | None]) -> Values:
    """One row of the process; none where it cannot yield, or `read` gives None."""
    return of_process(lambda o: None if o.yields is None else read(o.yields))


@of_process_by("state")
def yield_state(observation: Observation) -> Mapping[str, float]:
    """1 for the present state, and no row for the others."""
    status = observation.yields
    if status is None:
        return {}
    overdue = status.state is YieldState.YIELDED and status.reason
    return {OVERDUE if overdue else status.state.value: 1}


@of_process_by("cause")
def yield_residual(observation: Observation) -> Mapping[str, float]:
    """What the last yield left on the devices, by cause; no rows while nothing is yielded."""
    status = observation.yields
    return {} if status is None else dict(sorted(status.residual_bytes.items()))


@of_process_by("phase")
def yield_phases(observation: Observation) -> Mapping[str, float]:
    """Seconds spent so far, each phase from 0."""
    status = observation.yields
    if status is None:
        return {}
    return {phase.value: status.phase_seconds.get(phase.value, 0.0) for phase in Phase}


# This tool itself.


@of_process_by("reason")
def supported(observation: Observation) -> Mapping[str, float]:
    """1 where profiles are available, else 0 with the reason."""
    status = observation.status
    return {status.reason or "none": int(status.supported)}


def counter(name: str) -> Values:
    """One of our own counters, summed over its attributes; 0 from the first moment."""
    return of_process(lambda o: sum(v for (n, _), v in o.counters.items() if n == name))


def counter_by(name: str, attribute: str, known: tuple[str, ...]) -> Values:
    """One of our own counters by an attribute: each known value from 0, the rest in `other`."""

    @of_process_by(attribute)
    def values(observation: Observation) -> Mapping[str, float]:
        counts = dict.fromkeys((*known, OTHER), 0.0)
        for (counted, attributes), value in observation.counters.items():
            if counted == name:
                key = dict(attributes).get(attribute, OTHER)
                counts[key if key in counts else OTHER] += value
        return counts

    return values


def gauge_by(name: str, attribute: str, known: tuple[str, ...]) -> Values:
    """One of our own gauges by an attribute: only the known values, once they were set."""

    @of_process_by(attribute)
    def values(observation: Observation) -> Mapping[str, float]:
        set_values = {key: observation.counters.get((name, ((attribute, key),))) for key in known}
        return {key: value for key, value in set_values.items() if value is not None}

    return values
