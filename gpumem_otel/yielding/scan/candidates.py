"""Finds every storage on a CUDA device that can move, and all that cannot, with the reason.

A storage can move if Python can reach it, it is exactly one block of torch's own allocator, and no
other library or process has its address. Searched are all tensors and storages that the garbage
collector tracks, their gradients, tensors saved by autograd, optimizer states, and the address
table (which includes objects frozen by `gc.freeze()`). Each storage counts once.

Limits: addresses that the job's own code took with `data_ptr()`; graphs made without torch.
"""

from __future__ import annotations

import bisect
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpumem_otel.base.protocols import no_pause
from gpumem_otel.capture.objects.python_objects import Kinds, instance_dict
from gpumem_otel.capture.objects.storages import WeakStorage, address_of, storage_again, storages_of
from gpumem_otel.capture.objects.thread_activity import read_autograd
from gpumem_otel.capture.tensor_table import TensorTable
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.tensor_classes import Classifier, TensorClass
from gpumem_otel.snapshot.torch_format import DEFAULT_POOL, device_of, pool_of, whole
from gpumem_otel.tensors.saved import saved_tensors
from gpumem_otel.tensors.walk import is_parameter
from gpumem_otel.yielding.scan.cuda_graphs import graph_refusals, pool_ids
from gpumem_otel.yielding.values import Candidate, ScanResult, Unmovable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from gpumem_otel.capture.source import TorchSource
    from gpumem_otel.capture.stackless import Roots
    from gpumem_otel.snapshot.torch_format import RawBlock, RawSegment

# Between two yields of a job hardly anything changes, and a scan takes 0.1 s, enough to copy 5 GiB.
# So the copy of the last scan's large storages starts before the next scan, which alone decides.

_LARGE_BYTES: Final = 1 << 20


class Remembered:
    """Storages of at least 1 MiB of the last scan, by weak references."""

    def __init__(self) -> None:
        self._entries: list[tuple[WeakStorage, Candidate]] = []

    def keep(self, candidates: Iterable[Candidate]) -> None:
        """Replace the remembered storages."""
        self._entries = [
            (WeakStorage.of(one.storage), replace(one, storage=None, frames=()))
            for one in candidates
            if one.size_bytes >= _LARGE_BYTES
        ]

    def alive(self) -> list[Candidate]:
        """The living ones of unchanged size, with their current addresses, without frames."""
        torch = sys.modules.get("torch")
        alive = []
        for weak, one in self._entries:
            storage = storage_again(torch, weak)
            if storage is None or storage.nbytes() != one.size_bytes:
                continue
            address = address_of(storage)
            if address:
                alive.append(replace(one, storage=storage, address=address))
        return alive


_NCCL_REGISTERS: Final = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
_FALSE: Final = frozenset({"", "0", "false", "no", "off", "n", "f"})


class _Held(NamedTuple):
    """An allocated block of the default pool."""

    address: int
    size_bytes: int
    device: int
    stream: int
    raw: RawBlock


class CandidateFinder:
    """Scans at a safe point.

    Args:
        source: reads the allocator; has the address table and the record of shared storages.
        device_type: of the storages: `cpu` for tests without a GPU.
    """

    def __init__(
        self, source: TorchSource, environ: Mapping[str, str], *, device_type: str = "cuda"
    ) -> None:
        self._source = source
        self._environ = environ
        self._device_type = device_type
        self._last = Remembered()

    def probable(self) -> Sequence[Candidate]:
        """Large storages of the last scan that still live: cheap, for a prefetch only."""
        return self._last.alive()

    def find(self, *, assume_private: bool) -> ScanResult:
        """Scan, while the job's thread waits or is the caller.

        Args:
            assume_private: move storages too that another process or library may use, as the
                request promises that none does.

        Raises:
            CaptureError: the allocator could not be read.
        """
        torch = sys.modules.get("torch")
        status = self._source.status()
        if torch is None or not status.armed:
            return ScanResult(())
        if not status.supported:
            why = f"the allocator's blocks cannot be read here ({status.reason})"
            return ScanResult((), refusal=dict.fromkeys(status.devices, why))
        search = _Search(torch, self._device_type)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch.overrides documents
            search.objects(self._source.tensors)
        entries = self._source.tensors.snapshot() if self._source.tensors is not None else {}
        raw = self._source.recorder.snapshot(traces=False)
        roots = self._source.as_before_restores(raw)
        segments = from_torch(raw, source="torch").raw_segments()
        known = TensorTable.alive(entries, no_pause)
        sort = _Sort(
            torch=torch,
            blocks=_blocks_of(segments),
            classifier=Classifier({**search.classes, **known}),
            roots=roots,
            source=self._source,
            assume_private=assume_private,
        )
        sort.storages(search.storages.values())
        mem_pools = pool_ids(search.pools)
        stays = [*sort.stays(), *_pools(segments, mem_pools)]
        devices = {*status.devices, *sort.devices}
        refusal = graph_refusals(search.graphs, segments, mem_pools, devices)
        cause = "graphs"
        if str(self._environ.get(_NCCL_REGISTERS, "")).lower() not in _FALSE:
            why = f"{_NCCL_REGISTERS} is set: NCCL has registered all memory of the allocator"
            refusal.update(dict.fromkeys(devices, why))
            cause = "communicator"
        candidates = [one for one in sort.candidates if one.device not in refusal]
        self._last.keep(candidates)
        stays += [
            Unmovable(one.device, cause, one.block_bytes, refusal[one.device])
            for one in sort.candidates
            if one.device in refusal
        ]
        return ScanResult(tuple(candidates), tuple(_summed(stays)), refusal)


