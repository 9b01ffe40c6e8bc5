"""Collects the entries of the address table from modules, optimizers and named objects.

Runs on the thread that may read them, see `tensor_table.py`.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpumem_otel.capture.objects.storages import WeakStorage, address_of, storages_of, tensors_in
from gpumem_otel.snapshot.tensor_classes import TensorClass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_KIB = 1024
_HOPPER = (9, 0)
_LARGE = 4096 * 8 * _KIB
_SMALL = 4096 * 2 * _KIB + 16 * 8 * _KIB
_LT = 1024 * _KIB


def workspace_sizes(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Sizes in bytes of one workspace of cuBLAS and of cuBLASLt, () if unknown.

    As torch chooses them (`aten/src/ATen/cuda/CublasHandlePool.cpp`): `CUBLAS_WORKSPACE_CONFIG`
    (`:KiB:count` pairs), else 32 MiB since Hopper and 8,320 KiB before; `CUBLASLT_WORKSPACE_SIZE`
    in KiB, else 1 MiB (newer versions share the other workspace).
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return ()
    try:
        hopper = tuple(torch.cuda.get_device_capability()) >= _HOPPER
    except Exception:
        return ()
    sizes = {_configured(environ) or (_LARGE if hopper else _SMALL)}
    lt = environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    sizes.add(int(lt) * _KIB if lt.isdigit() else _LT)
    return tuple(sorted(sizes - {0}))


def _configured(environ: Mapping[str, str]) -> int:
    """Total bytes of `CUBLAS_WORKSPACE_CONFIG`; 0 if not set."""
    pairs: list[Any] = re.findall(r":(\d+):(\d+)", environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * int(count) for size, count in pairs) * _KIB


_CACHE_NAME: Final = re.compile(r"(^|_)(kv|k|v|key|value|past_key_values?)_?caches?(_|$)|^kv$")

_Entry: TypeAlias = "tuple[int, TensorClass, WeakStorage]"
TableEntries: TypeAlias = "dict[int, _Entry]"
"""Address -> (bytes, class, storage)."""


class EntryCollector:
    """Collects entries; the first one of an address wins.

    Args:
        last: the previous table, whose weak references are reused.
        host_too: include tensors in host memory.

    Attributes:
        entries: the result.
        tensors: number of tensors visited.
    """

    def __init__(self, torch: Any, last: TableEntries, *, host_too: bool) -> None:
        self.entries: TableEntries = {}
        self.tensors = 0
        self._torch = torch
        self._last = last
        self._host_too = host_too

    def add(self, tensors: Iterable[Any], tensor_class: TensorClass) -> None:
        """Add storages that have no entry yet. Hot path: 1 us per tensor."""
        torch, entries, last = self._torch, self.entries, self._last
        storage_type = torch.UntypedStorage
        expired, free = storage_type._expired, storage_type._free_weak_ref  # noqa: SLF001
        plain, host_too = (torch.nn.Parameter, torch.Tensor), self._host_too
        count = 0
        for tensor in tensors:
            if tensor is None:
                continue
            count += 1
            storages: Sequence[Any]
            if type(tensor) in plain:
                if tensor.is_cpu and not host_too:
                    continue
                try:
                    storages = (tensor.untyped_storage(),)
                except (RuntimeError, NotImplementedError):  # sparse
                    storages = storages_of(tensor)
            else:
                storages = storages_of(tensor)
            for storage in storages:
                address = address_of(storage)
                if not address or address in entries:
                    continue
                known = last.get(address)
                if known is not None and known[2].identity == storage._cdata:  # noqa: SLF001
                    weak = known[2]
                else:
                    weak = WeakStorage(storage, expired, free)
                entries[address] = (storage.nbytes(), tensor_class, weak)
        self.tensors += count

    def add_named(self, item: Any, tensor_class: TensorClass) -> None:
        """Add a named object's tensors, but not parameters, as of a cache's model."""
        parameter = self._torch.nn.Parameter
        self.add(
            (
                tensor
                for tensor in tensors_in(item, self._torch.Tensor)
                if tensor is item or not isinstance(tensor, parameter)
            ),
            tensor_class,
        )

    def add_modules(self, modules: Sequence[Any]) -> None:
        """Add the modules' own parameters, caches and buffers, not those of their submodules."""
        # not by named_parameters(), which walks the whole tree below each module; lists are made in
        # one step, since another thread may use a module
        parameters = [p for m in modules for p in list(m._parameters.values())]  # noqa: SLF001
        self.add(parameters, TensorClass.PARAMETER)
        for module in modules:
            self._add_caches(module)
        buffers = [b for m in modules for b in list(m._buffers.values())]  # noqa: SLF001
        self.add(buffers, TensorClass.BUFFER)

    def _add_caches(self, module: Any) -> None:
        for owned in (module._buffers, vars(module)):  # noqa: SLF001
            for name in list(owned):
                if ("cache" in name or name == "past_key_values") and _CACHE_NAME.search(name):
                    tensors = tensors_in(owned.get(name), self._torch.Tensor)
                    self.add(tensors, TensorClass.KV_CACHE)

    def add_optimizers(self, optimizers: Sequence[Any], modules: Sequence[Any]) -> None:
        """Add parameters, gradients and states, and the modules.

        Args:
            optimizers: those whose gradients and states this thread may read.
            modules: all known modules.
        """
        parameters = [
            parameter
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self.add(parameters, TensorClass.PARAMETER)
        self.add_modules(modules)
        self.add([p.grad for p in parameters], TensorClass.GRADIENT)
        for optimizer in optimizers:
            self.add(self._states_of(optimizer), TensorClass.OPTIMIZER_STATE)

    def _states_of(self, optimizer: Any) -> Iterator[Any]:
        tensor_type = self._torch.Tensor
        for state in list(optimizer.state.values()):
            for item in state.values() if isinstance(state, dict) else (state,):
                if isinstance(item, tensor_type):
                    yield item
                elif not isinstance(item, int | float):
                    yield from tensors_in(item, tensor_type)


def rekeyed(entries: TableEntries, addresses: Mapping[int, int]) -> TableEntries:
    """The entries after storages got other addresses, or none.

    An entry without memory is kept under a negative number.

    Args:
        entries: the old entries.
        addresses: the new address by the `_cdata` of the storage; 0 for none.
    """
    kept: TableEntries = {}
    moved: TableEntries = {}
    for address, entry in entries.items():
        identity = entry[2].identity
        if identity in addresses:
            moved[addresses[identity] or -identity] = entry
        else:
            kept[address] = entry
    return {**kept, **moved}
