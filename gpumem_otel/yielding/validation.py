"""What is wrong with a request in itself, without a look at any device.

One check for the job's own calls, the command line and the engine: they differ in the error that
they make of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_otel.yielding.request_fields import fields_of
from gpumem_otel.yielding.values import YieldLevel

if TYPE_CHECKING:
    from gpumem_otel.yielding.values import RestoreRequest, YieldRequest


def yield_fault(request: YieldRequest) -> str:
    """One clause, "" where nothing is wrong with it."""
    return _fields_fault(request) or _contradiction(request)


def restore_fault(request: RestoreRequest) -> str:
    """One clause, "" where nothing is wrong with it."""
    return _fields_fault(request)


def chooses(request: YieldRequest, *, but_discard: bool = False) -> bool:
    """Whether only a part is to go; the driver cannot choose."""
    chosen = request.devices is not None or request.classes is not None or bool(request.keep)
    return chosen or (bool(request.discard) and not but_discard)


def _fields_fault(request: YieldRequest | RestoreRequest) -> str:
    for name, field in fields_of(type(request)).items():
        if fault := field.fault(name, getattr(request, name)):
            return fault
    return ""


def _contradiction(request: YieldRequest) -> str:
    both = sorted(set(request.keep) & {*request.discard, *(request.classes or ())})
    if both:
        return f"{both[0]!r} is both to stay and to go; name it once"
    if request.level is YieldLevel.PROCESS and chooses(request):
        return (
            "the driver takes all devices and classes of a process; leave devices, classes, "
            "keep and discard out, or use level 'tensors'"
        )
    return ""
