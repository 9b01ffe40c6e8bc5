"""Records the storages that were shared with another process or library.

A storage does not show that it is shared: `is_shared()` is always true on CUDA, and a storage given
out by DLPack stays resizable. So the functions that share are wrapped: `_share_cuda_` (CUDA IPC),
torch's DLPack functions and `__cuda_array_interface__`. A storage counts as shared as long as it
lives, since its release on the other side cannot be observed.

Limits: storages from before `start` are unknown; the C exchange interface of DLPack
(`__dlpack_c_exchange_api__`, torch 2.10) and plain `data_ptr()` cannot be observed.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.capture.objects.storages import WeakStorage, storages_of
from gpumem_otel.capture.patching import Patch
from gpumem_otel.snapshot.torch_format import device_of, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpumem_otel.snapshot.torch_format import RawSegment

_DLPACK: Final = (
    ("torch._C", "_to_dlpack"),
    ("torch._C", "_to_dlpack_versioned"),
    ("torch.utils.dlpack", "to_dlpack"),
    ("torch", "to_dlpack"),
)
_FORGET_EVERY: Final = 1024


class SharedStorages:
    """Wraps the sharing functions from `start` to `stop`.

    Attributes:
        calls: number of calls that shared something.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._torch: Any = None
        self._patches: list[Patch] = []
        self._out: dict[int, WeakStorage] = {}
        self._before: frozenset[tuple[int, int]] = frozenset()
        self._began = False
        self._lock = threading.Lock()

    @property
    def watches(self) -> bool:
        """Whether the functions are wrapped now."""
        return bool(self._patches)

    def start(self, torch: Any) -> None:
        """Wrap the functions; does nothing if they already are."""
        if self._patches or not hasattr(torch, "UntypedStorage"):
            return
        self._torch = torch
        for module, name in _DLPACK:
            owner = sys.modules.get(module)
            if owner is not None and hasattr(owner, name):
                self._patches.append(Patch(owner, name, self._function))
        self._patches.append(_OfClass(torch.UntypedStorage, "_share_cuda_", self._function))
        self._patches.append(_OfClass(torch.Tensor, "__cuda_array_interface__", self._property))

    def stop(self) -> None:
        """Restore the functions, and forget everything."""
        patches, self._patches = self._patches, []
        for patch in reversed(patches):
            patch.revert()
        with self._lock:
            self._out = {}
        self._before, self._began = frozenset(), False

    def forget_parent(self) -> None:
        """In a forked child: forget what the parent has shared."""
        self._lock = threading.Lock()
        self._out = {}
        self._before, self._began = frozenset(), False

    def began(self, segments: Iterable[RawSegment]) -> None:
        """Note the memory allocated before `start`, which may be shared.

        Args:
            segments: of a snapshot; () if nothing was allocated yet.
        """
        self._began = True
        self._before = frozenset(
            (device_of(segment), whole(block.get("address")))
            for segment in segments
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        )

    def is_out(self, storage: Any) -> bool:
        """Whether this storage was shared."""
        with self._lock:
            known = self._out.get(storage._cdata)  # noqa: SLF001 - the identity of a storage
        return known is not None and not known.expired()

    def may_be_out(self, device: int, address: int) -> bool:
        """Whether this memory may have been shared before `start`.

        An address that was allocated again since then counts too: the two cannot be distinguished.
        """
        return not self._began or (device, address) in self._before

    def _note(self, item: Any) -> None:
        storage_type = self._torch.UntypedStorage
        storages = [item] if isinstance(item, storage_type) else storages_of(item)
        with self._lock:
            self.calls += 1
            for storage in storages:
                weak = WeakStorage.of(storage)
                self._out[weak.identity] = weak
            if not self.calls % _FORGET_EVERY:
                self._out = {k: one for k, one in self._out.items() if not one.expired()}

    def _function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def given_out(item: Any, *args: Any, **kwargs: Any) -> Any:
            self._seen(item)
            return original(item, *args, **kwargs)

        for name in ("__name__", "__qualname__", "__doc__"):
            setattr(given_out, name, getattr(original, name, None) or name)
        return given_out

    def _property(self, original: Any) -> property:
        def given_out(item: Any) -> Any:
            value = original.__get__(item)  # raises where there is no such interface
            self._seen(item)
            return value

        return property(given_out, doc=original.__doc__)

    def _seen(self, item: Any) -> None:
        if self._patches:
            try:
                self._note(item)
            except Exception:
                self._began = False  # something was shared but not noted: all is unknown


class _OfClass(Patch):
    """For a class that may inherit the attribute: `revert` then deletes its own."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        self._inherited = name not in vars(owner)
        super().__init__(owner, name, wrap)

    def revert(self) -> bool:
        """See `Patch`."""
        if not super().revert():
            return False
        if self._inherited:
            delattr(self._owner, self._name)
        return True
