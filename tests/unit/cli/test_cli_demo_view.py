"""One line of the demo's table says where, and for whom."""

from __future__ import annotations

from gpumem_otel.cli.demo_view import stack_line
from gpumem_otel.core.model import Frame, HeapProfile, ProfileKind, Sample
from gpumem_otel.core.text import top_rows


def line(*frames: Frame) -> str:
    profile = HeapProfile(ProfileKind.LIVE, 0, (Sample(frames, 1, 10),))
    return stack_line(top_rows(profile)[0])


def test_the_leaf_and_the_jobs_own_line():
    frames = (
        Frame("torch.nn.modules.linear.Linear.forward", "/torch/linear.py", 134),
        Frame("torch.nn.modules.module.Module._call_impl", "/torch/module.py", 1790),
        Frame("model.Attention.forward", "/job/model.py", 24),
        Frame("__main__.train", "/job/train.py", 7),
    )
    assert line(*frames) == "Linear.forward, from Attention.forward (model.py:24)"


def test_the_jobs_own_line_alone_and_named_roots():
    assert line(Frame("__main__.make.<locals>.run", "/job/t.py", 3)) == "make.run (t.py:3)"
    assert line(Frame("[backward]")) == "[backward]"
    assert line(Frame("torch.a.b", "/t.py", 1)) == "a.b (t.py:1)"
