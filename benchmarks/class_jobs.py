"""The jobs of `classes.py`: small models of each kind that torch users train.

Imported after `gpumem_otel.install()`, in a process of its own for each job.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as nnf
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable


WIDTH = 1024
VOCABULARY = 8000


@dataclass
class Job:
    """One training job.

    Attributes:
        module: whose parameters and buffers count.
        forward: makes the loss of a batch.
        inputs: the batch, as given to the model.
        scaler: of AMP, None without.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[], torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    scaler: Any = None
    keeps: list[Any] = field(default_factory=list)


def _mlp(batch: int = 512, **kind: Any) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(
        *[layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH, **kind), nn.GELU())],
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, 16),
    ).cuda()
    return model, (torch.randn(batch, WIDTH, device="cuda"),)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(nnf.gelu(self.up(self.norm2(x))))


class _Transformer(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = 6, *, tied: bool = False,
                 checkpointed: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.zeros(256, 256))
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def _tokens(batch: int = 8, length: int = 256) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), device="cuda")


def _job(model: nn.Module, inputs: tuple[torch.Tensor, ...], *, module: nn.Module | None = None,
         scaler: Any = None, amp: bool = False) -> Job:  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    criterion = nn.CrossEntropyLoss()
    targets: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
            output = model(*inputs)
            output = output.reshape(-1, output.shape[-1])
            if not targets:
                size = (output.shape[0],)
                targets.append(torch.randint(0, output.shape[-1], size, device="cuda"))
            return criterion(output, targets[0])

    return Job(module or model, optimizer, forward, inputs, scaler, targets)


def mlp() -> Job:
    """Linear layers with BatchNorm's buffers."""
    return _job(*_mlp())


def transformer() -> Job:
    """Attention, LayerNorm, an embedding."""
    return _job(_Transformer().cuda(), (_tokens(),))


def lstm() -> Job:
    """Weights that are views of one flat storage."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(512, WIDTH, num_layers=3, batch_first=True)
            self.head = nn.Linear(WIDTH, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0])

    return _job(Model().cuda(), (torch.randn(16, 64, 512, device="cuda"),))


def tied() -> Job:
    """Embedding and head are one parameter."""
    return _job(_Transformer(tied=True).cuda(), (_tokens(),))


def amp() -> Job:
    """Autocast with a GradScaler."""
    model = _Transformer().cuda()
    return _job(model, (_tokens(),), scaler=torch.amp.GradScaler("cuda"), amp=True)


def checkpointing() -> Job:
    """Forwards that run again inside backward."""
    return _job(_Transformer(checkpointed=True).cuda(), (_tokens(),))


def compiled() -> Job:
    """`torch.compile` of the whole model."""
    model = _Transformer().cuda()
    return _job(torch.compile(model), (_tokens(),), module=model)


def ddp() -> Job:
    """Two ranks, gradients in buckets."""
    _init()
    model = _Transformer().cuda()
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    return _job(wrapped, (_tokens(),), module=model)


def fsdp2() -> Job:
    """Two ranks, parameters in shards."""
    from torch.distributed.fsdp import fully_shard

    _init()
    model = _Transformer().cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return _job(model, (_tokens(),))


def _init() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")


JOBS: dict[str, Callable[[], Job]] = {
    made.__name__: made
    for made in (mlp, transformer, lstm, tied, amp, checkpointing, compiled, ddp, fsdp2)
}
PAIRS = ("ddp", "fsdp2")
"""Jobs of two ranks."""
