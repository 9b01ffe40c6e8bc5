"""Recording and the job's own recording, on the C signatures of six versions of torch."""

from __future__ import annotations

import logging
import os
import threading

import pytest
from support import fake_torch

from gpumem_otel.capture.recorder import Recorder, known_arity, torch_version
from gpumem_otel.errors import BusyError, CaptureError

VERSIONS = sorted(fake_torch.ARITY, key=lambda v: int(v.split(".")[1]))

STATE = ("state", "state", "python", 1)
OFF = (None, "state", "python", 1)


@pytest.fixture(params=VERSIONS)
def torch(request):
    return fake_torch.make(request.param)


@pytest.fixture
def recorder(torch):
    recorder = Recorder()
    recorder.prepare(torch)
    yield recorder
    recorder.stop()


def calls(torch):
    return [call[:4] for call in torch.allocators[0].calls]


@pytest.mark.parametrize("documented", [True, False])
@pytest.mark.parametrize("version", VERSIONS)
def test_arity_is_found_from_docstring_or_version(version, documented):
    torch = fake_torch.make(version, documented=documented)
    found = known_arity(torch._C._cuda_record_memory_history, torch_version(torch))
    assert found == fake_torch.ARITY[version]


def test_the_docstring_wins_over_the_version():
    torch = fake_torch.make("2.15")
    assert known_arity(torch._C._cuda_record_memory_history, (2, 3)) == 10


@pytest.mark.parametrize(
    ("text", "version"), [("2.11.0+cu130", (2, 11)), ("2.3.1", (2, 3)), ("main", (0, 0))]
)
def test_versions(text, version):
    class Module:
        __version__ = text

    assert torch_version(Module) == version


def test_start_records_state_with_python_stacks_and_stop_ends_it(torch, recorder):
    original = recorder._patches[0].original
    recorder.start()
    assert calls(torch) == [STATE]
    recorder.stop()
    assert calls(torch) == [STATE, OFF]
    assert torch._C._cuda_record_memory_history is original


def test_full_argument_lists():
    torch = fake_torch.make("2.15")
    recorder = Recorder(stacks="all")
    recorder.prepare(torch)
    recorder.start()
    recorder.open_window(1000)
    recorder.close_window()
    recorder.stop()
    free = ["free_requested", "free_completed", "segment_alloc", "segment_free"]
    assert torch.allocators[0].calls == [
        ("state", "state", "all", 1, False, False, False, [], False, True),
        ("all", "alloc", "all", 1000, True, False, False, free, False, True),
        ("state", "state", "all", 1, True, False, False, [], False, True),
        (None, "state", "all", 1, False, False, False, [], False, True),
    ]


def test_pinned_memory_and_annotations_are_in_every_call_where_torch_knows_them():
    torch = fake_torch.make("2.15")
    recorder = Recorder(pinned=True, annotations=True)
    recorder.prepare(torch)
    assert recorder.records_pinned
    recorder.start()
    recorder.open_window(1000, frees=True)
    recorder.close_window()
    free = ["free_completed", "segment_alloc", "segment_free"]
    assert torch.allocators[0].calls == [
        ("state", "state", "python", 1, False, False, True, [], True, True),
        ("all", "alloc", "python", 1000, True, False, True, free, True, True),
        ("state", "state", "python", 1, True, False, True, [], True, True),
    ]
    recorder.stop()


@pytest.mark.parametrize("version", [v for v in VERSIONS if v != "2.15"])
def test_an_older_torch_is_told_no_more_than_it_knows(version):
    torch = fake_torch.make(version)
    recorder = Recorder(pinned=True, annotations=True)
    recorder.prepare(torch)
    assert not recorder.records_pinned
    recorder.start()
    recorder.open_window(1000, frees=True)
    recorder.close_window()
    recorder.stop()
    arity = fake_torch.ARITY[version]
    assert {len(call) for call in torch.allocators[0].calls} == {arity}
    if arity >= 7:
        assert all(call[6] is True for call in torch.allocators[0].calls)


def test_a_torch_newer_than_the_table_is_asked_in_python():
    torch = fake_torch.make("2.15")
    recorder = Recorder(pinned=True, annotations=True)
    recorder.prepare(torch)
    recorder._arity = 11
    asked = []
    torch.cuda.memory._record_memory_history = lambda **values: asked.append(values)
    recorder.start()
    assert asked == [
        {
            "enabled": "state", "context": "state", "stacks": "python", "max_entries": 1,
            "clear_history": False, "record_pinned_host_memory": True,
            "global_record_annotations": True,
        }
    ]  # fmt: skip


def test_frees_of_a_window_are_one_event_each_where_torch_can_skip_the_other(torch, recorder):
    recorder.start()
    allocator = torch.allocators[0]
    recorder.open_window(50, frees=True)
    frames = ({"name": "f", "filename": "/job/a.py", "line": 1},)
    allocator.free(allocator.alloc(200, frames))
    actions = [event["action"] for event in allocator.trace]
    assert actions[:2] == ["alloc", "free_requested"]
    assert len(actions) == 2 + (recorder.events_per_free == 2)
    assert recorder.close_window()


