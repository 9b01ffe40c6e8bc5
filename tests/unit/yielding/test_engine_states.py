"""Random commands and failures: bytes are always somewhere, and a running job is let go."""

from __future__ import annotations

import threading

import pytest
from support.yield_parts import SIZE, LoopingJob, World

pytest.importorskip("hypothesis")
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.values import (
    OperationState,
    RestoreRequest,
    YieldLevel,
    YieldRequest,
    YieldState,
)

CALLS = (
    "find", "begin", "admit", "copy_out", "free", "free within", "free at its end", "abandon",
    "helper", "lock", "checkpoint", "restore", "copy_back", "copy_back within", "verify",
)  # fmt: skip
ERRORS = (YieldRefusedError, RuntimeError, YieldFailedError, KeyboardInterrupt)
CLASSES = ("parameter", "gradient", "optimizer_state", "activation")
LEASE = "gpumem-otel-lease"


class LeaseClock(SystemClock):
    """For the thread of a lease time stands still until the test lets it pass."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: dict[threading.Event, threading.Thread] = {}
        self.over: set[threading.Event] = set()

    def wait(self, event, seconds):
        me = threading.current_thread()
        if me.name != LEASE:
            return super().wait(event, seconds)
        with self.changed:
            self.waiting[event] = me
            while not event.is_set() and event not in self.over:
                self.changed.wait(0.005)  # nobody notifies when the event is set
            self.over.discard(event)
            del self.waiting[event]
        return event.is_set()

    def passes(self, event) -> None:
        """The time of this lease is over; returns once it waits again, or has ended."""
        with self.changed:
            while event not in self.waiting and not event.is_set():
                if not any(one.name == LEASE for one in threading.enumerate()):
                    return
                self.changed.wait(0.005)
            if event.is_set():
                return
            lease = self.waiting[event]
            self.over.add(event)
            while event in self.over or (lease.is_alive() and event not in self.waiting):
                self.changed.wait(0.005)


class Yields(RuleBasedStateMachine):
    """One job, commanded from outside or calling by itself."""

    @initialize(beside=st.booleans(), driver=st.booleans())
    def begin(self, beside: bool, driver: bool) -> None:
        self.clock = LeaseClock()
        self.world = World(driver=driver, clock=self.clock)
        self.job = LoopingJob(self.world.safe_points) if beside else None
        if self.job is not None:
            self.job.__enter__()
        self.zeros: set[str] = set()  # classes of which a report or an error has said so

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
        for movable in self.world.movables:
            one = movable.storage
            told = movable.tensor_class in self.zeros
            # of a class that is told to be lost some may have been saved
            assert one.device == one.content or (told and one.device == "zeros"), (
                movable.tensor_class
            )
            one.discarded, one.content = False, one.device
        self.zeros.clear()

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
        lease=st.sampled_from((None, 5.0)),
    )
    def yield_(self, *, level, keep, discard, verify, dry_run, lease) -> None:
        request = YieldRequest(
            level=level,
            keep=tuple(sorted(keep - discard)),
            discard=tuple(discard),
            verify=verify,
            dry_run=dry_run,
            wait_seconds=10.0,
            lease_seconds=lease,
        )
        report = self.command(lambda: self.world.engine.yield_(request))
        if report is not None and not dry_run:
            self.zeros |= set(report.discarded_bytes)

    @rule()
    def the_lease_ends(self) -> None:
        faults = self.world.faults
        faults.now = {call: one for call, one in faults.now.items() if isinstance(one, Exception)}
        self.clock.passes(self.world.engine._lease._ends)

    @rule(classes=st.none() | st.sets(st.sampled_from(CLASSES), min_size=1, max_size=2))
    def restore(self, classes) -> None:
        chosen = None if classes is None else tuple(classes)
        self.command(lambda: self.world.engine.restore(RestoreRequest(classes=chosen)))

    def command(self, call):
        engine, before = self.world.engine, self.world.engine.status.state
        try:
            return call()
        except YieldRefusedError:
            return None
        except YieldFailedError as error:
            said = str(error)
            assert engine.status.state is not YieldState.RUNNING or "thrown away already" in said
        except KeyboardInterrupt:
            said = engine.status.reason if before is YieldState.RUNNING else ""
        if "thrown away already" in said:
            named = said.split("contents of ")[1].split(" were")[0]
            self.zeros |= set(named.split(", "))
        return None

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
