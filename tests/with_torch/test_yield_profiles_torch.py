"""A live profile shows the same stacks and classes before a yield and after the restore.

The whole way of an installed job on the real torch, in host memory: its storages are really emptied
and filled again. Only the allocator is the test's: its blocks are those storages, and the stack of
a block is that of whoever called `resize_`.
"""

from __future__ import annotations

import textwrap

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not torch.version.cuda or torch.cuda.is_available(), reason="a CUDA build without a GPU"
    ),
]

HEAD = """
import json, os, sys, threading
import gpumem_otel
from gpumem_otel.api import lifecycle
from gpumem_otel.yielding import wiring
from gpumem_otel.yielding.scan.candidates import CandidateFinder
from gpumem_otel.snapshot.tensor_classes import classes_of
from gpumem_otel.yielding.copy.devices import CpuDevices
import torch
from support.pretend_cuda import pretend
allocator = pretend(torch)
wiring.CudaDevices = CpuDevices
wiring.CandidateFinder = lambda source, environ, **_: CandidateFinder(
    source, environ, device_type="cpu")
torch.cuda.is_current_stream_capturing = lambda: False
real = torch.UntypedStorage.resize_

def stack_of(frame):
    found = []
    while frame is not None:
        code = frame.f_code
        found.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    return found

def put(address, size, frames):
    allocator.allocations += 1
    allocator.blocks[address] = {
        "address": address, "size": size, "requested_size": size, "state": "active_allocated",
        "frames": list(frames)}

def hold(tensor, *names, file="/job/train.py"):
    "The block of a tensor, with this stack."
    storage = tensor.untyped_storage()
    frames = [{"name": name, "filename": file, "line": 7} for name in names]
    put(storage.data_ptr(), storage.nbytes(), frames)

def resize_(storage, size):
    if storage.nbytes() and allocator.blocks.pop(storage.data_ptr(), None):
        allocator.frees += 1
    real(storage, size)
    if size:
        put(storage.data_ptr(), size, stack_of(sys._getframe(1)))

torch.UntypedStorage.resize_ = resize_
gpumem_otel.install(interval_seconds=3600, serve=False, profiles=("live",))
torch.cuda._lazy_init()
agent = lifecycle.current()
agent.tensors._host_too = True
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 30))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
batch = torch.randn(8, 40)

def step():
    agent.tensors.want(0.0)
    optimizer.zero_grad(set_to_none=False)
    model(batch).sum().backward()
    optimizer.step()

step()
for number, one in enumerate(model.parameters()):
    hold(one, "__init__", f"build{number % 2}", file="/job/torch/nn/modules/linear.py")
    hold(one.grad)
    for name, state in optimizer.state[one].items():
        if name != "step":
            hold(state, "_init_group", "step", file="/job/torch/optim/adamw.py")
hold(batch, "load", "main")
saved = torch.randn(777)  # known by its stack alone
hold(saved, "forward", "_call_impl", file="/site/torch/nn/modules/module.py")

def profile():
    (found,) = agent.reader.live_now()
    assert agent.counters.get("readouts_breached") == 0
    return found

def shown(found):
    return [
        ([(frame.name, frame.filename, frame.line) for frame in one.frames], one.labels,
         one.objects, one.size_bytes)
        for one in found.samples
    ]

def classes():
    return dict(agent.reader.classes()[0])

def stacks_of_ours():
    "In the allocator itself: what torch recorded."
    return sum(
        any("yielding" in frame["filename"] for frame in block["frames"])
        for block in allocator.blocks.values())

def say(**facts):
    os.write(1, (json.dumps(facts) + "\\n").encode())

before, by_class = shown(profile()), classes()
assert len(allocator.blocks) == 18
assert len(by_class) >= 5, by_class
def is_as_before():
    return shown(profile()) == before and {
        name: size for name, size in classes().items() if size} == by_class
assert is_as_before()
"""


@pytest.fixture
def run(child):
    return lambda script: child(HEAD + textwrap.dedent(script))