def test_a_window_clears_the_trace_on_both_ends(torch, recorder):
    recorder.start()
    allocator = torch.allocators[0]
    allocator.alloc(100)
    recorder.open_window(50)
    assert allocator.trace == []
    address = allocator.alloc(200)
    allocator.free(address)
    frees = recorder.events_per_free
    assert [e["action"] for e in allocator.trace] == (
        ["alloc"] if frees == 0 else ["alloc", "free_requested", "free_completed"]
    )
    assert recorder.close_window()
    assert allocator.trace == []
    assert allocator.mode == "state"


def test_older_torch_clears_by_switching_off_in_between():
    torch = fake_torch.make("2.7")
    recorder = Recorder()
    recorder.prepare(torch)
    recorder.start()
    recorder.open_window(50)
    recorder.close_window()
    recorder.stop()
    window = ("all", "alloc", "python", 50)
    assert calls(torch) == [STATE, OFF, window, OFF, STATE, OFF]


def test_a_second_window_is_refused(torch, recorder):
    recorder.start()
    recorder.open_window(50)
    with pytest.raises(BusyError, match="another one is open"):
        recorder.open_window(50)
    assert recorder.close_window()


def test_a_job_that_records_before_us_is_left_alone(torch):
    torch.cuda.memory._record_memory_history("all", max_entries=5)
    recorder = Recorder()
    recorder.prepare(torch)
    before = list(torch.allocators[0].calls)
    recorder.start()
    recorder.keep_on()
    with pytest.raises(CaptureError, match="the job records"):
        recorder.open_window(50)
    recorder.stop()
    assert torch.allocators[0].calls == before
    assert torch.allocators[0].mode == "all"


def test_a_job_that_records_after_us_gets_exactly_what_it_asked_for(torch, recorder):
    recorder.start()
    torch.cuda.memory._record_memory_history("all", "all", "all", 77)
    assert calls(torch)[-1] == ("all", "all", "all", 77)
    assert recorder.job_records
    with pytest.raises(CaptureError, match="the job records"):
        recorder.open_window(50)
    recorder.keep_on()
    torch.cuda.memory._record_memory_history("state", "state", "python", 9)
    recorder.stop()
    assert [call[0] for call in calls(torch)] == ["state", "all", "state"]


def test_after_the_jobs_none_stacks_are_recorded_again_and_it_is_said_once(torch, recorder, caplog):
    caplog.set_level(logging.INFO, "gpumem_otel")
    recorder.start()
    for _ in range(2):
        torch.cuda.memory._record_memory_history("all")
        torch.cuda.memory._record_memory_history(None)
        assert torch.allocators[0].mode == "state"
        assert not recorder.job_records
    assert [r.message for r in caplog.records] == [
        "the job switched memory history off: recording stacks of live memory again"
    ]


def test_the_old_boolean_form_is_seen_too(torch, recorder):
    recorder.start()
    torch.cuda.memory._record_memory_history(True)
    assert recorder.job_records
    torch.cuda.memory._record_memory_history(False)
    assert not recorder.job_records
    assert torch.allocators[0].mode == "state"


def test_a_job_that_records_during_a_window_keeps_its_mode(torch, recorder):
    recorder.start()
    recorder.open_window(50)
    torch.cuda.memory._record_memory_history("all", max_entries=7)
    assert not recorder.close_window()
    assert torch.allocators[0].mode == "all"
    assert torch.allocators[0].max_entries == 7


def test_the_jobs_own_error_reaches_the_job(torch, recorder):
    recorder.start()
    with pytest.raises(TypeError, match="incompatible"):
        torch._C._cuda_record_memory_history("all")
    assert not recorder.job_records


def test_a_longer_trace_than_ours_belongs_to_somebody_else(torch, recorder):
    recorder.start()
    allocator = torch.allocators[0]
    allocator.record("all", 100, clear=False, skip=())  # C++ code, past every Python function
    allocator.alloc(1)
    allocator.alloc(1)
    with pytest.raises(CaptureError, match="the job records"):
        recorder.open_window(50)
    assert len(allocator.trace) == 2


def test_recording_that_was_switched_off_past_us_is_switched_on_again(torch, recorder):
    recorder.start()
    torch.allocators[0].record(None, 1, clear=False, skip=())
    recorder.keep_on()
    assert torch.allocators[0].mode == "state"


def test_a_wrapper_on_top_of_ours_stays_and_ours_only_passes_on(torch, recorder):
    recorder.start()
    ours = torch._C._cuda_record_memory_history

    def theirs(*args):
        return ours(*args)

    torch._C._cuda_record_memory_history = theirs
    recorder.stop()
    assert torch._C._cuda_record_memory_history is theirs
    torch.cuda.memory._record_memory_history("all")
    torch.cuda.memory._record_memory_history(None)
    assert torch.allocators[0].mode is None
    assert not recorder.job_records


