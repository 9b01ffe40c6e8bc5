"""The driver level with a keeper that is a real process and a driver that is a file."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import fake_driver
from support.fake_driver import GIB, CUresult, Device

from gpumem_otel.core.yields import Phase
from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.checkpoint import DriverCheckpoint
from gpumem_otel.yielding.keeperlink import KeeperSettings

LOCK, CHECKPOINT = "cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"
RESTORE, UNLOCK = "cuCheckpointProcessRestore", "cuCheckpointProcessUnlock"
STATE = "cuCheckpointProcessGetState"
WHOLE = [LOCK, CHECKPOINT, RESTORE, UNLOCK]
FAKE = "support.fake_driver"


@pytest.fixture(params=[0, 1], ids=["", "persistent"])
def device(tmp_path, monkeypatch, request):
    """With persistence mode a keeper lets go of the driver as soon as it has nothing to do."""
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
            environ={}, settings=KeeperSettings(**settings), call_seconds=5.0, **arguments
        )
        driver.told = queue.Queue()
        driver.on_restored = lambda phase: driver.told.put(("restored", phase))
        driver.on_waiting = lambda why: driver.told.put(("waiting", why))
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


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pid):
    end = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_alive(pid)


def test_there_and_back(make, device):
    driver = make()
    assert (driver.refusal(), driver.state, driver.keeper_pid) == ("", "running", None)
    went = driver.lock_and_checkpoint(5.0, None)
    keeper = driver.keeper_pid
    assert (went.phase, went.size_bytes) == (Phase.CHECKPOINT, 8 * GIB)
    assert 0 < went.seconds < 60
    assert (driver.state, device["state"], driver.size_bytes) == ("checkpointed", 2, 8 * GIB)
    assert is_alive(keeper)
    back = driver.restore(5.0)
    assert (back.phase, back.size_bytes) == (Phase.RESTORE, 8 * GIB)
    assert (driver.state, device["state"], driver.size_bytes) == ("running", 0, 0)
    assert device.names == WHOLE
    assert {pid for _, pid in device.calls} == {keeper}, "somebody else called the driver"
    assert wait_gone(keeper)
    assert driver.told.empty(), "nobody came back by a lease"


def has_loaded(pid):
    """Whether this image of the keeper is the first, which has loaded the driver."""
    return b"resume" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_the_keeper_lets_go_of_the_driver_where_devices_stay_ready_by_themselves(make, device):
    """Who has loaded it keeps a little of each device, which is to be empty."""
    driver = make()
    driver.lock_and_checkpoint(5.0, 600.0)
    keeper = driver.keeper_pid
    end = time.monotonic() + 10
    while device["persistent"] and has_loaded(keeper) and time.monotonic() < end:
        time.sleep(0.01)
    assert has_loaded(keeper) is not bool(device["persistent"])
    asked = device.asked("cuInit")
    assert asked == 1
    driver.restore(5.0)
    assert device.asked("cuInit") == 1 + device["persistent"]
    assert {pid for _, pid in device.calls} == {keeper}, "another process took its place"
    assert device.names == WHOLE


def test_a_keeper_that_can_not_load_the_driver_again_is_replaced(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    keeper = driver.keeper_pid
    device.plan("cuInit", CUresult.CUDA_ERROR_UNKNOWN)
    driver.restore(5.0)
    assert (driver.state, device["state"]) == ("running", 0)
    assert device.names == WHOLE
    who = {pid for _, pid in device.calls}
    assert who == {keeper} if not device["persistent"] else len(who) == 2


def test_a_signal_while_it_starts_itself_anew_is_not_lost(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    os.kill(driver.keeper_pid, signal.SIGTERM)
    what, _ = driver.told.get(timeout=10)
    assert what == "restored"
    assert (driver.state, device["state"]) == ("running", 0)
    assert device.names == WHOLE


def test_each_call_may_be_repeated(make, device):
    driver = make()
    assert driver.restore(0.0).seconds == 0.0
    driver.prepare()
    first = driver.keeper_pid
    driver.prepare()
    assert driver.keeper_pid == first
    driver.lock_and_checkpoint(5.0, None)
    again = driver.lock_and_checkpoint(5.0, None)
    assert (again.seconds, again.size_bytes) == (0.0, 8 * GIB)
    driver.restore(1.0)
    assert driver.restore(1.0).seconds == 0.0
    assert device.names == WHOLE
    driver.lock_and_checkpoint(5.0, None)
    driver.restore(1.0)
    assert device.names == WHOLE * 2


def test_the_keeper_is_a_process_of_its_own(make, device):
    driver = make()
    driver.prepare()
    pid = driver.keeper_pid
    assert os.getsid(pid) == pid != os.getsid(0), "a Ctrl-C would reach it"
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" not in maps
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    driver.lock_and_checkpoint(5.0, None)
    driver.restore(1.0)
    assert driver.state == "running"


def test_no_hook_of_the_environment_runs_in_the_keeper(make, device, tmp_path, monkeypatch):
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


# what is refused leaves a process that runs


@pytest.mark.parametrize(
    ("call", "result", "says", "calls"),
    [
        (LOCK, CUresult.CUDA_ERROR_NOT_READY, "did not end within 5 s", [LOCK]),
        (LOCK, CUresult.CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED (801)", [LOCK]),
        (
            LOCK,
            "raise",
            ": cuCheckpointProcessLock is not to be had: the driver and cuda-bindings do not fit;",
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
    with pytest.raises(YieldRefusedError, match=r"driver checkpoint: .*the process runs") as caught:
        driver.lock_and_checkpoint(5.0, 60.0)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (driver.state, device["state"], device.names) == ("running", 0, calls)
    driver.lock_and_checkpoint(5.0, None)
    driver.restore(1.0)
    assert device.names == calls + WHOLE


@pytest.mark.parametrize("how", ["hang", "die"])
@pytest.mark.parametrize("call", [LOCK, CHECKPOINT])
def test_a_keeper_that_hangs_or_dies_half_way_is_undone_by_another(make, device, call, how):
    driver = make()
    driver._call_seconds = 0.5
    device.plan(call, how)
    with pytest.raises(YieldRefusedError, match="undone, the process runs on"):
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
def test_without_a_keeper_nothing_is_locked(make, device, call, result):
    driver = make()
    device.plan(call, result)
    with pytest.raises(YieldRefusedError, match=r"^driver checkpoint: ") as caught:
        driver.lock_and_checkpoint(5.0, None)
    assert (driver.state, driver.keeper_pid, device.names) == ("running", None, [])
    if call == STATE:
        assert "CAP_SYS_PTRACE" in str(caught.value)


def test_an_old_driver_is_found_out_by_the_keeper(make, device):
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


# restore


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
        "restore it once there is room"
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
def test_a_keeper_lost_in_a_restore_is_replaced(make, device, call, how):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    first = driver.keeper_pid
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


def test_where_no_keeper_starts_the_process_brings_itself_back(make, device, tmp_path, monkeypatch):
    """It asks `nvidia-smi` for room: NVML would block in a process that is locked."""
    fake_driver.make_smi(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    device.set(others=9 * GIB)
    driver._settings = KeeperSettings(
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


# leases


def test_a_lease_ends_by_itself(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, 0.2)
    keeper = driver.keeper_pid
    what, phase = driver.told.get(timeout=20)
    assert (what, phase.phase, phase.size_bytes) == ("restored", Phase.RESTORE, 8 * GIB)
    assert (driver.state, device["state"], device.names) == ("running", 0, WHOLE)
    assert driver.restore(0.0).seconds == 0.0
    assert keeper is None or wait_gone(keeper)


def test_a_lease_that_is_over_before_the_checkpoint_is_done(make, device):
    driver = make()
    for _ in range(5):
        driver.lock_and_checkpoint(5.0, 0.0)
        assert driver.told.get(timeout=20)[0] == "restored"
        assert (driver.state, device["state"]) == ("running", 0)
    assert device.names == WHOLE * 5


def test_a_lease_whose_device_is_taken_waits_and_says_so_once(make, device):
    driver = make()
    device.set(others=9 * GIB)
    driver.lock_and_checkpoint(5.0, 0.05)
    told = driver.told.get(timeout=20)
    assert told == ("waiting", "1024 MiB more must become free on the device")
    assert driver.state == "checkpointed"
    with pytest.raises(YieldRefusedError, match="1024 MiB more"):
        driver.restore(0.0)
    device.set(others=0)
    assert driver.told.get(timeout=20)[0] == "restored"
    assert (driver.state, device["state"], driver.told.empty()) == ("running", 0, True)


def test_a_lease_can_be_changed(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    driver.renew(0.05)
    assert driver.told.get(timeout=20)[0] == "restored"
    driver.lock_and_checkpoint(5.0, 0.3)
    driver.lock_and_checkpoint(5.0, None)
    driver.restore(1.0)
    assert driver.told.empty()


def test_a_keeper_that_is_killed_is_replaced_and_the_lease_goes_on(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, 1.0)
    first = driver.keeper_pid
    os.kill(first, signal.SIGKILL)
    assert driver.told.get(timeout=30)[0] == "restored"
    restored = [pid for name, pid in device.calls if name == RESTORE]
    assert len(restored) == 1
    assert restored[0] not in (first, os.getpid())


def test_where_no_keeper_starts_this_process_ends_the_lease(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, 0.5)
    driver._settings = KeeperSettings(
        driver=FAKE, nvml=FAKE, environ=os.environ, python="/nowhere/python"
    )
    os.kill(driver.keeper_pid, signal.SIGKILL)
    assert driver.told.get(timeout=30)[0] == "restored"
    assert [pid for name, pid in device.calls if name == RESTORE] == [os.getpid()]


def test_sigterm_to_the_keeper_is_the_way_out(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    keeper = driver.keeper_pid
    os.kill(keeper, signal.SIGTERM)
    assert driver.told.get(timeout=20)[0] == "restored"
    assert (driver.state, device["state"]) == ("running", 0)
    assert wait_gone(keeper)


def test_a_pipe_that_is_closed_brings_the_process_back(make, device):
    driver = make()
    driver.lock_and_checkpoint(5.0, None)
    assert driver.close(20.0)
    assert (driver.state, device["state"]) == ("running", 0)


# life and death of the parent

PARENT = """
import os, sys, time
from gpumem_otel.yielding.checkpoint import DriverCheckpoint
from gpumem_otel.yielding.keeperlink import KeeperSettings
from support.fake_driver import Device, VARIABLE
Device(os.environ[VARIABLE])
driver = DriverCheckpoint(environ={}, settings=KeeperSettings(
    driver="support.fake_driver", nvml="support.fake_driver", environ=os.environ))
