"""The moment torch is imported and the moment CUDA is initialised, with a torch made of two files.

That torch has the queue of the real one: `_lazy_call` before, `_lazy_init` runs what is queued.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading

import pytest

from gpumem_otel.capture.arming import Arming

TORCH = """
import torch.cuda
import torch.later
finished = True
"""
CUDA = """
import threading
_initialized = False
_initialization_lock = threading.Lock()
_queued_calls = []

class DeferredCudaCallError(Exception):
    pass

def _lazy_call(call):
    if _initialized:
        call()
    else:
        _queued_calls.append((call, ["a stack"]))

def _lazy_init():
    global _initialized
    with _initialization_lock:
        if _initialized:
            return
        for call, _ in _queued_calls:
            try:
                call()
            except Exception as error:
                raise DeferredCudaCallError from error
        _initialized = True
"""


@pytest.fixture
def torch_folder(tmp_path, monkeypatch):
    """A torch that can be imported; the real one, if loaded, is put back afterwards."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(TORCH)
    (package / "cuda.py").write_text(CUDA)
    (package / "later.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    kept = {n: m for n, m in sys.modules.items() if n == "torch" or n.startswith("torch.")}
    for name in kept:
        del sys.modules[name]
    yield package
    for name in [n for n in sys.modules if n == "torch" or n.startswith("torch.")]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.fixture
def heard():
    return []


@pytest.fixture
def arming(heard, torch_folder):
    def imported(torch):
        heard.append(("imported", torch.__name__, getattr(torch, "finished", False)))

    arming = Arming(lambda: heard.append("armed"), on_import=imported)
    yield arming
    arming.stop()


def load(name="torch"):
    return importlib.import_module(name)


def test_torch_is_there_already(arming, heard):
    torch = load()
    arming.start()
    assert heard == [("imported", "torch", True)]
    torch.cuda._lazy_init()
    torch.cuda._lazy_init()
    assert heard == [("imported", "torch", True), "armed"]


def test_cuda_is_initialised_already(arming, heard):
    torch = load()
    torch.cuda._lazy_init()
    arming.start()
    assert heard == [("imported", "torch", True), "armed"]


@pytest.mark.parametrize("name", ["torch", "torch.cuda", "torch.later"])
def test_torch_comes_later(arming, heard, name):
    arming.start()
    assert heard == []
    load(name)
    assert heard == [("imported", "torch", True)]
    sys.modules["torch"].cuda._lazy_init()
    assert heard[1:] == ["armed"]


def test_waiting_imports_nothing_and_ends_with_the_import(arming, heard):
    path = list(sys.meta_path)
    arming.start()
    assert "torch" not in sys.modules
    assert len(sys.meta_path) == len(path) + 1
    torch = load()
    assert sys.meta_path == path
    assert "exec_module" not in vars(torch.__spec__.loader)
    assert type(torch.__spec__.loader).__name__ == "SourceFileLoader"


def test_asking_whether_torch_is_installed_is_no_import(arming, heard):
    arming.start()
    assert importlib.util.find_spec("torch") is not None
    assert heard == []
    load()
    assert heard == [("imported", "torch", True)]


def test_an_import_that_fails_is_waited_for_again(arming, heard, torch_folder):
    (torch_folder / "__init__.py").write_text("raise ImportError('no driver')")
    arming.start()
    with pytest.raises(ImportError, match="no driver"):
        load()
    assert heard == []
    (torch_folder / "__init__.py").write_text(TORCH + "# written again\n")
    importlib.invalidate_caches()
    load()
    assert heard == [("imported", "torch", True)]


def test_other_modules_are_found_by_others(arming, tmp_path):
    (tmp_path / "torchlike.py").write_text("x = 1")
    arming.start()
    assert load("torchlike").x == 1
    with pytest.raises(ModuleNotFoundError):
        load("torch_that_is_nowhere")
    del sys.modules["torchlike"]


def test_another_finder_in_front_that_wraps_the_loader(arming, heard):
    """As OpenTelemetry and APM agents hook imports."""

    class Loader:
        def __init__(self, inner):
            self.inner = inner

        def create_module(self, spec):
            return self.inner.create_module(spec)

        def exec_module(self, module):
            self.inner.exec_module(module)
            heard.append("theirs")

    class Finder:
        busy = False

        def find_spec(self, name, path=None, target=None):
            if name != "torch" or self.busy:
                return None
            self.busy = True
            try:
                spec = importlib.util.find_spec(name)
            finally:
                self.busy = False
            spec.loader = Loader(spec.loader)
            return spec

    arming.start()
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        load()
    finally:
        sys.meta_path.remove(finder)
    assert heard == [("imported", "torch", True), "theirs"]


def test_install_in_the_middle_of_torchs_import(heard, torch_folder):
    """torch.cuda is complete then, and the next submodule gives the sign."""
    arming = Arming(lambda: heard.append("armed"), on_import=lambda t: heard.append(t.__name__))
    (torch_folder / "__init__.py").write_text("import torch.hook\nimport torch.cuda, torch.later")
    (torch_folder / "hook.py").write_text("import sys\nsys.modules['test_hook'].start()")
    sys.modules["test_hook"] = arming
    try:
        torch = load()
    finally:
        del sys.modules["test_hook"]
    assert heard == ["torch"]
    torch.cuda._lazy_init()
    assert heard == ["torch", "armed"]
    arming.stop()


def test_stop_before_the_import_leaves_nothing(arming, heard):
    path = list(sys.meta_path)
    arming.start()
    spec = importlib.util.find_spec("torch")
    arming.stop()
    assert sys.meta_path == path
    assert "exec_module" not in vars(spec.loader)
    load().cuda._lazy_init()
    assert heard == []


def test_stop_takes_our_entry_out_of_torchs_queue(arming, heard):
    torch = load()
    torch.cuda._lazy_call(len)
    arming.start()
    assert len(torch.cuda._queued_calls) == 2
    arming.stop()
    assert [call for call, _ in torch.cuda._queued_calls] == [len]
    heard.clear()
    torch.cuda._queued_calls.clear()
    torch.cuda._lazy_init()
    assert heard == []


def test_an_entry_that_could_not_be_taken_out_is_inert(arming, heard):
    torch = load()
    arming.start()
    with torch.cuda._initialization_lock:
        arming.stop()
    assert len(torch.cuda._queued_calls) == 1
    torch.cuda._lazy_init()
    assert heard == [("imported", "torch", True)]


def test_start_again_after_stop_arms_once(arming, heard):
    torch = load()
    arming.start()
    arming.stop()
    arming.start()
    arming.start()
    torch.cuda._lazy_init()
    assert heard.count("armed") == 1


def test_a_callback_that_raises_never_reaches_the_job(torch_folder, caplog):
    def broken(*args):
        raise ValueError("ours")

    torch = load()
    arming = Arming(broken, on_import=broken)
    arming.start()
    torch.cuda._lazy_init()
    assert torch.cuda._initialized
    assert [r.message for r in caplog.records] == ["arming failed, the job continues"] * 2
    arming.stop()


def test_a_torch_without_lazy_call_is_only_imported(heard, torch_folder):
    (torch_folder / "cuda.py").write_text("")
    arming = Arming(lambda: heard.append("armed"), on_import=lambda t: heard.append(t.__name__))
    arming.start()
    load()
    assert heard == ["torch"]
    arming.stop()


def test_a_forked_child_arms_when_it_initialises_cuda_itself(arming, heard):
    torch = load()
    arming.start()
    child = os.fork()
    if child == 0:
        torch.cuda._lazy_init()
        os._exit(0 if heard[-1] == "armed" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert heard == [("imported", "torch", True)]
    torch.cuda._lazy_init()
    assert heard[-1] == "armed"


def test_two_threads_that_import_at_once(arming, heard):
    arming.start()
    barrier = threading.Barrier(2)

    def importing():
        barrier.wait(5)
        load()

    threads = [threading.Thread(target=importing) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == [("imported", "torch", True)]
