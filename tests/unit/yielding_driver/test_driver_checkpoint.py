"""The driver takes the memory of a process: there and back, and what refuses or undoes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fake_driver import CHECKPOINT, GIB, LOCK, STATE, UNLOCK, WHOLE, CUresult
from support.pids import is_alive, wait_gone

from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.values import Phase


def test_there_and_back(make, device):
    driver = make()
    assert (driver.refusal(), driver.state, driver.helper_pid) == ("", "running", None)
    went = driver.lock_and_checkpoint(5.0, None)
    helper = driver.helper_pid
    assert (went.phase, went.size_bytes) == (Phase.CHECKPOINT, 8 * GIB)
    assert 0 < went.seconds < 60
    assert (driver.state, device["state"], driver.size_bytes) == ("checkpointed", 2, 8 * GIB)
    assert is_alive(helper)
    back = driver.restore(5.0)
    assert (back.phase, back.size_bytes) == (Phase.RESTORE, 8 * GIB)
    assert (driver.state, device["state"], driver.size_bytes) == ("running", 0, 0)
    assert device.names == WHOLE
    assert {pid for _, pid in device.calls} == {helper}, "somebody else called the driver"
    assert wait_gone(helper)
    assert driver.reported.empty(), "nobody came back by a lease"


def has_loaded(pid):
    """Whether this image of the helper is the first, which has loaded the driver."""
    return b"resume" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_the_helper_lets_go_of_the_driver_where_devices_stay_ready_by_themselves(make, device):
    """Who has loaded it keeps a little of each device, which is to be empty."""
    driver = make()
    driver.lock_and_checkpoint(5.0, 600.0)
    helper = driver.helper_pid
    end = time.monotonic() + 10
    while device["persistent"] and has_loaded(helper) and time.monotonic() < end:
        time.sleep(0.01)
    assert has_loaded(helper) is not bool(device["persistent"])
    asked = device.asked("cuInit")
    assert asked == 1
    driver.restore(5.0)
    assert device.asked("cuInit") == 1 + device["persistent"]
    assert {pid for _, pid in device.calls} == {helper}, "another process took its place"
    assert device.names == WHOLE


def test_a_helper_that_can_not_load_the_driver_again_is_replaced(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    helper = driver.helper_pid
    device.plan("cuInit", CUresult.CUDA_ERROR_UNKNOWN)
    driver.restore(5.0)
    assert (driver.state, device["state"]) == ("running", 0)
    assert device.names == WHOLE
    who = {pid for _, pid in device.calls}
    assert who == {helper} if not device["persistent"] else len(who) == 2


def test_a_signal_while_it_starts_itself_anew_is_not_lost(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    os.kill(driver.helper_pid, signal.SIGTERM)
    what, _ = driver.reported.get(timeout=10)
    assert what == "restored"
    assert (driver.state, device["state"]) == ("running", 0)
    assert device.names == WHOLE


def test_each_call_may_be_repeated(make, device):
    driver = make()
    assert driver.restore(0.0).seconds == 0.0
    driver.prepare()
    first = driver.helper_pid
    driver.prepare()
    assert driver.helper_pid == first
    driver.lock_and_checkpoint(5.0, None)
    again = driver.lock_and_checkpoint(5.0, None)
    assert (again.seconds, again.size_bytes) == (0.0, 8 * GIB)
    driver.restore(1.0)
    assert driver.restore(1.0).seconds == 0.0
    assert device.names == WHOLE
    driver.lock_and_checkpoint(5.0, None)
    driver.restore(1.0)
    assert device.names == WHOLE * 2


def test_the_helper_is_a_process_of_its_own(make, device):
    driver = make()
    driver.prepare()
    pid = driver.helper_pid
    assert os.getsid(pid) == pid != os.getsid(0), "a Ctrl-C would reach it"
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" not in maps
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    driver.lock_and_checkpoint(5.0, None)
    driver.restore(1.0)
    assert driver.state == "running"


def test_no_hook_of_the_environment_runs_in_the_helper(make, device, tmp_path, monkeypatch):
    hook, mark = tmp_path / "hooks", tmp_path / "mark"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    subprocess.run(
        [sys.executable, "-c", ""], env={**os.environ, "PYTHONPATH": str(hook)}, check=True
    )
    assert mark.exists()
    mark.unlink()
    monkeypatch.syspath_prepend(str(hook))
    driver = make(settings={"environ": {**os.environ, "PYTHONPATH": str(hook)}})
    driver.lock_and_checkpoint(5.0, None)
    driver.restore(1.0)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("call", "result", "says", "calls"),
    [
        (LOCK, CUresult.CUDA_ERROR_NOT_READY, "did not end within 5 s", [LOCK]),
        (LOCK, CUresult.CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED (801)", [LOCK]),
        (
            LOCK,
            "raise",
            ": cuCheckpointProcessLock is not available: ",
            [LOCK],
        ),
        (
            CHECKPOINT,
            CUresult.CUDA_ERROR_OUT_OF_MEMORY,
            "CUDA_ERROR_OUT_OF_MEMORY (2)",
            [LOCK, CHECKPOINT, UNLOCK],
        ),
    ],
)
def test_a_step_that_fails_is_undone(  # noqa: PLR0917
    make, device, call, result, says, calls
):
    driver = make()
    device.plan(call, result)
    with pytest.raises(
        YieldRefusedError, match=r"driver checkpoint: .*the process keeps running"
    ) as caught:
        driver.lock_and_checkpoint(5.0, 60.0)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (driver.state, device["state"], device.names) == ("running", 0, calls)
    driver.lock_and_checkpoint(5.0, None)
    driver.restore(1.0)
    assert device.names == calls + WHOLE


@pytest.mark.parametrize("how", ["hang", "die"])
@pytest.mark.parametrize("call", [LOCK, CHECKPOINT])
def test_a_helper_that_hangs_or_dies_half_way_is_undone_by_another(make, device, call, how):
    driver = make()
    driver._call_seconds = 0.5
    device.plan(call, how)
    with pytest.raises(YieldRefusedError, match="undone, the process keeps running"):
        driver.lock_and_checkpoint(0.5, 60.0)
    assert (driver.state, device["state"]) == ("running", 0)
    driver._call_seconds = 5.0
    driver.lock_and_checkpoint(5.0, None)
    driver.restore(1.0)
    assert (driver.state, device["state"]) == ("running", 0)


def test_what_can_not_be_undone_is_said(make, device):
    driver = make()
    device.plan(CHECKPOINT, CUresult.CUDA_ERROR_UNKNOWN)
    device.plan(UNLOCK, CUresult.CUDA_ERROR_ILLEGAL_STATE)
    with pytest.raises(YieldFailedError) as caught:
        driver.lock_and_checkpoint(5.0, None)
    assert str(caught.value) == (
        "driver checkpoint: cuCheckpointProcessCheckpoint: CUDA_ERROR_UNKNOWN (999), and then "
        "cuCheckpointProcessUnlock: CUDA_ERROR_ILLEGAL_STATE (401); the process is locked, its "
        "device memory is lost: end it and start it from its last checkpoint"
    )
    assert driver.state == "failed"
    with pytest.raises(YieldFailedError, match="the process is failed"):
        driver.lock_and_checkpoint(5.0, None)
    driver.restore(1.0)  # asked for all the same, it is tried
    assert (driver.state, device["state"]) == ("running", 0)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("cuInit", CUresult.CUDA_ERROR_UNKNOWN),
        ("cuInit", "die"),
        (STATE, CUresult.CUDA_ERROR_NOT_PERMITTED),
    ],
)
def test_without_a_helper_nothing_is_locked(make, device, call, result):
    driver = make()
    device.plan(call, result)
    with pytest.raises(YieldRefusedError, match=r"^driver checkpoint: ") as caught:
        driver.lock_and_checkpoint(5.0, None)
    assert (driver.state, driver.helper_pid, device.names) == ("running", None, [])
    if call == STATE:
        assert "CAP_SYS_PTRACE" in str(caught.value)


def test_an_old_driver_is_found_out_by_the_helper(make, device):
    device.set(version=12070, driver="")
    driver = make()
    assert driver.refusal() == ""
    with pytest.raises(YieldRefusedError, match="older than 570"):
        driver.prepare()


def test_a_python_that_is_not_there(make):
    driver = make(settings={"python": "/nowhere/python"})
    with pytest.raises(YieldRefusedError) as refused:
        driver.prepare()
    assert str(refused.value) == (
        "driver checkpoint: its helper process could not be started: "
        "[Errno 2] No such file or directory: '/nowhere/python'"
    )


def test_a_refusal_is_raised_before_anything_is_begun(make, device):
    driver = make(communicators=lambda: 2)
    with pytest.raises(YieldRefusedError, match="2 NCCL communicator"):
        driver.lock_and_checkpoint(5.0, None)
    assert device["calls"] == []
