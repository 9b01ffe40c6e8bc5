"""Which other thread uses the GPU: by what it does now, and by the memory that it holds."""

from __future__ import annotations

import queue
import sys
import threading
import types

import pytest

from gpumem_otel.capture.otherthreads import who_else


@pytest.fixture
def torch_module(monkeypatch):
    """A module that knows torch, whose functions work or wait as told."""
    torch = types.ModuleType("torch")
    module = types.ModuleType("loader")
    module.torch, module.threading, module.queue = torch, threading, queue
    code = compile(
        "def prefetch(box, filled):\n"
        "    filled.set()\n"
        "    box.get()\n"
        "def spin(end, begun):\n"
        "    begun.set()\n"
        "    while not end:\n"
        "        pass\n",
        "/job/loader.py",
        "exec",
    )
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, "loader", module)
    return module


def block(*frames, state="active_allocated"):
    """Leaf first, as torch writes it."""
    named = [{"filename": file, "name": name, "line": 1} for file, name in frames]
    return {"size": 512, "state": state, "frames": named, "address": 1}


IN_THREAD = (
    ("/usr/lib/python3.11/threading.py", "run"),
    ("/usr/lib/python3.11/threading.py", "_bootstrap_inner"),
    ("/usr/lib/python3.11/threading.py", "_bootstrap"),
)


@pytest.fixture
def prefetcher(torch_module):
    box, filled = queue.Queue(), threading.Event()
    thread = threading.Thread(target=torch_module.prefetch, args=(box, filled), name="prefetch")
    thread.start()
    assert filled.wait(10)
    yield thread
    box.put(None)
    thread.join()


def segment(*blocks):
    return [{"blocks": list(blocks)}]


def test_a_thread_that_waits_and_holds_memory_is_named(prefetcher):
    held = segment(block(("/job/loader.py", "copy"), ("/job/loader.py", "prefetch"), *IN_THREAD))
    who = who_else(lambda: held, threading.current_thread(), ())
    assert who == "thread 'prefetch' holds memory on the device (prefetch)"


def test_one_that_is_registered_is_not(prefetcher):
    held = segment(block(("/job/loader.py", "prefetch"), *IN_THREAD))
    assert who_else(lambda: held, threading.current_thread(), {prefetcher.ident}) == ""


def test_one_that_waits_and_holds_none_is_not(prefetcher):
    held = segment(
        block(("/job/train.py", "step"), ("/job/train.py", "<module>")),
        block(("/job/loader.py", "prefetch"), *IN_THREAD, state="inactive"),
        block(("/job/other.py", "gone"), *IN_THREAD),
        block(),
    )
    assert who_else(lambda: held, threading.current_thread(), ()) == ""


def test_a_thread_at_work_is_named_with_its_place(torch_module):
    end, begun = [], threading.Event()
    thread = threading.Thread(target=torch_module.spin, args=(end, begun), name="average")
    thread.start()
    try:
        assert begun.wait(10)
        who = who_else(tuple, threading.current_thread(), ())
        assert who.startswith("thread 'average': another thread is at work in spin (loader.py:")
        assert who_else(tuple, threading.current_thread(), {thread.ident}) == ""
        assert who_else(tuple, thread, ()) == ""
    finally:
        end.append(True)
        thread.join()


def test_threads_of_ours_are_left_out(torch_module):
    end, begun = [], threading.Event()
    thread = threading.Thread(
        target=torch_module.spin, args=(end, begun), name="gpumem-otel-callback"
    )
    thread.start()
    try:
        assert begun.wait(10)
        assert who_else(tuple, threading.current_thread(), ()) == ""
    finally:
        end.append(True)
        thread.join()
