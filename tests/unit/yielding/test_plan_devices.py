"""What a plan says of devices that were asked for."""

from __future__ import annotations

import pytest

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.plan import make_plan
from gpumem_otel.yielding.values import Candidate, ScanResult, Unmovable, YieldLevel, YieldRequest

HERE = Candidate(
    storage=None,
    device=0,
    address=0,
    size_bytes=8,
    block_bytes=512,
    stream=0,
    tensor_class="parameter",
)


def test_a_device_without_anything_of_this_process_is_named():
    found = ScanResult((HERE,), (Unmovable(1, "graphs", 512, "a captured graph lives there"),))
    plan = make_plan(YieldRequest(devices=(99, 1, 0)), found, None)
    assert plan.movables == (HERE,)
    assert plan.notes == ("device 99: nothing of this process is there",)
    assert make_plan(YieldRequest(), found, None).notes == ()


@pytest.mark.parametrize(
    "chosen", [{"devices": (99,)}, {"classes": ("kv_cache",)}, {"keep": ("parameter",)}]
)
def test_a_choice_that_nothing_fits_does_not_stop_the_job(chosen):
    """A name that is wrong by a letter would have it stand still, and give nothing back."""
    with pytest.raises(YieldRefusedError, match="nothing of what was chosen is there"):
        make_plan(YieldRequest(**chosen), ScanResult((HERE,)), None)


def test_a_job_that_holds_nothing_may_be_asked_to_stand_aside():
    assert make_plan(YieldRequest(level=YieldLevel.TENSORS), ScanResult(()), None).movables == ()
