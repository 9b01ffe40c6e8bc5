"""Jobs that give the GPU back and take it again: each a way in which memory is held or reached.

Small (tens of megabytes) and deterministic: the same seed gives the same losses bit for bit, on a
GPU and on a CPU. They know nothing of `gpumem_otel`: what a yielding job would tell it goes through
`Hooks`, which does nothing in the job that never yields. Imported in a process of its own per job.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import tempfile
import threading
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["ENVIRON", "JOBS", "Hooks", "Job", "Spec", "deterministic", "make_job"]

ENVIRON = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0"}
"""Set before torch is imported."""

WIDTH, LAYERS, VOCABULARY, BATCH, LENGTH = 256, 4, 1000, 8, 32
PREFETCHER = "prefetcher"


class Hooks:
    """What a job tells `gpumem_otel`; of a job that never yields: nothing."""

    def watch(self, *objects: Any, **named: Any) -> None:
        """Watch a root module, or tensors by class."""

    def participant(self, thread: threading.Thread) -> None:
        """Say that the thread is quiet at safe points."""


@dataclass
class Job:
    """A job that was built.

    Attributes:
        step: trains one step (serves one token); the loss, or what stands for it.
        tensors: what the result consists of, compared bit for bit at the end.
        check: raises where storages no longer alias as they did.
        boundary: no optimizer marks its steps: the loop says where one ends.
    """

    step: Callable[[], float]
    tensors: Callable[[], Iterator[torch.Tensor]]
    check: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    boundary: bool = False


@dataclass(frozen=True)
class Spec:
    """A kind of job, and what is expected of its yields.

    Attributes:
        levels: those used, in turn: mostly the first, the others at every `others_every`-th yield.
        refused: level -> a word of the refusal, for what must be refused and leave the job alone.
        yields: how many are asked for in all, and how many per process.
    """

    make: Callable[[torch.device, Hooks], Job]
    levels: tuple[str, ...] = ("tensors", "process", "auto")
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    yields: int = 20
    per_process: int = 20
    others_every: int = 10
    cuda_only: bool = False


def deterministic(seed: int) -> None:
    """All that torch offers; attention without the kernels that are not."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    if hasattr(torch.backends.cuda, "enable_cudnn_sdp"):
        torch.backends.cuda.enable_cudnn_sdp(False)


class _Transformer(nn.Module):
    def __init__(self, *, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        # dropout: the generator's state is part of what must come back
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.1, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


def _batches(device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        both = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator).to(device)
        yield both[0], both[1]


def _loss(model: nn.Module, tokens: torch.Tensor, aims: torch.Tensor) -> torch.Tensor:
    return nnf.cross_entropy(model(tokens).float().flatten(0, 1), aims.flatten())


def _of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for one in [*model.parameters(), *model.buffers()]:
        yield one
        if one.grad is not None:
            yield one.grad
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def _training(
    device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[], float]:
    batches = _batches(device)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(model, *next(batches))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _plain(model: nn.Module, device: torch.device, **options: Any) -> Job:
    optimizer = _adamw(model, **options)
    return Job(_training(device, model, optimizer), lambda: _of(model, optimizer))


def _fused(device: torch.device, hooks: Hooks) -> Job:
    return _plain(_Transformer().to(device), device, fused=True)


def _foreach(device: torch.device, hooks: Hooks) -> Job:
    return _plain(_Transformer().to(device), device, foreach=True)


def _checkpointed(device: torch.device, hooks: Hooks) -> Job:
    return _plain(_Transformer(checkpointed=True).to(device), device)


def _tied(device: torch.device, hooks: Hooks) -> Job:
    model = _Transformer(tied=True).to(device)
    job = _plain(model, device)

    def check() -> None:
        assert model.head.weight is model.embed.weight
        assert model.head.weight.data_ptr() == model.embed.weight.data_ptr() != 0

    job.check = check
    return job


def _amp(device: torch.device, hooks: Hooks) -> Job:
    model = _Transformer().to(device)
    optimizer = _adamw(model)
    kind = torch.float16 if device.type == "cuda" else torch.bfloat16
    # so high that the first steps are skipped, and never reach an optimizer's hook
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**40)
    batches = _batches(device)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, kind):
            loss = _loss(model, *next(batches))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item() + scaler.get_scale()

    return Job(step, lambda: _of(model, optimizer))


