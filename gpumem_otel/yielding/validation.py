"""What is wrong with a request in itself, without a look at any device.

One check for the job's own calls, the command line and the engine: they differ in the error that
they make of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.snapshot.tensor_classes import TensorClass
from gpumem_otel.yielding.values import DEVICES, DISCARDABLE, SECONDS, YieldLevel

if TYPE_CHECKING:
    from gpumem_otel.yielding.values import RestoreRequest, Seconds, YieldRequest

_LONG_NUMBER: Final = 10**20
"""Python refuses to write numbers that are far longer."""

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
        "wait_seconds", request.wait_seconds, SECONDS["wait_seconds"]
    )


def seconds_fault(name: str, value: Any, known: Seconds) -> str:
    """Why this is none of the lengths of time, "" where it is one.

    Args:
        name: for the message.
        value: anything.
        known: what it may be.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"{name} must be a number of seconds, not {value!r}"
    if known.low <= value <= known.high:
        return ""
    return (
        f"{name} must be {known.low:g} to {known.high:.0f} seconds, not {_shown(value)}; leave it "
        f"out for {known.left_out}"
    )


def device_fault(value: Any) -> str:
    """Why this is no number of a device, "" where it is one."""
    if not isinstance(value, bool) and isinstance(value, int) and value in DEVICES:
        return ""
    return (
        f"devices must be whole numbers from {DEVICES[0]} to {DEVICES[-1]}, not {_shown(value)}; "
        "leave it out for all"
    )


def chooses(request: YieldRequest, *, but_discard: bool = False) -> bool:
    """Whether anything but all is to go: the driver knows no choice."""
    chosen = request.devices is not None or request.classes is not None or bool(request.keep)
    return chosen or (bool(request.discard) and not but_discard)


def _shown(value: Any) -> str:
    """A number as a person writes it; anything else as Python does."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(value, int) and abs(value) >= _LONG_NUMBER:
            return "one of more than 20 digits"
        if isinstance(value, float) and value.is_integer() and abs(value) < _LONG_NUMBER:
            return f"{value:.0f}"
    return repr(value)


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
        if fault := device_fault(one):
            return fault
    return twice_fault("devices", devices)


def _classes(name: str, classes: Any, *, empty: bool = True) -> str:
    if classes is None and not empty:
        return ""
    if not isinstance(classes, tuple) or not (classes or empty):
        return f"{name} must be a tuple of tensor classes, not {classes!r}"
    for one in classes:
        if one not in _CLASSES:
            return f"{name} holds {one!r}, which is none of {', '.join(_CLASSES)}"
    return twice_fault(name, classes)


def twice_fault(name: str, items: tuple[Any, ...]) -> str:
    """Which is there twice, "" where none is: a slip, the other was meant to be another."""
    if len(set(items)) == len(items):
        return ""
    twice = next(one for i, one in enumerate(items) if one in items[:i])
    return f"{name} holds {twice!r} twice; name it once"


def _seconds(request: YieldRequest) -> str:
    for name in ("lease_seconds", "deadline_seconds"):
        value = getattr(request, name)
        if value is not None and (fault := seconds_fault(name, value, SECONDS[name])):
            return fault
    return seconds_fault("wait_seconds", request.wait_seconds, SECONDS["wait_seconds"])


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
