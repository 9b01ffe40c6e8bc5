"""The line profiler over real code: kinds of functions, threads, other tracers, and no residue."""

from __future__ import annotations

import asyncio
import bdb
import contextlib
import functools
import inspect
import sys
import threading
from functools import partial

import pytest
from support.line_memory import Memory
from support.profiled import KIB, Job

from gpumem_otel import profiling
from gpumem_otel.capture import linehooks
from gpumem_otel.capture.linepeaks import TorchLineReader
from gpumem_otel.capture.lines import LineRecorder
from gpumem_otel.errors import ConfigError
from gpumem_otel.profiling import LineProfiler, line_profiler, profile, profile_every

MONITORING = hasattr(sys, "monitoring")
TRACING = pytest.mark.skipif(MONITORING, reason="this Python has sys.monitoring")
MONITORED = pytest.mark.skipif(not MONITORING, reason="this Python has no sys.monitoring")


@pytest.fixture
def memory():
    return Memory(devices=2)


@pytest.fixture
def job(memory):
    return Job(memory)


@pytest.fixture(autouse=True)
def torch(memory, monkeypatch):
    """A torch over the memory, a profiling state of the test's own, and nothing left behind."""
    fake = memory.torch()
    before = dict(vars(fake._C))
    state = profiling._State()
    monkeypatch.setattr(profiling, "_STATE", state)
    monkeypatch.setattr(profiling, "publish", lambda recorder: None)
    monkeypatch.setattr(profiling.atexit, "register", lambda function: None)
    monkeypatch.setitem(sys.modules, "torch", fake)
    trace = sys.gettrace()
    yield fake
    for profiler in state.profilers.values():
        profiler.disable()
    assert sys.gettrace() is trace
    assert threading.gettrace() is None
    if MONITORING:
        assert "gpumem_otel" not in [sys.monitoring.get_tool(tool) for tool in range(6)]
    fake._C._cuda_resetPeakMemoryStats(0), fake._C._cuda_resetPeakMemoryStats(1)
    assert vars(fake._C) == before


def allocated(profiler, name=None, device=0):
    """Function -> {line from its first: bytes allocated}, of the lines that allocated."""
    found = {}
    for function in profiler.display().functions:
        rows = {
            row.line - function.first_line: row.devices[device].allocation_bytes
            for row in function.rows
            if device in row.devices and row.devices[device].allocation_bytes
        }
        if function.rows:
            found[function.name.rpartition(".")[2]] = rows
    return found if name is None else found.get(name)


def row(profiler, name, line):
    """(hits, use on device 0) of a line, counted from the function's first."""
    (function,) = (f for f in profiler.display().functions if f.name.endswith(name))
    (found,) = (r for r in function.rows if r.line - function.first_line == line)
    return found.hits, found.devices[0]


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


def test_a_generator_is_charged_for_its_own_stretches_only(job):
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


def decorated(function):
    """`@profile` on a function of the job, its profiler beside it."""
    return profile(show=False)(function), line_profiler()


def test_decorated_coroutines_that_interleave_are_told_apart(job):
    coroutine, lines = decorated(job.functions()["coroutine"])
    assert inspect.iscoroutinefunction(coroutine)

    async def main():
        return await asyncio.gather(
            *(coroutine(partial(asyncio.sleep, 0)) for _ in range(3)), other()
        )

    async def other():
        for _ in range(2):
            job.hold(100 * KIB)
            await asyncio.sleep(0)

    assert asyncio.run(main())[:3] == ["done"] * 3
    assert allocated(lines, "coroutine") == {1: 3 * KIB, 3: 6 * KIB}
    assert lines.display().functions[0].calls == 3


def test_a_cancelled_coroutine_is_left(job):
    coroutine, lines = decorated(job.functions()["coroutine"])

    async def main():
        task = asyncio.ensure_future(coroutine(asyncio.Event().wait))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert allocated(lines, "coroutine") == {1: KIB}
    assert lines.recorder._books.open_threads() == ()


def test_a_decorated_asynchronous_generator(job):
    stream, lines = decorated(job.functions()["stream"])
    assert inspect.isasyncgenfunction(stream)

    async def main():
        pause = partial(asyncio.sleep, 0)
        whole = [item async for item in stream(pause)]
        async with contextlib.aclosing(stream(pause)) as broken:
            async for _ in broken:
                break
        return whole

    assert asyncio.run(main()) == [1, 2]
    assert allocated(lines, "stream") == {1: 2 * KIB, 4: 2 * KIB}


