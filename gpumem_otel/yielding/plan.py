"""What a yield will do, settled before it begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.validation import chooses, yield_fault
from gpumem_otel.yielding.values import ScanResult, YieldLevel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpumem_otel.yielding.values import Candidate, YieldRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What goes, and by which way.

    Attributes:
        movables: storages that are offloaded or discarded; () where the driver takes all.
        kept: storages that could go and were not asked for.
        driver: the driver takes what is left.
    """

    request: YieldRequest
    level: YieldLevel
    movables: tuple[Candidate, ...] = ()
    kept: tuple[Candidate, ...] = ()
    driver: bool = False
    found: ScanResult | None = None
    notes: tuple[str, ...] = ()

    @property
    def moved_bytes(self) -> dict[str, int]:
        """By class, without what is discarded."""
        return bytes_by_class(
            one for one in self.movables if one.tensor_class not in self.request.discard
        )

    @property
    def discarded_bytes(self) -> dict[str, int]:
        """By class."""
        return bytes_by_class(
            one for one in self.movables if one.tensor_class in self.request.discard
        )


def bytes_by_class(movables: Iterable[Candidate]) -> dict[str, int]:
    """Sizes of storages summed by tensor class."""
    sums: dict[str, int] = {}
    for one in movables:
        sums[one.tensor_class] = sums.get(one.tensor_class, 0) + one.size_bytes
    return sums


def check_request(request: YieldRequest) -> None:
    """What can be said without a look at the device.

    Raises:
        YieldRefusedError: a request that can not be meant.
    """
    fault = yield_fault(request)
    if fault:
        raise YieldRefusedError(f"yield: {fault}")


def probable_part(probable: Iterable[Candidate], request: YieldRequest) -> list[Candidate]:
    """Of what will probably be found, that which would be copied."""
    return [one for one in _goes(probable, request) if one.tensor_class not in request.discard]


def make_plan(request: YieldRequest, found: ScanResult, driver_refusal: str | None) -> Plan:
    """Settle what goes.

    Args:
        request: a checked one.
        found: what there is.
        driver_refusal: why the driver's checkpoint would not come back, "" where it would, None
            where it was not asked.

    Raises:
        YieldRefusedError: what was asked for can not be had here.
    """
    devices = None if request.devices is None else set(request.devices)
    goes = _goes(found.movables, request)
    chosen = {id(one) for one in goes}
    kept = [one for one in found.movables if id(one) not in chosen]
    refusals = {
        device: why for device, why in found.refusal.items() if devices is None or device in devices
    }
    auto = request.level is YieldLevel.AUTO
    driver = auto and driver_refusal == "" and not chooses(request, but_discard=True)
    has_some = {one.device for one in found.movables} | {one.device for one in found.stays}
    has_some |= set(found.refusal)
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
            f"yield: nothing of what was chosen is there{why}: the job would only stand still; a "
            "dry run without a choice says what there is"
        )
    elif auto and driver_refusal:
        notes.append(f"tensors alone, the context stays: {driver_refusal}")
    return Plan(
        request=request,
        level=_level(driver, alone=bool(refusals)),
        movables=tuple(goes),
        kept=tuple(kept),
        driver=driver,
        found=found,
        notes=tuple(notes),
    )


def _level(driver: bool, *, alone: bool) -> YieldLevel:
    """What was resolved: `auto` is tensors and driver together."""
    if not driver:
        return YieldLevel.TENSORS
    return YieldLevel.PROCESS if alone else YieldLevel.AUTO


def _goes(movables: Iterable[Candidate], request: YieldRequest) -> list[Candidate]:
    """Those that are asked for, kept on the host or not."""
    devices = request.devices
    here = (one for one in movables if devices is None or one.device in devices)
    return [one for one in here if _is_chosen(one, request)]


def _is_chosen(one: Candidate, request: YieldRequest) -> bool:
    if one.tensor_class in request.keep:
        return False
    named = request.classes is None or one.tensor_class in request.classes
    return named or one.tensor_class in request.discard


def _and_driver(request: YieldRequest, refusal: str | None) -> str:
    if request.level is not YieldLevel.AUTO:
        return "; with level 'auto' the driver can take it, where all of the process may go"
    if refusal:
        return f"; and the driver can not take it: {refusal}"
    return "; and the driver takes all of a process only: leave devices, classes and keep out"
