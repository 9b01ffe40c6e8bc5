"""The values that travel between the parts.

Units stand in the names. A stack is leaf first: element 0 is where the allocation happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack, already named for people.

    Attributes:
        name: unique and stable name (flame graphs merge on the name alone).
        filename: source file, "" where unknown.
        line: line number, 0 where unknown; always fits a signed 64-bit integer.
    """

    name: str
    filename: str = ""
    line: int = 0


Stack = tuple[Frame, ...]
"""Leaf first."""


class BlockState(str, Enum):
    """State of an allocator block, in the allocator's own words."""

    ACTIVE_ALLOCATED = "active_allocated"
    ACTIVE_PENDING_FREE = "active_pending_free"
    """Freed by the program, waiting for another stream to pass."""
    INACTIVE = "inactive"


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment.

    Attributes:
        address: start, None in files of torch 2.0 and older where blocks carry none.
        size_bytes: what the allocator holds for it, rounding included.
        requested_bytes: what was asked for; stale (to be ignored) where the block is inactive.
        frames: the recorded stack, leaf first, () where none was recorded.
    """

    address: int | None
    size_bytes: int
    requested_bytes: int
    state: BlockState
    frames: Stack = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """A range reserved from the device.

    Attributes:
        pool_id: (0, 0) is the default pool, anything else a private pool (CUDA graphs, MemPool).
    """

    device: int
    address: int
    size_bytes: int
    stream: int
    kind: str
    pool_id: tuple[int, int]
    is_expandable: bool
    blocks: tuple[Block, ...]
    frames: Stack = ()


@dataclass(frozen=True, slots=True)
class AllocEvent:
    """One entry of a recorded trace.

    Attributes:
        action: alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map,
            segment_unmap, oom, snapshot, annotate, or a word that is newer than this code.
        size_bytes: requested size (not the rounded size of the block), 0 where absent.
        time_us: microseconds since 1970, None before torch 2.2.
        device_free_bytes: what the device had free, only on `oom`.
    """

    action: str
    address: int | None
    size_bytes: int
    stream: int
    time_us: int | None = None
    frames: Stack = ()
    device_free_bytes: int | None = None
    compile_context: str | None = None
    user_metadata: str | None = None
    pool_id: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Annotation:
    """A START or END mark that torch or the user added to the trace."""

    name: str
    stage: str
    device: int
    time_us: int


class ProfileKind(str, Enum):
    """What a profile counts. The value is what `?kind=` and `--kind` take."""

    LIVE = "live"
    ALLOCATED = "allocated"
    PEAK = "peak"
    PINNED = "pinned"
    GROWTH = "growth"


class Sizes(str, Enum):
    """What the bytes of a profile are; bytes of the two kinds do not add up."""

    ALLOCATED = "allocated"
    """Of the allocator's blocks, its rounding included."""
    REQUESTED = "requested"
    """As asked for: that is what a trace holds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One distinct stack and what it holds.

    Attributes:
        frames: leaf first, never empty: memory without a stack has a named root.
        labels: string sample labels, sorted by key.
    """

    frames: Stack
    objects: int
    size_bytes: int
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class HeapProfile:
    """Bytes by stack on one device.

    Attributes:
        time_ns: moment of the reading, nanoseconds since 1970.
        duration_ns: 0 for a state, the interval for a delta.
        comments: sentences about the profile as a whole, written into the pprof's comments.
        sizes: what its bytes are.
    """

    kind: ProfileKind
    device: int
    samples: tuple[Sample, ...]
    time_ns: int = 0
    duration_ns: int = 0
    comments: tuple[str, ...] = ()
    sizes: Sizes = Sizes.ALLOCATED

    @property
    def total_bytes(self) -> int:
        """Sum over all samples; for a live profile the allocator's `allocated`."""
        return sum(sample.size_bytes for sample in self.samples)

    @property
    def total_objects(self) -> int:
        """Number of allocations over all samples."""
        return sum(sample.objects for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStats:
    """Counters of one device's allocator at one moment (torch's `memory_stats`, with raw names).

    Attributes:
        allocations: `allocation.all.allocated`, how many allocations were made ever.
        frees: `allocation.all.freed`.
        allocation_bytes: `allocated_bytes.all.allocated`, bytes allocated ever, rounded.
        requested_allocation_bytes: `requested_bytes.all.allocated`, the same, as asked for.
        requested_peak_bytes: `requested_bytes.all.peak`, in the unit of a trace.
        inactive_split_bytes: free remainders of split blocks; 0 under expandable segments.
        limit_bytes: the smaller of the device and the job's memory fraction, None if unknown.
        device_used_bytes: used on the device by everybody, None if unknown.
        process_used_bytes: of that by this process, by the driver's count, None if unknown.
        others_used_bytes: used by other processes; the rest is the driver's own.
        host_pinned_bytes: pinned host memory of this process, None where torch does not tell.
    """

    device: int
    allocated_bytes: int
    requested_bytes: int
    active_bytes: int
    reserved_bytes: int
    allocated_peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    inactive_split_bytes: int = 0
    allocations: int = 0
    frees: int = 0
    allocation_bytes: int = 0
    requested_allocation_bytes: int = 0
    requested_peak_bytes: int = 0
    segments: int = 0
    ooms: int = 0
    alloc_retries: int = 0
    limit_bytes: int | None = None
    device_total_bytes: int | None = None
    device_used_bytes: int | None = None
    process_used_bytes: int | None = None
    others_used_bytes: int | None = None
    host_pinned_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTotals:
    """What a snapshot says about one device, summed over its segments and blocks.

    The identities: reserved = active + free; active = allocated + pending free;
    free = whole free segments + split remainders, private pools counted apart in each.

    Attributes:
        free_segment_bytes: segments of the default pool without any active block.
        split_remainder_bytes: inactive blocks of the default pool next to active ones.
        pending_free_bytes: freed, waiting for another stream.
        private_pool_free_bytes: inactive blocks of private pools.
        pool_reserved_bytes: reserved per pool; (0, 0) is the default pool.
        bytes_without_stack: allocated bytes whose blocks carry no stack.
        history: whether any block or event carries a stack or the trace holds events.
    """

    device: int
    reserved_bytes: int
    allocated_bytes: int
    active_bytes: int
    requested_bytes: int
    segments: int
    blocks: int
    free_segment_bytes: int
    split_remainder_bytes: int
    pending_free_bytes: int
    private_pool_free_bytes: int
    bytes_without_stack: int
    history: bool
    pool_reserved_bytes: Mapping[tuple[int, int], int] = field(
        default_factory=lambda: MappingProxyType({})
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Optimizer steps (or calls of `step()`) seen so far.

    Attributes:
        last_step_time_ns: nanoseconds since 1970, 0 before the first step.
        floor_bytes: the lowest allocated at the last 16 step boundaries that were read, by device.
    """

    steps: int = 0
    last_step_time_ns: int = 0
    floor_bytes: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is in its job. Strings are "" where unknown.

    Attributes:
        rank: global rank, 0 for a job of one process.
        device_uuids: torch device index -> uuid as DCGM writes it (`GPU-...`, `MIG-...`).
    """

    service_name: str
    namespace: str = ""
    run_id: str = ""
    restart: int = 0
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    node: str = ""
    pid: int = 0
    tags: tuple[tuple[str, str], ...] = ()
    device_uuids: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """Whether a source can be read.

    Attributes:
        armed: there is something to read: CUDA is initialised in this process (or a recording
            is loaded). Before that nothing of ours opens a socket or pushes.
        supported: profiles can be had; False where the allocator cannot be recorded.
        reason: slug that says why not ("" where supported): `no_torch`, `no_cuda`,
            `not_initialised`, `allocator_backend`, `no_caching`, `job_records_history`,
            `disabled`, `forked`, `error`.
        devices: devices of this process that have a context, sorted.
    """

    armed: bool
    supported: bool
    reason: str = ""
    devices: tuple[int, ...] = ()
