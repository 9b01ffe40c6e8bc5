"""A torch module without a GPU: allocator, history and lazy initialisation as torch behaves.

The C functions have exactly the positional signatures of each version.
"""

from __future__ import annotations

import types
from typing import Any

ARITY = {"2.3": 4, "2.7": 4, "2.8": 7, "2.11": 8, "2.13": 8, "2.15": 10}
"""Positional arguments of `torch._C._cuda_record_memory_history` by version."""

KINDS = (
    "str | None",
    "str | None",
    "str",
    "typing.SupportsInt | typing.SupportsIndex",
    "bool",
    "bool",
    "bool",
    "collections.abc.Sequence[str]",
    "bool",
    "bool",
)
"""The types in pybind11's docstring."""

FRAME = {"name": "main", "filename": "/job/train.py", "line": 3}


def _stat(current=0, peak=0, allocated=0, freed=0):
    return {"all": {"current": current, "peak": peak, "allocated": allocated, "freed": freed}}


class Allocator:
    """One device's caching allocator: a segment per block, rounding to 512 bytes."""

    def __init__(self):
        self.mode: str | None = None
        self.max_entries = 1
        self.skip: tuple[str, ...] = ()
        self.calls: list[tuple[Any, ...]] = []
        self.blocks: dict[int, dict[str, Any]] = {}
        self.trace: list[dict[str, Any]] = []
        self.ooms = 2
        self.allocations = self.frees = self.allocation_bytes = self.requested_ever = 0
        self.peak_held = self.peak_asked = 0
        self.metadata = ""
        self.time_us = lambda: 1
        self.next_address = 0x1000

    def record(self, enabled, max_entries, clear, skip):
        self.mode = enabled if enabled in {None, "state", "all"} else "state"
        self.max_entries = max_entries if enabled == "all" else 1
        self.skip = tuple(skip)
        if enabled is None or clear:
            self.trace.clear()

    def event(self, action, **more):
        if self.mode is None or action in self.skip:
            return
        self.trace.append({"action": action, "time_us": self.time_us(), **more})
        del self.trace[: -self.max_entries]

    def alloc(self, size, frames=(FRAME,)):
        address, self.next_address = self.next_address, self.next_address + (1 << 20)
        rounded = -(-size // 512) * 512
        self.allocations += 1
        self.allocation_bytes += rounded
        self.requested_ever += size
        kept = list(frames) if self.mode else []
        self.blocks[address] = {
            "address": address, "size": rounded, "requested_size": size,
            "state": "active_allocated", "frames": kept,
        }  # fmt: skip
        self.peak_held = max(self.peak_held, self.held())
        self.peak_asked = max(self.peak_asked, self.held("requested_size"))
        self.event(
            "alloc", addr=address, size=size, stream=0, frames=kept, user_metadata=self.metadata
        )
        return address

    def free(self, address):
        """Its events carry the stack of the allocation, as torch's do unless `context` is all."""
        gone = self.blocks.pop(address)
        self.frees += 1
        for action in ("free_requested", "free_completed"):
            self.event(
                action, addr=address, size=gone["requested_size"], stream=0, frames=gone["frames"]
            )

    def held(self, what="size"):
        return sum(block[what] for block in self.blocks.values())

    def stats(self):
        held, asked = self.held(), self.held("requested_size")
        return {
            "allocated_bytes": _stat(held, self.peak_held, self.allocation_bytes, 0),
            "requested_bytes": _stat(asked, self.peak_asked, self.requested_ever, 0),
            "active_bytes": _stat(held),
            "reserved_bytes": _stat(held, held + 512),
            "allocation": _stat(len(self.blocks), 0, self.allocations, self.frees),
            "segment": _stat(len(self.blocks), 0, self.allocations),
            "num_ooms": self.ooms,
            "num_alloc_retries": 1,
        }

    def segments(self, device):
        return [
            {
                "device": device, "address": b["address"], "total_size": b["size"],
                "allocated_size": b["size"], "active_size": b["size"], "stream": 0,
                "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False,
                "requested_size": b["requested_size"], "frames": [], "blocks": [dict(b)],
            }
            for b in self.blocks.values()
        ]  # fmt: skip


def make(version: str, *, devices: int = 1, documented: bool = True) -> types.ModuleType:
    """A `torch` of that version, CUDA initialised, every device with a context."""
    minor = int(version.split(".")[1])
    torch: Any = types.ModuleType("torch")
    torch.__version__ = f"{version}.0+cu130"
    torch.version = types.SimpleNamespace(cuda="13.0", hip=None)
    torch.allocators = [Allocator() for _ in range(devices)]
    torch.contexts = set(range(devices))
    torch.backend = "native"
    torch.snapshots = []
    torch.annotations = []
    torch.host_segments = []
    c: Any = types.ModuleType("torch._C")
    torch._C = c
    arity = ARITY[version]

    def apply(values):
        for allocator in torch.allocators:
            allocator.calls.append(values)
            clear = values[4] if arity > 4 else False
            skip = values[7] if arity > 7 else ()
            allocator.record(values[0], values[3], clear, skip)

    def record(*values):
        if len(values) != arity:
            raise TypeError("_cuda_record_memory_history(): incompatible function arguments")
        apply(values)

    if documented:
        written = ", ".join(f"arg{i}: {kind}" for i, kind in enumerate(KINDS[:arity]))
        record.__doc__ = f"_cuda_record_memory_history({written}) -> None\n"
    c._cuda_record_memory_history = record
    c._cuda_record_memory_history_legacy = lambda *values: record(
        "all" if values[0] else None, "all", "all", 7, *_rest(arity)
    )
    c._cuda_isHistoryEnabled = lambda: torch.allocators[0].mode is not None
    c._cuda_getDeviceCount = lambda: devices
    c._cuda_hasPrimaryContext = lambda device: device in torch.contexts
    c._cuda_memoryStats = lambda device: torch.allocators[device].stats()

    _with_ooms(torch)
    torch.on_snapshot = []
    c._cuda_memorySnapshot = _snapshot(torch, minor)
    cuda: Any = types.ModuleType("torch.cuda")
    torch.cuda = cuda
    cuda.get_allocator_backend = lambda: torch.backend
    cuda.mem_get_info = lambda device: (60 << 30, 80 << 30)
    cuda.memory = types.SimpleNamespace(_record_memory_history=_python_level(c, arity))
    return torch


def _with_ooms(torch):
    """Observers of failed allocations, and `torch.fail(size)`, an allocation that fails."""
    torch.observers = []
    torch.OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})

    def attach(observer):
        if not torch.contexts:
            raise SystemError("attached before CUDA is up: torch would crash here")
        torch.observers.append(observer)

    def fail(size, device=0, *, free=1 << 20, limit=80 << 30):
        """What an allocation does that finds no room: count, tell the observers, raise."""
        torch.allocators[device].ooms += 1
        torch.allocators[device].event("oom", size=size, stream=0, device_free=free, frames=[])
        for observer in torch.observers:
            observer(device, size, limit, free)
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")

    torch._C._cuda_attach_out_of_memory_observer = attach
    torch.fail = fail


