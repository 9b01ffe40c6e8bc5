"""Jobs that run out of memory on a real GPU: where, and what they do about it.

`HEAD` comes first, after `import gpumem_otel; gpumem_otel.install()` where it is with us.
"""

from __future__ import annotations

HEAD = """
import json, os, sys, threading, time
import torch

def tell(**facts):
    sys.stdout.flush()
    os.write(1, (json.dumps(facts) + "\\n").encode())

def limit(gib=3.0):
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)

def eat():
    held = []
    while True:
        held.append(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))

class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1

    @staticmethod
    def backward(context, gradient):
        eat()

model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(64, 1024, device="cuda")
for _ in range(2):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
limit()
"""

FORWARD = """
class Big(torch.nn.Module):
    def forward(self, x):
        eat()
torch.nn.Sequential(model, Big())(x)
"""
BACKWARD = """
Greedy.apply(model(x)).sum().backward()
"""
OPTIMIZER = """
model(x).sum().backward()
wide = torch.nn.Parameter(torch.zeros(200 << 20, device="cuda"))
wide.grad = torch.zeros_like(wide)
limit(2.0)
torch.optim.AdamW([wide]).step()
"""
THREAD = """
thread = threading.Thread(target=eat, name="loader")
thread.start()
thread.join()
sys.exit(5)
"""
COMPILED = """
@torch.compile
def layer(x):
    return torch.nn.functional.gelu(x.repeat(40_000, 1) @ model[0].weight.T)
layer(x)
"""
SURVIVED = """
try:
    eat()
except torch.OutOfMemoryError:
    pass
sys.exit(7)
"""
CAUSED = """
try:
    eat()
except torch.OutOfMemoryError as error:
    raise ValueError("batch too large") from error
"""
JOBS = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "optimizer": OPTIMIZER,
    "thread": THREAD,
    "compiled": COMPILED,
    "survived": SURVIVED,
    "caused": CAUSED,
}

LOOP = """
def loop(turns):
    started = time.perf_counter()
    for _ in range(turns):
        try:
            torch.empty(10**15, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
    return time.perf_counter() - started
loop(20)
seconds = min(loop(1000) for _ in range(3))
tell(seconds=seconds, ooms=torch.cuda.memory_stats()["num_ooms"])
"""
"""What 1,000 survived failures take, and how many the allocator has counted."""