def _lstm(device: torch.device, hooks: Hooks) -> Job:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(VOCABULARY, WIDTH),
            "lstm": nn.LSTM(WIDTH, WIDTH, 3, batch_first=True, dropout=0.1),
            "head": nn.Linear(WIDTH, VOCABULARY),
        }
    ).to(device)
    optimizer = _adamw(model)
    batches = _batches(device)
    flat = model["lstm"]._flat_weights

    def step() -> float:
        tokens, aims = next(batches)
        optimizer.zero_grad(set_to_none=True)
        hidden, _ = model["lstm"](model["embed"](tokens))
        loss = nnf.cross_entropy(model["head"](hidden).flatten(0, 1), aims.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    before = len({one.untyped_storage().data_ptr() for one in flat})

    def check() -> None:
        # one buffer for all weights is what cuDNN asks for
        assert len({one.untyped_storage().data_ptr() for one in flat}) == before
        assert all(a is b for a, b in zip(flat, model["lstm"]._flat_weights, strict=True))

    return Job(step, lambda: _of(model, optimizer), check)


def _graphed(device: torch.device, hooks: Hooks) -> Job:
    """Parameters, optimizer state and inputs in the default pool, whole step captured."""
    model = _Transformer().to(device)
    optimizer = _adamw(model, capturable=True)
    batches = _batches(device)
    tokens, aims = next(batches)

    def whole() -> torch.Tensor:
        loss = _loss(model, tokens, aims)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            whole()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = whole()

    def step() -> float:
        new_tokens, new_aims = next(batches)
        tokens.copy_(new_tokens)
        aims.copy_(new_aims)
        graph.replay()
        return loss.item()

    return Job(step, lambda: _of(model, optimizer), boundary=True)


def _compiled(mode: str) -> Callable[[torch.device, Hooks], Job]:
    def make(device: torch.device, hooks: Hooks) -> Job:
        model = _Transformer().to(device)
        optimizer = _adamw(model)
        step = _training(device, torch.compile(model, mode=mode), optimizer)
        for _ in range(4):
            step()
        return Job(step, lambda: _of(model, optimizer))

    return make


def _fsdp2(device: torch.device, hooks: Hooks) -> Job:
    try:
        fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    except AttributeError:  # before torch 2.6
        fully_shard = importlib.import_module("torch.distributed._composable.fsdp").fully_shard
    store = os.path.join(tempfile.mkdtemp(), "store")  # noqa: PTH118 - a URL, not a path
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", f"file://{store}", rank=0, world_size=1
    )
    # a communicator that lives from here on
    dist.all_reduce(torch.ones(1, device=device))
    mesh = init_device_mesh(device.type, (1,))
    model = _Transformer().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = _adamw(model)

    def tensors() -> Iterator[torch.Tensor]:
        for one in _of(model, optimizer):
            yield one.to_local() if hasattr(one, "to_local") else one

    return Job(_training(device, model, optimizer), tensors, close=dist.destroy_process_group)


