"""Calls the driver's checkpoint of a process, and checks the device memory that a restore needs.

Facts about `cuCheckpointProcess*` (CUDA Driver API, "CUDA Checkpointing"; README and issues of
NVIDIA's repository cuda-checkpoint; "measured" is on an H200 with driver 580):

* running --lock--> locked --checkpoint--> checkpointed --restore--> locked --unlock--> running;
  any other order is CUDA_ERROR_ILLEGAL_STATE. A lock that reaches its timeout leaves the process
  running (CUDA_ERROR_NOT_READY); 0 would be no timeout.
* lock waits for submitted work; afterwards CUDA calls of the process block, without the
  interpreter lock if the caller released it (measured). So do NVML calls, even `nvmlInit`
  (measured): a locked process must ask another one how much memory is free.
* restore needs persistence mode or a process that has called `cuInit`. Such a process holds 4 MiB
  of each device, without a context (measured): where persistence mode is on, the helper unloads
  the driver while it does not need it.
* "does not attempt to keep the process in a good state if an error [...] is encountered during
  checkpoint or restore" (README): whatever would fail must be known beforehand.
* a restore that ran out of device memory may never succeed afterwards (issue 44: error 2, then
  always 304, driver 580.95): so free memory is checked before each restore.
* no UVM, no IPC memory, x86-64 only (README), no MIG (issue 42), no NCCL communicator (issue 30;
  measured: checkpoint succeeds, restore fails with 801, unlock with 401, the job is lost).
"""

from __future__ import annotations

import ctypes
import importlib
import math
import subprocess
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

DRIVER: Final = "cuda.bindings.driver"
NVML: Final = "pynvml"
_INSTALL: Final = "pip install 'cuda-bindings>=12.8' nvidia-ml-py"
NOT_INSTALLED: Final = f"cuda-bindings is not installed: {_INSTALL}"
NOT_LOADED: Final = f"cuda-bindings cannot be imported: {_INSTALL}"
NO_DRIVER: Final = "there is no NVIDIA driver here (libcuda.so.1 cannot be loaded)"
OLDEST_CUDA: Final = 12080
"""`cuDriverGetVersion` of driver 570, the first with these calls."""

_LIBRARY: Final = "libcuda.so.1"
_STATES: Final = {
    0: "running",
    1: "locked",
    2: "checkpointed",
    3: "failed",
    4: "checkpointing",
    5: "restoring",
}
OUT_OF_MEMORY: Final = 2
_NOT_READY: Final = 600
_PAUSE_SECONDS: Final = 0.5
_SMI_SECONDS: Final = 20.0
_NOISE_BYTES: Final = 8 << 20
"""If a device's free memory changed by less, the process did not use it."""


class DriverError(Exception):
    """A call that the driver refused.

    Attributes:
        code: its CUresult.
    """

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})" if name else call)
        self.code = code

    @property
    def out_of_memory(self) -> bool:
        """Whether the device is full."""
        return self.code == OUT_OF_MEMORY

    @property
    def timed_out(self) -> bool:
        """Whether a lock reached its timeout; the process keeps running."""
        return self.code == _NOT_READY


class DriverCalls:
    """The calls for one process, made by itself or another one.

    Args:
        pid: the process that is locked and moved.
        driver: name of the module with the driver's functions.

    Raises:
        ImportError: the module is missing or broken.
    """

    def __init__(self, pid: int, *, driver: str = DRIVER) -> None:
        self._pid = pid
        try:
            self._driver: Any = importlib.import_module(driver)
        except Exception as error:  # what its binary raises may be anything
            raise ImportError(NOT_LOADED) from error

    def start(self) -> None:
        """Load the driver, without creating a context.

        Raises:
            DriverError: it is missing, or older than 570.
        """
        if not hasattr(self._driver, "cuCheckpointProcessLock"):
            raise DriverError("cuda-bindings", -1, "older than 12.8, without checkpoint calls")
        (version,) = self._call("cuDriverGetVersion")
        if int(version) < OLDEST_CUDA:
            raise DriverError("driver", int(version), "older than 570, without checkpoint calls")
        self._call("cuInit", 0)

    def state(self) -> str:
        """`running`, `locked`, `checkpointed`, `failed`, `checkpointing` or `restoring`."""
        (state,) = self._call("cuCheckpointProcessGetState", self._pid)
        return _STATES.get(int(state), f"unknown ({int(state)})")

    def lock(self, timeout_seconds: float) -> None:
        """Wait for submitted work and block further CUDA calls of the process."""
        arguments = self._driver.CUcheckpointLockArgs()
        arguments.timeoutMs = max(math.ceil(timeout_seconds * 1000), 1)
        self._call("cuCheckpointProcessLock", self._pid, arguments)

    def checkpoint(self) -> None:
        """Move its device memory to host memory and release the devices."""
        arguments = self._driver.CUcheckpointCheckpointArgs()
        self._call("cuCheckpointProcessCheckpoint", self._pid, arguments)

    def restore(self) -> None:
        """Undo `checkpoint`; the process is locked afterwards."""
        arguments = self._driver.CUcheckpointRestoreArgs()
        self._call("cuCheckpointProcessRestore", self._pid, arguments)

    def unlock(self) -> None:
        """Allow CUDA calls again."""
        arguments = self._driver.CUcheckpointUnlockArgs()
        self._call("cuCheckpointProcessUnlock", self._pid, arguments)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        try:
            result, *values = getattr(self._driver, name)(*arguments)
        except Exception as error:  # no driver library, or one without the call
            why = f"{name} is not available: the driver and cuda-bindings do not match"
            if self._driver.__name__ == DRIVER and not has_driver():
                why = NO_DRIVER
            raise DriverError(why, -1, "") from error
        if int(result):
            raise DriverError(name, int(result), getattr(result, "name", "") or str(result))
        return tuple(values)


