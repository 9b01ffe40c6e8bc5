"""The guard around `torch.__getattr__`, on a module with the same hook."""

from __future__ import annotations

import os
import threading
import types

import pytest

from gpumem_otel.capture.patching import InductorGuard


@pytest.fixture
def torch():
    module = types.ModuleType("torch")
    module.asked = []

    def module_getattr(name):
        module.asked.append((name, threading.get_ident()))
        if name == "_inductor":
            return "imported"
        raise AttributeError(name)

    module.__getattr__ = module_getattr
    return module


@pytest.fixture
def guard(torch):
    guard = InductorGuard()
    guard.install(torch)
    yield guard
    guard.uninstall()


def test_only_our_threads_are_told_no_and_only_within(torch, guard):
    assert torch._inductor == "imported"
    with guard.ours():
        assert not hasattr(torch, "_inductor")
        answers = []
        other = threading.Thread(target=lambda: answers.append(torch._inductor))
        other.start()
        other.join()
        assert answers == ["imported"]
    assert torch._inductor == "imported"


def test_what_is_loaded_is_seen_by_us_too(torch, guard):
    torch.__dict__["_inductor"] = "loaded"
    with guard.ours():
        assert torch._inductor == "loaded"


def test_other_lazy_names_work_within(torch, guard):
    with guard.ours(), pytest.raises(AttributeError, match="other"):
        _ = torch.other
    assert [name for name, _ in torch.asked] == ["other"]


def test_uninstall_puts_back_exactly_the_original(torch):
    original = torch.__dict__["__getattr__"]
    guard = InductorGuard()
    guard.install(torch)
    guard.install(torch)
    assert torch.__dict__["__getattr__"] is not original
    guard.uninstall()
    assert torch.__dict__["__getattr__"] is original


def test_a_torch_without_the_hook_is_left_alone():
    module = types.ModuleType("torch")
    guard = InductorGuard()
    guard.install(module)
    assert "__getattr__" not in vars(module)
    guard.uninstall()


def test_a_child_forked_within_is_not_one_of_our_threads(torch, guard):
    with guard.ours():
        child = os.fork()
        if child == 0:
            os._exit(0 if torch._inductor == "imported" else 1)
    assert os.waitpid(child, 0)[1] == 0
