"""Shared fixtures. The first one watches every test: nothing of ours may be left behind."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# A shell starts a command in the background with SIGINT ignored, and all children inherit that:
# whoever is sent a Ctrl-C by a test would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("hypothesis"):  # a Python with a GPU's torch may have none
    from hypothesis import settings

    # No time limits on single examples: machines are busy. CI tries the same examples each time.
    settings.register_profile("local", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True, database=None)
    settings.load_profile("ci" if os.environ.get("CI") else "local")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def _sockets() -> set[str]:
    """Inodes of the sockets that this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def _not_pytests(hook: object) -> object:
    """The hook; None for those that older versions of pytest put there for each phase of a test."""
    return None if getattr(hook, "__module__", "").startswith("_pytest") else hook


def _hooks() -> dict[str, object]:
    """Every place of the process that we hook into, as it is now."""
    state: dict[str, object] = {
        "excepthook": sys.excepthook,
        "threading.excepthook": _not_pytests(threading.excepthook),
        "meta_path": list(sys.meta_path),
        **{str(number): signal.getsignal(number) for number in SIGNALS},
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        optimizer = sys.modules.get("torch.optim.optimizer")
        state["torch.__getattr__"] = getattr(torch, "__getattr__", None)
        state["record"] = getattr(getattr(torch, "_C", None), "_cuda_record_memory_history", None)
        if optimizer is not None:
            state["pre"] = list(getattr(optimizer, "_global_optimizer_pre_hooks", {}).values())
            state["post"] = list(getattr(optimizer, "_global_optimizer_post_hooks", {}).values())
    return state


def _not_inductors(thread: threading.Thread) -> bool:
    """The compiler of torch 2.3 keeps a pool of processes, with two threads; we have none."""
    pool = type(thread).__module__ == "concurrent.futures.process"
    return not pool and thread.name != "QueueFeederThread"


def _join(thread: threading.Thread) -> None:
    for _ in range(1000):
        try:
            thread.join(timeout=5)
        except RuntimeError:  # noqa: PERF203 - of this very moment: not begun yet
            threading.Event().wait(0.001)
        else:
            return


@pytest.fixture(autouse=True)
def no_residue():
    """No thread, hook or socket of ours outlives a test."""
    threads, sockets, hooks = set(threading.enumerate()), _sockets(), _hooks()
    had_torch = "torch" in sys.modules
    yield
    if "support.yield_parts" in sys.modules:
        for engine in list(sys.modules["support.yield_parts"].World.made):
            engine._waiter.close()
    ours: set[threading.Thread] = set()
    while fresh := set(filter(_not_inductors, threading.enumerate())) - threads - ours:
        for thread in fresh:
            _join(thread)
        ours |= fresh
    left = [thread.name for thread in ours if thread.is_alive()]
    assert left == [], f"threads left behind: {left}"
    if _sockets() - sockets:
        gc.collect()
    assert _sockets() - sockets == set(), "sockets left behind"
    if had_torch == ("torch" in sys.modules):
        assert _hooks() == hooks


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Recordings that ship with the tests."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def recordings() -> list[Path]:
    """Every recording of the folder that GPUMEM_SNAPSHOTS names."""
    folder = os.environ.get("GPUMEM_SNAPSHOTS")
    if not folder:
        pytest.skip("GPUMEM_SNAPSHOTS names no folder of recordings")
    found = sorted(Path(folder).glob("*.pickle.gz"))
    assert found, f"no *.pickle.gz in {folder}"
    return found
