"""The tensor report does no harm: it runs no code, keeps nothing and disturbs no thread."""

from __future__ import annotations

import importlib
import sys
import threading
import time
import weakref

import pytest
from support.reported import by_name, run

import gpumem_otel
from gpumem_otel.tensors.saved import can_be_read

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left_of_other_tests")]
tells_saved = pytest.mark.skipif(
    not can_be_read(torch), reason="this torch does not show what autograd saved"
)


def test_objects_are_not_asked_what_they_are():
    asked = []

    class Proxy:
        @property
        def __class__(self):
            asked.append(1)
            raise ReferenceError("gone")

        def __getattr__(self, name):
            asked.append(name)
            raise RuntimeError(name)

    proxy = Proxy()
    before = len(asked)
    gpumem_otel.report()
    assert len(asked) == before
    del proxy


@tells_saved
def test_what_autograd_saved_is_named_by_its_node():
    linear = nn.Linear(16, 16)
    inp = torch.randn(4, 16)
    out = linear(inp * (inp + 2)).mean()
    rows = by_name(gpumem_otel.report(linear))
    assert rows["AddmmBackward0.mat1"].used_bytes == 256
    assert rows["AddmmBackward0.mat1"].tensor_class.value == "activation"
    assert rows["out"].tensor_class.value == "activation"
    assert not any(name.startswith("Tensor") and row.shape == (4, 16) for name, row in rows.items())
    assert out.requires_grad


@tells_saved
def test_saved_views_and_outputs_name_their_tensor_too():
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    batch = torch.randn(2, 3, 16)
    losses = [second(torch.relu(first(batch))).sum()]
    loss = losses[0]
    rows = by_name(gpumem_otel.report())
    assert rows["ReluBackward0.result"].shape == (2, 3, 16)
    assert rows["loss"].shape == ()
    unnamed = [row for name, row in rows.items() if name.startswith("Tensor")]
    assert not [row for row in unnamed if row.shape == (2, 3, 16) and not row.shares], unnamed
    assert loss.requires_grad


@tells_saved
def test_what_has_no_python_object_is_listed_apart():
    source = torch.randn(64, requires_grad=True)
    softmaxed = torch.nn.functional.cross_entropy(source.view(8, 8), torch.zeros(8).long())
    report = gpumem_otel.report()
    device = next(entry for entry in report.devices if entry.device == "cpu")
    # the log-softmax inside cross_entropy never was a Python object
    saved = {row.name: row for row in device.saved}
    assert saved["NllLossBackward0.self"].used_bytes == 256
    assert device.used_bytes == sum(row.used_bytes for row in report.tensors)
    assert softmaxed.requires_grad


def test_hooks_of_saved_tensors_are_never_run():
    ran = []

    def pack(tensor):
        return ("packed", tensor.clone())

    def unpack(packed):
        ran.append(packed)
        return packed[1]

    source = torch.randn(8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = (source * source).exp()
    gpumem_otel.report()
    gpumem_otel.holders(source)
    assert ran == []
    out.sum().backward()
    assert len(ran) == 3


def test_a_checkpointed_forward_is_not_computed_again():
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    calls = []

    def block(x):
        calls.append(1)
        return x.sin().cos()

    source = torch.randn(4, requires_grad=True)
    out = checkpoint(block, source, use_reentrant=False)
    gpumem_otel.report()
    assert len(calls) == 1
    out.sum().backward()
    assert len(calls) == 2


def test_no_reference_is_kept():
    model = nn.Linear(64, 64)
    model(torch.randn(2, 64)).sum().backward()
    alive = [weakref.ref(model), weakref.ref(model.weight), weakref.ref(model.weight.grad)]
    report = gpumem_otel.report(model, verbose=True)
    answer = gpumem_otel.holders(model.weight)
    text = str(report) + report.to_json() + str(answer)
    del model
    assert [ref() for ref in alive] == [None] * 3
    assert text


def test_a_variable_that_is_deleted_after_the_report_is_gone():
    """Python 3.12 and older keep variables in the frame once they were read."""

    def work():
        big = torch.zeros(1000)
        gone = weakref.ref(big)
        gpumem_otel.report()
        gpumem_otel.holders(gone())
        del big
        return gone() is None

    def outer():
        also = torch.zeros(1000)
        gone = weakref.ref(also)
        done = work()
        del also
        return done, gone() is None

    assert outer() == (True, True)


def test_what_locals_gave_to_the_job_stays():
    first = torch.zeros(3)
    mine = locals()
    gpumem_otel.report()
    assert mine["first"] is first


def test_variables_survive_a_report_under_a_tracer():
    def traced():
        one, two = torch.zeros(3), 2
        gpumem_otel.report()
        return one, two

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: lambda *_: None)
    try:
        one, two = traced()
    finally:
        sys.settrace(before)
    assert (one.shape, two) == ((3,), 2)


