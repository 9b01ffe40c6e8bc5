"""Calls back when this process has imported torch and when it has initialised CUDA; never polls.

torch itself calls back (`torch.cuda._lazy_call`) before the job's first allocation, so that all of
them are recorded. Until torch is imported, a finder at the head of `sys.meta_path` waits for it and
then removes itself. torch is never imported here.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from gpumem_otel.base.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_log = named_logger("gpumem_otel.capture")


class Arming:
    """Calls back once when CUDA is initialised in this process.

    A forked child that inherits this before CUDA was initialised calls `on_armed` when it
    initialises CUDA itself.

    Args:
        on_armed: called inside torch's initialisation, on the job's thread and under torch's lock:
            it must be quick and must not wait for another thread. If CUDA is initialised already,
            it is called at once on the caller's thread. Its errors are logged, never raised into
            the job.
        on_import: called with the torch module once it is imported (at once if it already is),
            always before `on_armed`; the same rules.
    """

    def __init__(
        self,
        on_armed: Callable[[], object],
        *,
        on_import: Callable[[ModuleType], object] | None = None,
    ) -> None:
        self._on_armed = on_armed
        self._on_import = on_import
        self._lock = threading.Lock()
        self._finder: _TorchFinder | None = None
        self._entry: Callable[[], None] | None = None
        self._cuda: Any = None
        self._waiting = False
        self._fired = False

    def start(self) -> None:
        """Wait for CUDA; does nothing if already waiting."""
        with self._lock:
            if self._waiting:
                return
            self._waiting = True
            self._fired = False
        torch = sys.modules.get("torch")
        if torch is not None and _is_complete(torch):
            self._attach(torch)
            return
        with self._lock:
            self._finder = _TorchFinder(self._attach)
            sys.meta_path.insert(0, self._finder)

    def stop(self) -> None:
        """Stop waiting; leaves at most an inert entry in torch's queue."""
        with self._lock:
            self._waiting = False
            finder, self._finder = self._finder, None
            entry, self._entry = self._entry, None
        if finder is not None:
            finder.remove()
        if entry is not None:
            _drop_queued(self._cuda, entry)

    def _attach(self, torch: ModuleType) -> None:
        with self._lock:
            if not self._waiting or self._entry is not None:
                return
            finder, self._finder = self._finder, None

            def armed() -> None:
                if self._entry is armed and not self._fired:
                    self._fired = True
                    self._run(self._on_armed)

            self._entry = armed
            self._cuda = getattr(torch, "cuda", None)
        if finder is not None:
            finder.remove()
        if self._on_import is not None:
            self._run(self._on_import, torch)
        lazy_call = getattr(self._cuda, "_lazy_call", None)
        if lazy_call is not None:
            lazy_call(armed)

    @staticmethod
    def _run(callback: Callable[..., object], *args: object) -> None:
        try:
            callback(*args)
        except Exception:
            _log.warning("arming failed, the job continues", exc_info=True)


class _TorchFinder:
    """A meta path finder that finds nothing itself, but notices the end of torch's import."""

    def __init__(self, on_imported: Callable[[ModuleType], object]) -> None:
        self._on_imported = on_imported
        self._patched: list[tuple[Any, Any]] = []
        self._importing = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if not fullname.startswith("torch"):
            return None
        if fullname == "torch":
            return self._spec_of_torch(path, target)
        if fullname.startswith("torch."):
            # install() ran during the import of torch, whose end cannot be observed; but torch.cuda
            # is complete before the end, and some submodule is imported after it
            torch = sys.modules.get("torch")
            if torch is not None and not self._importing and _is_complete(torch):
                self._on_imported(torch)
        return None

    def _spec_of_torch(
        self, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec("torch", path, target)
            if spec is not None:
                self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: Any) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            if module.__name__ != "torch":  # a shared loader, as of a zip file
                execute(module)
                return
            self._importing = True
            try:
                execute(module)
            finally:
                self._importing = False
            self._on_imported(module)

        try:
            # on this loader object only, not on its type
            loader.exec_module = exec_module
        except (AttributeError, TypeError):
            return
        # several, since find_spec is also called without an import (is torch installed?)
        self._patched.append((loader, exec_module))

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._patched:
            loader, exec_module = self._patched.pop()
            if vars(loader).get("exec_module") is exec_module:
                del loader.exec_module


def _is_complete(torch: Any) -> bool:
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or getattr(torch, "cuda", None) is not cuda or not hasattr(cuda, "_lazy_call"):
        return False
    spec = getattr(cuda, "__spec__", None)
    return not getattr(spec, "_initializing", False)


def _drop_queued(cuda: Any, entry: Callable[[], None]) -> None:
    """Remove our entry from torch's queue, unless torch is processing the queue now."""
    queue = getattr(cuda, "_queued_calls", None)
    lock = getattr(cuda, "_initialization_lock", None)
    if not isinstance(queue, list) or lock is None or not lock.acquire(blocking=False):
        return
    try:
        for index, queued in enumerate(queue):
            if queued[0] is entry:
                del queue[index]
                break
    finally:
        lock.release()
