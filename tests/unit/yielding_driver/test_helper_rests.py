"""When a helper lets go of the driver, and what it must not forget or load for that."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import fake_driver
from support.fake_driver import GIB, Device

from gpumem_otel.yielding.driver.driver_api import DriverError
from gpumem_otel.yielding.driver.helper import CheckpointHelper

CHECKPOINT = {"do": "checkpoint", "lock_seconds": 1, "lease_seconds": None, "least": {}}
NEED = {"GPU": 5}


class Calls:
    """A driver that does what it is reported."""

    def __init__(self, state="running", *, starts=True):
        self.now, self.starts, self.started = state, starts, 0

    def start(self):
        self.started += 1
        if not self.starts:
            raise DriverError("cuInit", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    def state(self):
        return self.now

    def lock(self, seconds):
        self.now = "locked"

    def checkpoint(self):
        self.now = "checkpointed"

    def restore(self):
        self.now = "locked"

    def unlock(self):
        self.now = "running"


class Room:
    missing = 0

    def __init__(self, need):
        self.need = dict(need)

    def note_before(self):
        pass

    def note_after(self, least):
        self.need = dict(NEED)

    def missing_bytes(self):
        return self.missing

    def persistent(self):
        return True


@pytest.fixture
def full(monkeypatch):
    monkeypatch.setattr(Room, "missing", 1 << 30)


def helper(calls, **more):
    sent = []
    made = CheckpointHelper(calls, room=Room, send=sent.append, monotonic=lambda: 100.0, **more)
    made.sent = sent
    return made


def command(one, **message):
    one.command(json.dumps({"id": 1, **message}))


def test_it_rests_once_the_parent_is_checkpointed():
    one = helper(Calls())
    assert not one.rests
    command(one, **CHECKPOINT)
    one.turn()
    assert one.rests
    assert one.kept() == {"need": NEED, "lease_end": None}
    command(one, do="restore", wait_seconds=1)
    assert not one.rests
    one.turn()
    assert not one.rests
    assert one.sent[-1]["state"] == "running"


def test_who_is_sent_away_does_not_rest_but_ends():
    one = helper(Calls())
    one.leave("signal")  # heard in the same turn, before the command
    command(one, **CHECKPOINT)
    one.turn()
    assert (one.ended, one.rests) == (True, False)


@pytest.mark.usefixtures("full")
def test_who_waits_for_room_does_not_rest():
    one = helper(Calls())
    command(one, **CHECKPOINT)
    one.leave("signal")
    one.turn()
    assert not one.rests
    command(one, do="adopt", need=NEED, lease_seconds=60.0)
    one.turn()
    assert not one.rests


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("starts", [True, False])
def test_a_lease_that_is_over_without_room_loads_no_driver(starts):
    """It would hold a little memory of the device beside the guest, or fail and end the helper."""
    calls = Calls("checkpointed", starts=starts)
    one = helper(calls, loaded=False)
    one.resume(NEED, 50.0)
    one.turn()
    assert calls.started == 0
    assert one.sent[-1]["event"] == "waiting"
    assert one.sent[-1]["state"] == "checkpointed"


@pytest.mark.parametrize("others", [0, 12 * GIB], ids=["room", "no room"])
def test_a_signal_in_the_turn_of_the_command_is_not_forgotten(tmp_path, others):
    """A real process that is stopped, so that it finds both at once."""
    device = Device(tmp_path / "device")
    device.set(persistent=1)
    if others:
        device.plan("cuCheckpointProcessCheckpoint", [others])
    reported = {
        "pid": os.getpid(), "driver": "support.fake_driver", "nvml": "support.fake_driver",
        "first_pause_seconds": 0.02, "longest_pause_seconds": 0.1,
    }  # fmt: skip
    tests = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-S", "-m", "gpumem_otel.yielding.driver.helper", json.dumps(reported)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            fake_driver.VARIABLE: str(tmp_path / "device"),
            "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
        },
    )
    messages = queue.Queue()

    def listen():
        for line in process.stdout:
            messages.put(json.loads(line))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        assert messages.get(timeout=20) == {"event": "ready"}
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        os.kill(process.pid, signal.SIGTERM)
        process.stdin.write((json.dumps({"id": 1, **CHECKPOINT}) + "\n").encode())
        process.stdin.flush()
        os.kill(process.pid, signal.SIGCONT)
        assert messages.get(timeout=20)["state"] == "checkpointed"
        if others:
            assert messages.get(timeout=20)["event"] == "waiting"
            device.set(others=0)
        assert messages.get(timeout=20)["event"] == "restored"
        assert process.wait(20) == 0
        assert device["state"] == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        listener.join(10)
        process.stdout.close()
