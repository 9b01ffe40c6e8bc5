"""Holders of real CPU tensors, and the release of a traceback, with and without IPython."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import deque

import pytest
from support.reported import run

import gpumem_otel
from gpumem_otel.errors import ConfigError
from gpumem_otel.tensors.saved import can_be_read

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

kept_by_module = None
HERE = __name__


def held(x):
    """{(kind, path)} of its holders, but for the variables of running functions."""
    return {(h.kind, h.path) for h in gpumem_otel.holders(x).held_by if h.kind != "frame"}


@pytest.fixture
def module_attribute(monkeypatch):
    def put(value):
        monkeypatch.setattr(sys.modules[HERE], "kept_by_module", value)

    return put


def test_a_variable_of_a_running_function_with_its_line():
    tensor = torch.zeros(4)
    answer = gpumem_otel.holders(tensor)
    (holder,) = answer.held_by
    assert (holder.path, holder.kind) == ("tensor", "frame")
    assert "test_a_variable_of_a_running_function_with_its_line" in holder.place
    assert "test_holders_torch.py:" in holder.place


def test_a_module_attribute(module_attribute):
    module_attribute(torch.zeros(4))
    assert held(kept_by_module) == {("module", f"{HERE}.kept_by_module")}


def test_containers_and_attributes_as_code_writes_them(module_attribute):
    class Thing:
        pass

    class Slotted:
        __slots__ = ("inside",)

    tensor = torch.zeros(4)
    thing, slotted = Thing(), Slotted()
    thing.batches = {"a": [None, (tensor,)]}
    slotted.inside = tensor
    module_attribute([thing, slotted, deque([tensor])])
    assert held(tensor) == {
        ("module", f"{HERE}.kept_by_module[0].batches['a'][1][0]"),
        ("module", f"{HERE}.kept_by_module[1].inside"),
        ("module", f"{HERE}.kept_by_module[2][0]"),
    }


def test_parameters_by_the_way_code_reaches_them(module_attribute):
    module_attribute(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    weight = kept_by_module[0].weight
    assert held(weight) == {("module", f"{HERE}.kept_by_module[0].weight")}
    answer = gpumem_otel.holders(weight)
    assert answer.tensor_class.value == "parameter"
    kept_by_module(torch.randn(1, 2)).sum().backward()
    gradient = gpumem_otel.holders(weight.grad)
    assert gradient.tensor_class.value == "gradient"
    assert f"{HERE}.kept_by_module[0].weight.grad" in {h.path for h in gradient.held_by}


def test_closures_and_classes(module_attribute):
    tensor = torch.zeros(4)

    def make(inside):
        def hook():
            return inside

        return hook

    class Registry:
        cache = {"x": tensor}  # noqa: RUF012

    module_attribute(make(tensor))
    found = held(tensor)
    name = test_closures_and_classes.__name__
    assert ("closure", f"{name}.<locals>.make.<locals>.hook:inside") in found
    assert ("class", f"{name}.<locals>.Registry.cache['x']") in found
    assert Registry.cache is not None


def test_a_suspended_generator_and_a_method(module_attribute):
    def produce(batch):
        yield batch

    class Owner:
        def __init__(self, tensor):
            self.tensor = tensor

        def call(self):
            return self.tensor

    tensor = torch.zeros(4)
    generator = produce(tensor)
    next(generator)
    answer = gpumem_otel.holders(tensor)
    suspended = {(h.path, h.place) for h in answer.held_by if h.place.startswith("suspended")}
    assert {path for path, _ in suspended} == {"batch"}
    assert all("produce" in place for _, place in suspended)
    module_attribute({"hook": Owner(tensor).call})
    assert ("module", f"{HERE}.kept_by_module['hook'].__self__.tensor") in held(tensor)
    module_attribute(functools.partial(print, tensor))
    assert any(path.startswith(f"{HERE}.kept_by_module") for _, path in held(tensor))


def test_views_lead_to_the_same_storage(module_attribute):
    base = torch.zeros(100)
    module_attribute({"view": base[5:10]})
    assert held(base) == {("module", f"{HERE}.kept_by_module['view']")}
    answer = gpumem_otel.holders(kept_by_module["view"])
    assert answer.subject.storage_bytes == 400
    assert "base" in {h.path for h in answer.held_by}


def test_storages_and_addresses(module_attribute):
    module_attribute(torch.zeros(64))
    path = ("module", f"{HERE}.kept_by_module")
    assert path in held(kept_by_module.untyped_storage())
    answer = gpumem_otel.holders(kept_by_module.data_ptr() + 17)
    assert path in {(h.kind, h.path) for h in answer.held_by}
    assert (answer.subject.device, answer.subject.storage_bytes) == ("cpu", 256)
    assert "held by nothing that Python can see" in str(gpumem_otel.holders(64))


@pytest.mark.skipif(not can_be_read(torch), reason="this torch does not show what it saved")
def test_what_autograd_saved_is_a_holder():
    source = torch.randn(4, requires_grad=True)
    out = source.sin()
    assert ("autograd", "SinBackward0.self") in held(source)
    out.sum().backward()
    assert ("autograd", "SinBackward0.self") not in held(source)


def fail_with(size, sizes):
    activations = torch.zeros(size)
    sizes.append(weakref.ref(activations))
    raise RuntimeError("CUDA out of memory, so to say")


def leave_a_traceback():
    """What the interpreter does with an error that was not caught."""
    sizes = []
    try:
        fail_with(1000, sizes)
    except RuntimeError as error:
        sys.last_value, sys.last_traceback, sys.last_type = error, error.__traceback__, type(error)
        if sys.version_info >= (3, 12):
            sys.last_exc = error
    return sizes[0]


@pytest.fixture
def last_error():
    """Leaves an error when it is called: pytest clears what is there before a test."""
    gc.collect()
    yield leave_a_traceback
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        vars(sys).pop(name, None)


def test_a_frame_of_the_last_traceback_by_function_and_variable(last_error):
    activations = last_error()
    (holder,) = gpumem_otel.holders(activations()).held_by
    assert (holder.path, holder.kind) == ("activations", "last traceback")
    assert "fail_with (test_holders_torch.py:" in holder.place


def test_release_clears_the_last_traceback(last_error):
    activations = last_error()
    error = sys.last_value
    gpumem_otel.report()  # looks into those frames too
    gpumem_otel.holders(activations())
    assert activations() is not None
    assert gpumem_otel.release_traceback() == 0  # no GPU memory here
    assert activations() is None
    assert not {"last_exc", "last_value", "last_traceback"} & set(vars(sys))
    # the error itself is kept, with its lines
    assert str(error) == "CUDA out of memory, so to say"
    assert error.__traceback__.tb_next.tb_frame.f_code.co_name == "fail_with"
    assert gpumem_otel.release_traceback() == 0


def test_release_follows_causes_groups_and_the_error_being_handled():
    sizes = []
    try:
        try:
            fail_with(10, sizes)
        except RuntimeError as error:
            raise ValueError("later") from error
    except ValueError:
        gpumem_otel.release_traceback()
        assert sizes[0]() is None
    if sys.version_info >= (3, 11):
        sizes.clear()
        inner = None
        try:
            fail_with(10, sizes)
        except RuntimeError as error:
            inner = error
        sys.last_value = ExceptionGroup("several", [inner])  # noqa: F821
        gpumem_otel.release_traceback()
        assert sizes[0]() is None


def test_running_functions_keep_their_variables():
    here = torch.zeros(3)
    try:
        fail_with(3, [])
    except RuntimeError as error:
        sys.last_value = error
        gpumem_otel.release_traceback()
    assert here.shape == (3,)


def test_a_shell_that_keeps_outputs(monkeypatch):
    """The parts of IPython's shell that keep objects, whose own way to release them fails."""

    class Shell:
        pass

    out = torch.zeros(5)
    gone = weakref.ref(out)
    shell = Shell()
    shell.user_ns = {"_oh": {5: out}, "Out": None, "_5": out, "_": out, "_i5": "text", "_mine": 1}
    shell.user_ns["Out"] = shell.user_ns["_oh"]
    shell.user_ns_hidden = {"_": out, "_5": out}
    shell.InteractiveTB = types.SimpleNamespace(tb=object(), etype=ValueError, evalue=out)
    shell.last_execution_result = types.SimpleNamespace(result=out, error_in_exec=None)
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    del out
    gpumem_otel.release_traceback()
    assert gone() is None
    assert shell.user_ns_hidden == {"_": ""}
    assert shell.user_ns == {"_oh": {}, "Out": {}, "_": "", "_i5": "text", "_mine": 1}
    assert shell.InteractiveTB.tb is None


