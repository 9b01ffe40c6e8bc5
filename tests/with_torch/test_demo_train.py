"""The demo's training job and doctor's probe, on a real torch without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from gpumem_otel.cli.demo import demo_train

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")


@pytest.fixture
def tiny(monkeypatch):
    for name, value in {
        "_VOCABULARY": 64,
        "_WIDTH": 16,
        "_LAYERS": 2,
        "_HEADS": 2,
        "_BATCH": 2,
        "_LENGTHS": (8, 16),
        "_EVALUATE_EVERY": 2,
        "_REST_SECONDS": 0.0,
    }.items():
        monkeypatch.setattr(demo_train, name, value)


def test_trains_until_told_to_stop(tiny, monkeypatch):
    """GIVEN a stop in the fifth step WHEN it trains THEN five steps are made, two evaluations."""
    stop = threading.Event()
    losses = []
    step, evaluate = demo_train._step, demo_train._evaluate

    def counted_step(*arguments) -> None:
        step(*arguments)
        losses.append("step")
        if losses.count("step") == 5:
            stop.set()

    def counted_evaluation(*arguments) -> float:
        losses.append(evaluate(*arguments))
        return losses[-1]

    monkeypatch.setattr(demo_train, "_step", counted_step)
    monkeypatch.setattr(demo_train, "_evaluate", counted_evaluation)
    assert demo_train.train(stop, device="cpu") == 5
    values = [loss for loss in losses if loss != "step"]
    assert len(values) == 2
    assert all(3.0 < loss < 6.0 for loss in values)


def test_probe_tells_what_torch_is():
    done = subprocess.run(
        [sys.executable, "-m", "gpumem_otel.capture.probe"], capture_output=True, check=True
    )
    facts = json.loads(done.stdout)
    assert facts["torch"] == torch.__version__
    assert facts["cuda_build"] == torch.version.cuda
    assert facts["cuda_available"] == torch.cuda.is_available()
    assert len(facts["devices"]) == (torch.cuda.device_count() if facts["cuda_available"] else 0)
    if torch.version.cuda:
        assert facts["recording"] is True
        assert facts["lazy_call"] is True
