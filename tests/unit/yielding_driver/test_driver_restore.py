"""The way back from the driver: room, failures, helpers that are lost."""

from __future__ import annotations

import os
import queue
import threading
import time

import pytest
from support import fake_driver
from support.fake_driver import CHECKPOINT, FAKE, GIB, LOCK, RESTORE, UNLOCK, WHOLE, CUresult
from support.pids import wait_gone

from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.driver.helper_client import HelperSettings


@pytest.mark.parametrize("knows_pids", [True, False])
def test_no_room_is_seen_before_the_driver_is_asked(make, device, knows_pids):
    """A restore that ran out of memory can make every later one fail."""
    device.set(knows_pids=knows_pids)
    driver = make()
    assert driver.lock_and_checkpoint(5.0, None).size_bytes == 8 * GIB
    device.set(others=9 * GIB)
    with pytest.raises(YieldRefusedError) as caught:
        driver.restore(0.1)
    assert str(caught.value) == (
        "restore: 1024 MiB more must become free on the device; the process stays checkpointed, "
        "restore it once there is enough device memory"
    )
    assert (driver.state, device.names) == ("checkpointed", [LOCK, CHECKPOINT])
    device.set(others=8 * GIB)
    driver.restore(0.0)
    assert (driver.state, device.names) == ("running", WHOLE)


def test_what_others_take_meanwhile_does_not_hide_what_it_needs(make, device):
    """Where NVML knows no pids, all that can be seen is how much is free before and after."""
    device.set(knows_pids=False)
    device.plan(CHECKPOINT, [6 * GIB])
    driver = make(reserved=lambda: {fake_driver.UUID: 8 * GIB})
    assert driver.lock_and_checkpoint(5.0, None).size_bytes == 8 * GIB
    device.set(others=9 * GIB)
    with pytest.raises(YieldRefusedError, match="1024 MiB more must become free"):
        driver.restore(0.0)
    assert device.names == [LOCK, CHECKPOINT], "a restore without room"


def test_an_allocator_that_does_not_count_is_no_reason_to_refuse(make, device):
    def reserved():
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    driver = make(reserved=reserved)
    assert driver.lock_and_checkpoint(5.0, None).size_bytes == 8 * GIB
    driver.restore(5.0)
    assert device.names == WHOLE


def test_what_others_take_before_it_is_locked_is_not_its_own(make, device):
    device.set(knows_pids=False)
    device.plan(LOCK, [-4 * GIB])
    device.set(others=4 * GIB)
    driver = make()
    assert driver.lock_and_checkpoint(5.0, None).size_bytes == 8 * GIB


def test_room_is_waited_for(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    device.set(others=9 * GIB)
    outcome = queue.Queue()

    def restore():
        outcome.put(driver.restore(60.0))

    looked = device.asked("nvmlDeviceGetMemoryInfo")
    waiting = threading.Thread(target=restore)
    waiting.start()
    end = time.monotonic() + 20
    while device.asked("nvmlDeviceGetMemoryInfo") < looked + 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert device.names == [LOCK, CHECKPOINT]
    device.set(others=0)
    assert outcome.get(timeout=30).size_bytes == 8 * GIB
    waiting.join()
    assert device.names == WHOLE


def test_without_nvml_a_full_device_is_tried_and_stays(make, device):
    driver = make(settings={"nvml": "no_such_module"})
    assert driver.lock_and_checkpoint(5.0, None).size_bytes == 0
    device.set(others=9 * GIB)
    with pytest.raises(YieldRefusedError, match=r"CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        driver.restore(0.0)
    assert driver.state == "checkpointed"
    device.set(others=0)
    driver.restore(0.0)
    assert (driver.state, device["state"]) == ("running", 0)


def test_what_the_driver_can_not_bring_back_is_failed_and_says_what_to_do(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    device.plan(RESTORE, CUresult.CUDA_ERROR_NOT_SUPPORTED)
    with pytest.raises(YieldFailedError) as caught:
        driver.restore(5.0)
    assert str(caught.value) == (
        "restore: cuCheckpointProcessRestore: CUDA_ERROR_NOT_SUPPORTED (801); the process is "
        "checkpointed, its device memory is lost: end it and start it from its last checkpoint"
    )
    assert driver.state == "failed"


def test_an_unlock_that_fails_once_is_done_again(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    device.plan(UNLOCK, CUresult.CUDA_ERROR_UNKNOWN)
    with pytest.raises(YieldFailedError):
        driver.restore(0.0)
    assert device["state"] == 1
    driver.restore(0.0)
    assert (driver.state, device["state"]) == ("running", 0)


@pytest.mark.parametrize("how", ["hang", "die"])
@pytest.mark.parametrize("call", [RESTORE, UNLOCK])
def test_a_helper_lost_in_a_restore_is_replaced(make, device, call, how):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    first = driver.helper_pid
    driver._call_seconds = 2.0 if how == "hang" else 20.0  # the next one has to start in it
    device.plan(call, how)
    driver.restore(0.5)
    assert (driver.state, device["state"]) == ("running", 0)
    assert wait_gone(first)


def test_a_driver_that_hangs_for_everybody_hangs_no_caller(make, device):
    driver = make(settings={"start_seconds": 5.0})
    driver.lock_and_checkpoint(5.0, None)
    driver._call_seconds = 0.3
    device.plan(RESTORE, "hang", "hang", "hang")
    with pytest.raises(YieldFailedError, match="no answer to restore"):
        driver.restore(0.0)
    assert driver.state == "failed"


def test_where_no_helper_starts_the_process_brings_itself_back(make, device, tmp_path, monkeypatch):
    """It asks `nvidia-smi` for room: NVML would block in a process that is locked."""
    fake_driver.make_smi(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    device.set(others=9 * GIB)
    driver._settings = HelperSettings(
        driver=FAKE, nvml=FAKE, environ=os.environ, python="/nowhere/python"
    )
    driver._link.kill()
    with pytest.raises(YieldRefusedError, match="1024 MiB more must become free"):
        driver.restore(0.1)
    assert RESTORE not in device.names
    device.set(others=8 * GIB)
    driver.restore(1.0)
    assert (driver.state, device["state"]) == ("running", 0)
    assert [pid for name, pid in device.calls if name == RESTORE] == [os.getpid()]
    assert fake_driver.BLOCKS not in device.names
