"""The copy that begins beside the look for what goes: when it begins, and what ends it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.yield_parts import World

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.values import Phase, ScanResult, YieldLevel, YieldRequest

TENSORS = YieldRequest(level=YieldLevel.TENSORS)


class Ticks(SystemClock):
    """A clock that a test sets."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def world():
    made = World()
    made.begun = []
    made.phases = []
    begin = made.offload.begin

    def noted(candidates):
        made.begun.append([one.tensor_class for one in candidates])
        begin(candidates)

    made.offload.begin = noted
    return made


def test_only_what_a_look_has_found_and_is_asked_for_is_begun(world):
    world.engine.yield_(TENSORS)
    world.engine.restore()
    world.engine.yield_(replace(TENSORS, keep=("activation",), discard=("optimizer_state",)))
    world.engine.restore()
    world.engine.yield_(replace(TENSORS, classes=("gradient",)))
    world.engine.restore()
    with pytest.raises(YieldRefusedError, match="nothing of what was chosen is there"):
        world.engine.yield_(replace(TENSORS, devices=(1,)))
    assert world.begun == [[], ["parameter", "gradient"], ["gradient"], []]
    assert world.nothing_lost


def test_a_dry_run_begins_nothing(world):
    world.engine.yield_(replace(TENSORS, dry_run=True))
    world.engine.yield_(replace(TENSORS, dry_run=True))
    assert world.begun == []


@pytest.mark.parametrize("why", ["find", "begin", "graphs", "nothing"])
def test_what_was_begun_is_given_up_where_nothing_goes(world, why):
    world.engine.yield_(TENSORS)
    world.engine.restore()
    if why == "graphs":
        world.finder.found = ScanResult((), refusal={0: "captured graphs"})
    elif why == "nothing":
        world.finder.found = ScanResult(())
    else:
        world.faults.now[why] = YieldRefusedError(f"{why}: no")
    found = world.finder.probable
    world.finder.probable = lambda: tuple(world.movables)
    if why == "nothing":
        world.engine.yield_(TENSORS)
        assert world.offload.begun == []
        world.engine.restore()
    else:
        with pytest.raises(YieldRefusedError):
            world.engine.yield_(TENSORS)
    assert world.offload.begun == []
    assert not world.offload.items
    assert world.all_on_device
    world.finder.found, world.finder.probable = ScanResult(tuple(world.movables)), found
    world.engine.yield_(TENSORS)
    world.engine.restore()
    assert world.all_on_device


def test_the_speed_counts_the_look_beside_which_the_copy_ran():
    """Else it would look faster than the link; the seconds of the phases stay what they are."""
    clock = Ticks()
    world = World(clock=clock, driver=False)
    find = world.finder.find

    def find_slowly(*, assume_private):
        clock.now += 3
        return find(assume_private=assume_private)

    world.finder.find = find_slowly

    def release():
        report = world.engine.yield_(TENSORS)
        world.engine.restore()
        prepare, found = report.phases
        assert (prepare.phase, prepare.seconds, found.phase) == (Phase.PREPARE, 3, Phase.RELEASE)
        return found

    copy_out = world.offload.copy_out

    def copy_slowly(progress, stop):
        clock.now += 2
        return copy_out(progress, stop)

    world.offload.copy_out = copy_slowly
    found = release()
    assert (found.seconds, found.moving_seconds) == (2, None)
    assert found.bytes_per_second == found.size_bytes / 2 > 0
    world.offload.copies_ahead = True
    found = release()
    assert (found.seconds, found.moving_seconds) == (2, 5)
    assert found.bytes_per_second == found.size_bytes / 5
    world.offload.copies_ahead = False
    assert release().moving_seconds is None
