"""The seams of the yield engine in memory: contents are bytes that are on a device or on the host.

They keep the promises of the real parts (all or nothing, nothing changed before `free`, a host copy
that stays until all is back) and fail where a test says so.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import ClassVar

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.base.counters import Counters
from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.callbacks import Callbacks
from gpumem_otel.yielding.engine.dependencies import YieldDependencies
from gpumem_otel.yielding.engine.engine import YieldEngine
from gpumem_otel.yielding.engine.safepoint import Quiescence, SafePoints
from gpumem_otel.yielding.values import Candidate, OperationState, Phase, PhaseTime, ScanResult

SIZE = 1 << 20


@dataclass
class Storage:
    """Contents: on the device, on the host, or thrown away on request."""

    content: str
    device: str | None = None
    host: str | None = None
    discarded: bool = False

    def __post_init__(self) -> None:
        self.device = self.content

    @property
    def safe(self) -> bool:
        return self.discarded or self.content in {self.device, self.host}


@dataclass
class Faults:
    """What is to fail next, by the name of the call; each takes its entry away."""

    now: dict[str, BaseException] = field(default_factory=dict)

    def hit(self, call: str) -> None:
        if call in self.now:
            raise self.now.pop(call)


def movable(storage: Storage, number: int, tensor_class: str, device: int = 0) -> Candidate:
    return Candidate(storage, device, 0x1000 * (number + 1), SIZE, SIZE, 0, tensor_class)


class FakeFinder:
    def __init__(self, faults: Faults, movables: list[Candidate]) -> None:
        self.faults = faults
        self.found = ScanResult(tuple(movables))
        self.asked: list[bool] = []

    def find(self, *, assume_private: bool) -> ScanResult:
        self.asked.append(assume_private)
        self.faults.hit("find")
        return self.found

    def probable(self) -> tuple[Candidate, ...]:
        return self.found.movables if self.asked else ()


class FakeOffload:
    """As `Offload`, over `Storage`."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.items: list[Candidate] = []
        self.thrown: tuple[str, ...] = ()
        self.verifies = False
        self.away: set[int] = set()
        self.bytes_per_second = 0.0
        self.notes: list[str] = []
        self.room = True
        self.during_copy = lambda: None
        self.reserved = False
        self.closed = 0
        self.zeroed: set[str] = set()
        self.begun: list[Candidate] = []
        self.copies_ahead = False
        self.on_waiting = lambda why: None

    def _sum(self, *, discarded: bool) -> dict[str, int]:
        sums: dict[str, int] = {}
        for one in self.items:
            if id(one) in self.away and one.storage.discarded == discarded:
                sums[one.tensor_class] = sums.get(one.tensor_class, 0) + one.size_bytes
        return sums

    @property
    def held_bytes(self) -> dict[str, int]:
        return self._sum(discarded=False)

    @property
    def discarded_bytes(self) -> dict[str, int]:
        return self._sum(discarded=True)

    @property
    def host_bytes(self) -> int:
        return sum(one.size_bytes for one in self.items if one.storage.host is not None)

    disk_bytes = 0

    def begin(self, movables) -> None:
        assert not self.items, "begun with memory held"
        assert not self.begun, "begun twice"
        self.begun = list(movables)
        self.faults.hit("begin")

    def admit(self, movables, request) -> tuple[int, int]:
        assert not self.items, "admitted twice"
        self.faults.hit("admit")
        self.items, self.thrown, self.begun = list(movables), request.discard, []
        self.zeroed = set()
        self.verifies, self.reserved = request.verify, True
        kept = [one for one in movables if one.tensor_class not in request.discard]
        return sum(one.size_bytes for one in kept), 0

    def copy_out(self, progress, stop) -> PhaseTime:
        self.faults.hit("copy_out")
        done, total = 0, SIZE * len(self.items)
        for one in self.items:
            self.during_copy()
            if stop():
                raise YieldRefusedError("offload: stopped")
            if one.tensor_class not in self.thrown:
                one.storage.host = one.storage.device
                done += one.size_bytes
            progress(done, total)
        return PhaseTime(Phase.RELEASE, 0.5, done)

    def free(self) -> None:
        self.faults.hit("free")
        for one in self.items:
            if len(self.away) == len(self.items) // 2:
                self._hit_within("free within", self._fill_again)
            if one.tensor_class in self.thrown:
                one.storage.discarded = True
            one.storage.device = None
            self.away.add(id(one))
        self._hit_within("free at its end", self._fill_again)

    def _hit_within(self, call: str, undo) -> None:
        """Errors are undone, as the real one does it; an interrupt leaves what there is."""
        try:
            self.faults.hit(call)
        except Exception:
            undo()
            raise

    def _fill_again(self) -> None:
        for one in self.items:
            if id(one) in self.away and one.storage.discarded:
                self.zeroed.add(one.tensor_class)
            self._fill(one)

    def _fill(self, one: Candidate) -> None:
        if id(one) in self.away:
            one.storage.device = "zeros" if one.storage.discarded else one.storage.host
            self.away.discard(id(one))

    def discard(self, classes) -> None:
        for one in self.items:
            if id(one) in self.away and one.tensor_class in classes:
                one.storage.discarded, one.storage.host = True, None

    def abandon(self) -> None:
        assert not self.away
        self.faults.hit("abandon")
        self.begun = []
        self._finish()

    def copy_back(self, classes, wait_seconds, progress, stop) -> PhaseTime:
        self.faults.hit("copy_back")
        if not self.room:
            raise YieldRefusedError(f"device 0: {SIZE} bytes are missing; the host copy stays")
        todo = [
            one
            for one in self.items
            if id(one) in self.away and (classes is None or one.tensor_class in classes)
        ]
        for number, one in enumerate(todo):
            if number == len(todo) // 2:  # what this call brought back is gone again
                try:
                    self.faults.hit("copy_back within")
                except BaseException:
                    for back in todo[:number]:
                        back.storage.device = None
                        self.away.add(id(back))
                    raise
            self._fill(one)
        size = sum(one.size_bytes for one in todo)
        progress(size, size)
        if not self.away:
            self._finish()
        return PhaseTime(Phase.RELOAD, 0.5, size)

    def _finish(self) -> None:
        for one in self.items:
            one.storage.host = None
        self.items, self.reserved = [], False

    def close(self) -> bool:
        assert not self.items
        self.closed += 1
        return True

    def verify(self) -> str:
        self.faults.hit("verify")
        return "equal" if self.verifies else ""


