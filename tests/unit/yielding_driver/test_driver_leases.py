"""Who brings a process back that does not ask: leases, and what the helper outlives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import fake_driver
from support.fake_driver import CHECKPOINT, FAKE, GIB, LOCK, RESTORE, STATE, WHOLE, CUresult
from support.pids import wait_gone

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.driver.helper_client import HelperSettings
from gpumem_otel.yielding.values import Phase


def test_a_lease_ends_by_itself(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, 0.2)
    helper = driver.helper_pid
    what, phase = driver.reported.get(timeout=20)
    assert (what, phase.phase, phase.size_bytes) == ("restored", Phase.RESTORE, 8 * GIB)
    assert (driver.state, device["state"], device.names) == ("running", 0, WHOLE)
    assert driver.restore(0.0).seconds == 0.0
    assert helper is None or wait_gone(helper)


def test_a_lease_that_is_over_before_the_checkpoint_is_done(make, device):
    driver = make()
    for _ in range(5):
        driver.lock_and_checkpoint(5.0, 0.0)
        assert driver.reported.get(timeout=20)[0] == "restored"
        assert (driver.state, device["state"]) == ("running", 0)
    assert device.names == WHOLE * 5


def test_a_lease_whose_device_is_taken_waits_and_says_so_once(make, device):
    driver = make()
    device.set(others=9 * GIB)
    driver.lock_and_checkpoint(5.0, 0.05)
    reported = driver.reported.get(timeout=20)
    assert reported == ("waiting", "1024 MiB more must become free on the device")
    assert driver.state == "checkpointed"
    with pytest.raises(YieldRefusedError, match="1024 MiB more"):
        driver.restore(0.0)
    device.set(others=0)
    assert driver.reported.get(timeout=20)[0] == "restored"
    assert (driver.state, device["state"], driver.reported.empty()) == ("running", 0, True)


def test_a_lease_can_be_changed(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    driver.renew(0.05)
    assert driver.reported.get(timeout=20)[0] == "restored"
    driver.lock_and_checkpoint(5.0, 0.3)
    driver.lock_and_checkpoint(5.0, None)
    driver.restore(1.0)
    assert driver.reported.empty()


def test_a_helper_that_is_killed_is_replaced_and_the_lease_goes_on(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, 1.0)
    first = driver.helper_pid
    os.kill(first, signal.SIGKILL)
    assert driver.reported.get(timeout=30)[0] == "restored"
    restored = [pid for name, pid in device.calls if name == RESTORE]
    assert len(restored) == 1
    assert restored[0] not in (first, os.getpid())


def test_where_no_helper_starts_this_process_ends_the_lease(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, 0.5)
    driver._settings = HelperSettings(
        driver=FAKE, nvml=FAKE, environ=os.environ, python="/nowhere/python"
    )
    os.kill(driver.helper_pid, signal.SIGKILL)
    assert driver.reported.get(timeout=30)[0] == "restored"
    assert [pid for name, pid in device.calls if name == RESTORE] == [os.getpid()]


def test_sigterm_to_the_helper_is_the_way_out(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    helper = driver.helper_pid
    os.kill(helper, signal.SIGTERM)
    assert driver.reported.get(timeout=20)[0] == "restored"
    assert (driver.state, device["state"]) == ("running", 0)
    assert wait_gone(helper)


def test_a_pipe_that_is_closed_brings_the_process_back(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    assert driver.close(20.0)
    assert (driver.state, device["state"]) == ("running", 0)


PARENT = """
import os, sys, time
from gpumem_otel.yielding.driver.checkpoint import DriverCheckpoint
from gpumem_otel.yielding.driver.helper_client import HelperSettings
from support.fake_driver import Device, VARIABLE
Device(os.environ[VARIABLE])
driver = DriverCheckpoint(environ={}, settings=HelperSettings(
    driver="support.fake_driver", nvml="support.fake_driver", environ=os.environ))
driver.lock_and_checkpoint(5.0, None)
if os.fork() == 0:  # inherits the pipes, as a worker of a data loader does
    driver.forget_parent()
    os.write(1, f"{driver.state}\\n".encode())
    time.sleep(60)
os.write(1, f"{driver.helper_pid}\\n".encode())
if sys.argv[1] == "exit":
    sys.exit(0)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "exit"])
def test_a_parent_that_ends_leaves_no_helper(device, how):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, how],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(fake_driver.__file__).parents[1])},
    )
    try:
        reported = {parent.stdout.readline().strip() for _ in range(2)}
        assert "running" in reported, "a forked child is not locked"
        (helper,) = (int(line) for line in reported - {"running"})
        if how != "exit":
            parent.send_signal(getattr(signal, how))
        parent.wait(20)
        assert wait_gone(helper)
        assert device.names == [LOCK, CHECKPOINT], "no process is left to be restored"
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.stdout.close()


@pytest.fixture
def tracers(monkeypatch):
    """Yama stands in the way: the pids that this process allowed to trace it; 0 for none."""
    named = []
    where = "gpumem_otel.yielding.driver.checkpoint."
    monkeypatch.setattr(where + "yama_scope", lambda: 1)
    monkeypatch.setattr(where + "allow_tracing", lambda pid=0: named.append(pid) or True)
    return named


@pytest.mark.parametrize("refusals", [1, 20])
def test_nobody_may_act_on_this_process_once_there_is_no_helper(make, device, tracers, refusals):
    driver = make()
    device.plan(STATE, *[CUresult.CUDA_ERROR_NOT_PERMITTED] * refusals)
    if refusals > 1:
        with pytest.raises(YieldRefusedError, match="NOT_PERMITTED"):
            driver.prepare()
    else:
        driver.prepare()
        link = driver._link
        assert tracers == [link.pid]
        assert driver.close()
        assert link.join(10)
    assert len(tracers) == 2
    assert tracers[0] > 0
    assert tracers[1] == 0
    assert not driver._named_tracer