def test_a_real_ipython_is_released():
    pytest.importorskip("IPython")
    out = run("""
        import gc, weakref
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        import sys; sys.modules["__main__"] = shell.user_module
        def cell(code): return shell.run_cell(code, store_history=True)
        cell("import torch, weakref, gpumem_otel")
        cell("torch.zeros(1000)")
        cell("gone = weakref.ref(Out[2])")
        cell("paths = {(h.kind, h.path) for h in gpumem_otel.holders(gone()).held_by}")
        cell('''
        def fail():
            big = torch.zeros(500)
            global inside
            inside = weakref.ref(big)
            raise RuntimeError("no memory")
        ''')
        cell("fail()")
        cell("kinds = {h.kind for h in gpumem_otel.holders(inside()).held_by}")
        cell("before = gone() is not None, inside() is not None")
        cell("gpumem_otel.release_traceback()")
        cell("after = gone() is None, inside() is None")
        ns = shell.user_ns
        assert ("notebook output", "Out[2]") in ns["paths"], ns["paths"]
        assert "last traceback" in ns["kinds"], ns["kinds"]
        print(ns["before"], ns["after"])
    """)
    assert out.splitlines()[-1] == "(True, True) (True, True)"


@pytest.mark.parametrize("nothing", ["text", 3.0, None, -5, True])
def test_what_is_not_memory_is_refused(nothing):
    with pytest.raises(ConfigError, match="is not a tensor"):
        gpumem_otel.holders(nothing)


def test_the_answer_as_text_and_values(module_attribute):
    module_attribute(torch.zeros(256))
    answer = gpumem_otel.holders(kept_by_module)
    text = str(answer)
    assert text.startswith("Tensor (256,) float32 on cpu at 0x")
    assert "1.0 KiB asked for" in text
    assert f"    {HERE}.kept_by_module  [module]\n" in text
    plain = answer.to_dict()
    assert plain["storage_bytes"] == 1024
    assert plain["held_by"] == [{"path": f"{HERE}.kept_by_module", "kind": "module", "place": ""}]


def test_a_tuple_that_is_being_filled_is_left_alone():
    """Its end does not exist yet: reading it would crash, keeping it would make `tuple()` fail."""
    out = run("""
        import torch, gpumem_otel
        def produce():
            tensor = torch.zeros(4)
            yield tensor
            print({h.path for h in gpumem_otel.holders(tensor).held_by} == {"tensor"})
        print(len(tuple(produce())))
    """)
    assert out == "True\n1\n"


def test_nothing_is_kept_by_the_search():
    tensor = torch.zeros(4)
    gone = weakref.ref(tensor)
    answer = gpumem_otel.holders(tensor)
    del tensor
    assert gone() is None
    assert answer.held_by