class _Search:
    """Collects everything that Python can reach.

    Attributes:
        storages: by identity.
        classes: address -> (bytes, class), as far as the objects alone prove it.
        graphs, pools: live `CUDAGraph` and `MemPool` objects.
    """

    def __init__(self, torch: Any, device_type: str) -> None:
        self._torch = torch
        self._device_type = device_type
        self.storages: dict[int, Any] = {}
        self.classes: dict[int, tuple[int, TensorClass]] = {}
        self.graphs: list[Any] = []
        self.pools: list[Any] = []

    def objects(self, table: TensorTable | None) -> None:
        by_kind = _kinds(self._torch).collected()
        self.graphs = by_kind.get("graph", [])
        self.pools = by_kind.get("pool", [])
        tensors = by_kind.get("tensor", [])
        parameters = [one for one in tensors if is_parameter(self._torch, one)]
        self._add(parameters, TensorClass.PARAMETER)
        for module in by_kind.get("module", ()):
            buffers = instance_dict(module).get("_buffers")
            if isinstance(buffers, dict):
                self._add(list(buffers.values()), TensorClass.BUFFER)
        gradients, saved = self._of_autograd(tensors)
        self._add(gradients, TensorClass.GRADIENT)
        for optimizer in by_kind.get("optimizer", ()):
            self._add(_states_of(self._torch, optimizer), TensorClass.OPTIMIZER_STATE)
        self._add(tensors, None)
        self._add(saved, None)
        for storage in by_kind.get("storage", ()):
            self._take(storage, None)
        for storage in _of_table(self._torch, table):
            self._take(storage, None)

    def _of_autograd(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Gradients (of gradients too), and the tensors saved for backward."""

        def read() -> tuple[list[Any], list[Any]]:
            gradients: list[Any] = []
            level, seen = list(tensors), set(map(id, tensors))
            while level:
                below = [one for one in map(_gradient_of, level) if one is not None]
                gradients += below
                level = [one for one in below if id(one) not in seen]
                seen.update(map(id, level))
            nodes = [_node_of(one) for one in (*tensors, *gradients)]
            saved = saved_tensors(self._torch, [node for node in nodes if node is not None])
            return gradients, [tensor for _, tensor in saved]

        result, _ = read_autograd(self._torch, read)
        return result if result is not None else ([], [])  # what is not found does not move

    def _add(self, tensors: Iterable[Any], tensor_class: TensorClass | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                for storage in storages_of(tensor):
                    self._take(storage, tensor_class)

    def _take(self, storage: Any, tensor_class: TensorClass | None) -> None:
        try:
            if storage.device.type != self._device_type or not storage.nbytes():
                return
        except Exception:  # a fake storage, or one under construction
            return
        address = address_of(storage)
        if not address:
            return
        self.storages.setdefault(storage._cdata, storage)  # noqa: SLF001 - its identity
        if tensor_class is not None:
            self.classes.setdefault(address, (storage.nbytes(), tensor_class))


class _Sort:
    """Decides for each block whether it moves or stays."""

    def __init__(
        self,
        *,
        torch: Any,
        blocks: Sequence[_Held],
        classifier: Classifier,
        roots: Roots,
        source: TorchSource,
        assume_private: bool,
    ) -> None:
        self._torch = torch
        self._blocks = blocks
        self._addresses = [block.address for block in blocks]
        self._classifier = classifier
        self._roots = roots
        self._exports = source.exports
        self._assume_private = assume_private
        self._of_block: dict[int, list[Any]] = defaultdict(list)
        self._foreign: list[Unmovable] = []
        self.candidates: list[Candidate] = []
        self.devices = {block.device for block in blocks}

    def storages(self, storages: Iterable[Any]) -> None:
        for storage in storages:
            address = address_of(storage)
            index = bisect.bisect_right(self._addresses, address) - 1
            block = self._blocks[index] if index >= 0 else None
            if block is None or address >= block.address + block.size_bytes:
                self._foreign.append(
                    Unmovable(
                        storage.device.index or 0,
                        "foreign",
                        storage.nbytes(),
                        "memory that is not of torch's allocator: imported, or registered",
                    )
                )
            else:
                self._of_block[index].append(storage)

    def stays(self) -> Iterator[Unmovable]:
        """The blocks that stay; fills `candidates`."""
        yield from self._foreign
        for index, block in enumerate(self._blocks):
            storages = self._of_block.get(index)
            if not storages:
                why = "no tensor that Python can reach holds it (workspaces, C++ objects)"
                yield Unmovable(block.device, "unknown", block.size_bytes, why)
                continue
            why = self._why_not(block, storages)
            if why:
                yield Unmovable(block.device, "foreign", block.size_bytes, why)
                continue
            tensor_class = self._classifier.of_block(block.raw)
            if tensor_class is None:
                tensor_class = self._classifier.of_stack(block.raw.get("frames") or ())
            self.candidates.append(
                Candidate(
                    storage=storages[0],
                    device=block.device,
                    address=block.address,
                    size_bytes=storages[0].nbytes(),
                    block_bytes=block.size_bytes,
                    stream=block.stream,
                    tensor_class=tensor_class.value,
                    frames=block.raw.get("frames") or (),
                    root=self._roots.get((block.device, block.address), ""),
                )
            )

    def _why_not(self, block: _Held, storages: Sequence[Any]) -> str:
        storage = storages[0]
        if len(storages) > 1:
            return "several storages share its memory"
        if address_of(storage) != block.address or storage.nbytes() > block.size_bytes:
            return "a storage that starts inside the block, or is larger"
        if not storage.resizable():
            return "a storage that cannot be resized: imported, or of an older file"
        if self._assume_private:
            return ""
        if self._exports.is_out(storage):
            return "shared with another library or process (DLPack, CUDA IPC, array interface)"
        if self._exports.may_be_out(block.device, block.address):
            return "allocated before install(): may be shared; assume_private moves it"
        return ""


def _kinds(torch: Any) -> Kinds:
    """The kinds of objects; fakes first, since they are tensors too."""
    modules = sys.modules
    bases = {
        "fake": getattr(modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None),
        "functional": getattr(
            modules.get("torch._subclasses.functional_tensor"), "FunctionalTensor", None
        ),
        "tensor": torch.Tensor,
        "storage": torch.UntypedStorage,
        "module": torch.nn.Module,
        "optimizer": getattr(modules.get("torch.optim.optimizer"), "Optimizer", None),
        "graph": getattr(torch.cuda, "CUDAGraph", None),
        "pool": getattr(torch.cuda, "MemPool", None),
    }
    return Kinds(**{kind: base for kind, base in bases.items() if isinstance(base, type)})


def _blocks_of(segments: Iterable[RawSegment]) -> list[_Held]:
    """Allocated blocks of the default pool, by address."""
    blocks = [
        _Held(
            whole(block.get("address")),
            block["size"],
            device_of(segment),
            whole(segment.get("stream")),
            block,
        )
        for segment in segments
        if (pool_of(segment.get("segment_pool_id")) or DEFAULT_POOL) == DEFAULT_POOL
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    return sorted(blocks, key=lambda block: block.address)


def _pools(
    segments: Iterable[RawSegment], mem_pools: Collection[tuple[int, int]]
) -> Iterator[Unmovable]:
    """Segments of private pools with live blocks; their free blocks stay too."""
    for segment in segments:
        pool = pool_of(segment.get("segment_pool_id")) or DEFAULT_POOL
        lives = any(block["state"] != "inactive" for block in segment["blocks"])
        if pool == DEFAULT_POOL or not lives:
            continue
        size = sum(block["size"] for block in segment["blocks"])
        if pool in mem_pools:
            why = "memory of a torch.cuda.MemPool, which only its owner frees"
            yield Unmovable(device_of(segment), "kept", size, why)
        else:
            yield Unmovable(device_of(segment), "graphs", size, "private pools of captured graphs")


def _summed(stays: Iterable[Unmovable]) -> list[Unmovable]:
    totals: Counter[tuple[int, str, str]] = Counter()
    for one in stays:
        totals[one.device, one.cause, one.why] += one.size_bytes
    return [
        Unmovable(device, cause, size, why) for (device, cause, why), size in sorted(totals.items())
    ]


def _states_of(torch: Any, optimizer: Any) -> Iterator[Any]:
    state = instance_dict(optimizer).get("state")
    for values in list(state.values()) if isinstance(state, dict) else ():
        for item in list(values.values()) if isinstance(values, dict) else (values,):
            if isinstance(item, torch.Tensor):
                yield item


def _of_table(torch: Any, table: TensorTable | None) -> Iterator[Any]:
    """Living storages of the address table, including those that the collector does not track."""
    for _, _, weak in table.snapshot().values() if table is not None else ():
        storage = storage_again(torch, weak)
        if storage is not None:
            yield storage


def _gradient_of(tensor: Any) -> Any:
    try:
        return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
    except Exception:  # a subclass
        return None


def _node_of(tensor: Any) -> Any:
    try:
        return tensor.grad_fn
    except Exception:  # a subclass
        return None
