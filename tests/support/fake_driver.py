"""A `cuda.bindings.driver` and a `pynvml` whose device is a file that several processes share.

The file is named by FAKE_DRIVER_STATE and made by `Device`. It follows the documented order of
calls (any other is CUDA_ERROR_ILLEGAL_STATE) and what was found of real drivers: a lock that times
out leaves the process running, a restore without room fails and stays checkpointed. Every call can
be set to fail, to hang, or to end its own process.
"""

# ruff: noqa: N802 - the names of the real modules
from __future__ import annotations

import contextlib
import enum
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

GIB = 1 << 30
VARIABLE = "FAKE_DRIVER_STATE"
UUID = "GPU-fake"
FAKE = "support.fake_driver"
LOCK, CHECKPOINT = "cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"
RESTORE, UNLOCK = "cuCheckpointProcessRestore", "cuCheckpointProcessUnlock"
STATE = "cuCheckpointProcessGetState"
WHOLE = [LOCK, CHECKPOINT, RESTORE, UNLOCK]

BLOCKS = "NVML in a locked process"

SMI = """#!{python}
import json, os, pathlib
device = json.loads(pathlib.Path(os.environ["{variable}"]).read_text())
used = device["others"] + (device["used"] if device["state"] < 2 else 0)
print("{uuid}, " + str(device["total"] - used >> 20))
"""


def make_smi(folder):
    """An `nvidia-smi` in that folder, which is to be on the path."""
    path = Path(folder) / "nvidia-smi"
    path.write_text(SMI.format(python=sys.executable, variable=VARIABLE, uuid=UUID))
    path.chmod(0o755)


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_ILLEGAL_STATE = 401
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


class CUprocessState(enum.IntEnum):
    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


class CUcheckpointLockArgs:
    def __init__(self):
        self.timeoutMs = 0


class CUcheckpointCheckpointArgs:
    pass


class CUcheckpointRestoreArgs:
    pass


class CUcheckpointUnlockArgs:
    pass


class Device:
    """The file, from the test's side."""

    def __init__(self, path, *, used=8 * GIB, total=16 * GIB, version=13000):
        self.path = Path(path)
        self.path.write_text(
            json.dumps(
                {
                    "state": 0,
                    "pid": os.getpid(),
                    "used": used,
                    "others": 0,
                    "total": total,
                    "version": version,
                    "driver": "580.159.03",
                    "knows_pids": True,
                    "mig": 0,
                    "mps": [],
                    "persistent": 0,
                    "plans": {},
                    "calls": [],
                }
            )
        )

    def plan(self, call, *what):
        """What the next calls of this name do: a CUresult, "hang", "die", "ok", or [bytes]: others
        take so much meanwhile."""
        with _changed(self.path) as device:
            device["plans"].setdefault(call, []).extend(what)

    def set(self, **values):
        with _changed(self.path) as device:
            device.update(values)

    def __getitem__(self, name):
        return json.loads(self.path.read_text())[name]

    @property
    def calls(self):
        """(name, pid that called) in order, the questions left out."""
        return [(name, pid) for name, pid in self["calls"] if name not in QUESTIONS]

    def asked(self, question):
        return sum(name == question for name, _ in self["calls"])

    @property
    def names(self):
        return [name for name, _ in self.calls]


QUESTIONS = {
    "cuCheckpointProcessGetState",
    "cuDriverGetVersion",
    "cuInit",
    "nvmlDeviceGetMemoryInfo",
}


@contextlib.contextmanager
def _changed(path):
    path = Path(path)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        device = json.loads(path.read_text())
        yield device
        whole = path.with_suffix(".new")  # who is killed meanwhile leaves the old one
        whole.write_text(json.dumps(device))
        whole.replace(path)


def _device():
    return _changed(os.environ[VARIABLE])


