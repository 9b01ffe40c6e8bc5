"""The two ways in which Python reports lines, together with other tools that use them."""

from __future__ import annotations

import bdb
import contextlib
import functools
import sys
import threading

import pytest
from support.profiled import KIB, MONITORING, allocated, decorated

from gpumem_otel.api.line_profiler import LineProfiler, line_profiler, profile
from gpumem_otel.line_profiling import tracing

TRACING = pytest.mark.skipif(MONITORING, reason="this Python has sys.monitoring")
MONITORED = pytest.mark.skipif(not MONITORING, reason="this Python has no sys.monitoring")


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
    mine = [tool for tool in tracing._TOOL_IDS if sys.monitoring.get_tool(tool) is None]
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
    """Records every line, as a debugger that steps does."""

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
        together = run(Debugger(names))
    assert len(alone) == 8
    assert together == alone
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
    together = run([], calls, generator)
    assert {event for _, event, _ in alone} >= {"call", "line", "return"}
    if not MONITORING:  # the wrappers have the names of what they wrap
        wrapper_lines = {line for _, event, line in together} - {line for _, event, line in alone}
        together = [event for event in together if event[2] not in wrapper_lines]
    assert together == alone
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
    assert lines.recorder._accounts.open_threads() == ()
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
    assert lines.recorder._accounts.open_threads() == ()


def test_a_finalizer_that_runs_within_a_reading_blocks_no_thread(job, memory, torch):
    """As if the collector ran: profiled code inside a read of the allocator, in two threads."""
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
    """As the C tracer of coverage does with every call."""
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
