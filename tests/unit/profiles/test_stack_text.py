"""Stacks in few lines."""

from __future__ import annotations

import pytest

from gpumem_otel.base.profile import Frame
from gpumem_otel.profiles.stack_text import is_torch, more, short_frame, short_line, short_stack

LEAF = Frame("linear.py:forward", "/venv/torch/nn/linear.py", 134)
OWN = Frame("train.py:step", "/job/train.py", 20)
MAIN = Frame("train.py:<module>", "/job/train.py", 90)


@pytest.mark.parametrize(
    ("frame", "line"),
    [
        (LEAF, "forward (linear.py:134)"),
        (
            Frame("torch.nn.Linear.forward", "/v/linear.py", 3),
            "torch.nn.Linear.forward (linear.py:3)",
        ),
        (Frame("at::empty", "??", 0), "at::empty"),
        (Frame("f", "a.py"), "f (a.py)"),
        (Frame("x\x1b[2J", "b\n.py", 1), "x\\u001b[2J (b\\u000a.py:1)"),
    ],
)
def test_short_frame(frame, line):
    assert short_frame(frame) == line


def test_short_line():
    assert short_line((LEAF, OWN, MAIN)) == "forward (linear.py:134), from step (train.py:20)"
    assert short_line((OWN, MAIN)) == "step (train.py:20)"
    assert short_line((Frame("[backward]"),)) == "[backward]"
    assert short_line(()) == ""


@pytest.mark.parametrize(
    ("number", "lines"),
    [
        (1, ["linear.py:forward (linear.py:134)", "... 3 more frames"]),
        (
            2,
            [
                "linear.py:forward (linear.py:134)",
                "... 2 more frames",
                "train.py:<module> (train.py:90)",
            ],
        ),
        (4, 4),
    ],
)
def test_short_stack(number, lines):
    shown = short_stack((LEAF, LEAF, OWN, MAIN), number)
    assert shown == lines if isinstance(lines, list) else len(shown) == lines


def test_short_stack_keeps_the_first_own_frame():
    shown = short_stack((LEAF, LEAF, LEAF, OWN, MAIN, MAIN, MAIN), 4)
    assert shown[1:3] == ["... 2 more frames", "train.py:step (train.py:20)"]
    assert short_stack((), 3) == []


def test_is_torch_and_more():
    assert is_torch(LEAF)
    assert is_torch(Frame("at::empty"))
    assert not is_torch(OWN)
    assert (more(1, "frame"), more(1234, "stack")) == ("... 1 more frame", "... 1,234 more stacks")