def _planned(name):
    """Note the call; what it is to answer, None where nothing was planned."""
    with _device() as device:
        device["calls"].append((name, os.getpid()))
        plans = device["plans"].get(name) or ["ok"]
        what = plans.pop(0)
        if isinstance(what, list):  # others take memory meanwhile
            device["others"] += what[0]
            what = "ok"
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(600)
    if what == "raise":
        raise RuntimeError(f"Function {name} not found")
    return None if what == "ok" else CUresult(what)


def cuDriverGetVersion():
    failed = _planned("cuDriverGetVersion")
    with _device() as device:
        return (failed or CUresult(0), device["version"])


def cuInit(flags):
    return (_planned("cuInit") or CUresult(0),)


def cuCheckpointProcessGetState(pid):
    failed = _planned("cuCheckpointProcessGetState")
    with _device() as device:
        if device["pid"] != pid:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        return failed or CUresult(0), CUprocessState(device["state"])


def _step(name, pid, before, after, check=lambda device: None):
    failed = _planned(name)
    with _device() as device:
        if device["pid"] != pid:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        if device["state"] != before:
            return (CUresult.CUDA_ERROR_ILLEGAL_STATE,)
        failed = failed or check(device)
        if failed:
            return (failed,)
        device["state"] = int(after)
        return (CUresult(0),)


def cuCheckpointProcessLock(pid, args):
    assert args.timeoutMs > 0, "a lock without a timeout"
    return _step("cuCheckpointProcessLock", pid, CUprocessState.RUNNING, CUprocessState.LOCKED)


def cuCheckpointProcessCheckpoint(pid, args):
    return _step(
        "cuCheckpointProcessCheckpoint", pid, CUprocessState.LOCKED, CUprocessState.CHECKPOINTED
    )


def cuCheckpointProcessRestore(pid, args):
    def room(device):
        if device["used"] + device["others"] > device["total"]:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY
        return None

    return _step(
        "cuCheckpointProcessRestore", pid, CUprocessState.CHECKPOINTED, CUprocessState.LOCKED, room
    )


def cuCheckpointProcessUnlock(pid, args):
    return _step("cuCheckpointProcessUnlock", pid, CUprocessState.LOCKED, CUprocessState.RUNNING)


# pynvml


def _asked_by_nvml():
    """Real NVML blocks in a locked process; here that is noted as a forbidden call."""
    with _device() as device:
        if device["state"] != CUprocessState.RUNNING and device["pid"] == os.getpid():
            device["calls"].append((BLOCKS, os.getpid()))


class _Told:
    def __init__(self, **values):
        self.__dict__.update(values)


def nvmlInit():
    _asked_by_nvml()


def nvmlSystemGetDriverVersion():
    _asked_by_nvml()
    with _device() as device:
        return device["driver"]


def nvmlDeviceGetCount():
    _asked_by_nvml()
    return 1


def nvmlDeviceGetHandleByIndex(index):
    _asked_by_nvml()
    return index


def nvmlDeviceGetHandleByUUID(uuid):
    _asked_by_nvml()
    if uuid != UUID:
        raise LookupError(uuid)
    return 0


def nvmlDeviceGetUUID(handle):
    return UUID


def nvmlDeviceGetMigMode(handle):
    with _device() as device:
        return device["mig"], device["mig"]


def nvmlDeviceGetPersistenceMode(handle):
    with _device() as device:
        return device["persistent"]


def nvmlDeviceGetMPSComputeRunningProcesses(handle):
    with _device() as device:
        return [_Told(pid=pid) for pid in device["mps"]]


def nvmlDeviceGetMemoryInfo(handle):
    _asked_by_nvml()
    _planned("nvmlDeviceGetMemoryInfo")
    with _device() as device:
        used = device["others"] + (device["used"] if device["state"] < 2 else 0)
        return _Told(free=device["total"] - used)


def nvmlDeviceGetComputeRunningProcesses(handle):
    _asked_by_nvml()
    with _device() as device:
        if device["state"] >= 2 or not device["knows_pids"]:
            return []
        return [_Told(pid=device["pid"], usedGpuMemory=device["used"])]
