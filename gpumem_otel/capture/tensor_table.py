"""The address table: which storages hold parameters, buffers, gradients, optimizer state, caches.

Only the thread that steps an optimizer may read its parameters' gradients and its state: the
autograd engine writes `.grad` without the interpreter lock, and reading it on another thread
crashes the process. So the job's thread makes the table in the optimizer's hook (or in `step()`, or
at the end of the forward of a watched root module), and only shortly before a reading is due.

Nothing is kept alive: modules, optimizers and named objects are held weakly, storages by torch's
own weak reference. If a storage was freed between table and snapshot and its address allocated
again, its reference is expired and the entry does not count (`alive`).
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.gate import QuietGate
from gpumem_otel.base.logs import named_logger
from gpumem_otel.capture.objects.python_objects import Kinds
from gpumem_otel.capture.objects.storages import tensors_in
from gpumem_otel.capture.table_entries import EntryCollector, rekeyed
from gpumem_otel.snapshot.tensor_classes import TensorClass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gpumem_otel.capture.table_entries import TableEntries


class ModelHook:
    """A hook of a watched model; copies and pickles get a no-op of the standard library instead."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Called by torch."""
        self._call(*args)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, (nullcontext, "__exit__")


_log = named_logger("gpumem_otel.capture")

_MIN_SECONDS: Final = 0.2
_COST_FACTOR: Final = 500.0
_AHEAD_SECONDS: Final = 5.0
"""A table is made at most this long before a reading is due,"""
_AHEAD_BOUNDARIES: Final = 2.0
"""or this many steps before it, if they take longer."""
_CLASSES: Final = {member.value: member for member in TensorClass}
_MOST_INPUT_PARTS: Final = 10_000
"""Limit for the arguments of one forward, the job's hot path."""
_NO_THREAD: Final = -1
"""Owner of an optimizer that only `step()` may read."""