class FakeCheckpoint:
    """As `DriverCheckpoint`: `driver` is what the driver would say."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.state = "running"
        self.why_not = ""
        self.room = True
        self.on_restored = None
        self.on_waiting = None
        self.leases: list[float | None] = []

    def refusal(self) -> str:
        return self.why_not

    def prepare(self) -> None:
        self.faults.hit("helper")

    def lock_and_checkpoint(self, timeout_seconds, lease_seconds) -> PhaseTime:
        self.faults.hit("lock")
        self.state = "locked"
        self.faults.hit("checkpoint")
        self.state = "checkpointed"
        self.leases.append(lease_seconds)
        return PhaseTime(Phase.CHECKPOINT, 0.25, 7)

    def restore(self, wait_seconds) -> PhaseTime:
        if self.state == "running":
            return PhaseTime(Phase.RESTORE, 0.0)
        if self.state == "failed":
            raise YieldFailedError("driver: the process is lost")
        self.faults.hit("restore")
        if not self.room:
            raise YieldRefusedError("driver: the device is taken; the process stays checkpointed")
        self.state = "running"
        return PhaseTime(Phase.RESTORE, 0.25, 7)

    def close(self, wait_seconds: float = 0.0) -> bool:
        return self.state == "running"


class FakeGate:
    def __init__(self) -> None:
        self.closed = False
        self.stuck = False

    def close(self, timeout: float) -> bool:
        self.closed = not self.stuck
        return self.closed

    def open(self) -> None:
        self.closed = False


class World:
    """An engine over the doubles, and what a test wants to look at."""

    made: ClassVar[weakref.WeakSet[YieldEngine]] = weakref.WeakSet()
    """For `tests/conftest.py`, which ends their threads."""

    def __init__(self, *, clock=None, driver: bool = True, safe_points=None, environ=None) -> None:
        self.faults = Faults()
        classes = ("parameter", "gradient", "optimizer_state", "optimizer_state", "activation")
        self.storages = [Storage(f"bytes {n}") for n in range(len(classes))]
        self.movables = [movable(one, n, classes[n]) for n, one in enumerate(self.storages)]
        self.finder = FakeFinder(self.faults, self.movables)
        self.offload = FakeOffload(self.faults)
        self.checkpoint = FakeCheckpoint(self.faults) if driver else None
        self.gate = FakeGate()
        self.counters = Counters()
        self.clock = clock or SystemClock()
        self.callbacks = Callbacks()
        self.safe_points = safe_points or SafePoints()
        self.moving = {0: (10, 5)}
        self.works = ""
        self.ranks = 1
        self.why_not_now = ""
        self.usage: tuple = ()
        self.participants: set[threading.Thread] = set()
        self.parts = YieldDependencies(
            finder=self.finder,
            offload=self.offload,
            safe_points=self.safe_points,
            quiescence=Quiescence(
                participants=lambda: self.participants,
                who_else=lambda parked, known, glance: self.works,
                counters=lambda: dict(self.moving),
                clock=self.clock,
            ),
            callbacks=self.callbacks,
            clock=self.clock,
            checkpoint=self.checkpoint,
            gate=self.gate,
            world_size=lambda: self.ranks,
            why_not_now=lambda: self.why_not_now,
            usage=lambda: self.usage,
        )
        self.engine = YieldEngine(self.parts, counters=self.counters, environ=environ or {})
        self.made.add(self.engine)

    @property
    def nothing_lost(self) -> bool:
        return all(one.safe for one in self.storages)

    @property
    def all_on_device(self) -> bool:
        return all(one.device == one.content for one in self.storages)


def ended(world: World, operation_id: str):
    """Wait until an operation has ended."""
    engine = world.engine
    while engine.operation(operation_id).state is OperationState.RUNNING:
        engine.wait(engine.status.version, 5.0)
    return engine.operation(operation_id)


class LoopingJob:
    """A job's thread that reaches a safe point in each turn of its loop."""

    def __init__(self, safe_points: SafePoints) -> None:
        self.safe_points = safe_points
        self.turns = 0
        self.turned = threading.Condition()
        self.error: BaseException | None = None
        self._ends = threading.Event()
        self.thread = threading.Thread(target=self._run, name="job", daemon=True)

    def __enter__(self):
        self.thread.start()
        self.goes_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self.thread.join(10)
        assert not self.thread.is_alive(), "the job's thread was never let go"

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                self.safe_points.reached()
                with self.turned:
                    self.turns += 1
                    self.turned.notify_all()
                self._ends.wait(0.001)
        except BaseException as error:
            self.error = error

    def goes_on(self) -> None:
        """Wait for two more turns; fails where none come."""
        with self.turned:
            aim = self.turns + 2
            assert self.turned.wait_for(lambda: self.turns >= aim, 10), "the job stands still"
