"""What is said of requests and states."""

from __future__ import annotations

import pytest

from gpumem_otel.yielding.engine.messages import gives, way_on
from gpumem_otel.yielding.values import RestoreRequest, YieldRequest, YieldState


def test_a_yield_takes_memory_away_and_nothing_else_does():
    requests = (YieldRequest(), YieldRequest(dry_run=True), RestoreRequest())
    assert [gives(one) for one in requests] == [True, False, False]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (YieldState.YIELDED, "nothing is lost: restore() once the device has room"),
        (YieldState.FAILED, "the job must be started again"),
        (YieldState.RUNNING, "the job goes on"),
    ],
)
def test_the_way_on_is_that_of_the_state(state, says):
    assert way_on(state) == says
