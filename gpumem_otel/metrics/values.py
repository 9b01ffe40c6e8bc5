"""How the METRICS table gets its values out of an Observation: no I/O, no clock, no state.

Each builder returns a function Observation -> (attributes, value) pairs. Every pair carries `rank`
and `device`. What belongs to the process as a whole (steps, our own counters, pinned host memory)
carries the home device: so every series joins the others on (rank, device), and a sum over devices
counts it once. These rows exist from the first moment of an armed process, whatever can be read.

Before the first read-out there are no books, and what only they know has no row; a value that is
not known has no row either. Nothing is made up. An event that can be seen and did not happen is
known: it is 0 from the first moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
"""Attribute value that takes in everything beyond a fixed list: series stay bounded."""

CACHED_CAUSES = ("waiting_for_stream", "split_remainders", "private_pools", "free_segments")
COMMON_CLASSES = tuple(
    found.value
    for found in (
        TensorClass.PARAMETER,
        TensorClass.GRADIENT,
        TensorClass.OPTIMIZER_STATE,
        TensorClass.ACTIVATION,
        TensorClass.KV_CACHE,
        TensorClass.UNATTRIBUTED,
    )
)
"""Told apart at level standard: a fixed list, so that no series comes and goes with its size."""
DEFAULT_POOL = (0, 0)
PRIVATE_POOLS_SHOWN = 2
"""With the default pool that makes three by name; the rest is `other`."""

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


# memory --------------------------------------------------------------------------------------


def from_stats(read: Callable[[DeviceStats], float | None]) -> Values:
    """One row per device, from its counters; none where `read` says None."""

    def values(observation: Observation) -> Iterator[Row]:
        for stats in _allocators(observation):
            value = read(stats)
            if value is not None:
                yield _at(observation, stats.device), value

    return values


def events(read: Callable[[DeviceStats], int]) -> Values:
    """One row per device, from a counter of events; the home device has one before its first use.

    Where the allocator can not be read there is no row: a 0 would deny what nobody can see, or
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


def from_books(read: Callable[[DeviceTotals], float]) -> Values:
    """One row per device, from its last read-out."""

    def values(observation: Observation) -> Iterator[Row]:
        for stats in _allocators(observation):
            books = observation.books.get(stats.device)
            if books is not None:
                yield _at(observation, stats.device), read(books)

    return values


def _split_cached(stats: DeviceStats, books: DeviceTotals | None) -> tuple[int, int, int, int]:
    """Bytes reserved but not allocated, in the order of CACHED_CAUSES.

    They always add up to reserved - allocated of `stats`. The books may be a read-out older, so
    what they say is cut to what is left now, and whole free segments are the remainder. Without
    books torch's own counter stands in for split remainders (0 under expandable segments).
    """
    left = max(stats.reserved_bytes - stats.allocated_bytes, 0)
    parts = []
    for wanted in (
        stats.active_bytes - stats.allocated_bytes,
        stats.inactive_split_bytes if books is None else books.split_remainder_bytes,
        0 if books is None else books.private_pool_free_bytes,
    ):
        part = min(max(wanted, 0), left)
        parts.append(part)
        left -= part
    return parts[0], parts[1], parts[2], left


def cached(observation: Observation) -> Iterator[Row]:
    """Reserved but not allocated, by cause."""
    for stats in _allocators(observation):
        parts = _split_cached(stats, observation.books.get(stats.device))
        for cause, value in zip(CACHED_CAUSES, parts, strict=True):
            yield {**_at(observation, stats.device), "cause": cause}, value


def class_bytes(observation: Observation) -> Iterator[Row]:
    """Allocated by tensor class, as of the last read-out; `unattributed` always has a row."""
    for stats in _allocators(observation):
        classes = observation.classes.get(stats.device)
        if classes is None:
            continue
        for tensor_class, size in {TensorClass.UNATTRIBUTED.value: 0, **classes}.items():
            yield {**_at(observation, stats.device), "tensor_class": tensor_class}, size


def fragmentation_ratio(observation: Observation) -> Iterator[Row]:
    """Split remainders over reserved; 0 where nothing is reserved."""
    for stats in _allocators(observation):
        remainders = _split_cached(stats, observation.books.get(stats.device))[1]
        yield _at(observation, stats.device), remainders / max(stats.reserved_bytes, 1)


def pool_reserved(observation: Observation) -> Iterator[Row]:
    """Reserved by pool, as of the last read-out; the parts add up to its reserved bytes."""
    for stats in _allocators(observation):
        books = observation.books.get(stats.device)
        if books is None:
            continue
        private = sorted(
            ((size, pool) for pool, size in books.pool_reserved_bytes.items() if any(pool)),
            key=lambda entry: (-entry[0], entry[1]),
        )
        shown = {"default": books.pool_reserved_bytes.get(DEFAULT_POOL, 0)}
        shown |= {f"private_{a}_{b}": size for size, (a, b) in private[:PRIVATE_POOLS_SHOWN]}
        rest = sum(size for size, _ in private[PRIVATE_POOLS_SHOWN:])
        if rest:
            shown[OTHER] = rest
        for pool, size in shown.items():
            yield {**_at(observation, stats.device), "pool": pool}, size


def outside(observation: Observation) -> Iterator[Row]:
    """Used on the device but not reserved by this process's allocator, by cause.

    `context` is this process's context with its libraries (cuBLAS, NCCL), `other_process` what the
    others use; both only where the driver's count by process is known. All else is `unknown`: the
    driver's own on each device (123 MiB of an H200), or everything where it does not count. The
    numbers are read one after the other; a difference below zero is shown as 0.
    """
    for stats in _allocators(observation):
        if stats.device_used_bytes is None:
            continue
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
        for cause, value in {**causes, "unknown": left}.items():
            yield {**_at(observation, stats.device), "cause": cause}, value


