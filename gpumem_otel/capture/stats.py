"""The allocator's raw counters -> `DeviceStats`, without torch's flattening.

`torch._C._cuda_memoryStats` answers in 11 us where `torch.cuda.memory_stats()` takes 84 to 358.
Peaks are read, never reset. A device is asked about only if it has a primary context already:
asking for its free memory would otherwise create one.
"""

# ruff: noqa: SLF001 - torch's raw counters have no public name
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpumem_otel.capture.nvml import DriverCount, ProcessMemory
from gpumem_otel.capture.process import device_uuids
from gpumem_otel.core.model import DeviceStats

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["StatsReader", "allocated_bytes", "device_stats", "pinned_bytes"]

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
    """What is allocated now, from the nested counters."""
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
    """One device's counters; what a version of torch does not count is 0.

    Args:
        raw: the nested dict of `torch._C._cuda_memoryStats` (the form of
            `torch.cuda.memory_stats_as_nested_dict`).
        device: torch's index.
        limit_bytes: see `DeviceStats`, as are the others.
        device_total_bytes: of the device, for everybody.
        device_used_bytes: by everybody.
        count: of that by this process and by others.
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
    """Pinned host memory that this process holds, None where torch does not say.

    Args:
        raw: `torch._C._cuda_hostMemoryStats()`. `reserved_bytes` was its name for a while; since
            then `allocated_bytes` counts blocks in use and cached together.
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
        torch: the module.
        counted: whether the allocator counts at all; False where its numbers are 0 or refused
            (another backend, no caching), then every device with a context is reported.
        process: tells what this process uses by the driver's count.
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
        found = []
        for device in range(int(self._c._cuda_getDeviceCount())):
            if not self._c._cuda_hasPrimaryContext(device):
                continue
            if device not in self._used and self._is_used(device):
                self._used.add(device)
            if device in self._used:
                found.append(device)
        return tuple(found)

    def _is_used(self, device: int) -> bool:
        if not self._counted:
            return True
        raw = self._c._cuda_memoryStats(device)
        return (
            _at(raw, "allocation", "all", "allocated") > 0
            or _at(raw, "segment", "all", "allocated") > 0
        )

    def counters(self, devices: Iterable[int]) -> tuple[DeviceStats, ...]:
        """The allocator's own counters and nothing else: one C call per device."""
        return tuple(device_stats(self._raw(device), device) for device in devices)

    def allocated(self, devices: Iterable[int]) -> dict[int, int]:
        """Bytes allocated now, by device."""
        return {device: allocated_bytes(self._raw(device)) for device in devices}

    def full(self, devices: Iterable[int]) -> tuple[DeviceStats, ...]:
        """The counters with what the driver and the host allocator say."""
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