def test_a_decorated_generator_hands_everything_on(job):
    generator, lines = decorated(job.functions()["generator"])
    assert inspect.isgeneratorfunction(generator)

    def outer():
        return (yield from generator())

    items = outer()
    assert next(items) == 1
    job.hold(100 * KIB)
    with pytest.raises(StopIteration, match="end"):
        items.send(3)
    thrown = generator()
    next(thrown)
    with pytest.raises(ZeroDivisionError):
        thrown.throw(ZeroDivisionError)
    assert allocated(lines, "generator") == {1: 2 * KIB, 3: 3 * KIB}


def test_a_decorated_class_keeps_the_kinds_of_its_members(job):
    net_class = profile(show=False)(job.make_class())
    lines = line_profiler()
    net = net_class()
    assert (net.forward(2), net_class.helper(), net.helper()) == (2, "static", "static")
    assert isinstance(net_class.build(), net_class)
    assert (net.size, net.table, net.table) == (6, 7, 7)
    net.size = 8
    assert isinstance(vars(net_class)["helper"], staticmethod)
    assert isinstance(vars(net_class)["build"], classmethod)
    assert isinstance(vars(net_class)["size"], property)
    assert net_class.scale == 3
    sums = {}
    for function in lines.display().functions:
        sums.setdefault(function.name.rpartition(".")[2], []).append(
            sum(
                use.allocation_bytes
                for line in function.rows
                for device, use in line.devices.items()
                if device == 0
            )
            // KIB
        )
    assert sums == {
        "__init__": [2], "forward": [2], "helper": [8], "build": [6], "size": [6, 8], "table": [7],
    }  # fmt: skip


@pytest.mark.parametrize("kind", [staticmethod, classmethod, property])
def test_it_stands_above_other_decorators_too(job, kind):
    function = job.functions()["plain"]

    class Holder:
        member = profile(show=False)(kind(lambda *_: function()))

    value = Holder().member
    assert isinstance(vars(Holder)["member"], kind)
    assert (value if kind is property else value()) == 1
    (shown,) = line_profiler().display().functions
    assert shown.calls == 1


def test_below_a_wrapper_the_lines_of_the_function_itself_are_followed(job):
    plain = job.functions()["plain"]

    @functools.wraps(plain)
    def no_grad(*args):
        return plain(*args)

    function, lines = decorated(no_grad)
    function(1)
    assert allocated(lines) == {"plain": {1: KIB, 2: 8 * KIB}}


def test_every_thread_that_calls_a_decorated_function_is_followed(job):
    function, lines = decorated(job.functions()["plain"])
    ready, go = threading.Barrier(3), threading.Event()

    def work():
        ready.wait(30)
        assert go.wait(30)
        function(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    ready.wait(30)
    go.set()
    for thread in threads:
        thread.join()
    assert lines.display().functions[0].calls == 2
    assert row(lines, "plain", 1)[0] == 2
    assert row(lines, "plain", 1)[1].net_bytes >= 2 * KIB


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
        "lines are profiled no more, the job goes on: driver gone"
    ]


def test_off_is_off(job, memory):
    function, lines = decorated(job.functions()["plain"])
    function(1)
    lines.disable()
    reads = memory.reads
    function(1)
    assert memory.reads == reads
    assert lines.display().functions[0].calls == 1
    assert profile(enable=False)(function) is function
    assert profile_every(2, enable=False)(function) is function
    lines.enable()
    function(1)
    assert lines.display().functions[0].calls == 2
    lines.clear()
    assert str(lines.display()).startswith("no line was profiled")


def test_what_has_no_python_code_is_refused_by_name():
    with pytest.raises(ConfigError, match="built-in function len"):
        profile(len)
    with pytest.raises(ConfigError, match="has no Python code"):
        LineProfiler(3)


def test_the_same_function_twice_is_one(job):
    plain = job.functions()["plain"]
    with LineProfiler(plain, plain) as lines:
        plain(1)
    assert len(lines.display().functions) == 1
    assert allocated(lines) == {"plain": {1: KIB, 2: 8 * KIB}}


