"""A driver that is a file, and driver levels with a helper that is a real process."""

from __future__ import annotations

import os
import queue

import pytest
from support import fake_driver
from support.fake_driver import FAKE, Device
from support.pids import is_alive

from gpumem_otel.yielding.driver.checkpoint import DriverCheckpoint
from gpumem_otel.yielding.driver.helper_client import HelperSettings


@pytest.fixture(params=[0, 1], ids=["", "persistent"])
def device(tmp_path, monkeypatch, request):
    """With persistence mode a helper lets go of the driver as soon as it has nothing to do."""
    path = tmp_path / "device.json"
    monkeypatch.setenv(fake_driver.VARIABLE, str(path))
    made = Device(path)
    made.set(persistent=request.param)
    return made


@pytest.fixture
def make(device):
    """A driver level; whatever a test leaves undone is done at its end."""
    made, pids = [], set()

    def call(*, settings=None, **arguments):
        settings = {
            "driver": FAKE,
            "nvml": FAKE,
            "environ": os.environ,
            "first_pause_seconds": 0.01,
            "longest_pause_seconds": 0.05,
            **(settings or {}),
        }
        driver = DriverCheckpoint(
            environ={}, settings=HelperSettings(**settings), call_seconds=5.0, **arguments
        )
        driver.reported = queue.Queue()
        driver.on_restored = lambda phase: driver.reported.put(("restored", phase))
        driver.on_waiting = lambda why: driver.reported.put(("waiting", why))
        made.append(driver)
        return driver

    yield call
    assert fake_driver.BLOCKS not in device.names
    device.set(others=0, plans={})
    for driver in made:
        driver._garbage.let_go()
        if (link := driver._link) is not None:
            pids.add(link.pid)
            driver.close()
            assert link.join(10)
    assert not any(is_alive(pid) for pid in pids)
