"""Reads the allocator's raw counters as `DeviceStats`, and per-process memory from NVML.

`torch._C._cuda_memoryStats` takes 11 us, `torch.cuda.memory_stats()` 84 to 358. Peaks are read,
never reset. Only devices with a primary context are read: asking for the free memory of others
would create one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpumem_otel.base.logs import named_logger
from gpumem_otel.base.profile import DeviceStats
from gpumem_otel.capture.process_facts import device_uuids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# ruff: noqa: SLF001 - torch's raw counters have no public name

_log = named_logger("gpumem_otel.capture")

_ASK_EVERY_SECONDS: Final = 10.0


class DriverCount(NamedTuple):
    """Memory of a device by user, as the driver counts it; the rest is the driver's own.

    Attributes:
        own_bytes: of this process, its context and libraries included.
        others_bytes: of all other processes; None if one of them is unknown.
    """

    own_bytes: int
    others_bytes: int | None


class ProcessMemory:
    """Bytes that processes use on a device, from NVML.

    NVML needs no CUDA context and does not call the job's allocator. It is optional (package
    `nvidia-ml-py`) and queried at most every ten seconds. In a container it may know this process
    only by the host's pid; then nothing is reported.

    Args:
        load: imports `pynvml`; raises if it is missing.
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
        """The memory of this process and of the others on the device.

        Memory outside the allocator is up to ten seconds old, the allocator's is current: a job
        that grows meanwhile does not grow its context.

        Args:
            uuid: `GPU-...` or `MIG-...`.
            reserved_bytes: by the allocator, now.

        Returns:
            None if NVML is missing or does not know this process or the device. A process with less
            memory than reserved is another one with the same pid.
        """
        outside = self._outside_allocator(uuid, reserved_bytes)
        if outside is None:
            return None
        return outside._replace(own_bytes=reserved_bytes + outside.own_bytes)

    def _outside_allocator(self, uuid: str, reserved_bytes: int) -> DriverCount | None:
        """`count`, without the reserved memory of this process."""
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
        except Exception as error:  # NVMLError, or a library that does not match the driver
            self._broken = True
            _log.info("NVML failed, memory outside the allocator stays unknown: %s", error)
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


_RESERVED = ("reserved_bytes", "all", "current")


def _number(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) else 0


def _at(raw: object, *path: str) -> int:
    for key in path:
        if not isinstance(raw, Mapping):
            return 0
        raw = raw.get(key)
    return _number(raw)


def allocated_bytes(raw: object) -> int:
    """Bytes allocated now, from the nested counters."""
    return _at(raw, "allocated_bytes", "all", "current")


def device_stats(
    raw: object,
    device: int,
    *,
    limit_bytes: int | None = None,
    device_total_bytes: int | None = None,
    device_used_bytes: int | None = None,
    count: DriverCount | None = None,
    host_pinned_bytes: int | None = None,
) -> DeviceStats:
    """One device's counters; those that a version of torch lacks are 0.

    Args:
        raw: the nested dict of `torch._C._cuda_memoryStats` (the form of
            `torch.cuda.memory_stats_as_nested_dict`).
        device: torch's index.
        limit_bytes: see `DeviceStats`, as for the others.
        device_total_bytes: of the device.
        device_used_bytes: by all processes.
        count: by this process and by others.
        host_pinned_bytes: of this process.
    """
    return DeviceStats(
        device=device,
        allocated_bytes=allocated_bytes(raw),
        requested_bytes=_at(raw, "requested_bytes", "all", "current"),
        active_bytes=_at(raw, "active_bytes", "all", "current"),
        reserved_bytes=_at(raw, *_RESERVED),
        allocated_peak_bytes=_at(raw, "allocated_bytes", "all", "peak"),
        reserved_peak_bytes=_at(raw, "reserved_bytes", "all", "peak"),
        inactive_split_bytes=_at(raw, "inactive_split_bytes", "all", "current"),
        allocations=_at(raw, "allocation", "all", "allocated"),
        frees=_at(raw, "allocation", "all", "freed"),
        allocation_bytes=_at(raw, "allocated_bytes", "all", "allocated"),
        requested_allocation_bytes=_at(raw, "requested_bytes", "all", "allocated"),
        requested_peak_bytes=_at(raw, "requested_bytes", "all", "peak"),
        segments=_at(raw, "segment", "all", "current"),
        ooms=_at(raw, "num_ooms"),
        alloc_retries=_at(raw, "num_alloc_retries"),
        limit_bytes=limit_bytes,
        device_total_bytes=device_total_bytes,
        device_used_bytes=device_used_bytes,
        process_used_bytes=count.own_bytes if count is not None else None,
        others_used_bytes=count.others_bytes if count is not None else None,
        host_pinned_bytes=host_pinned_bytes,
    )


