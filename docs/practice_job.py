"""A job to try `gpumem-otel ctl` on, on a machine without a GPU: its "device" is host memory.

    python practice_job.py            until Ctrl-C; takes torch 2.3 or newer, of any build

It trains a small model endlessly. Listener, engine and commands are the real ones, and its tensors
are really emptied and filled again. Only what finds them is its own: a job on a GPU has none of
this, it calls `gpumem_otel.install(control=True)`.
"""

import itertools
import os
import time

import torch

from gpumem_otel.base.counters import Counters
from gpumem_otel.capture.source import TorchSource
from gpumem_otel.settings.identity import identify
from gpumem_otel.settings.options import resolve
from gpumem_otel.yielding.callbacks import Callbacks
from gpumem_otel.yielding.control.listener import ControlListener
from gpumem_otel.yielding.engine.safepoint import SafePoints
from gpumem_otel.yielding.values import Candidate, ScanResult
from gpumem_otel.yielding.wiring import compose

nn = torch.nn
model = nn.Sequential(nn.Linear(2048, 4096), nn.Tanh(), nn.Linear(4096, 2048))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
batch = torch.randn(8, 2048)


def step() -> float:
    optimizer.zero_grad(set_to_none=False)
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


class Finder:
    """Says what of the job can go."""

    def find(self, *, assume_private: bool) -> ScanResult:  # noqa: ARG002 - nothing here is shared
        tensors = [("input", batch)]
        for one in model.parameters():
            tensors += [("parameter", one), ("gradient", one.grad)]
            state = optimizer.state[one]
            tensors += [("optimizer_state", state[name]) for name in ("exp_avg", "exp_avg_sq")]
        return ScanResult(tuple(self.movable(*one) for one in tensors if one[1] is not None))

    def probable(self) -> tuple[Candidate, ...]:
        return ()

    @staticmethod
    def movable(tensor_class: str, tensor: torch.Tensor) -> Candidate:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        return Candidate(storage, 0, storage.data_ptr(), size, size, 0, tensor_class)


step()
environ = {"OTEL_SERVICE_NAME": "train", **os.environ}
config = resolve(environ, control=True)  # GPUMEM_OTEL_CONTROL_HOST and the others work too
for line in config.warnings:
    print(f"setting: {line}", flush=True)
if not config.enabled:
    raise SystemExit("GPUMEM_OTEL_DISABLED is set: no commands are taken")
counters = Counters()
safe_points = SafePoints()
engine = compose(
    TorchSource(counters=counters, environ=environ),
    safe_points=safe_points,
    callbacks=Callbacks(),
    participants=list,
    environ=environ,
    counters=counters,
    run_dir=config.serve.run_dir,
    limits=config.yields,
    device_type="cpu",
    finder=Finder(),
)
listener = ControlListener(
    engine,
    config.control,
    run_dir=config.serve.run_dir,
    identity=identify(environ, service_name=config.service_name),
    counters=counters,
)
listener.start()
listener.wait(3)
if listener.socket_path:
    print(f"commands are taken at unix://{listener.socket_path}", flush=True)
if listener.address:
    print(f"commands are taken at {':'.join(map(str, listener.address))}", flush=True)
if listener.refusal:
    print(listener.refusal, flush=True)
try:
    for number in itertools.count(1):
        loss = step()
        safe_points.reached()  # the end of the optimizer's step, which a real job need not say
        if number % 100 == 0:
            print(f"step {number}, loss {loss:.6f}", flush=True)
        time.sleep(0.05)
except KeyboardInterrupt:
    pass
finally:
    engine.close(5)
    listener.stop()