def has_driver() -> bool:
    """Whether the driver's library can be loaded; calls none of its functions."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def bring_back(calls: DriverCalls) -> float:
    """Restore and unlock, as far as needed.

    Returns:
        Seconds.

    Raises:
        DriverError: a call failed, or the process is in another state.
    """
    started = time.monotonic()
    state = calls.state()
    if state == "checkpointed":
        calls.restore()
        state = "locked"
    if state == "locked":
        calls.unlock()
        state = "running"
    if state != "running":
        raise DriverError("restore", -1, f"the driver reports the process as {state}")
    return time.monotonic() - started


def bring_back_within(
    calls: DriverCalls, room: DeviceRoom, wait_seconds: float
) -> DriverError | None:
    """Bring a process back once there is enough device memory, on the calling thread.

    Returns:
        None once it runs; the error if it does not within `wait_seconds`.
    """
    end = time.monotonic() + wait_seconds
    while True:
        missing = room.missing_bytes()
        try:
            if not missing:
                bring_back(calls)
                return None
            error = no_room(missing)
        except DriverError as refused:
            error = refused
        left = end - time.monotonic()
        if not error.out_of_memory or left <= 0:
            return error
        time.sleep(min(_PAUSE_SECONDS, left))


def no_room(missing_bytes: int) -> DriverError:
    """The error while device memory is missing."""
    why = f"{max(missing_bytes >> 20, 1)} MiB more must become free on the device"
    return DriverError(why, OUT_OF_MEMORY, "")


class DeviceRoom:
    """The bytes that a process gave up on each device, and whether as many are free there now.

    Uses NVML, which needs no context. Without NVML nothing is known, and a restore is tried anyway.

    Args:
        nvml: name of the module.
        need: by device UUID, if known from before.
        ask_smi: use `nvidia-smi` instead, as a locked process must.
    """

    def __init__(
        self,
        pid: int,
        *,
        nvml: str = NVML,
        need: Mapping[str, int] | None = None,
        ask_smi: bool = False,
    ) -> None:
        self.need: dict[str, int] = dict(need or {})
        self._pid = pid
        self._nvml: Any = None
        self._before: dict[str, tuple[int, int]] = {}
        self._look = _look_by_smi if ask_smi else self._look_by_nvml
        if not ask_smi:
            try:
                self._nvml = importlib.import_module(nvml)
                self._nvml.nvmlInit()
            except Exception:  # not installed, or without a driver
                self._nvml = None

    def note_before(self) -> None:
        """Read free memory before the checkpoint."""
        self._before = self._look()

    def note_after(self, least: Mapping[str, int]) -> None:
        """After the checkpoint: compute what the process gave up.

        This is NVML's number for the pid if that has dropped to 0; else (in many containers NVML
        does not know the pid) the change of free memory. Others may allocate meanwhile, so it is
        at least `least`: a restore that runs out of memory may lose the process, one that waits
        for too much only waits.

        Args:
            least: bytes that the process is known to have had, by device UUID.
        """
        self.need = {}
        now = self._look()
        for uuid, (free, own) in self._before.items():
            free_now, own_now = now.get(uuid, (free, own))
            gave = own if own and not own_now else free_now - free
            gave = max(gave, least.get(uuid, 0))
            if gave > _NOISE_BYTES:
                self.need[uuid] = gave

    def missing_bytes(self) -> int:
        """Bytes that must become free before a restore can succeed; 0 if unknown."""
        now = self._look() if self.need else {}
        return sum(max(need - now[uuid][0], 0) for uuid, need in self.need.items() if uuid in now)

    def persistent(self) -> bool:
        """Whether the driver keeps the used devices initialized without any client."""
        used = 0
        try:
            for index in range(int(self._nvml.nvmlDeviceGetCount())):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                if _text(self._nvml.nvmlDeviceGetUUID(handle)) in self.need:
                    used += 1
                    if not self._nvml.nvmlDeviceGetPersistenceMode(handle):
                        return False
        except Exception:  # no NVML, or no permission
            return False
        return used > 0

    def _look_by_nvml(self) -> dict[str, tuple[int, int]]:
        """UUID -> (free bytes, bytes of the process)."""
        memory: dict[str, tuple[int, int]] = {}
        nvml = self._nvml
        if nvml is None:
            return memory
        try:
            for index in range(int(nvml.nvmlDeviceGetCount())):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                own = sum(
                    int(process.usedGpuMemory or 0)
                    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                    if process.pid == self._pid
                )
                free = int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
                memory[_text(nvml.nvmlDeviceGetUUID(handle))] = free, own
        except Exception:  # NVMLError: no permission
            return memory
        return memory


def _look_by_smi() -> dict[str, tuple[int, int]]:
    """UUID -> (free bytes, 0); {} if it fails."""
    ask = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    memory: dict[str, tuple[int, int]] = {}
    try:
        done = subprocess.run(  # noqa: S603 - found in PATH, as for an operator
            ask, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        )
        for line in done.stdout.splitlines():
            uuid, _, mebibytes = line.partition(",")
            memory[uuid.strip()] = int(mebibytes) << 20, 0
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return memory


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
