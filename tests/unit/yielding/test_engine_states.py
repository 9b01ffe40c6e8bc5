"""Random commands and failures: bytes are always somewhere, and a running job is let go."""

from __future__ import annotations

import pytest
from support.yield_parts import SIZE, LoopingJob, World

pytest.importorskip("hypothesis")
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpumem_otel.core.yields import (
    OperationState,
    RestoreRequest,
    YieldLevel,
    YieldRequest,
    YieldState,
)
from gpumem_otel.errors import YieldFailedError, YieldRefusedError

CALLS = (
    "find", "admit", "copy_out", "free", "abandon", "keeper", "lock", "checkpoint", "restore",
    "copy_back", "verify",
)  # fmt: skip
ERRORS = (YieldRefusedError, RuntimeError, YieldFailedError)
CLASSES = ("parameter", "gradient", "optimizer_state", "activation")


class Yields(RuleBasedStateMachine):
    """One job, commanded from outside or calling by itself."""

    @initialize(beside=st.booleans(), driver=st.booleans())
    def begin(self, beside: bool, driver: bool) -> None:
        self.world = World(driver=driver)
        self.world.engine._lease.start = lambda seconds: None  # the test is the lease
        self.job = LoopingJob(self.world.safe_points) if beside else None
        if self.job is not None:
            self.job.__enter__()
        self.discarded: set[str] = set()

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        world.faults.now.clear()
        world.offload.room = True
        if world.checkpoint is not None:
            world.checkpoint.room = True
        world.engine.restore()
        assert world.engine.status.state is YieldState.RUNNING
        self.everything_is_back()
        if self.job is not None:
            self.job.goes_on()
            self.job.__exit__()

    def everything_is_back(self) -> None:
        for one in self.world.storages:
            assert one.device == ("zeros" if one.discarded else one.content)
            if one.discarded:
                one.discarded, one.content = False, "zeros"

    @rule(call=st.sampled_from(CALLS), error=st.sampled_from(ERRORS))
    def something_is_about_to_fail(self, call, error) -> None:
        self.world.faults.now[call] = error("injected")

    @rule(room=st.booleans())
    def a_guest_comes_or_goes(self, room) -> None:
        self.world.offload.room = room
        if self.world.checkpoint is not None:
            self.world.checkpoint.room = room

    @rule(
        level=st.sampled_from(YieldLevel),
        keep=st.sets(st.sampled_from(CLASSES), max_size=2),
        discard=st.sets(st.sampled_from(("optimizer_state", "parameter")), max_size=1),
        verify=st.booleans(),
        dry_run=st.booleans(),
    )
    def yield_(self, level, keep, discard, verify, dry_run) -> None:
        request = YieldRequest(
            level=level,
            keep=tuple(sorted(keep - discard)),
            discard=tuple(discard),
            verify=verify,
            dry_run=dry_run,
            wait_seconds=10.0,
        )
        self.command(lambda: self.world.engine.yield_(request))

    @rule(classes=st.none() | st.sets(st.sampled_from(CLASSES), min_size=1, max_size=2))
    def restore(self, classes) -> None:
        chosen = None if classes is None else tuple(classes)
        self.command(lambda: self.world.engine.restore(RestoreRequest(classes=chosen)))

    def command(self, call) -> None:
        try:
            call()
        except YieldRefusedError:
            pass
        except YieldFailedError:
            assert self.world.engine.status.state is not YieldState.RUNNING

    @invariant()
    def bytes_are_somewhere(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        assert world.nothing_lost
        status = world.engine.status
        assert status.operation is None or status.operation.state is not OperationState.RUNNING
        assert status.state not in {YieldState.YIELDING, YieldState.RESTORING}
        away = sum(SIZE for one in world.storages if one.device is None and not one.discarded)
        assert status.moved_bytes == away
        if status.state is YieldState.RUNNING:
            self.everything_is_back()
            assert world.engine.phases.parked is None
            assert not world.gate.closed
            if world.checkpoint is not None:
                assert world.checkpoint.state == "running"
            if self.job is not None:
                self.job.goes_on()
        else:
            assert status.reason or status.operation.state is OperationState.DONE


TestYields = Yields.TestCase
TestYields.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
