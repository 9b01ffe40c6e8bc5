"""What the job is asked before its memory goes, and told after it is back."""

from __future__ import annotations

import threading

import pytest
from support.yield_parts import World

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.values import YieldLevel, YieldRequest, YieldState

TENSORS = YieldRequest(level=YieldLevel.TENSORS)


def test_callbacks_are_asked_in_order_and_told_in_reverse():
    world = World()
    said = []
    for name in "ab":
        world.callbacks.add(
            lambda name=name: said.append(f"before {name}"),
            lambda name=name: said.append(f"after {name}"),
            None,
            5.0,
        )
    world.engine.yield_(TENSORS)
    assert said == ["before a", "before b"]
    world.engine.restore()
    assert said == ["before a", "before b", "after b", "after a"]


def test_a_callback_that_raises_refuses_and_those_before_it_are_told():
    world = World()
    said = []
    world.callbacks.add(lambda: said.append("a"), lambda: said.append("after a"), None, 5.0)

    def broken() -> None:
        raise ValueError("saving a checkpoint")

    remove = world.callbacks.add(broken, lambda: said.append("after broken"), None, 5.0)
    with pytest.raises(YieldRefusedError, match=r"broken raised ValueError.*saving a checkpoint"):
        world.engine.yield_(TENSORS)
    assert said == ["a", "after a"]
    assert world.finder.asked == []
    remove()
    world.engine.yield_(TENSORS)
    world.engine.restore()


def test_a_callback_that_takes_too_long_refuses():
    world = World()
    go, said = threading.Event(), []
    world.callbacks.add(lambda: go.wait(10), lambda: said.append("after"), None, 0.05)
    with pytest.raises(YieldRefusedError, match=r"took longer than 0.05 s"):
        world.engine.yield_(TENSORS)
    assert said == ["after"]
    go.set()


def test_an_after_restore_that_raises_is_a_note_and_the_job_goes_on():
    world = World()

    def broken() -> None:
        raise KeyError("x")

    world.callbacks.add(None, broken, None, 5.0)
    world.engine.yield_(TENSORS)
    report = world.engine.restore()
    assert report.state is YieldState.RUNNING
    assert "after_restore" in report.notes[0]
    assert "KeyError" in report.notes[0]
