"""What the driver counts for this process, from a library that may not be there."""

from __future__ import annotations

import os
from types import SimpleNamespace

from gpumem_otel.capture.device_stats import ProcessMemory


class Nvml:
    """As `pynvml`: handles by UUID, processes with their numbers."""

    def __init__(self, processes):
        self.processes, self.asked = processes, 0

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in self.processes:
            raise RuntimeError("Not Found")
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        self.asked += 1
        return [SimpleNamespace(pid=pid, usedGpuMemory=n) for pid, n in self.processes[handle]]


def test_this_process_among_others_and_at_most_every_ten_seconds():
    nvml = Nvml({"GPU-1": [(1, 10), (os.getpid(), 700)], "MIG-2": [(os.getpid(), 5)]})
    now = [0.0]
    memory = ProcessMemory(monotonic=lambda: now[0], load=lambda: nvml)
    assert memory.count("GPU-1", 100) == (700, 10)
    nvml.processes["GPU-1"] = [(os.getpid(), 900), (1, 20), (2, 30)]
    assert memory.count("GPU-1", 100) == (700, 10)
    assert memory.count("MIG-2", 1) == (5, 0)
    now[0] = 10.0
    assert memory.count("GPU-1", 100) == (900, 50)
    assert nvml.asked == 3
    assert memory.count("GPU-1", 5_100) == (5_900, 50)  # the job grew, its context did not


def test_of_others_that_the_driver_does_not_tell_of_nothing_is_said():
    nvml = Nvml({"GPU-1": [(1, 10), (2, None), (os.getpid(), 700), (3, 5)]})
    assert ProcessMemory(load=lambda: nvml).count("GPU-1", 100) == (700, None)


def test_less_than_is_reserved_is_somebody_elses():
    """A container's number of this process may be another process's on the host."""
    memory = ProcessMemory(load=lambda: Nvml({"GPU-1": [(os.getpid(), 50)]}))
    assert memory.count("GPU-1", 100) is None


def test_a_process_that_is_known_by_another_number_is_unknown():
    """As inside a container; and where the driver may not tell bytes."""
    assert ProcessMemory(load=lambda: Nvml({"GPU-1": [(1, 10)]})).count("GPU-1", 100) is None
    hidden = Nvml({"GPU-1": [(os.getpid(), None)]})
    assert ProcessMemory(load=lambda: hidden).count("GPU-1", 100) is None


def test_without_the_library_it_is_looked_for_once():
    tries = []

    def load():
        tries.append(1)
        raise ImportError("pynvml")

    memory = ProcessMemory(load=load)
    assert memory.count("GPU-1", 100) is memory.count("GPU-1", 100) is None
    assert tries == [1]
    assert memory.count("", 0) is None


def test_an_error_ends_it_with_one_line(caplog):
    caplog.set_level("INFO", "gpumem_otel")
    memory = ProcessMemory(load=lambda: Nvml({}))
    assert memory.count("GPU-1", 100) is memory.count("GPU-1", 100) is None
    assert [record.message for record in caplog.records] == [
        "NVML failed, memory outside the allocator stays unknown: Not Found"
    ]
