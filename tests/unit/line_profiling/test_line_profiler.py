"""The line profiler over real code: kinds of functions, threads, devices, and no residue."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from support.profiled import KIB, allocated, decorated, row

from gpumem_otel.api.line_profiler import LineProfiler
from gpumem_otel.line_profiling.peaks import TorchLineReader
from gpumem_otel.line_profiling.profiler import LineRecorder


def test_a_function_in_a_with_block(job):
    functions = job.functions()
    with LineProfiler(functions["plain"]) as lines:
        assert functions["plain"](2) == 2
        assert functions["plain"](1) == 1
    functions["plain"](9)

    assert allocated(lines) == {"plain": {1: 3 * KIB, 2: 16 * KIB}}
    hits, use = row(lines, "plain", 2)
    assert (hits, use.net_bytes, use.peak_rise_bytes) == (2, 0, 8 * KIB)
    assert (use.after_bytes, use.peak_bytes) == (3 * KIB, 11 * KIB)
    assert row(lines, "plain", 0)[0] == 2
    assert lines.display().functions[0].calls == 2


def test_a_function_in_one_line_has_one_row_that_counts_its_calls(memory):
    blocks = []
    once = lambda: blocks.append(memory.alloc(KIB))  # noqa: E731
    with LineProfiler(once) as lines:
        for _ in range(3):
            once()
    (function,) = lines.display().functions
    (row,) = function.rows
    assert function.calls == row.hits == 3
    assert row.devices[0].allocation_bytes == 3 * KIB


def test_nested_calls_count_for_the_line_that_called(job):
    functions = job.functions()
    with LineProfiler(functions["plain"], functions["calls_plain"]) as lines:
        functions["calls_plain"]()
    assert allocated(lines) == {
        "plain": {1: 3 * KIB, 2: 16 * KIB},
        "calls_plain": {1: 9 * KIB, 2: 10 * KIB},
    }
    assert row(lines, "calls_plain", 1)[1].peak_rise_bytes == 9 * KIB
    (profiled,) = lines.display().profiles
    assert profiled.total_bytes == 19 * KIB
    leaf = max(profiled.samples, key=lambda sample: sample.size_bytes).frames
    assert [frame.name.rpartition(".")[2].split(":")[0] for frame in leaf] == [
        "plain", "calls_plain",
    ]  # fmt: skip


def test_recursion_counts_each_level(job):
    recursive = job.functions()["recursive"]
    with LineProfiler(recursive) as lines:
        recursive(3)
    assert allocated(lines, "recursive") == {1: 4 * KIB, 3: (3 + 2 + 1) * KIB}
    assert row(lines, "recursive", 3)[0] == 3
    assert sum(p.total_bytes for p in lines.display().profiles) == 4 * KIB


def test_an_exception_goes_through_and_closes_its_lines(job):
    raises, plain = job.functions()["raises"], job.functions()["plain"]
    with LineProfiler(raises, plain) as lines:
        with pytest.raises(KeyError, match="lost") as caught:
            raises()
        plain()
    assert allocated(lines) == {"raises": {1: KIB}, "plain": {1: KIB, 2: 8 * KIB}}
    assert caught.traceback[-1].name == "raises"
    (own,) = lines.display().profiles
    assert {len(sample.frames) for sample in own.samples} == {1}, "plain was not called by raises"


def test_only_its_own_stretches_count_for_a_generator(job):
    generator = job.functions()["generator"]
    with LineProfiler(generator) as lines:
        items = generator()
        assert next(items) == 1
        job.hold(100 * KIB)
        with pytest.raises(StopIteration, match="end"):
            items.send(2)
    assert allocated(lines, "generator") == {1: KIB, 3: 2 * KIB}
    assert lines.display().functions[0].calls == 1


def test_a_generator_that_is_closed_or_thrown_into_is_left(job):
    generator, plain = job.functions()["generator"], job.functions()["plain"]
    with LineProfiler(generator, plain) as lines:
        closed, thrown = generator(), generator()
        next(closed), next(thrown)
        closed.close()
        with pytest.raises(ZeroDivisionError):
            thrown.throw(ZeroDivisionError())
        plain()
    assert allocated(lines) == {"generator": {1: 2 * KIB}, "plain": {1: KIB, 2: 8 * KIB}}
    assert {len(s.frames) for p in lines.display().profiles for s in p.samples} == {1}


def test_a_thread_started_in_a_with_block_is_followed(job):
    plain = job.functions()["plain"]
    with LineProfiler(plain) as lines:
        thread = threading.Thread(target=plain)
        thread.start()
        thread.join()
    assert allocated(lines) == {"plain": {1: KIB, 2: 8 * KIB}}


def test_two_profilers_at_once_see_the_same_and_the_job_its_own_peak(job, torch):
    plain = job.functions()["plain"]
    job.memory.alloc(64 * KIB).free()
    function, lasting = decorated(plain)
    with LineProfiler(plain) as lines:
        function(1)
    for profiler in (lines, lasting):
        assert allocated(profiler) == {"plain": {1: KIB, 2: 8 * KIB}}
        assert row(profiler, "plain", 2)[1].peak_bytes == 9 * KIB
    stats = torch._C._cuda_memoryStats(0)
    assert stats["allocated_bytes"]["all"]["peak"] == 64 * KIB


def test_all_devices_are_read_at_once(job):
    memory = job.memory

    def both():
        memory.alloc(KIB, device=0)
        memory.alloc(2 * KIB, device=1)

    with LineProfiler(both) as lines:
        both()
    assert allocated(lines, "both", device=0) == {1: KIB}
    assert allocated(lines, "both", device=1) == {2: 2 * KIB}
    assert [p.device for p in lines.display().profiles] == [0, 1]


def test_a_reader_that_fails_ends_the_profile_and_not_the_job(job, caplog):
    class Failing:
        def read(self):
            raise RuntimeError("driver gone")

        def close(self):
            pass

    plain = job.functions()["plain"]
    with LineProfiler(plain, reader=lambda _: Failing()) as lines:
        assert plain(1) == 1
        assert plain(2) == 2
    assert lines.recorder.failure == "driver gone"
    assert not lines.recorder.on
    assert [r.getMessage() for r in caplog.records] == [
        "line profiling has stopped, the job goes on: driver gone"
    ]


def test_the_same_function_twice_is_one(job):
    plain = job.functions()["plain"]
    with LineProfiler(plain, plain) as lines:
        plain(1)
    assert len(lines.display().functions) == 1
    assert allocated(lines) == {"plain": {1: KIB, 2: 8 * KIB}}


def test_more_functions_than_are_followed_are_left_alone(job, monkeypatch, caplog):
    monkeypatch.setattr("gpumem_otel.line_profiling.profiler.MAX_FUNCTIONS", 1)
    functions = job.functions()
    recorder = LineRecorder(reader=partial(TorchLineReader, find_torch=lambda: None))
    assert recorder.add(functions["plain"]) == 0
    assert recorder.add(functions["raises"]) is None
    assert "raises is not profiled: 1 functions are" in caplog.text
