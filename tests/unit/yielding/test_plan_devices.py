"""What a plan says of devices that were asked for."""

from __future__ import annotations

from gpumem_otel.core.yields import Found, Movable, Stays, YieldRequest
from gpumem_otel.yielding.plan import make_plan

HERE = Movable(
    storage=None,
    device=0,
    address=0,
    size_bytes=8,
    block_bytes=512,
    stream=0,
    tensor_class="parameter",
)


def test_a_device_without_anything_of_this_process_is_named():
    found = Found((HERE,), (Stays(1, "graphs", 512, "a captured graph lives there"),))
    plan = make_plan(YieldRequest(devices=(99, 1, 0)), found, None)
    assert plan.movables == (HERE,)
    assert plan.notes == ("device 99: nothing of this process is there",)
    assert make_plan(YieldRequest(), found, None).notes == ()
