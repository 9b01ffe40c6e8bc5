"""Which other thread uses the GPU: by what it does now, and by the memory that it holds."""

from __future__ import annotations

import hashlib
import os
import queue
import sys
import threading
import time
import types
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpumem_otel.capture.objects.thread_activity import read_autograd
from gpumem_otel.yielding.scan.other_threads import who_else

AT_WORK = "thread 'worker': another thread is at work in {} ({}:"
MIB = 1 << 20


@pytest.fixture
def torch_module(monkeypatch):
    """A module that knows torch, whose functions work or wait as reported."""
    torch = types.ModuleType("torch")
    module = types.ModuleType("loader")
    module.torch, module.threading, module.queue = torch, threading, queue
    module.os, module.hashlib, module.zlib = os, hashlib, zlib
    code = compile(
        "def prefetch(box, filled):\n"
        "    filled.set()\n"
        "    box.get()\n"
        "def spin(end, begun):\n"
        "    begun.set()\n"
        "    while not end:\n"
        "        pass\n"
        "def hash_all(end, begun, data):\n"
        "    begun.set()\n"
        "    while not end:\n"
        "        hashlib.sha256(data)\n"
        "def pack(end, begun, data):\n"
        "    begun.set()\n"
        "    while not end:\n"
        "        zlib.compress(data)\n",
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


# threads that wait in the kernel, in a function of the job

HEAR = "def hear(fd):\n    os.read(fd, 1)\n"
BACKWARD = "def backward(fd):\n    hear(fd)\n"


@contextmanager
def hearing(module, file="/job/loader.py", function="hear"):
    """A thread that waits for a byte on a pipe, in the kernel by now."""
    exec(compile(HEAR, file, "exec"), module.__dict__)
    exec(compile(BACKWARD, "/site/torch/autograd/__init__.py", "exec"), module.__dict__)
    reader, writer = os.pipe()
    thread = threading.Thread(target=getattr(module, function), args=(reader,), name="worker")
    thread.start()
    try:
        called = Path(f"/proc/self/task/{thread.native_id}/syscall")
        deadline = time.monotonic() + 10
        # "number argument ...", or "running"
        while called.read_text().split()[1:2] != [hex(reader)]:
            assert time.monotonic() < deadline
        yield thread
    finally:
        os.write(writer, b"x")
        thread.join()
        os.close(reader)
        os.close(writer)


@pytest.fixture
def long_interval():
    was = sys.getswitchinterval()
    yield lambda: sys.setswitchinterval(0.5)
    sys.setswitchinterval(was)


glances = pytest.mark.parametrize("glance", [False, True])


@glances
def test_one_that_waits_in_the_kernel_is_not_at_work(torch_module, glance):
    with hearing(torch_module):
        assert who_else(tuple, threading.current_thread(), (), glance) == ""


def test_one_that_waits_in_the_kernel_and_holds_memory_is_named(torch_module):
    held = segment(block(("/job/loader.py", "hear"), *IN_THREAD))
    with hearing(torch_module):
        who = who_else(lambda: held, threading.current_thread(), ())
    assert who == "thread 'worker' holds memory on the device (hear)"


@glances
def test_one_that_waits_in_a_function_of_torch_is_at_work(torch_module, glance):
    """It may wait for a device."""
    with hearing(torch_module, "/site/torch/cuda/streams.py"):
        who = who_else(tuple, threading.current_thread(), (), glance)
    assert who.startswith(AT_WORK.format("hear", "streams.py"))


@glances
def test_one_that_waits_within_backward_is_at_work(torch_module, glance):
    with hearing(torch_module, function="backward"):
        who = who_else(tuple, threading.current_thread(), (), glance)
    assert who == "thread 'worker': backward runs"


@glances
def test_where_the_kernel_tells_nothing_it_is_at_work(torch_module, glance, tmp_path):
    with hearing(torch_module):
        who = who_else(tuple, threading.current_thread(), (), glance, proc=tmp_path)
    assert who.startswith(AT_WORK.format("hear", "loader.py"))


def test_with_a_long_switch_interval_nothing_is_proved(torch_module, long_interval):
    with hearing(torch_module):
        long_interval()
        who = who_else(tuple, threading.current_thread(), (), True)
    assert who.startswith(AT_WORK.format("hear", "loader.py"))


@glances
@pytest.mark.parametrize("function", ["hash_all", "pack"])
def test_one_that_computes_without_the_interpreter_lock_is_at_work(torch_module, glance, function):
    end, begun = [], threading.Event()
    data = bytes(64 * MIB)
    work = getattr(torch_module, function)
    thread = threading.Thread(target=work, args=(end, begun, data), name="worker")
    thread.start()
    try:
        assert begun.wait(10)
        # it is at this line whenever it is not about to be
        while sys._current_frames()[thread.ident].f_code.co_name != function:
            pass
        who = who_else(tuple, threading.current_thread(), (), glance)
    finally:
        end.append(True)
        thread.join()
    assert who.startswith(AT_WORK.format(function, "loader.py"))


def test_those_that_wait_for_the_interpreter_lock_are_at_work(torch_module):
    """They sleep in the kernel most of the time, each of them."""
    end, begun = [], [threading.Event() for _ in range(3)]
    threads = [
        threading.Thread(target=torch_module.spin, args=(end, event), name="worker")
        for event in begun
    ]
    for thread in threads:
        thread.start()
    try:
        assert all(event.wait(30) for event in begun)
        for thread in threads:
            while sys._current_frames()[thread.ident].f_code.co_name != "spin":
                time.sleep(0)
            others = {other.ident for other in threads if other is not thread}
            who = who_else(tuple, threading.current_thread(), others, True)
            assert who.startswith(AT_WORK.format("spin", "loader.py"))
    finally:
        end.append(True)
        for thread in threads:
            thread.join()


def test_what_autograd_keeps_is_not_read_beside_one_that_waits_in_the_kernel(torch_module):
    """It may go on in C, without the interpreter lock, while `.grad` is read."""
    torch = types.SimpleNamespace(_C=types.SimpleNamespace(_current_graph_task_id=lambda: -1))
    with hearing(torch_module):
        read, who = read_autograd(torch, lambda: pytest.fail("it is read"))
    assert read is None
    assert who.startswith("another thread is at work in hear (loader.py:")
