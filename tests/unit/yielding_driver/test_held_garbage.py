"""Garbage of before stays where it is while the driver holds the process."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
from support import fake_driver
from support.fake_driver import CUresult, Device

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.copy.gc_control import HeldGarbage
from gpumem_otel.yielding.driver.checkpoint import DriverCheckpoint
from gpumem_otel.yielding.driver.helper_client import HelperSettings


class Thing:
    """Stands for a tensor that a cycle holds."""

    def __init__(self):
        self.itself = self


def garbage():
    thing = Thing()
    return weakref.ref(thing)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    path = tmp_path / "device.json"
    monkeypatch.setenv(fake_driver.VARIABLE, str(path))
    names = {"driver": "support.fake_driver", "nvml": "support.fake_driver"}
    made = DriverCheckpoint(environ={}, settings=HelperSettings(environ=os.environ, **names))
    made.device = Device(path)
    yield made
    made.close(10.0)


def test_what_was_there_is_not_collected_and_what_comes_is():
    held, before = HeldGarbage(), garbage()
    held.hold()
    held.hold()
    new = garbage()
    gc.collect()
    assert before() is not None
    assert new() is None
    held.let_go()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None
    held.let_go()


def test_what_the_job_keeps_from_being_collected_stays_so():
    try:
        gc.freeze()
        count = gc.get_freeze_count()
        assert count
        held = HeldGarbage()
        held.hold()
        held.let_go()
        assert gc.get_freeze_count() >= count - 10
    finally:
        gc.unfreeze()


def test_what_the_job_keeps_from_being_collected_meanwhile_stays_so():
    """A server that freezes before it forks, while another thread gave the memory back."""
    held = HeldGarbage()
    held.hold()
    try:
        new = [Thing() for _ in range(1000)]
        gc.freeze()
        held.let_go()
        assert gc.get_freeze_count() > len(new)
    finally:
        gc.unfreeze()


def test_nothing_is_collected_until_the_process_runs_again(driver):
    before = garbage()
    driver.lock_and_checkpoint(5.0, None)
    gc.collect()
    assert before() is not None
    link = driver._link
    driver.restore(5.0)
    gc.collect()
    assert before() is None
    assert gc.get_freeze_count() == 0
    assert link.join(10)


def test_a_refusal_lets_it_go(driver):
    driver.device.plan("cuCheckpointProcessLock", CUresult.CUDA_ERROR_NOT_READY)
    with pytest.raises(YieldRefusedError):
        driver.lock_and_checkpoint(5.0, None)
    assert gc.get_freeze_count() == 0
