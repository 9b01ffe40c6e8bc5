"""Blocking calls on daemon threads."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest

from gpumem_otel.serve.threads import RequestThreads


def soon() -> float:
    return time.monotonic() + 30


def test_a_call_runs_on_a_daemon_thread_of_its_own():
    workers = RequestThreads()
    thread = asyncio.run(_awaited(workers, threading.current_thread))
    assert thread.daemon
    assert thread is not threading.current_thread()
    assert workers.join(soon())
    assert not thread.is_alive()


async def _awaited(workers, call):
    return await workers.start(call)


def test_exceptions_arrive():
    def broken():
        raise KeyError("x")

    workers = RequestThreads()
    with pytest.raises(KeyError):
        asyncio.run(_awaited(workers, broken))


@pytest.mark.parametrize("kind", [SystemExit, StopIteration, KeyboardInterrupt])
def test_exceptions_that_a_future_does_not_take(kind):
    def broken():
        raise kind

    with pytest.raises(RuntimeError, match=f"^{kind.__name__} in a request$"):
        asyncio.run(_awaited(RequestThreads(), broken))


def test_stop_sets_the_events_of_running_calls_only():
    async def scenario():
        workers = RequestThreads()
        first, second = threading.Event(), threading.Event()
        await workers.start(lambda: None, first)
        waiting = workers.start(lambda: second.wait(30), second)
        workers.stop()
        assert await waiting
        assert not first.is_set()
        with pytest.raises(RuntimeError, match="the listener stops"):
            workers.start(lambda: None)
        return workers

    assert asyncio.run(scenario()).join(soon())


def test_a_call_that_outlives_its_loop_ends_quietly():
    release = threading.Event()
    workers = RequestThreads()

    async def scenario():
        workers.start(lambda: release.wait(30))

    asyncio.run(scenario())
    assert not workers.join(time.monotonic())
    release.set()
    assert workers.join(soon())


def test_a_failed_call_leaves_no_cycle():
    """Training jobs switch the garbage collector off."""

    class MarkedError(Exception):
        pass

    seen = []

    def broken():
        error = MarkedError()
        seen.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    async def scenario(workers):
        future = workers.start(broken)
        await asyncio.wait({future})
        future.exception()

    gc.collect()
    gc.disable()
    try:
        workers = RequestThreads()
        asyncio.run(scenario(workers))
        assert workers.join(soon())
        assert seen[0]() is None
    finally:
        gc.enable()
