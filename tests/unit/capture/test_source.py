"""TorchSource over a torch without a GPU that counts, records and refuses like the real one."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from support import fake_torch
from support.fake_clock import FakeClock

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.profile import SourceStatus
from gpumem_otel.capture.gil_pacing import Pacer
from gpumem_otel.capture.source import TorchSource
from gpumem_otel.capture.stackless import autograd_has_threads
from gpumem_otel.errors import BusyError, CaptureError

VERSIONS = ["2.3", "2.8", "2.11", "2.15"]


@pytest.fixture(params=VERSIONS)
def torch(request, monkeypatch):
    module = fake_torch.make(request.param, devices=2)
    module.contexts = {0}
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def counters():
    return Counters()


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def source(torch, counters, clock):
    source = TorchSource(counters=counters, clock=clock, max_window_events=100)
    source.prepare(torch)
    yield source
    source.stop()


@pytest.fixture
def engine():
    """A thread called as those of the autograd engine."""
    named, stop = threading.Event(), threading.Event()

    def run():
        name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        name.write_bytes(b"pt_autograd_0")
        named.set()
        stop.wait()
        name.write_bytes(b"ended")  # the kernel may show it a little longer than join() waits

    thread = threading.Thread(target=run)
    thread.start()
    named.wait()
    yield
    stop.set()
    thread.join()


# status


def test_before_torch_is_imported(monkeypatch, counters):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    source = TorchSource(counters=counters)
    assert source.status() == SourceStatus(armed=False, supported=False, reason="no_torch")
    source.start()
    assert source.stats() == ()
    assert source.allocated() == {}
    with pytest.raises(CaptureError, match="no_torch"):
        source.read()


def test_a_build_without_cuda(torch, counters):
    torch.version.cuda = None
    assert TorchSource(counters=counters).status().reason == "no_cuda"


def test_before_cuda_is_initialised_nothing_is_read(torch, source):
    for name in ("_cuda_getDeviceCount", "_cuda_hasPrimaryContext", "_cuda_memoryStats"):
        setattr(torch._C, name, None)
    assert source.status() == SourceStatus(armed=False, supported=False, reason="not_initialised")
    assert source.stats() == ()
    with pytest.raises(CaptureError, match="not_initialised"):
        source.read()


def test_armed_with_the_devices_that_are_used(torch, source):
    source.start()
    assert source.status() == SourceStatus(armed=True, supported=True)
    torch.allocators[0].alloc(1000)
    assert source.status().devices == (0,)
    source.stop()
    assert source.status().reason == "disabled"
    assert torch.allocators[0].mode is None


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_another_allocator_gives_device_metrics_only(torch, source, backend, caplog):
    torch.backend = backend

    def refuse(*args):
        raise RuntimeError(f"{backend} does not support this")

    torch._C._cuda_memoryStats = refuse
    torch._C._cuda_memorySnapshot = refuse
    source.start()
    assert source.status() == SourceStatus(True, False, "allocator_backend", (0,))
    (stats,) = source.stats()
    assert (stats.allocated_bytes, stats.device_used_bytes) == (0, 20 << 30)
    assert source.allocated() == {}
    assert torch.allocators[0].calls == []
    with pytest.raises(CaptureError, match="allocator_backend"):
        source.read()
    with pytest.raises(CaptureError, match="allocator_backend"):
        source.window(1, threading.Event())
    assert [r.message for r in caplog.records] == [
        f"allocator backend {backend} keeps no stacks: device metrics only"
    ]


def test_no_caching_gives_device_metrics_only(torch, counters):
    source = TorchSource(counters=counters, environ={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    source.start()
    assert source.status().reason == "no_caching"
    assert source.stats()[0].device_total_bytes == 80 << 30
    assert torch.allocators[0].calls == []
    source.stop()


def test_recording_that_can_not_be_had_is_a_reason_not_an_error(torch, source):
    torch._C._cuda_isHistoryEnabled = _raises(RuntimeError("driver too old"))
    source.start()
    assert source.status() == SourceStatus(armed=True, supported=False, reason="error")


def test_errors_of_torch_become_capture_errors(torch, source):
    source.start()
    torch.allocators[0].alloc(10)
    assert source.status().devices == (0,)
    torch._C._cuda_memoryStats = _raises(RuntimeError("device lost"))
    with pytest.raises(CaptureError, match="device lost"):
        source.stats()
    with pytest.raises(CaptureError, match="device lost"):
        source.read()
    assert source.allocated() == {}
    torch._C._cuda_hasPrimaryContext = _raises(RuntimeError("device lost"))
    assert source.status().reason == "error"


@pytest.mark.parametrize("name", ["_cuda_memoryStats", "_cuda_hasPrimaryContext"])
def test_whatever_torch_raises_never_reaches_a_step(torch, source, name):
    source.start()
    torch.allocators[0].alloc(10)
    assert source.allocated() == {0: 512}
    delattr(torch._C, name)
    assert source.allocated() == {}


def test_a_forked_child_reads_nothing_until_it_starts(torch, source):
    source.start()
    torch.allocators[0].alloc(1000)
    child = os.fork()
    if child == 0:
        silent = source.status().reason == "forked" and source.stats() == ()
        silent = silent and source.allocated() == {}
        source.start()
        own = source.status().armed and source.read().before[0].allocated_bytes == 1024
        os._exit(0 if silent and own else 1)
    assert os.waitpid(child, 0)[1] == 0


# read


def test_a_quiet_read_adds_up(torch, source):
    source.start()
    torch.allocators[0].alloc(1000)
    reading = source.read()
    assert reading.snapshot.totals(0).allocated_bytes == 1024
    assert reading.before[0].allocated_bytes == 1024
    assert not reading.raced(0)
    assert reading.snapshot.devices() == (0,)


def test_a_read_beside_an_allocation_is_raced(torch, source):
    source.start()
    torch.allocators[0].alloc(1000)
    torch.on_snapshot.append(lambda: torch.allocators[0].alloc(1))
    assert source.read().raced(0)


def test_stall_is_the_time_in_the_calls(torch, source, clock):
    source.start()
    torch.allocators[0].alloc(1000)
    torch.on_snapshot.append(lambda: clock.advance(0.25))
    assert source.read().stall_seconds == 0.25


def history(torch, seconds_per_event, clock):
    """A snapshot that copies events takes so long for each of them."""
    allocator = torch.allocators[0]

    def copy():
        if torch.snapshots[-1] != ((0, 0, False),):
            clock.advance(len(allocator.trace) * seconds_per_event)

    torch.on_snapshot.append(copy)
    return torch.cuda.memory._record_memory_history


def test_copying_the_jobs_events_is_done_once_not_at_each_read(torch, source, clock, caplog):
    source.start()
    allocator = torch.allocators[0]
    record = history(torch, 0.0625, clock)
    record("all")
    for _ in range(4):
        allocator.alloc(10)
    source.read()
    assert source.status().supported  # a quarter of a second is still borne
    allocator.alloc(10)
    assert source.read().snapshot.totals(0).allocated_bytes == 5 * 512
    status = source.status()
    if (0, 0, False) in [args[0] for args in torch.snapshots if args]:  # 2.11: no events, no copy
        assert status.supported
        assert [r.message for r in caplog.records if r.levelname == "WARNING"] == []
        return
    assert (status.supported, status.reason) == (False, "job_records_history")
    taken = len(torch.snapshots)
    why = (
        "the job records memory history, and this torch (before 2.11) copies all of it with each "
        "snapshot: no profiles until it stops recording"
    )
    for _ in range(2):
        with pytest.raises(CaptureError, match="no profiles until it stops") as caught:
            source.read()
        assert str(caught.value) == f"read: {why}"
    assert len(torch.snapshots) == taken
    assert source.allocated() == {0: 5 * 512}
    assert source.stats()[0].allocated_bytes == 5 * 512
    record(None)
    assert source.status().supported
    source.read()
    record("all")  # anew, and short again
    source.read()
    record(None)
    record("all")
    for _ in range(5):
        allocator.alloc(10)
    source.read()
    assert source.status().reason == "job_records_history"
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        f"{why} (a snapshot took 0.31 s)"
    ]


# blocks without a stack


def roots(reading):
    return {
        group.address: reading.stackless(0, group.address)
        for group in reading.snapshot.live_groups(0)
        if not group.frames
    }


@pytest.mark.usefixtures("engine")
def test_install_before_the_first_allocation_leaves_nothing_before_install(torch, source):
    source.start()
    backward = torch.allocators[0].alloc(100, frames=())
    torch.allocators[0].alloc(100)
    assert roots(source.read()) == {backward: "[backward]"}


def test_without_threads_of_the_engine_nothing_is_of_the_backward(torch, source):
    source.start()
    native = torch.allocators[0].alloc(100, frames=())
    assert not autograd_has_threads()
    names_its_threads = torch.__version__[:3] != "2.3"
    root = "[no Python frame]" if names_its_threads else "[backward]"
    assert roots(source.read()) == {native: root}


@pytest.mark.usefixtures("engine")
def test_the_threads_of_the_engine_are_seen_once_they_are_there():
    assert autograd_has_threads()


@pytest.mark.usefixtures("engine")
def test_what_was_allocated_while_recording_was_off_is_not_of_the_backward(torch, source):
    source.start()
    allocator = torch.allocators[0]
    allocator.record(None, 1, clear=False, skip=())  # past every Python function
    unrecorded = allocator.alloc(5000)
    assert roots(source.read()) == {unrecorded: "[no Python frame]"}
    backward = allocator.alloc(100, frames=())
    expected = {unrecorded: "[no Python frame]", backward: "[backward]"}
    assert roots(source.read()) == expected
    assert roots(source.read()) == expected
    allocator.free(unrecorded)
    source.read()
    allocator.next_address = unrecorded
    allocator.alloc(100, frames=())
    assert roots(source.read()) == {unrecorded: "[backward]", backward: "[backward]"}


@pytest.mark.usefixtures("engine")
def test_what_the_jobs_recording_left_without_a_stack_is_not_of_the_backward(torch, source):
    source.start()
    allocator = torch.allocators[0]
    torch.cuda.memory._record_memory_history("all", context=None)
    unrecorded = allocator.alloc(100, frames=())
    assert roots(source.read()) == {unrecorded: "[no Python frame]"}
    torch.cuda.memory._record_memory_history(None)
    backward = allocator.alloc(100, frames=())
    source.recorder.keep_on()
    assert roots(source.read()) == {unrecorded: "[no Python frame]", backward: "[no Python frame]"}
    later = allocator.alloc(100, frames=())
    assert roots(source.read())[later] == "[backward]"


def test_a_read_that_fails_does_not_lose_that_recording_was_off(torch, source):
    source.start()
    allocator = torch.allocators[0]
    allocator.record(None, 1, clear=False, skip=())
    unrecorded = allocator.alloc(5000)
    take, torch._C._cuda_memorySnapshot = torch._C._cuda_memorySnapshot, _raises(RuntimeError("x"))
    with pytest.raises(CaptureError):
        source.read()
    torch._C._cuda_memorySnapshot = take
    assert roots(source.read()) == {unrecorded: "[no Python frame]"}


def test_a_rule_given_out_does_not_change_with_the_next_read(torch, source):
    old = torch.allocators[0].alloc(100)
    source.start()
    reading = source.read()
    torch.allocators[0].free(old)
    source.read()
    assert reading.stackless(0, old) == "[allocated before install]"


def test_the_pass_over_old_blocks_is_sliced_and_counted(torch, counters, clock):
    allocator = torch.allocators[0]
    for _ in range(320):
        allocator.alloc(10)
    worked, slept = iter(range(10_000)), []
    # each look at the clock is a second later: a slice, at once used up, per 32 blocks
    pacer = Pacer(now=lambda: float(next(worked)), sleep=slept.append)
    source = TorchSource(counters=counters, clock=clock, pacer=pacer)
    torch.on_snapshot.append(lambda: clock.advance(0.5))
    source.start()
    assert slept == []  # the job's own thread waits for it in any case
    assert counters.get("exporter_stall_seconds") == 0.5
    reading = source.read()
    assert slept == [0.002] * 10
    assert reading.stall_seconds == 0.5 + 11
    source.stop()


@pytest.mark.usefixtures("engine")
def test_old_blocks_are_told_from_those_of_the_backward(torch, source):
    allocator = torch.allocators[0]
    old = allocator.alloc(100)
    source.start()
    backward = allocator.alloc(100, frames=())
    assert roots(source.read()) == {old: "[allocated before install]", backward: "[backward]"}


@pytest.mark.usefixtures("engine")
def test_an_old_address_that_is_given_out_again_is_old_no_longer(torch, source):
    allocator = torch.allocators[0]
    first, second, third = (allocator.alloc(100) for _ in range(3))
    source.start()
    allocator.free(first)
    source.read()
    allocator.next_address = first
    again = allocator.alloc(100, frames=())
    assert again == first
    allocator.free(second)
    allocator.next_address = second
    allocator.alloc(100)  # with a stack
    source.read()
    allocator.free(second)
    allocator.next_address = second
    allocator.alloc(100, frames=())
    assert roots(source.read()) == {
        first: "[backward]", second: "[backward]", third: "[allocated before install]",
    }  # fmt: skip


@pytest.mark.usefixtures("engine")
def test_under_the_jobs_settings_a_missing_stack_says_little(torch, source):
    torch.cuda.memory._record_memory_history("all")
    old = torch.allocators[0].alloc(100, frames=())
    source.start()
    later = torch.allocators[0].alloc(100, frames=())
    expected = {old: "[allocated before install]", later: "[no Python frame]"}
    assert roots(source.read()) == expected


# windows


def test_a_window_holds_only_its_own_events(torch, source, clock):
    source.start()
    allocator = torch.allocators[0]
    allocator.alloc(5000)

    def work():
        allocator.free(allocator.alloc(700))

    clock.on_wait.append(work)
    reading = source.window(0.1, threading.Event())
    groups = reading.snapshot.event_groups(0)
    assert [(g.objects, g.size_bytes) for g in groups] == [(2, 1400)]
    grown = (
        reading.after[0].requested_allocation_bytes - reading.before[0].requested_allocation_bytes
    )
    assert grown == 1400
    assert allocator.mode == "state"
    assert allocator.trace == []


def test_the_stall_of_a_window_is_all_but_the_wait(torch, source, clock):
    source.start()
    torch.allocators[0].alloc(1)
    torch.on_snapshot.append(lambda: clock.advance(0.25))
    begin = clock.seconds
    reading = source.window(0.0625, threading.Event())
    assert len(torch.snapshots) == 2  # is the trace somebody else's, and the window itself
    assert clock.seconds - begin == 0.5625
    assert reading.stall_seconds == 0.5


def test_the_stall_of_a_window_that_fails_is_counted(torch, source, clock, counters):
    source.start()
    torch.allocators[0].alloc(1)
    torch.on_snapshot.append(lambda: clock.advance(0.25))
    clock.on_wait.append(lambda: torch.cuda.memory._record_memory_history("all"))
    with pytest.raises(CaptureError, match="the job switched"):
        source.window(0.0625, threading.Event())
    assert counters.get("exporter_stall_seconds") == 0.5


@pytest.mark.usefixtures("engine")
def test_events_of_a_window_are_never_older_than_it(torch, source, clock):
    old = torch.allocators[0].alloc(100)
    source.start()

    def work():
        torch.allocators[0].free(old)
        torch.allocators[0].next_address = old
        torch.allocators[0].alloc(100, frames=())
        clock.on_wait.clear()

    clock.on_wait.append(work)
    reading = source.window(0.05, threading.Event())
    assert reading.stackless(0, old) == "[backward]"


def test_a_window_ends_early_when_the_events_are_many(torch, source, clock, counters):
    source.start()
    allocator = torch.allocators[0]
    clock.on_wait.append(lambda: [allocator.free(allocator.alloc(1)) for _ in range(10)])
    begin = clock.seconds
    source.window(60, threading.Event())
    per_tick = 10 if source.recorder.events_per_free == 0 else 30
    assert clock.seconds - begin == pytest.approx(0.05 * -(-80 // per_tick))
    assert counters.get("exporter_history_overflow") == 0


def test_a_burst_that_overflows_is_counted(torch, source, clock, counters):
    source.start()
    clock.on_wait.append(lambda: [torch.allocators[0].alloc(1) for _ in range(500)])
    reading = source.window(60, threading.Event())
    assert sum(g.objects for g in reading.snapshot.event_groups(0)) == 100
    assert counters.get("exporter_history_overflow") == 1


def test_stop_ends_a_window(torch, source, clock):
    source.start()
    torch.allocators[0].alloc(1)
    stop = threading.Event()
    stop.set()
    source.window(60, stop)
    assert clock.seconds == 0


def test_a_device_that_appears_in_a_window_counts_from_zero(torch, source, clock):
    source.start()
    torch.allocators[0].alloc(1)

    def second_device():
        torch.contexts = {0, 1}
        torch.allocators[1].alloc(300)

    clock.on_wait.append(second_device)
    reading = source.window(0.05, threading.Event())
    before = {s.device: s for s in reading.before}
    assert before[1].requested_allocation_bytes == 0
    assert [s.requested_allocation_bytes for s in reading.after] == [1, 300]


def test_a_job_that_starts_recording_in_a_window_keeps_its_events(torch, source, clock):
    source.start()
    record = torch.cuda.memory._record_memory_history

    def job():
        clock.on_wait.clear()
        record("all", max_entries=1000)
        torch.allocators[0].alloc(1)

    torch.allocators[0].alloc(1)
    clock.on_wait.append(job)
    with pytest.raises(CaptureError, match="the job switched memory history itself"):
        source.window(1, threading.Event())
    assert torch.allocators[0].mode == "all"
    assert len(torch.allocators[0].trace) >= 1


def test_one_window_at_a_time(torch, source, clock):
    source.start()
    torch.allocators[0].alloc(1)
    errors = []

    def second():
        clock.on_wait.clear()
        with pytest.raises(BusyError, match="another one is open") as caught:
            source.window(1, threading.Event())
        errors.append(caught.value)

    clock.on_wait.append(second)
    source.window(1, threading.Event())
    assert len(errors) == 1
    source.window(1, threading.Event())


def _raises(error):
    def call(*args):
        raise error

    return call