def _two_streams(device: torch.device, hooks: Hooks) -> Job:
    """Half of the model is allocated, trained and read on a stream of its own."""
    cuda = device.type == "cuda"
    side = torch.cuda.Stream() if cuda else None

    def beside() -> Any:
        return torch.cuda.stream(side) if side is not None else contextlib.nullcontext()

    def branch() -> nn.Module:
        layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        return nn.Sequential(*layers, *[nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    left = branch().to(device)
    with beside():
        right = branch().to(device)
    both = nn.ModuleList([left, right])
    optimizer = _adamw(both)
    generator = torch.Generator().manual_seed(1)

    def step() -> float:
        x = torch.randn(64, WIDTH, generator=generator).to(device)
        optimizer.zero_grad(set_to_none=True)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
            x.record_stream(side)
        with beside():
            second = right(x)
        first = left(x)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
            second.record_stream(torch.cuda.current_stream())
        loss = (first * second).square().mean() + first.mean()
        loss.backward()
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        optimizer.step()
        return loss.item()

    return Job(step, lambda: _of(both, optimizer))


class _Server(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.queries = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, tokens: torch.Tensor, caches: list[tuple[torch.Tensor, torch.Tensor]], at: int
    ) -> torch.Tensor:
        x = self.embed(tokens)
        for layer, (keys, values) in zip(self.queries, caches, strict=True):
            query, key, value = layer(x).chunk(3, dim=-1)
            keys[:, at], values[:, at] = key, value
            scores = torch.einsum("bw,btw->bt", query, keys[:, : at + 1]) / WIDTH**0.5
            x = x + torch.einsum("bt,btw->bw", scores.softmax(-1), values[:, : at + 1])
        return self.head(x)


def _server(device: torch.device, hooks: Hooks) -> Job:
    """Steps no optimizer: a safe point is the end of a forward of the watched root module."""
    room = 256
    with torch.inference_mode():
        model = _Server().to(device).eval()
        caches = [
            (
                torch.zeros(BATCH, room, WIDTH, device=device),
                torch.zeros(BATCH, room, WIDTH, device=device),
            )
            for _ in range(LAYERS)
        ]
        tokens = torch.arange(BATCH, device=device)
    hooks.watch(model, kv_cache=caches)
    at = 0

    def step() -> float:
        nonlocal tokens, at
        with torch.inference_mode():
            logits = model(tokens, caches, at)
            tokens = logits.argmax(-1)
            at = (at + 1) % room
            return logits.double().square().sum().item()

    def tensors() -> Iterator[torch.Tensor]:
        yield from model.parameters()
        for pair in caches:
            yield from pair

    return Job(step, tensors)


def _prefetched(*, registered: bool) -> Callable[[torch.device, Hooks], Job]:
    """The next batch is brought to the device by a thread, on a stream of its own.

    Asked for at the beginning of a step and there before its end: the thread is quiet at safe
    points. Nothing knows that where it is not registered.
    """

    def make(device: torch.device, hooks: Hooks) -> Job:
        model = _Transformer().to(device)
        optimizer = _adamw(model)
        source = _batches(torch.device("cpu"))
        asked: queue.Queue[bool] = queue.Queue()
        ready: queue.Queue[tuple[torch.Tensor, torch.Tensor]] = queue.Queue()

        def prefetch() -> None:
            stream = torch.cuda.Stream() if device.type == "cuda" else None
            while asked.get():
                tokens, aims = next(source)
                on = torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()
                with on:
                    moved = tokens.to(device), aims.to(device)
                    if stream is not None:
                        stream.synchronize()
                ready.put(moved)

        thread = threading.Thread(target=prefetch, name=PREFETCHER, daemon=True)
        thread.start()
        if registered:
            hooks.participant(thread)
        asked.put(True)
        batch = ready.get()

        def step() -> float:
            nonlocal batch
            asked.put(True)
            optimizer.zero_grad(set_to_none=True)
            loss = _loss(model, *batch)
            loss.backward()
            following = ready.get()
            if device.type == "cuda":
                for one in batch:
                    one.record_stream(torch.cuda.current_stream())
            optimizer.step()
            batch = following
            return loss.item()

        def close() -> None:
            asked.put(False)
            thread.join()

        return Job(step, lambda: _of(model, optimizer), close=close)

    return make


_COMMUNICATOR = MappingProxyType({"process": "communicator"})
_GRAPH = MappingProxyType({"tensors": "graph"})

JOBS: Mapping[str, Spec] = MappingProxyType(
    {
        "adamw-fused": Spec(_fused, yields=200, per_process=100, others_every=20),
        "adamw-foreach": Spec(_foreach),
        "amp": Spec(_amp),
        "checkpointing": Spec(_checkpointed),
        "tied": Spec(_tied),
        "lstm": Spec(_lstm),
        "graphed": Spec(_graphed, ("auto", "process"), _GRAPH, cuda_only=True),
        "compiled": Spec(_compiled("default")),
        "reduce-overhead": Spec(
            _compiled("reduce-overhead"), ("auto", "process"), _GRAPH, cuda_only=True
        ),
        "fsdp2": Spec(_fsdp2, ("tensors",), _COMMUNICATOR),
        "two-streams": Spec(_two_streams),
        "server": Spec(_server),
        "prefetcher": Spec(
            _prefetched(registered=False), (), MappingProxyType({"tensors": PREFETCHER})
        ),
        "prefetcher-told": Spec(_prefetched(registered=True), ("tensors",)),
    }
)
"""By name; in the order in which they are run."""


def make_job(name: str, device: str, seed: int, hooks: Hooks | None = None) -> Job:
    """Build a job, all its randomness from the seed."""
    deterministic(seed)
    return JOBS[name].make(torch.device(device), hooks or Hooks())