def test_the_same_stacks_and_classes_after_one_yield_and_after_two(run):
    said = run("""
        for _ in range(2):
            with gpumem_otel.yielded(level="tensors", assume_private=True) as report:
                say(away=profile().total_bytes, moved=dict(report.moved_bytes) == by_class)
            say(ours=stacks_of_ours(), same=is_as_before())
        step()
        say(trains_on=is_as_before())
    """)
    after = {"ours": 18, "same": True}
    away = {"away": 0, "moved": True}
    assert said == [away, after, away, after, {"trains_on": True}]


def test_a_class_at_a_time(run):
    said = run("""
        gpumem_otel.yield_memory(level="tensors", assume_private=True)
        gpumem_otel.restore(classes=("optimizer_state",))
        profile()
        say(back={name: size for name, size in classes().items() if size},
            stacks=sorted({one[0][0][0] for one in shown(profile())}))
        gpumem_otel.restore(classes=("parameter", "gradient"))
        profile()
        say(back=sorted(name for name, size in classes().items() if size))
        gpumem_otel.restore()
        say(same=is_as_before(), ours=stacks_of_ours())
    """)
    state = 2 * 4 * (40 * 30 + 30 + 30 * 30 + 30)
    assert said == [
        {"back": {"optimizer_state": state}, "stacks": ["adamw.py:_init_group"]},
        {"back": ["gradient", "optimizer_state", "parameter"]},
        {"same": True, "ours": 18},
    ]


def test_a_yield_that_is_undone_shows_what_was(run):
    said = run("""
        counting = torch.UntypedStorage.resize_
        calls = []
        def failing(storage, size):
            calls.append(size)
            if len(calls) == 9:
                raise RuntimeError("the driver is gone")
            counting(storage, size)
        torch.UntypedStorage.resize_ = failing
        try:
            gpumem_otel.yield_memory(level="tensors", assume_private=True)
        except gpumem_otel.YieldRefusedError as error:
            say(undone="undone" in str(error))
        say(ours=stacks_of_ours(), same=is_as_before())
        torch.UntypedStorage.resize_ = counting
        gpumem_otel.yield_memory(level="tensors", assume_private=True, dry_run=True)
        say(ours=stacks_of_ours(), same=is_as_before())
        with gpumem_otel.yielded(level="tensors", assume_private=True):
            pass
        say(ours=stacks_of_ours(), same=is_as_before())
    """)
    # eight that were freed, and the one whose turn it was when the driver failed
    undone = {"ours": 9, "same": True}
    assert said == [{"undone": True}, undone, undone, {"ours": 18, "same": True}]


def test_memory_that_is_read_while_it_comes_back_is_whose_it_was(run):
    said = run("""
        of_torch = torch.UntypedStorage.resize_
        seen = []
        def reading(storage, size):
            if size:
                seen.append(shown(profile()))
            of_torch(storage, size)
        with gpumem_otel.yielded(level="tensors", assume_private=True):
            torch.UntypedStorage.resize_ = reading
        known = {json.dumps(one[0][:-1]) for one in before}
        told = {json.dumps(one[0][:-1]) for profile in seen for one in profile}
        say(reads=len(seen), strangers=sorted(told - known), same=is_as_before())
    """)
    assert said == [{"reads": 18, "strangers": [], "same": True}]


def test_nothing_that_was_moved_is_kept_alive(run):
    said = run("""
        import gc
        with gpumem_otel.yielded(level="tensors", assume_private=True):
            pass
        where = saved.untyped_storage().data_ptr()
        weak, kind = saved.untyped_storage()._weak_ref(), torch.UntypedStorage
        del saved
        say(gone=kind._expired(weak))
        kind._free_weak_ref(weak)
        known = agent.source.restored
        del allocator.blocks[where]
        say(known=len(known.entries()))
        profile()
        say(known=len(known.entries()))
        gpumem_otel.yield_memory(level="tensors", assume_private=True, dry_run=True)
        weak = batch.untyped_storage()._weak_ref()
        del batch
        say(gone=kind._expired(weak))
    """)
    assert said == [{"gone": True}, {"known": 18}, {"known": 17}, {"gone": True}]
