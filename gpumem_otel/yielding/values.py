"""Requests and reports of yields and restores: plain values.

A job gives its GPU memory back in phases, which a coordinator of many ranks can run one by one:

    prepare     stop at a safe point, scan, call `before_yield`, reserve host memory
    release     copy to the host, then free on the device
    checkpoint  the driver takes the rest, the context included
    restore     the driver gives it back
    reload      allocate on the device again, copy back
    verify      compare checksums, where asked
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpumem_otel.base.text import by_size, human_bytes
from gpumem_otel.snapshot.tensor_classes import TensorClass
from gpumem_otel.yielding.request_fields import (
    DeviceNumbers,
    Flag,
    Folder,
    Names,
    OneOf,
    Repeat,
    Seconds,
    described,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def report_lines(report: YieldReport) -> list[str]:
    """A report for people: what moved, what is left and why, how long each phase took."""
    lines = [f"state {report.state.value}, level {report.level.value}"]
    lines += _total("moved", report.moved_bytes)
    lines += _total("discarded", report.discarded_bytes)
    lines += _total("left on the devices", report.residual_bytes)
    lines += [_phase_line(phase) for phase in report.phases]
    if report.host_bytes or report.disk_bytes:
        disk = f", {human_bytes(report.disk_bytes)} on disk" if report.disk_bytes else ""
        dry = report.state.value == "running" and not report.operation
        verb = "needed" if dry else "held"
        lines.append(f"{verb} in host memory: {human_bytes(report.host_bytes)}{disk}")
    if report.expected_seconds is not None:
        lines.append(f"the copy will take about {report.expected_seconds:.1f} s")
    if report.checksums:
        lines.append(f"checksums: {report.checksums}")
    lines += [f"danger: {line}" for line in report.dangers]
    lines += [f"note: {line}" for line in report.notes]
    return lines


def _total(label: str, sizes: Mapping[str, int]) -> list[str]:
    if not sizes:
        return []
    return [f"{label}: {human_bytes(sum(sizes.values()))} ({by_size(sizes)})"]


def _phase_line(took: PhaseTime) -> str:
    speed = ""
    if took.bytes_per_second:
        per_second = human_bytes(round(took.bytes_per_second))
        speed = f", {human_bytes(took.size_bytes)} at {per_second}/s"
    return f"{took.phase.value}: {took.seconds:.3f} s{speed}"


DISCARDABLE = ("optimizer_state", "parameter", "buffer", "kv_cache")
"""Tensor classes whose contents a request may throw away. Except for the optimizer's state, the job
must overwrite them before it uses them."""

_CLASSES = tuple(member.value for member in TensorClass)

_DAY = 86_400.0

RESIDUAL_CAUSES = (
    "context",
    "communicator",
    "graphs",
    "foreign",
    "kept",
    "other_process",
    "unknown",
)
"""Why bytes stay on the device after a yield."""


class YieldState(str, Enum):
    """The state of a process; FAILED only where something is lost."""

    RUNNING = "running"
    YIELDING = "yielding"
    YIELDED = "yielded"
    RESTORING = "restoring"
    FAILED = "failed"


class YieldLevel(str, Enum):
    """How much memory is given back."""

    TENSORS = "tensors"
    """Storages that Python can reach; the context stays."""
    PROCESS = "process"
    """Everything, by the driver alone; needs no safe point."""
    AUTO = "auto"
    """Tensors first, then the driver takes the rest, where each of them can."""


class Phase(str, Enum):
    """A phase, see the module."""

    PREPARE = "prepare"
    RELEASE = "release"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    RELOAD = "reload"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldRequest:
    """What a yield is asked for."""

    level: YieldLevel = field(
        default=YieldLevel.AUTO,
        metadata=described(
            OneOf(YieldLevel),
            "tensors (the context stays), process (all, by the driver), or auto (both, if it can).",
            help="tensors: the context stays; process: all, by the driver; auto (default): both.",
            repeat=Repeat.NEVER,
        ),
    )
    devices: tuple[int, ...] | None = field(
        default=None,
        metadata=described(
            DeviceNumbers(range(1024)),
            "Devices of the process, by torch's number; null for all.",
            option="--device",
            help="Only this.",
            repeat=Repeat.NEVER,
        ),
    )
    classes: tuple[str, ...] | None = field(
        default=None,
        metadata=described(
            Names(_CLASSES, least=1),
            "Tensor classes that go; null for all.",
            option="--class",
            help="Only this tensor class.",
            repeat=Repeat.NEVER,
        ),
    )
    keep: tuple[str, ...] = field(
        default=(),
        metadata=described(
            Names(_CLASSES),
            "Tensor classes that stay on the device.",
            help="Tensor class that stays.",
            repeat=Repeat.NEVER,
        ),
    )
    discard: tuple[str, ...] = field(
        default=(),
        metadata=described(
            Names(DISCARDABLE),
            "Tensor classes whose contents are thrown away: zeros after the restore.",
            help="Tensor class that is thrown away: zeros after the restore.",
            repeat=Repeat.NEVER,
        ),
    )
    lease_seconds: float | None = field(
        default=None,
        metadata=described(
            Seconds(0.1, 31 * _DAY, "no lease"),
            "Restore by itself after so long; null for never.",
            option="--lease",
            help="Restore by itself after so long.",
            repeat=Repeat.LEFT_OUT,
        ),
    )
    deadline_seconds: float | None = field(
        default=None,
        metadata=described(
            Seconds(0.1, _DAY, "no deadline"),
            "Rolled back where it takes longer, the wait for a safe point included.",
            option="--deadline",
            help="Undo it where it takes longer.",
        ),
    )
    wait_seconds: float = field(
        default=60.0,
        metadata=described(Seconds(0.0, _DAY, "60"), "How long to wait for a safe point."),
    )
    dry_run: bool = field(
        default=False,
        metadata=described(Flag(), "Only say what would happen.", repeat=Repeat.NEVER),
    )
    verify: bool = field(
        default=False,
        metadata=described(
            Flag(),
            "Compare checksums made on the device before and after.",
            help="Compare checksums before and after.",
            repeat=Repeat.LEFT_OUT,
        ),
    )
    assume_private: bool = field(
        default=False,
        metadata=described(
            Flag(),
            "Move also what may be shared with another process or library.",
            help="Move also what others may share.",
            repeat=Repeat.LEFT_OUT,
        ),
    )
    release_host: bool = field(
        default=False,
        metadata=described(
            Flag(),
            "Give the pinned host memory back after the restore.",
            help="Give host memory back after the restore.",
            repeat=Repeat.LEFT_OUT,
        ),
    )
    disk_dir: str = field(
        default="",
        metadata=described(
            Folder(json_pattern="^(/[ -~]*)?$", json_most=4096),
            'Folder, one that the job allows, for what host memory cannot hold; "" for none.',
            help="Folder for what host memory cannot hold; the job must allow it.",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What a restore is asked for; with classes the process stays YIELDED until all are back."""

    classes: tuple[str, ...] | None = field(
        default=None,
        metadata=described(
            Names(_CLASSES, least=1),
            "Tensor classes to bring back now; null for all.",
            option="--class",
            help="Only this tensor class.",
            repeat=Repeat.NEVER,
        ),
    )
    wait_seconds: float = field(
        default=60.0,
        metadata=described(
            Seconds(0.0, _DAY, "60"),
            "How long to wait for device memory; then it stays yielded and says what is missing.",
            help="How long to wait for device memory.",
        ),
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One storage that can be moved.

    Attributes:
        storage: the `torch.UntypedStorage`.
        block_bytes: of the allocator's block.
        stream: raw handle of the block's stream; 0 is the default stream.
        frames: the allocation's stack as torch recorded it, leaf first; () where unknown.
        root: named root of memory without frames, "" where unknown.
    """

    storage: Any
    device: int
    address: int
    size_bytes: int
    block_bytes: int
    stream: int
    tensor_class: str
    frames: Sequence[Any] = field(default=(), repr=False, compare=False)
    root: str = field(default="", repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Unmovable:
    """Bytes of a device that cannot be moved.

    Attributes:
        cause: one of `RESIDUAL_CAUSES`.
        why: one clause for people.
    """

    device: int
    cause: str
    size_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class ScanResult:
    """What a scan found on the devices of this process at a safe point.

    Attributes:
        refusal: why no storage of a device may be moved (a captured graph uses it), by device.
    """

    movables: tuple[Candidate, ...]
    stays: tuple[Unmovable, ...] = ()
    refusal: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """How long a phase took and what it moved.

    Attributes:
        moving_seconds: how long the copy took where it began in the phase before; None otherwise.
    """

    phase: Phase
    seconds: float
    size_bytes: int = 0
    moving_seconds: float | None = None

    @property
    def bytes_per_second(self) -> float:
        """Bytes moved per second; 0.0 where nothing was moved or no time passed."""
        seconds = self.seconds if self.moving_seconds is None else self.moving_seconds
        return self.size_bytes / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldReport:
    """What a yield or a restore did, or what a dry run would do.

    Attributes:
        operation: id of the operation, "" for a dry run.
        state: the state that remains.
        level: the one that was used, where `auto` was asked for.
        phases: in order.
        moved_bytes: to the host or back, by tensor class.
        discarded_bytes: by tensor class.
        residual_bytes: left on the devices by cause, other processes included.
        host_bytes: host memory held for yields of this process, pinned and pageable, and memory
            kept pinned for the next one.
        disk_bytes: held on disk.
        expected_seconds: of a dry run, from the measured speed of the link.
        checksums: "equal" where asked for and compared, else "".
        dangers: what may end a stopped job, one line each.
        notes: anything else that a person should know, one line each.
    """

    operation: str = ""
    state: YieldState = YieldState.RUNNING
    level: YieldLevel = YieldLevel.AUTO
    phases: tuple[PhaseTime, ...] = ()
    moved_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    discarded_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    residual_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    host_bytes: int = 0
    disk_bytes: int = 0
    expected_seconds: float | None = None
    checksums: str = ""
    dangers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(report_lines(self))


class OperationState(str, Enum):
    """The progress or result of an operation."""

    RUNNING = "running"
    DONE = "done"
    REFUSED = "refused"
    """Nothing was moved."""
    FAILED = "failed"
    """Rolled back, or lost: `YieldStatus.state` says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One yield or restore.

    Attributes:
        kind: `yield` or `restore`.
        who: the sender of the command, for the audit log.
        phase: the current phase, None where it waits or has ended.
        done_bytes: of the phase's `total_bytes`.
        error: one line, "" where there is none.
        already: in the answer to a command: the state was there already, so that nothing was begun;
            the other fields are of the operation that led to it.
    """

    id: str
    kind: str
    state: OperationState
    who: str = ""
    phase: Phase | None = None
    done_bytes: int = 0
    total_bytes: int = 0
    error: str = ""
    report: YieldReport | None = None
    already: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldStatus:
    """The status, available at any moment without torch or CUDA.

    Attributes:
        version: rises with every change.
        since_ns: when the state began, nanoseconds since 1970.
        lease_expiry_ns: when the lease ends, nanoseconds since 1970; 0 without a lease.
        moved_bytes: now in host memory or on disk.
        residual_bytes: left on the devices by the last yield, by cause.
        phase_seconds: spent so far by phase, over the life of the process.
        operation: the running one, else the last one.
        reason: why the state is FAILED, or why a lease could not restore; else "".
    """

    version: int = 0
    state: YieldState = YieldState.RUNNING
    since_ns: int = 0
    lease_expiry_ns: int = 0
    moved_bytes: int = 0
    residual_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    phase_seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    operation: Operation | None = None
    reason: str = ""