class TensorTable:
    """Address -> class, kept by the job's own threads, read by ours.

    Args:
        on_refreshed: called with the seconds that each refresh took of the job's thread.
        host_too: include tensors in host memory, whose addresses match no device block.
        gate: while it is closed the job's hooks read no tensor.

    Attributes:
        on_forward: called at the end of each forward without gradients of a watched model, on its
            thread: it may block there, and its errors are raised into the job.
        last_seconds: duration of the last refresh.
        tensors: number of tensors it visited.
    """

    def __init__(
        self,
        on_refreshed: Callable[[float], object] | None = None,
        *,
        monotonic: Callable[[], float] = time.perf_counter,
        host_too: bool = False,
        gate: QuietGate | None = None,
    ) -> None:
        self._gate = gate or QuietGate()
        self._on_refreshed = on_refreshed
        self._host_too = host_too
        self._monotonic = monotonic
        self._torch: Any = None
        self._entries: TableEntries = {}
        self._modules: dict[int, weakref.ref[Any]] = {}
        self._optimizers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._named: dict[tuple[TensorClass, int], weakref.ref[Any]] = {}
        self._roots: dict[int, tuple[weakref.ref[Any], tuple[Any, ...]]] = {}
        self._inputs: TableEntries = {}
        self._inputs_allowed_from = float("-inf")
        self._inputs_seconds = 0.0
        self._handles: list[Any] = []
        self._lock = threading.RLock()  # a finalizer may call `watch` in the middle of anything
        self._between_seconds, self._boundary_seconds = 0.0, self._monotonic()
        self._wanted_from = float("-inf")
        self._allowed_from = float("-inf")
        self._searched = False
        self._active = False
        self.last_seconds = 0.0
        self.tensors = 0
        self.on_forward: Callable[[], object] | None = None

    # life

    def start(self) -> None:
        """Register hooks for modules built from now on. On the job's thread."""
        torch = sys.modules.get("torch")
        module = sys.modules.get("torch.nn.modules.module")
        if self._active or torch is None or module is None:
            return
        self._torch, self._active = torch, True
        modules, reference = self._modules, weakref.ref

        def registered(owner: Any, name: str, item: object) -> None:  # noqa: ARG001
            if id(owner) not in modules:
                key = id(owner)
                modules[key] = reference(owner, lambda _: modules.pop(key, None))

        for register in (
            module.register_module_parameter_registration_hook,
            module.register_module_buffer_registration_hook,
        ):
            self._handles.append(register(registered))

    def stop(self) -> None:
        """Remove the hooks and forget everything."""
        self._active = False
        handles, self._handles = self._handles, []
        for _, of_root in list(self._roots.values()):
            handles += of_root
        for handle in handles:
            handle.remove()
        self._roots.clear()
        self._modules.clear()
        self._optimizers.clear()
        self._named.clear()
        self._entries, self._inputs = {}, {}

    def forget_parent(self) -> None:
        """In a forked child: the parent's storages are not in this process."""
        self._lock = threading.RLock()
        self._entries = self._inputs = {}
        self._optimizers.clear()
        self._wanted_from = float("-inf")

    def watch(self, name: str, item: Any) -> None:
        """Add a model, an optimizer, or an object whose tensors are of the class `name`.

        On the job's thread. A model's parameters are read at once, its inputs at each forward. A
        known item is only read again.

        Args:
            name: "" for models and optimizers; else a tensor class, for instance `kv_cache`.
            item: must support weak references.
        """
        torch = self._torch
        if not self._active or torch is None:
            return
        collector = self._collector()
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - shields us from the job's modes
            self._add_item(collector, name, item)
        self.tensors += collector.tensors
        with self._lock:
            self._entries = {**self._entries, **collector.entries}
        self.want(0.0)

    def _add_item(self, collector: EntryCollector, name: str, item: Any) -> None:
        torch = self._torch
        if isinstance(item, torch.nn.Module):
            self._add_tree(item)
            if id(item) not in self._roots:
                handles = (
                    item.register_forward_pre_hook(
                        ModelHook(self._before_forward()), with_kwargs=True
                    ),
                    item.register_forward_hook(ModelHook(self._after_forward())),
                )
                self._roots[id(item)] = self._forgetting(self._roots, item), handles
            collector.add_modules(list(item.modules()))
        elif isinstance(item, torch.optim.Optimizer):
            # its thread is known after the first step
            self._optimizers[id(item)] = (self._forgetting(self._optimizers, item), _NO_THREAD)
        elif name in _CLASSES:
            named, key = self._named, (_CLASSES[name], id(item))
            named[key] = weakref.ref(item, lambda _: named.pop(key, None))
            collector.add_named(item, _CLASSES[name])
        else:
            known = ", ".join(_CLASSES)
            _log.warning("watch(%s=...): no such class; known are %s", name, known)

    def want(self, seconds: float) -> None:
        """Make a table shortly before a reading that is due in this many seconds."""
        ahead = max(_AHEAD_SECONDS, _AHEAD_BOUNDARIES * self._between_seconds)
        self._wanted_from = self._monotonic() + seconds - ahead

    @contextmanager
    def wanted_now(self) -> Iterator[None]:
        """Make tables at once within the block, while a window of events is open."""
        before, self._wanted_from = self._wanted_from, float("-inf")
        try:
            yield
        finally:
            if self._wanted_from == float("-inf"):  # else `want` was called meanwhile
                self._wanted_from = before

    def class_at(self, address: int) -> TensorClass | None:
        """The class of the storage at this address in the last table, if it still lives."""
        for entries in (self._entries, self._inputs):
            entry = entries.get(address)
            if entry is not None and not entry[2].expired():
                return entry[1]
        return None

    def snapshot(self) -> TableEntries:
        """The current table with the last inputs; never changed afterwards."""
        entries, inputs = self._entries, self._inputs
        new = {
            address: entry
            for address, entry in inputs.items()
            if (known := entries.get(address)) is None or known[2].expired()
        }
        return {**entries, **new} if new else entries

    def moved(self, addresses: Mapping[int, int]) -> None:
        """Storages have other addresses from now on, or none. The job's threads are stopped.

        Args:
            addresses: the new address by the `_cdata` of the storage; 0 for none.
        """
        with self._lock:
            self._entries = rekeyed(self._entries, addresses)
            self._inputs = rekeyed(self._inputs, addresses)

    @staticmethod
    def alive(entries: TableEntries, pause: Callable[[], None]) -> dict[int, Any]:
        """The entries whose storages still live: address -> (bytes, class).

        Called after the snapshot: a storage that lives now had its address all the time, unless it
        was resized to 0 meanwhile (as FSDP of torch 2.3 does).

        Args:
            entries: of `snapshot()`, taken before the allocator's snapshot.
            pause: called every 256 entries.
        """
        living = {}
        for count, (address, (size, tensor_class, storage)) in enumerate(entries.items(), 1):
            if not storage.expired():
                living[address] = (size, tensor_class)
            if not count % 256:
                pause()
        return living

    # the job's hooks

    def stepped(self, optimizer: Any | None, in_backward: bool = False) -> None:
        """An optimizer has stepped on this thread, or `step()` was called (None). Never raises.

        Args:
            optimizer: the outermost that stepped.
            in_backward: it stepped inside backward: nothing is read now, its gradients and state
                only in `step()`.
        """
        if not self._active:
            return
        if optimizer is not None:
            owner = _NO_THREAD if in_backward else threading.get_ident()
            known = self._optimizers.get(id(optimizer))
            if known is None:
                self._wanted_from = float("-inf")  # the first table of this optimizer
            if known is None or known[1] != owner:
                try:
                    reference = self._forgetting(self._optimizers, optimizer)
                except TypeError:
                    return
                self._optimizers[id(optimizer)] = (reference, owner)
        if not in_backward:
            now = self._monotonic()
            self._between_seconds, self._boundary_seconds = now - self._boundary_seconds, now
            self._refresh_if_due(here=optimizer is None)

    def _refresh_if_due(self, *, here: bool = False) -> None:
        now = self._monotonic()
        if now < self._wanted_from or now < self._allowed_from:
            return
        if not self._gate.enter():
            return
        try:
            self._refresh(now, here=here)
        finally:
            self._gate.leave()

    def _refresh(self, now: float, *, here: bool) -> None:
        if not self._lock.acquire(blocking=False):
            return
        searched_seconds = 0.0
        try:
            if not self._searched:
                self._searched = True
                self._search()
                searched_seconds = self._monotonic() - now
            with self._torch._C.DisableTorchFunction():  # noqa: SLF001 - as in `watch`
                self._entries = self._read(here=here)
        except Exception:
            self._active = False
            _log.warning("tensor classes come from stacks only from now on", exc_info=True)
        finally:
            took = self._monotonic() - now + self._inputs_seconds
            self._inputs_seconds = 0.0
            self.last_seconds = took
            often = (took - searched_seconds) * _COST_FACTOR
            self._allowed_from = now + max(_MIN_SECONDS, often)
            self._lock.release()
        if self._on_refreshed is not None:
            self._on_refreshed(took)

    def _before_forward(self) -> Callable[..., None]:
        is_compiling = self._torch.compiler.is_compiling

        def before(module: Any, args: Any, kwargs: Any) -> None:
            if is_compiling():
                return
            self._note_inputs(module, (args, kwargs))

        return before

    def _after_forward(self) -> Callable[..., None]:
        is_compiling = self._torch.compiler.is_compiling
        is_grad_enabled = self._torch.is_grad_enabled

        def after(module: Any, args: Any, output: Any) -> None:  # noqa: ARG001
            # with gradients on, the optimizer's hook comes later and knows more
            if not is_compiling() and not is_grad_enabled():
                self._refresh_if_due()
                if self.on_forward is not None:
                    self.on_forward()

        return after

    def _note_inputs(self, module: Any, arguments: Any) -> None:
        now = self._monotonic()
        if not self._active or now < self._wanted_from or now < self._inputs_allowed_from:
            return
        if self._gate.closed:  # noting inputs never waits
            return
        try:
            collector = self._collector()
            tensors = tensors_in(arguments, self._torch.Tensor, _MOST_INPUT_PARTS)
            with self._torch._C.DisableTorchFunction():  # noqa: SLF001 - as in `watch`
                collector.add(tensors, TensorClass.INPUT)
            self._inputs = collector.entries
            self.tensors += collector.tensors
        except Exception:
            _log.warning("inputs of %s are not recorded", type(module).__name__, exc_info=True)
            self._inputs, self._inputs_allowed_from = {}, float("inf")
            return
        took = self._monotonic() - now
        self._inputs_seconds += took
        self._inputs_allowed_from = now + took * _COST_FACTOR

    # the table

    def _read(self, *, here: bool) -> TableEntries:
        """A new table; the first entry of an address wins.

        Args:
            here: include optimizers that stepped on other threads: with `step()` the job declares
                that none of these threads works now.
        """
        collector = self._collector()
        modules = [m for m in (ref() for ref in list(self._modules.values())) if m is not None]
        for (tensor_class, _), ref in list(self._named.items()):
            if (item := ref()) is not None:
                collector.add_named(item, tensor_class)
        thread = threading.get_ident()
        optimizers = [
            optimizer
            for optimizer, owner in ((ref(), owner) for ref, owner in [*self._optimizers.values()])
            if optimizer is not None and (here or owner == thread)
        ]
        collector.add_optimizers(optimizers, modules)
        self.tensors = collector.tensors
        return collector.entries

    def _collector(self) -> EntryCollector:
        return EntryCollector(self._torch, self._entries, host_too=self._host_too)

    def _search(self) -> None:
        """Add modules that no hook reports: older, copied or unpickled ones."""
        kinds = Kinds(module=self._torch.nn.Module)
        for module in kinds.collected().get("module", ()):
            self._add_module(module)

    def _add_tree(self, root: Any) -> None:
        for module in root.modules():
            self._add_module(module)

    def _add_module(self, module: Any) -> None:
        if id(module) not in self._modules and "_parameters" in vars(module):
            self._modules[id(module)] = self._forgetting(self._modules, module)

    @staticmethod
    def _forgetting(held: dict[int, Any], item: Any) -> weakref.ref[Any]:
        key = id(item)
        return weakref.ref(item, lambda _: held.pop(key, None))
