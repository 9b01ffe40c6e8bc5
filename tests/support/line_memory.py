"""A deterministic allocator with torch's counters, and a reader of it for the line profiler."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace

ROUND = 512
SEGMENT = 2 << 20


class Memory:
    """Devices that allocate and free, and count as torch does: blocks of 512, segments of 2 MiB."""

    def __init__(self, devices=1):
        self.lock = threading.Lock()
        self.devices = [_new_counters() for _ in range(devices)]
        self.reads = 0
        self.resets = 0

    def alloc(self, size, device=0):
        """Allocate; hand what is returned to `free`."""
        rounded = max(ROUND, -(-size // ROUND) * ROUND)
        with self.lock:
            raw = self.devices[device]
            for name, amount in (
                ("allocation", 1),
                ("allocated_bytes", rounded),
                ("active_bytes", rounded),
                ("requested_bytes", size),
            ):
                _grow(raw[name], amount)
            held, reserved = raw["allocated_bytes"]["all"], raw["reserved_bytes"]["all"]
            if held["current"] > reserved["current"]:
                more = -(-(held["current"] - reserved["current"]) // SEGMENT) * SEGMENT
                _grow(raw["reserved_bytes"], more)
                _grow(raw["segment"], more // SEGMENT)
        return _Block(self, device, size, rounded)

    def stats(self, device):
        """As `torch._C._cuda_memoryStats`."""
        self.reads += 1
        return copy.deepcopy(self.devices[device])

    def reset_peaks(self, device):
        """As `torch._C._cuda_resetPeakMemoryStats`."""
        self.resets += 1
        for entry in self.devices[device].values():
            if isinstance(entry, dict):
                for values in entry.values() if "all" in entry else [entry]:
                    values["peak"] = values["current"]

    def peak(self, device=0):
        """As the allocator itself has it."""
        return self.devices[device]["allocated_bytes"]["all"]["peak"]

    def torch(self):
        """A module that looks like torch as far as the profiler's reader goes."""
        c = SimpleNamespace(
            _cuda_memoryStats=self.stats,
            _cuda_resetPeakMemoryStats=self.reset_peaks,
            _cuda_getDeviceCount=lambda: len(self.devices),
            _cuda_hasPrimaryContext=lambda device: True,
        )
        return SimpleNamespace(_C=c, cuda=SimpleNamespace(is_initialized=lambda: True))


class _Block:
    def __init__(self, memory, device, size, rounded):
        self.where = memory, device
        self.sizes = size, rounded

    def free(self):
        memory, device = self.where
        size, rounded = self.sizes
        with memory.lock:
            raw = memory.devices[device]
            for name, amount in (
                ("allocation", 1),
                ("allocated_bytes", rounded),
                ("active_bytes", rounded),
                ("requested_bytes", size),
            ):
                values = raw[name]["all"]
                values["current"] -= amount
                values["freed"] += amount


def _grow(entry, amount):
    values = entry["all"]
    values["current"] += amount
    values["allocated"] += amount
    values["peak"] = max(values["peak"], values["current"])


def _new_counters():
    def zero():
        return {"current": 0, "peak": 0, "allocated": 0, "freed": 0}

    names = ("allocation", "segment", "allocated_bytes", "active_bytes", "requested_bytes",
             "reserved_bytes")  # fmt: skip
    return {
        "num_alloc_retries": 0,
        "num_ooms": 0,
        **{name: {"all": zero()} for name in names},
        "oversize_allocations": zero(),
    }