driver.lock_and_checkpoint(5.0, None)
if os.fork() == 0:  # inherits the pipes, as a worker of a data loader does
    driver.forget_parent()
    os.write(1, f"{driver.state}\\n".encode())
    time.sleep(60)
os.write(1, f"{driver.keeper_pid}\\n".encode())
if sys.argv[1] == "exit":
    sys.exit(0)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "exit"])
def test_a_parent_that_ends_leaves_no_keeper(device, how):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, how],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(fake_driver.__file__).parents[1])},
    )
    try:
        told = {parent.stdout.readline().strip() for _ in range(2)}
        assert "running" in told, "a forked child is not locked"
        (keeper,) = (int(line) for line in told - {"running"})
        if how != "exit":
            parent.send_signal(getattr(signal, how))
        parent.wait(20)
        assert wait_gone(keeper)
        assert device.names == [LOCK, CHECKPOINT], "nobody is there to be restored"
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.stdout.close()


@pytest.fixture
def tracers(monkeypatch):
    """Yama stands in the way: which processes this one let act on it; 0: nobody again."""
    named = []
    where = "gpumem_otel.yielding.checkpoint."
    monkeypatch.setattr(where + "yama_scope", lambda: 1)
    monkeypatch.setattr(where + "allow_tracing", lambda pid=0: named.append(pid) or True)
    return named


@pytest.mark.parametrize("refusals", [1, 20])
def test_nobody_may_act_on_this_process_once_there_is_no_keeper(make, device, tracers, refusals):
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