def test_a_signature_newer_than_the_table_goes_through_torchs_python_function():
    torch = fake_torch.make("2.15")
    inner = torch._C._cuda_record_memory_history

    def wider(*args):
        if len(args) != 11:
            raise TypeError("incompatible function arguments")
        inner(*args[:10])

    names = ", ".join(f"arg{i}: bool" for i in range(11))
    wider.__doc__ = f"_cuda_record_memory_history({names}) -> None"
    torch._C._cuda_record_memory_history = wider

    def python_level(enabled, context, stacks, max_entries, clear_history):
        torch._C._cuda_record_memory_history(
            enabled, context, stacks, max_entries, clear_history, False, False, [], False, True, 0
        )

    torch.cuda.memory._record_memory_history = python_level
    recorder = Recorder()
    recorder.prepare(torch)
    recorder.start()
    assert torch.allocators[0].mode == "state"
    assert not recorder.job_records
    recorder.stop()
    assert torch.allocators[0].mode is None


def test_a_torch_that_refuses_is_one_error():
    torch = fake_torch.make("2.15")

    def refuse(*args):
        raise RuntimeError("not supported by this allocator")

    torch._C._cuda_record_memory_history = refuse
    recorder = Recorder()
    recorder.prepare(torch)
    with pytest.raises(CaptureError, match="not supported by this allocator"):
        recorder.start()


def test_a_build_without_cuda_has_nothing_to_record():
    torch = fake_torch.make("2.15")
    del torch._C._cuda_record_memory_history
    recorder = Recorder()
    recorder.prepare(torch)
    with pytest.raises(CaptureError, match="no allocator history"):
        recorder.start()
    recorder.stop()


def test_snapshots_leave_events_out_where_torch_can(torch, recorder):
    recorder.start()
    torch.allocators[0].alloc(100)
    raw = recorder.snapshot(traces=False)
    assert [s["total_size"] for s in raw["segments"]] == [512]
    minor = int(torch.__version__.split(".")[1])
    assert torch.snapshots == [((0, 0, False),) if minor >= 11 else (None,) if minor >= 7 else ()]
    assert len(raw["device_traces"][0]) == (0 if minor >= 11 else 1)
    assert len(recorder.snapshot(traces=True)["device_traces"][0]) == 1


def test_an_unknown_version_asks_until_an_argument_is_taken():
    torch = fake_torch.make("2.8")
    torch.__version__ = "2.99"
    recorder = Recorder()
    recorder.prepare(torch)
    for _ in range(2):
        recorder.snapshot(traces=False)
    assert torch.snapshots == [(None,), (None,)]
    recorder.stop()


def test_a_snapshot_that_fails_is_one_error(torch, recorder):
    def broken(*args):
        raise RuntimeError("device lost")

    torch._C._cuda_memorySnapshot = broken
    with pytest.raises(CaptureError, match="device lost"):
        recorder.snapshot(traces=False)


def test_an_error_of_the_moment_changes_nothing_for_the_next_snapshot(torch, recorder):
    recorder.snapshot(traces=False)
    take = torch._C._cuda_memorySnapshot

    def broken(*args):
        raise RuntimeError("device busy")

    torch._C._cuda_memorySnapshot = broken
    with pytest.raises(CaptureError, match="device busy"):
        recorder.snapshot(traces=False)
    torch._C._cuda_memorySnapshot = take
    recorder.snapshot(traces=False)
    assert len(torch.snapshots) == 2
    assert torch.snapshots[0] == torch.snapshots[1]


def test_threads_that_switch_at_once_leave_one_consistent_mode(torch, recorder):
    recorder.start()
    barrier = threading.Barrier(2)

    def job():
        barrier.wait(5)
        for _ in range(200):
            torch.cuda.memory._record_memory_history("all")
            torch.cuda.memory._record_memory_history(None)

    thread = threading.Thread(target=job)
    thread.start()
    barrier.wait(5)
    for _ in range(200):
        try:
            recorder.open_window(5)
        except CaptureError:
            continue
        recorder.close_window()
    thread.join()
    assert torch.allocators[0].mode == "state"
    assert not recorder.job_records


def test_a_forked_child_starts_anew(torch, recorder):
    recorder.start()
    seen = list(torch.allocators[0].calls)
    child = os.fork()
    if child == 0:
        # past the hooks until it is started here: no lock of the parent, no mode of ours
        torch.cuda.memory._record_memory_history("all")
        ok = torch.allocators[0].mode == "all" and not recorder.job_records
        torch.allocators[0].record(None, 1, clear=False, skip=())
        recorder.forget_parent()
        recorder.start()
        ok = ok and torch.allocators[0].mode == "state"
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.allocators[0].calls == seen
