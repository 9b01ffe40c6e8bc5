"""A small data-parallel training, for the launchers beside it: torchrun's environment, any device.

Nothing in it knows of gpumem_otel: `gpumem-otel run` in front of the launcher is enough.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(steps: int) -> None:
    """Train for some steps and let rank 0 say how it went."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)
    ).to(device)
    model = DistributedDataParallel(model, device_ids=[device] if gpu else None)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        batch = torch.randn(64, 1024, device=device)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and ((step + 1) % 50 == 0 or step + 1 == steps):
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
