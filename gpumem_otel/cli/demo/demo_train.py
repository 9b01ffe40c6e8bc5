"""A small transformer that trains on made-up text: the job behind `gpumem-otel demo`.

It has what real jobs have: named modules, AdamW, evaluations, sequences of changing length, so that
its memory looks like that of a real run. It needs about 2 GiB of GPU memory.

    python -m gpumem_otel.cli.demo.demo_train --seconds 20
"""

from __future__ import annotations

import argparse
import importlib
import sys
import threading
import time
from typing import Any

_VOCABULARY = 16_384
_WIDTH = 512
_LAYERS = 8
_HEADS = 8
_BATCH = 16
_LENGTHS = (256, 512, 384)
"""Tokens per sequence, in turn."""
_EVALUATE_EVERY = 25
_REST_SECONDS = 0.02
"""Between steps: the demo shares its machine with other work."""


def gpu_name() -> str:
    """Name of the first CUDA device, "" where this Python has none to train on."""
    try:
        torch = importlib.import_module("torch")
        return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else ""
    except Exception:  # torch is absent or broken: the demo replays a recording then
        return ""


def train(stop: threading.Event, *, device: str = "cuda") -> int:
    """Train until `stop` is set; returns the number of steps."""
    torch = importlib.import_module("torch")
    modules = importlib.import_module("gpumem_otel.cli.demo.demo_model")
    torch.manual_seed(0)
    model = modules.LanguageModel(_VOCABULARY, _WIDTH, _LAYERS, _HEADS, max(_LENGTHS)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    steps = 0
    while not stop.is_set():
        tokens = _batch(torch, _LENGTHS[steps % len(_LENGTHS)], device)
        _step(model, optimizer, tokens)
        steps += 1
        if steps % _EVALUATE_EVERY == 0:
            _evaluate(torch, model, device)
        stop.wait(_REST_SECONDS)
    return steps


def _batch(torch: Any, length: int, device: str) -> Any:
    return torch.randint(_VOCABULARY, (_BATCH, length + 1)).to(device, non_blocking=True)


def _step(model: Any, optimizer: Any, tokens: Any) -> None:
    loss = model.loss(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _evaluate(torch: Any, model: Any, device: str) -> float:
    with torch.no_grad():
        return float(model.loss(_batch(torch, max(_LENGTHS), device)))


def main() -> None:
    """Train for some seconds: the command of which the demo's recording was made."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    stop = threading.Event()
    timer = threading.Timer(options.seconds, stop.set)
    timer.daemon = True
    timer.start()
    started = time.monotonic()
    steps = train(stop, device=options.device)
    sys.stdout.write(f"{steps} steps in {time.monotonic() - started:.1f} s\n")


if __name__ == "__main__":
    main()