def test_more_functions_than_are_followed_are_left_alone(job, monkeypatch, caplog):
    monkeypatch.setattr("gpumem_otel.capture.lines.MAX_FUNCTIONS", 1)
    functions = job.functions()
    recorder = LineRecorder(reader=partial(TorchLineReader, find_torch=lambda: None))
    assert recorder.add(functions["plain"]) == 0
    assert recorder.add(functions["raises"]) is None
    assert "raises is not profiled: 1 functions are" in caplog.text


# the two ways to be told ---------------------------------------------------------------------


@MONITORED
def test_the_function_itself_is_returned_and_only_its_code_has_events(job):
    plain = job.functions()["plain"]
    function, lines = decorated(plain)
    assert function is plain
    tool = lines.recorder._hook._tool
    assert sys.monitoring.get_tool(tool) == "gpumem_otel"
    assert sys.monitoring.get_local_events(tool, plain.__code__)
    events = sys.monitoring.events
    assert sys.monitoring.get_events(tool) == events.PY_THROW | events.PY_UNWIND
    assert sys.monitoring.get_local_events(tool, job.hold.__func__.__code__) == 0
    assert sys.gettrace() is None
    lines.disable()
    assert sys.monitoring.get_tool(tool) is None


@MONITORED
def test_without_a_free_tool_id_the_job_goes_on(job, caplog):
    mine = [tool for tool in linehooks._TOOL_IDS if sys.monitoring.get_tool(tool) is None]
    for tool in mine:
        sys.monitoring.use_tool_id(tool, f"other{tool}")
    try:
        plain = job.functions()["plain"]
        with LineProfiler(plain) as lines:
            assert plain(1) == 1
    finally:
        for tool in mine:
            sys.monitoring.free_tool_id(tool)
    assert lines.recorder.failure == "every tool id of sys.monitoring is taken"
    assert "every tool id of sys.monitoring is taken" in caplog.text
    assert allocated(lines) == {}


@MONITORED
def test_another_tool_on_the_same_code_goes_on(job):
    plain, seen = job.functions()["plain"], []
    events = sys.monitoring.events
    sys.monitoring.use_tool_id(1, "coverage")
    sys.monitoring.register_callback(1, events.LINE, lambda code, line: seen.append(line))
    sys.monitoring.set_local_events(1, plain.__code__, events.LINE)
    try:
        with LineProfiler(plain) as lines:
            plain(1)
        plain(1)
    finally:
        sys.monitoring.set_local_events(1, plain.__code__, 0)
        sys.monitoring.free_tool_id(1)
    first = plain.__code__.co_firstlineno
    assert seen == [first + 1, first + 2, first + 3] * 2
    assert allocated(lines) == {"plain": {1: KIB, 2: 8 * KIB}}


@TRACING
def test_threads_are_traced_only_while_a_profiled_function_runs(job):
    plain = job.functions()["plain"]
    seen = []
    wrapped = functools.wraps(plain)(lambda: (seen.append(sys.gettrace()), plain())[1])
    function, lines = decorated(wrapped)
    before = sys.gettrace()
    function()
    assert sys.gettrace() is before
    assert seen == [lines.recorder._hook.entry]


class Debugger(bdb.Bdb):
    """Writes down every line it is shown, as a debugger that steps does."""

    def __init__(self, names):
        super().__init__()
        self.names, self.lines = names, []

    def user_line(self, frame):
        if frame.f_code.co_name in self.names:
            self.lines.append((frame.f_code.co_name, frame.f_lineno))
        self.set_step()


def test_a_debugger_that_steps_sees_every_line_and_so_do_we(job):
    functions = job.functions()
    names = {"plain", "calls_plain"}

    def run(debugger):
        debugger.runcall(functions["calls_plain"])
        return debugger.lines

    alone = run(Debugger(names))
    with LineProfiler(functions["plain"], functions["calls_plain"]) as lines:
        beside = run(Debugger(names))
    assert len(alone) == 8
    assert beside == alone
    decorated_calls, lasting = decorated(functions["calls_plain"])
    lasting.add_function(functions["plain"])
    functions["calls_plain"] = decorated_calls
    assert run(Debugger(names)) == alone
    assert allocated(lasting, "calls_plain") == {1: 9 * KIB, 2: 10 * KIB}
    if MONITORING:  # before, a debugger that comes later takes the with block's place
        assert allocated(lines, "calls_plain") == {1: 9 * KIB, 2: 10 * KIB}


