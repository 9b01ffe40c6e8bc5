"""The line profiler as a decorator: what it decorates keeps its kind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from functools import partial

import pytest
from support.profiled import KIB, allocated, decorated, row

from gpumem_otel.api.line_profiler import LineProfiler, line_profiler, profile, profile_every
from gpumem_otel.errors import ConfigError


def test_decorated_coroutines_that_interleave_are_counted_apart(job):
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
    assert lines.recorder._accounts.open_threads() == ()


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


def test_a_decorated_generator_passes_everything_on(job):
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