def pinned_bytes(raw: object) -> int | None:
    """Pinned host memory that this process holds, None if unknown.

    Args:
        raw: `torch._C._cuda_hostMemoryStats()`. Some versions have `reserved_bytes`; in later ones
            `allocated_bytes` counts blocks in use and cached ones.
    """
    if not isinstance(raw, Mapping):
        return None
    for name in ("reserved_bytes", "allocated_bytes"):
        entry = raw.get(name)
        if isinstance(entry, Mapping) and "all" in entry:
            entry = entry["all"]
        if isinstance(entry, Mapping) and "current" in entry:
            return _number(entry["current"])
    return None


class StatsReader:
    """Reads the counters of the devices that this process uses. CUDA is initialised.

    Args:
        counted: whether the allocator counts; False with another backend or without caching: then
            every device with a context is reported.
        process: reads the memory of processes from NVML.
    """

    def __init__(
        self, torch: Any, *, counted: bool = True, process: ProcessMemory | None = None
    ) -> None:
        self._torch = torch
        self._c = torch._C
        self._counted = counted
        self._used: set[int] = set()
        self._uuids: dict[int, str] = {}
        self._process = process or ProcessMemory()

    def devices(self) -> tuple[int, ...]:
        """Devices with a context on which this process has ever allocated, sorted."""
        devices = []
        for device in range(int(self._c._cuda_getDeviceCount())):
            if not self._c._cuda_hasPrimaryContext(device):
                continue
            if device not in self._used and self._is_used(device):
                self._used.add(device)
            if device in self._used:
                devices.append(device)
        return tuple(devices)

    def _is_used(self, device: int) -> bool:
        if not self._counted:
            return True
        raw = self._c._cuda_memoryStats(device)
        return (
            _at(raw, "allocation", "all", "allocated") > 0
            or _at(raw, "segment", "all", "allocated") > 0
        )

    def counters(self, devices: Iterable[int]) -> tuple[DeviceStats, ...]:
        """Only the allocator's own counters: one C call per device."""
        return tuple(device_stats(self._raw(device), device) for device in devices)

    def allocated(self, devices: Iterable[int]) -> dict[int, int]:
        """Bytes allocated now, by device."""
        return {device: allocated_bytes(self._raw(device)) for device in devices}

    def full(self, devices: Iterable[int]) -> tuple[DeviceStats, ...]:
        """The counters, with those of the driver and the host allocator."""
        pinned = self._pinned()
        return tuple(self._full(device, pinned) for device in devices)

    def _full(self, device: int, pinned: int | None) -> DeviceStats:
        free, total = self._torch.cuda.mem_get_info(device)
        raw = self._raw(device)
        return device_stats(
            raw,
            device,
            limit_bytes=min(int(total), int(total * self._fraction(device))),
            device_total_bytes=int(total),
            device_used_bytes=int(total) - int(free),
            count=self._count(device, _at(raw, *_RESERVED)),
            host_pinned_bytes=pinned,
        )

    def _count(self, device: int, reserved_bytes: int) -> DriverCount | None:
        if device not in self._uuids:
            self._uuids[device] = device_uuids((device,)).get(device, "")
        return self._process.count(self._uuids[device], reserved_bytes)

    def _raw(self, device: int) -> object:
        return self._c._cuda_memoryStats(device) if self._counted else {}

    def _fraction(self, device: int) -> float:
        ask = getattr(self._c, "_cuda_getMemoryFraction", None)
        try:
            return float(ask(device)) if ask is not None else 1.0
        except RuntimeError:
            return 1.0

    def _pinned(self) -> int | None:
        ask = getattr(self._c, "_cuda_hostMemoryStats", None)
        try:
            return pinned_bytes(ask()) if ask is not None else None
        except RuntimeError:
            return None
