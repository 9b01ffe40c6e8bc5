"""Whose the memory outside of this process's allocator is, where NVML is there to tell.

NVML counts by process, without a CUDA context and without a call into the job's allocator. It is
optional: with the package `nvidia-ml-py` installed it is asked, at most every ten seconds. Inside a
container it may know this process by the host's number alone; then nothing is told.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpumem_otel.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DriverCount", "ProcessMemory"]

_log = named_logger("gpumem_otel.capture")

_ASK_EVERY_SECONDS: Final = 10.0


class DriverCount(NamedTuple):
    """Who uses a device, by the driver's count. What is used beyond both is the driver's own.

    Attributes:
        own_bytes: this process, its context and libraries included.
        others_bytes: all other processes; None where the driver does not tell of one.
    """

    own_bytes: int
    others_bytes: int | None


class ProcessMemory:
    """Bytes that processes use on a device by the driver's own count.

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
        self._known: dict[str, tuple[float, DriverCount | None]] = {}

    def count(self, uuid: str, reserved_bytes: int) -> DriverCount | None:
        """What this process and the others hold on the device.

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
        if beside is None:
            return None
        return beside._replace(own_bytes=reserved_bytes + beside.own_bytes)

    def _beside(self, uuid: str, reserved_bytes: int) -> DriverCount | None:
        """Likewise, without what this process has reserved."""
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
        value = None
        if used is not None and used.own_bytes >= reserved_bytes:
            value = used._replace(own_bytes=used.own_bytes - reserved_bytes)
        self._known[uuid] = (now, value)
        return value

    def _ask(self, uuid: str) -> DriverCount | None:
        if self._nvml is None:
            nvml = self._load()
            nvml.nvmlInit()
            self._nvml = nvml
        handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        pid = os.getpid()
        own: int | None = None
        others: int | None = 0
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            used = process.usedGpuMemory
            if process.pid == pid:
                own = None if used is None else int(used)
            elif used is None:
                others = None
            elif others is not None:
                others += int(used)
        return None if own is None else DriverCount(own, others)


def _import() -> Any:
    import pynvml  # noqa: PLC0415 - optional, and only where a GPU is used

    return pynvml