def test_within_backward_no_gradient_is_read():
    seen = []
    weight = torch.randn(4, requires_grad=True)
    other = torch.randn(4, requires_grad=True)
    other.sum().backward()

    def hook(gradient):
        seen.append(gpumem_otel.report())
        return gradient

    weight.register_hook(hook)
    (weight * 2).sum().backward()
    (report,) = seen
    assert any("backward runs" in note for note in report.notes)
    assert not any(row.name.endswith(".grad") for row in report.tensors)
    assert any(row.name.endswith("other.grad") for row in gpumem_otel.report().tensors)


def test_while_another_thread_runs_backward_no_gradient_is_read():
    entered, leave = threading.Event(), threading.Event()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            entered.set()
            leave.wait(60)
            return gradient

    weight = torch.randn(4, requires_grad=True)
    thread = threading.Thread(target=lambda: Waits.apply(weight).sum().backward())
    thread.start()
    try:
        assert entered.wait(60)
        report = gpumem_otel.report()
        answer = gpumem_otel.holders(weight)
    finally:
        leave.set()
        thread.join()
    assert any("backward runs" in note for note in report.notes)
    assert any("backward runs" in note for note in answer.notes)
    assert weight.grad is not None


def test_a_thread_that_waits_or_sleeps_or_knows_no_torch_is_no_hindrance():
    stop = threading.Event()
    names = {"stop": stop}
    exec("def computes():\n    while not stop.is_set():\n        pass", names)

    def sleeps():
        while not stop.is_set():
            time.sleep(0.01)

    weight = torch.randn(4, requires_grad=True)
    weight.sum().backward()
    threads = [threading.Thread(target=work) for work in (stop.wait, sleeps, names["computes"])]
    for thread in threads:
        thread.start()
    try:
        report = gpumem_otel.report()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert "weight.grad" in by_name(report), report.notes


def test_a_thread_at_work_with_tensors_is_named():
    stop = threading.Event()

    def works():
        tensor = torch.zeros(1000)
        while not stop.is_set():
            tensor = tensor + 1

    thread = threading.Thread(target=works)
    thread.start()
    try:
        reports = [gpumem_otel.report() for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    assert any("works (test_report_beside_torch.py:" in n for r in reports for n in r.notes)


def test_threads_that_train_and_fill_tuples_are_not_disturbed():
    out = run("""
        import sys, threading, time, torch, gpumem_otel
        torch.set_num_threads(1)
        torch.optim.SGD([torch.zeros(1)])  # imports the compiler
        stop, failed = threading.Event(), []
        shared = torch.zeros(4)
        def train():
            model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(8)])
            while not stop.is_set():
                model(torch.randn(4, 16)).sum().backward()
                model.zero_grad()
        def pause():
            time.sleep(0.0005)
            return shared
        def fill():
            while not stop.is_set():
                assert len(tuple(pause() for _ in range(60))) == 60
        def guarded(work):
            try:
                work()
            except BaseException as error:
                failed.append(repr(error))
        threads = [threading.Thread(target=guarded, args=[work]) for work in (train, fill)]
        for thread in threads: thread.start()
        interval = sys.getswitchinterval()
        for _ in range(12):
            gpumem_otel.report()
            gpumem_otel.holders(shared)
        stop.set()
        for thread in threads: thread.join()
        print(failed, sys.getswitchinterval() == interval)
    """)
    assert out == "[] True\n"
