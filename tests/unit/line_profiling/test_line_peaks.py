"""Every reader of peaks has its own, and torch's functions come back."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from support.line_memory import Memory

from gpumem_otel.errors import CaptureError
from gpumem_otel.line_profiling.accounts import BASE_COLUMNS
from gpumem_otel.line_profiling.peaks import SharedPeaks, TorchLineReader


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def torch(memory):
    return memory.torch()


def job_peak(torch, device=0):
    """As `torch.cuda.max_memory_allocated()` reads it."""
    return torch._C._cuda_memoryStats(device)["allocated_bytes"]["all"]["peak"]


def own_peak(shared, view, device=0):
    return shared.read(view, device)["allocated_bytes"]["all"]["peak"]


def test_the_job_keeps_its_peak_while_lines_reset_it(memory, torch):
    shared = SharedPeaks(torch._C)
    memory.alloc(8192).free()
    view = shared.open()
    assert own_peak(shared, view) == 8192
    memory.alloc(1024)
    assert own_peak(shared, view) == 1024
    assert memory.peak() == 1024, "the allocator's own was set back"
    assert job_peak(torch) == 8192
    assert torch._C._cuda_memoryStats(0)["allocated_bytes"]["all"]["current"] == 1024
    assert torch._C._cuda_memoryStats(0)["reserved_bytes"]["all"]["peak"] == 2 << 20
    shared.close(view)
    assert job_peak(torch) == 8192


def test_the_jobs_own_reset_is_obeyed_and_disturbs_no_line(memory, torch):
    shared = SharedPeaks(torch._C)
    view = shared.open()
    shared.read(view, 0)
    memory.alloc(8192).free()
    torch._C._cuda_resetPeakMemoryStats(0)
    assert job_peak(torch) == 0
    memory.alloc(1024)
    assert own_peak(shared, view) == 8192
    assert job_peak(torch) == 1024
    shared.close(view)


def test_two_views_have_a_peak_each(memory, torch):
    shared = SharedPeaks(torch._C)
    first, second = shared.open(), shared.open()
    shared.read(first, 0), shared.read(second, 0)
    memory.alloc(4096).free()
    assert own_peak(shared, first) == 4096
    memory.alloc(512)
    assert own_peak(shared, first) == 512
    assert own_peak(shared, second) == 4096
    assert own_peak(shared, second) == 512
    shared.close(first)
    shared.close(second)


def test_torchs_functions_come_back_once_they_are_right_by_themselves(memory, torch):
    before = dict(vars(torch._C))
    shared = SharedPeaks(torch._C)
    memory.alloc(8192).free()
    view = shared.open()
    shared.read(view, 0)
    shared.close(view)
    assert torch._C._cuda_memoryStats != before["_cuda_memoryStats"], "the job's peak is needed"
    memory.alloc(16384)
    assert job_peak(torch) == 16384
    assert vars(torch._C) == before


def test_they_come_back_at_once_where_no_peak_was_lost(memory, torch):
    before = dict(vars(torch._C))
    shared = SharedPeaks(torch._C)
    memory.alloc(8192)
    view = shared.open()
    shared.read(view, 0)
    assert vars(torch._C) != before
    shared.close(view)
    assert vars(torch._C) == before


def test_they_come_back_with_the_jobs_next_reset(memory, torch):
    before = dict(vars(torch._C))
    shared = SharedPeaks(torch._C)
    memory.alloc(8192).free()
    view = shared.open()
    shared.read(view, 0)
    shared.close(view)
    torch._C._cuda_resetPeakMemoryStats(0)
    assert vars(torch._C) == before
    assert job_peak(torch) == 0


def test_a_wrapper_around_ours_stays_and_peaks_stay_right(memory, torch):
    shared = SharedPeaks(torch._C)
    memory.alloc(8192).free()
    view = shared.open()
    shared.read(view, 0)
    ours = torch._C._cuda_memoryStats
    torch._C._cuda_memoryStats = theirs = lambda device: {**ours(device)}
    shared.close(view)
    memory.alloc(16384).free()
    assert job_peak(torch) == 16384
    assert torch._C._cuda_memoryStats is theirs

    again = shared.open()
    shared.read(again, 0)
    memory.alloc(512)
    assert own_peak(shared, again) == 512, "a line's peak is read below all wrappers"
    assert job_peak(torch) == 16384
    shared.close(again)


def test_the_other_names_of_the_same_counters_are_covered(memory, torch):
    torch._C._accelerator_getDeviceStats = memory.stats
    torch._C._accelerator_resetPeakStats = memory.reset_peaks
    shared = SharedPeaks(torch._C)
    view = shared.open()
    memory.alloc(8192).free()
    shared.read(view, 0)
    stats = torch._C._accelerator_getDeviceStats(0)
    assert stats["allocated_bytes"]["all"]["peak"] == 8192
    torch._C._accelerator_resetPeakStats(0)
    assert job_peak(torch) == 0
    shared.close(view)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_reads_the_allocator_as_it_is(memory, torch):
    shared = SharedPeaks(torch._C)
    memory.alloc(8192).free()
    view = shared.open()
    shared.read(view, 0)
    held, done = threading.Event(), threading.Event()

    def hold():
        with shared._lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits for the lock
        os._exit(0 if job_peak(torch) == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    done.set()
    thread.join()
    shared.close(view)


def test_nothing_is_read_before_cuda_is_initialised(memory, torch):
    torch.cuda.is_initialized = lambda: False
    assert TorchLineReader(BASE_COLUMNS, lambda: torch).read() == {}
    assert TorchLineReader(BASE_COLUMNS, lambda: None).read() == {}
    assert (memory.reads, memory.resets) == (0, 0)


def test_devices_without_a_context_or_never_used_are_not_read():
    memory = Memory(devices=3)
    torch = memory.torch()
    torch._C._cuda_hasPrimaryContext = lambda device: device != 1
    memory.alloc(512, device=0)
    memory.alloc(512, device=1)
    reader = TorchLineReader(BASE_COLUMNS, lambda: torch)
    assert set(reader.read()) == {0}
    reader.close()


def test_the_columns_are_read_in_their_order(memory, torch):
    memory.alloc(1000)
    reader = TorchLineReader(
        (*BASE_COLUMNS, "requested_bytes.all.current", "num_ooms"), lambda: torch
    )
    assert reader.read() == {0: (1024, 1024, 1024, 2 << 20, 1024, 1, 1000, 0)}
    reader.close()


def test_a_column_that_does_not_exist_is_named(memory, torch):
    memory.alloc(512)
    reader = TorchLineReader(("no_such.all.peak",), lambda: torch)
    with pytest.raises(CaptureError, match=r"no_such\.all\.peak"):
        reader.read()
    reader.close()


def test_a_torch_that_cannot_reset_is_named(memory, torch):
    memory.alloc(512)
    del torch._C._cuda_resetPeakMemoryStats
    reader = TorchLineReader(BASE_COLUMNS, lambda: torch)
    with pytest.raises(CaptureError, match="no _cuda_resetPeakMemoryStats"):
        reader.read()
    assert torch._C._cuda_memoryStats == memory.stats
    reader.close()


def test_two_torch_modules_share_nothing():
    first, second = Memory(), Memory()
    readers = [
        TorchLineReader(BASE_COLUMNS, lambda m=m: m) for m in (first.torch(), second.torch())
    ]
    first.alloc(512), second.alloc(1024)
    assert [reader.read()[0][0] for reader in readers] == [512, 1024]
    for reader in readers:
        reader.close()
