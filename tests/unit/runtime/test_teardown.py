"""What a failure of ours leaves in a job's log."""

from __future__ import annotations

import logging

import pytest

from gpumem_otel.base.counters import Counters
from gpumem_otel.errors import ServeError
from gpumem_otel.runtime.teardown import FailureGuard


@pytest.mark.parametrize(
    ("error", "traced"),
    [(ServeError("port 80: not allowed; choose another"), False), (KeyError("x"), True)],
)
def test_a_traceback_is_for_what_we_do_not_say_ourselves(caplog, error, traced):
    counters = Counters()
    guard = FailureGuard(counters)

    def fails():
        raise error

    caplog.set_level(logging.WARNING, "gpumem_otel")
    assert not guard.run("listen", fails)
    assert not guard.run("listen", fails)
    (record,) = caplog.records
    assert record.getMessage() == f"listen failed, the job goes on: {error}"
    assert bool(record.exc_info) is traced
    assert counters.get("exporter_errors", stage="listen") == 2
    assert guard.failures == {"listen": str(error)}
