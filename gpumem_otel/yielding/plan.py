"""What a yield will do, decided before it begins, and what it leaves on the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.validation import chooses, yield_fault
from gpumem_otel.yielding.values import RESIDUAL_CAUSES, ScanResult, YieldLevel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpumem_otel.base.profile import DeviceStats
    from gpumem_otel.yielding.values import Candidate, YieldRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What goes, and how.

    Attributes:
        movables: storages that are copied or discarded; () where the driver takes everything.
        kept: storages that could go and were not asked for.
        driver: the driver takes what is left.
    """

    request: YieldRequest
    level: YieldLevel
    movables: tuple[Candidate, ...] = ()
    kept: tuple[Candidate, ...] = ()
    driver: bool = False
    scan: ScanResult | None = None
    notes: tuple[str, ...] = ()

    @property
    def moved_bytes(self) -> dict[str, int]:
        """By class, without what is discarded."""
        return bytes_by_class(
            storage for storage in self.movables if storage.tensor_class not in self.request.discard
        )

    @property
    def discarded_bytes(self) -> dict[str, int]:
        """By class."""
        return bytes_by_class(
            storage for storage in self.movables if storage.tensor_class in self.request.discard
        )


def bytes_by_class(movables: Iterable[Candidate]) -> dict[str, int]:
    """Total size of storages by tensor class."""
    totals: dict[str, int] = {}
    for storage in movables:
        totals[storage.tensor_class] = totals.get(storage.tensor_class, 0) + storage.size_bytes
    return totals


def check_request(request: YieldRequest) -> None:
    """Check what needs no look at the device.

    Raises:
        YieldRefusedError: the request contradicts itself, or a field has no such value.
    """
    fault = yield_fault(request)
    if fault:
        raise YieldRefusedError(f"yield: {fault}")


def probable_part(probable: Iterable[Candidate], request: YieldRequest) -> list[Candidate]:
    """The part of the probable candidates that would be copied."""
    return [
        storage
        for storage in _goes(probable, request)
        if storage.tensor_class not in request.discard
    ]


def make_plan(request: YieldRequest, scan: ScanResult, driver_refusal: str | None) -> Plan:
    """Decide what goes.

    Args:
        request: a checked one.
        scan: its result.
        driver_refusal: why the driver would not restore the process, "" where it would, None where
            it was not asked.

    Raises:
        YieldRefusedError: what was asked for is not possible here.
    """
    devices = None if request.devices is None else set(request.devices)
    goes = _goes(scan.movables, request)
    chosen = {id(storage) for storage in goes}
    kept = [storage for storage in scan.movables if id(storage) not in chosen]
    refusals = {
        device: why for device, why in scan.refusal.items() if devices is None or device in devices
    }
    auto = request.level is YieldLevel.AUTO
    driver = auto and driver_refusal == "" and not chooses(request, but_discard=True)
    has_some = {storage.device for storage in scan.movables} | {stay.device for stay in scan.stays}
    has_some |= set(scan.refusal)
    notes = [
        f"device {device}: nothing of this process is there"
        for device in sorted((devices or set()) - has_some)
    ]
    if refusals:
        device, why = min(refusals.items())
        if not driver:
            raise YieldRefusedError(
                f"yield: device {device}: {why}{_and_driver(request, driver_refusal)}"
            )
        if request.discard:
            raise YieldRefusedError(
                f"yield: device {device}: {why}, so the driver takes it whole and throws nothing "
                "away; leave discard out"
            )
        notes.append(f"device {device}: {why}: the driver alone takes it")
        goes, kept = [], []
    elif not driver and not goes and chooses(request):
        why = f" ({'; '.join(notes)})" if notes else ""
        raise YieldRefusedError(
            f"yield: nothing of what was chosen is there{why}: the job would only wait; a "
            "dry run without a choice lists what exists"
        )
    elif auto and driver_refusal:
        notes.append(f"tensors alone, the context stays: {driver_refusal}")
    return Plan(
        request=request,
        level=_level(driver, alone=bool(refusals)),
        movables=tuple(goes),
        kept=tuple(kept),
        driver=driver,
        scan=scan,
        notes=tuple(notes),
    )


def _level(driver: bool, *, alone: bool) -> YieldLevel:
    """The level that is used: `auto` is tensors and driver together."""
    if not driver:
        return YieldLevel.TENSORS
    return YieldLevel.PROCESS if alone else YieldLevel.AUTO


def _goes(movables: Iterable[Candidate], request: YieldRequest) -> list[Candidate]:
    """The storages that are asked for, copied or discarded."""
    devices = request.devices
    here = (storage for storage in movables if devices is None or storage.device in devices)
    return [storage for storage in here if _is_chosen(storage, request)]


def _is_chosen(storage: Candidate, request: YieldRequest) -> bool:
    if storage.tensor_class in request.keep:
        return False
    named = request.classes is None or storage.tensor_class in request.classes
    return named or storage.tensor_class in request.discard


def _and_driver(request: YieldRequest, refusal: str | None) -> str:
    if request.level is not YieldLevel.AUTO:
        return "; with level 'auto' the driver can take it, where all of the process may go"
    if refusal:
        return f"; and the driver cannot take it: {refusal}"
    return "; and the driver takes all of a process only: leave devices, classes and keep out"


def residual_of(plan: Plan, stats: Sequence[DeviceStats]) -> dict[str, int]:
    """Bytes left on the chosen devices after a release, by cause; they add up to what is used.

    `context` is what the process uses outside the allocator, by the driver's count. Where that is
    not known it is part of `unknown`, as is what the allocator holds for no known reason, and what
    the driver needs for itself.

    Args:
        plan: what was done.
        stats: current; () where they cannot be read: then only the scan's result counts.
    """
    chosen = plan.request.devices
    left = dict.fromkeys(RESIDUAL_CAUSES, 0)
    for stay in plan.scan.stays if plan.scan is not None else ():
        if chosen is None or stay.device in chosen:
            left[stay.cause if stay.cause in left else "unknown"] += stay.size_bytes
    for kept in plan.kept:
        if chosen is None or kept.device in chosen:
            left["kept"] += kept.block_bytes
    used = 0
    for device in stats:
        if device.device_used_bytes is None or (chosen is not None and device.device not in chosen):
            continue
        used += device.device_used_bytes
        ours = device.process_used_bytes
        if ours is not None:
            others = device.others_used_bytes
            rest = max(device.device_used_bytes - ours, 0)
            left["other_process"] += rest if others is None else min(others, rest)
            left["context"] += max(ours - device.reserved_bytes, 0)
    left["unknown"] += max(used - sum(left.values()), 0)
    return {cause: size for cause, size in left.items() if size}


def foreign_bytes(residual: Mapping[str, int]) -> dict[str, int]:
    """What is left once the driver took all of this process: the memory of other processes."""
    size = residual.get("other_process", 0)
    return {"other_process": size} if size else {}