def _rest(arity, *, clear_history=False):
    return [clear_history, False, False, [], False, True][: arity - 4]


def _python_level(c, arity):
    def _record_memory_history(
        enabled="all", context="all", stacks="all", max_entries=2**63 - 1, *, clear_history=False
    ):
        more = _rest(arity, clear_history=clear_history)
        if isinstance(enabled, bool):
            c._cuda_record_memory_history_legacy(enabled)
        else:
            c._cuda_record_memory_history(enabled, context, stacks, max_entries, *more)

    return _record_memory_history


def _snapshot(torch, minor):
    def snapshot(*args):
        if minor < 7 and args:
            raise TypeError("_cuda_memorySnapshot() takes no arguments")
        if minor >= 7 and len(args) != 1:
            raise TypeError("_cuda_memorySnapshot() takes exactly one argument")
        if args and args[0] is not None and minor < 11:
            raise RuntimeError("mempool_id must be a tuple of size 2")
        torch.snapshots.append(args)
        traces = not (args and args[0] is not None and args[0][2] is False)
        found = {
            "segments": [s for d, a in enumerate(torch.allocators) for s in a.segments(d)],
            "device_traces": [list(a.trace) if traces else [] for a in torch.allocators],
            "external_annotations": list(torch.annotations),
        }
        if minor >= 14:
            found["host_segments"] = [dict(segment) for segment in torch.host_segments]
            found["host_traces"] = []
        for hook in list(torch.on_snapshot):
            hook()
        return found

    return snapshot