def host_pinned(observation: Observation) -> Iterator[Row]:
    """Pinned host memory of this process, whichever device's counters know it."""
    home = _home(observation)
    known = [s.host_pinned_bytes for s in observation.devices if s.host_pinned_bytes is not None]
    if home is not None and known:
        yield home, max(known)


def device_memory(read: Callable[[DeviceStats], int | None]) -> Values:
    """A number of the device as a whole, with `hw.id`, from one rank per GPU.

    The rank that speaks for a device is the one whose local rank is the device's index; a process
    that is alone in its job, or that uses one GPU only, speaks for all it has.

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


# identity, steps -----------------------------------------------------------------------------


def target_info(observation: Observation) -> Iterator[Row]:
    """Constant 1 per device; everything about identity that is no label of the other rows."""
    identity = observation.identity
    home = _home(observation)
    if home is None:
        return
    for device in sorted({int(home["device"]), *_armed(observation)}):
        yield (
            {
                **_at(observation, device),
                "local_rank": str(identity.local_rank),
                "world_size": str(identity.world_size),
                "run_id": identity.run_id,
                "restart": str(identity.restart),
                "gpu_uuid": identity.device_uuids.get(device, ""),
                "node": identity.node,
            },
            1,
        )


def steps(observation: Observation) -> Iterator[Row]:
    """Steps seen so far."""
    home = _home(observation)
    if home is not None:
        yield home, observation.steps.steps


def last_step_seconds(observation: Observation) -> Iterator[Row]:
    """Time of the last step; no row before the first, since 0 would look like 1970."""
    home = _home(observation)
    if home is not None and observation.steps.last_step_time_ns > 0:
        yield home, observation.steps.last_step_time_ns / 1_000_000_000


def values_seconds(observation: Observation) -> Iterator[Row]:
    """When the allocator's values were taken."""
    home = _home(observation)
    if home is not None:
        yield home, observation.time_ns / 1_000_000_000


def step_floor(observation: Observation) -> Iterator[Row]:
    """Lowest allocated at recent step boundaries, by device."""
    armed = _armed(observation)
    for device, value in sorted(observation.steps.floor_bytes.items()):
        if device in armed:
            yield _at(observation, device), value


# yield and restore -----------------------------------------------------------------------------

OVERDUE = "overdue"
"""State of a process that is yielded though it should not be: a restore, or the end of a lease,
found the device taken."""


def _yields(observation: Observation) -> tuple[Attributes, YieldStatus] | None:
    home = _home(observation)
    return None if home is None or observation.yields is None else (home, observation.yields)


def yield_state(observation: Observation) -> Iterator[Row]:
    """1 for the state that is, and no row for the others."""
    found = _yields(observation)
    if found is not None:
        home, status = found
        overdue = status.state is YieldState.YIELDED and status.reason
        yield {**home, "state": OVERDUE if overdue else status.state.value}, 1


def yield_moved(observation: Observation) -> Iterator[Row]:
    """Bytes that are away from the device now."""
    found = _yields(observation)
    if found is not None:
        yield found[0], found[1].moved_bytes


def yield_residual(observation: Observation) -> Iterator[Row]:
    """What the last yield left on the devices, by cause; no rows while nothing is yielded."""
    found = _yields(observation)
    if found is not None:
        for cause, value in sorted(found[1].residual_bytes.items()):
            yield {**found[0], "cause": cause}, value


def yield_phases(observation: Observation) -> Iterator[Row]:
    """Seconds spent so far, each phase from 0."""
    found = _yields(observation)
    if found is not None:
        for phase in Phase:
            seconds = found[1].phase_seconds.get(phase.value, 0.0)
            yield {**found[0], "phase": phase.value}, seconds


def yield_lease_seconds(observation: Observation) -> Iterator[Row]:
    """When the lease ends; no row where there is none."""
    found = _yields(observation)
    if found is not None and found[1].lease_expiry_ns > 0:
        yield found[0], found[1].lease_expiry_ns / 1_000_000_000


# about ourselves -----------------------------------------------------------------------------


def supported(observation: Observation) -> Iterator[Row]:
    """1 where profiles can be had, else 0 with the reason."""
    home = _home(observation)
    if home is not None:
        status = observation.status
        yield {**home, "reason": status.reason or "none"}, int(status.supported)


def counter(name: str) -> Values:
    """One of our own counters, summed over its attributes; 0 from the first moment."""

    def values(observation: Observation) -> Iterator[Row]:
        home = _home(observation)
        if home is not None:
            yield home, sum(v for (n, _), v in observation.counters.items() if n == name)

    return values


def counter_by(name: str, attribute: str, known: tuple[str, ...]) -> Values:
    """One of our own counters by an attribute: each known value from 0, the rest in `other`."""

    def values(observation: Observation) -> Iterator[Row]:
        home = _home(observation)
        if home is None:
            return
        sums = dict.fromkeys((*known, OTHER), 0.0)
        for (counted, attributes), value in observation.counters.items():
            if counted == name:
                key = dict(attributes).get(attribute, OTHER)
                sums[key if key in sums else OTHER] += value
        for key, value in sums.items():
            yield {**home, attribute: key}, value

    return values


def gauge_by(name: str, attribute: str, known: tuple[str, ...]) -> Values:
    """One of our own gauges by an attribute: only the known values, once they were set."""

    def values(observation: Observation) -> Iterator[Row]:
        home = _home(observation)
        if home is None:
            return
        for key in known:
            value = observation.counters.get((name, ((attribute, key),)))
            if value is not None:
                yield {**home, attribute: key}, value

    return values