def test_a_tracer_that_was_there_is_called_as_if_alone_and_is_back_afterwards(job):
    functions = job.functions()

    def trace_into(events):
        def trace(frame, event, arg):
            if frame.f_code.co_name in {"calls_plain", "plain", "hold", "generator"}:
                events.append((frame.f_code.co_name, event, frame.f_lineno))
            return trace

        return trace

    def run(events, calls, generator):
        before = sys.gettrace()
        trace = trace_into(events)
        sys.settrace(trace)
        try:
            calls()
            list_of = generator()
            next(list_of)
            with contextlib.suppress(StopIteration):
                list_of.send(1)
            assert sys.gettrace() is trace
        finally:
            sys.settrace(before)
        return events

    alone = run([], functions["calls_plain"], functions["generator"])
    profiler = line_profiler()
    calls, _ = decorated(functions["calls_plain"])
    generator, _ = decorated(functions["generator"])
    beside = run([], calls, generator)
    assert {event for _, event, _ in alone} >= {"call", "line", "return"}
    if not MONITORING:  # the wrappers have the names of what they wrap
        wrapper_lines = {line for _, event, line in beside} - {line for _, event, line in alone}
        beside = [event for event in beside if event[2] not in wrapper_lines]
    assert beside == alone
    assert allocated(profiler, "calls_plain") == {1: 9 * KIB, 2: 10 * KIB}


def test_a_tracer_that_a_profiled_function_sets_stays(job):
    plain = job.functions()["plain"]
    seen = []

    def later(frame, event, arg):
        seen.append(event)
        return later

    def starts_debugger():
        sys.settrace(later)
        plain(1)

    function, lines = decorated(starts_debugger)
    before = sys.gettrace()
    try:
        function()
        assert sys.gettrace() is later
    finally:
        sys.settrace(before)
    assert "call" in seen
    assert lines.recorder._books.open_threads() == ()
    assert lines.display().functions[0].calls == 1


@TRACING
def test_a_tracer_that_raises_is_dealt_with_by_python_as_without_us(job):
    plain = job.functions()["plain"]

    def quits(frame, event, arg):
        if frame.f_code.co_name == "plain" and event == "line":
            raise bdb.BdbQuit
        return quits

    function, lines = decorated(plain)
    before = sys.gettrace()
    sys.settrace(quits)
    try:
        with pytest.raises(bdb.BdbQuit):
            function(1)
    finally:
        sys.settrace(before)
    assert lines.recorder._books.open_threads() == ()


def test_a_finalizer_that_runs_within_a_reading_holds_up_nobody(job, memory, torch):
    """As if the collector ran: profiled code inside the allocator's answer, in two threads."""
    function, lines = decorated(job.functions()["plain"])
    inside, raw, together = threading.local(), memory.stats, threading.Barrier(2)

    def stats(device):
        if not getattr(inside, "now", False):
            inside.now = True
            function(1)
            inside.now = False
        return raw(device)

    torch._C._cuda_memoryStats = stats
    failed = []

    def work():
        together.wait(30)
        try:
            for _ in range(50):
                torch._C._cuda_memoryStats(0)
                function(1)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "two locks taken in either order"
    assert failed == []
    lines.disable()
    torch._C._cuda_resetPeakMemoryStats(0), torch._C._cuda_resetPeakMemoryStats(1)
    torch._C._cuda_memoryStats = memory.stats


@TRACING
def test_a_tracer_that_puts_itself_back_in_place_hides_nothing_and_is_put_back_last(job):
    """As coverage's C tracer does with every call it is told of."""
    functions = job.functions()
    seen = []

    def trace(frame, event, arg):
        if frame.f_code.co_name in {"plain", "calls_plain"}:
            seen.append((frame.f_code.co_name, event))
        if event == "call":
            sys.settrace(trace)
        return trace

    profiler = line_profiler()
    plain, _ = decorated(functions["plain"])
    profiler.add_function(functions["calls_plain"])
    calls = profile(show=False)(functions["calls_plain"])
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        calls()
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert allocated(profiler) == {
        "plain": {1: 3 * KIB, 2: 16 * KIB},
        "calls_plain": {1: 9 * KIB, 2: 10 * KIB},
    }
    assert plain is not functions["plain"]
    assert [event for event in seen if event[1] == "call"].count(("plain", "call")) == 2
