"""What is left on devices after a yield, by cause."""

from __future__ import annotations

from dataclasses import MISSING, fields

from gpumem_otel.base.profile import DeviceStats
from gpumem_otel.yielding.plan import Plan, residual_of
from gpumem_otel.yielding.values import YieldRequest


def stats(device, **more):
    needed = {
        field.name: 0
        for field in fields(DeviceStats)
        if field.default is MISSING and field.default_factory is MISSING
    }
    return DeviceStats(**{**needed, "device": device, **more})


def left(*found, **request):
    asked = YieldRequest(**request)
    return residual_of(Plan(request=asked, level=asked.level), found)


def test_each_device_has_a_context_of_its_own():
    both = [
        stats(0, device_used_bytes=700, process_used_bytes=600, reserved_bytes=50),
        stats(1, device_used_bytes=500, process_used_bytes=500, reserved_bytes=0),
    ]
    assert left(*both) == {"context": 1050, "other_process": 100, "unknown": 50}
    assert left(*both, devices=(1,)) == {"context": 500}


def test_what_the_driver_needs_for_itself_is_no_other_process():
    """An unused H200: 867 MiB by `nvidia-smi`, of which 123 belong to no process."""
    alone = stats(
        0, device_used_bytes=867, process_used_bytes=744, others_used_bytes=0, reserved_bytes=66
    )
    assert left(alone) == {"context": 678, "unknown": 66 + 123}
    shared = stats(
        0, device_used_bytes=967, process_used_bytes=744, others_used_bytes=100, reserved_bytes=66
    )
    assert left(shared) == {"context": 678, "other_process": 100, "unknown": 66 + 123}


def test_what_is_not_known_of_this_process_is_unknown():
    assert left(stats(0, device_used_bytes=700, process_used_bytes=None)) == {"unknown": 700}
    assert left(stats(0, device_used_bytes=None)) == {}
    assert left() == {}
