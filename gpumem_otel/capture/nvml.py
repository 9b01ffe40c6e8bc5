"""Whose the memory outside of this process's allocator is, where NVML is there to tell.

NVML counts by process, without a CUDA context and without a call into the job's allocator. It is
optional: with the package `nvidia-ml-py` installed it is asked, at most every ten seconds. Inside a
container it may know this process by the host's number alone; then nothing is told.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ProcessMemory"]

_log = named_logger("gpumem_otel.capture")

_ASK_EVERY_SECONDS: Final = 10.0


class ProcessMemory:
    """Bytes that this process uses on a device by the driver's own count.

    Args:
        monotonic: seconds of a clock that never goes back.
        load: imports `pynvml`; raises where it is not there.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        load: Callable[[], Any] | None = None,
    ) -> None:
        self._monotonic = monotonic
        self._load = load or _import
        self._nvml: Any = None
        self._broken = False
        self._known: dict[str, tuple[float, int | None]] = {}

    def used_bytes(self, uuid: str, reserved_bytes: int) -> int | None:
        """What this process holds on the device, its context and libraries included.

        What it holds beside the allocator is up to ten seconds old, what the allocator holds is of
        now: a job that grows meanwhile has not grown its context.

        Args:
            uuid: `GPU-...` or `MIG-...`.
            reserved_bytes: of that by the allocator, now.

        Returns:
            None where NVML is not there, does not know this process, or the device. A process
            that is said to use less than it has reserved is another one with the same number.
        """
        beside = self._beside(uuid, reserved_bytes)
        return None if beside is None else reserved_bytes + beside

    def _beside(self, uuid: str, reserved_bytes: int) -> int | None:
        if self._broken or not uuid:
            return None
        now = self._monotonic()
        asked, value = self._known.get(uuid, (float("-inf"), None))
        if now - asked < _ASK_EVERY_SECONDS:
            return value
        try:
            used = self._ask(uuid)
        except ImportError:
            self._broken = True
            return None
        except Exception as error:  # NVMLError, or a library that does not fit the driver
            self._broken = True
            _log.info("NVML is asked no more, memory outside stays unknown: %s", error)
            return None
        value = None if used is None or used < reserved_bytes else used - reserved_bytes
        self._known[uuid] = (now, value)
        return value

    def _ask(self, uuid: str) -> int | None:
        if self._nvml is None:
            nvml = self._load()
            nvml.nvmlInit()
            self._nvml = nvml
        handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        pid = os.getpid()
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == pid and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
        return None


def _import() -> Any:
    import pynvml  # noqa: PLC0415 - optional, and only where a GPU is used

    return pynvml
