"""What is wrong with a request in itself, without a look at any device.

One check for the job's own calls, the command line and the engine: they differ in the error that
they make of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.core.classify import TensorClass
from gpumem_otel.core.yields import DISCARDABLE, YieldLevel

if TYPE_CHECKING:
    from gpumem_otel.core.yields import RestoreRequest, YieldRequest

__all__ = ["LONGEST_SECONDS", "chooses", "restore_fault", "seconds_fault", "yield_fault"]

LONGEST_SECONDS: Final = 31 * 86_400.0
"""No wait or lease is longer."""

_CLASSES: Final = tuple(one.value for one in TensorClass)


def yield_fault(request: YieldRequest) -> str:
    """One clause, "" where nothing is wrong with it."""
    return (
        _level(request.level)
        or _devices(request.devices)
        or _classes("classes", request.classes, empty=False)
        or _classes("keep", request.keep)
        or _classes("discard", request.discard)
        or _seconds(request)
        or _flags(request)
        or _contradiction(request)
    )


def restore_fault(request: RestoreRequest) -> str:
    """Likewise."""
    return _classes("classes", request.classes, empty=False) or seconds_fault(
        "wait_seconds", request.wait_seconds
    )


def seconds_fault(name: str, value: Any, *, zero: bool = True) -> str:
    """Why this is no length of time, "" where it is one.

    Args:
        name: for the message.
        value: anything.
        zero: whether it may be none at all.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"{name} must be a number of seconds, not {value!r}"
    if not math.isfinite(value) or value < 0 or value > LONGEST_SECONDS or not (value or zero):
        low = "0" if zero else "more than 0"
        return f"{name} must be {low} to {LONGEST_SECONDS:.0f} seconds, not {value!r}"
    return ""


def chooses(request: YieldRequest, *, but_discard: bool = False) -> bool:
    """Whether anything but all is to go: the driver knows no choice."""
    chosen = request.devices is not None or request.classes is not None or bool(request.keep)
    return chosen or (bool(request.discard) and not but_discard)


def _level(level: Any) -> str:
    if isinstance(level, YieldLevel):
        return ""
    return f"level must be one of {', '.join(one.value for one in YieldLevel)}, not {level!r}"


def _devices(devices: Any) -> str:
    if devices is None:
        return ""
    if not isinstance(devices, tuple) or not devices:
        return f"devices must be a tuple of torch's numbers, or None for all, not {devices!r}"
    for one in devices:
        if isinstance(one, bool) or not isinstance(one, int) or one < 0:
            return f"devices holds {one!r}, which is no number of a device"
    return ""


def _classes(name: str, classes: Any, *, empty: bool = True) -> str:
    if classes is None and not empty:
        return ""
    if not isinstance(classes, tuple) or not (classes or empty):
        return f"{name} must be a tuple of tensor classes, not {classes!r}"
    for one in classes:
        if one not in _CLASSES:
            return f"{name} holds {one!r}, which is none of {', '.join(_CLASSES)}"
    return ""


def _seconds(request: YieldRequest) -> str:
    for name in ("lease_seconds", "deadline_seconds"):
        value = getattr(request, name)
        if value is not None and (fault := seconds_fault(name, value, zero=False)):
            return fault
    return seconds_fault("wait_seconds", request.wait_seconds)


def _flags(request: YieldRequest) -> str:
    for name in ("dry_run", "verify", "assume_private", "release_host"):
        value = getattr(request, name)
        if not isinstance(value, bool):
            return f"{name} must be True or False, not {value!r}"
    if not isinstance(request.disk_dir, str):
        return f'disk_dir must be the path of a folder, or "", not {request.disk_dir!r}'
    return ""


def _contradiction(request: YieldRequest) -> str:
    wrong = sorted(set(request.discard) - set(DISCARDABLE))
    if wrong:
        return f"contents of {wrong[0]!r} can not be thrown away; {', '.join(DISCARDABLE)} can"
    both = sorted(set(request.keep) & {*request.discard, *(request.classes or ())})
    if both:
        return f"{both[0]!r} is both to stay and to go; name it once"
    if request.level is YieldLevel.PROCESS and chooses(request):
        return (
            "the driver takes all devices and classes of a process; leave devices, classes, "
            "keep and discard out, or use level 'tensors'"
        )
    return ""
