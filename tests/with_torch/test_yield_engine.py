"""Training on the real torch, in host memory, that yields and restores at random steps.

The storages are really emptied (`resize_(0)`) and filled again, by the real offload, at safe points
that torch's own optimizer hooks make. Only what finds them is the test's: there is no allocator of
a GPU to read.
"""

from __future__ import annotations

import gc
import mmap
import os
import queue
import random
import signal
import threading
import weakref
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from support.yield_parts import World  # noqa: E402

from gpumem_otel.base.clock import SystemClock  # noqa: E402
from gpumem_otel.base.counters import Counters  # noqa: E402
from gpumem_otel.capture.steps import StepCounter  # noqa: E402
from gpumem_otel.capture.tensor_table import TensorTable  # noqa: E402
from gpumem_otel.errors import YieldFailedError, YieldRefusedError  # noqa: E402
from gpumem_otel.yielding.copy.devices import CpuDevices  # noqa: E402
from gpumem_otel.yielding.copy.host_memory import HostPool  # noqa: E402
from gpumem_otel.yielding.copy.limits import HostRoom  # noqa: E402
from gpumem_otel.yielding.copy.offload import Offload  # noqa: E402
from gpumem_otel.yielding.copy.reservations import DeviceReservations, HostReservations  # noqa: E402
from gpumem_otel.yielding.engine.engine import YieldEngine  # noqa: E402
from gpumem_otel.yielding.engine.safepoint import (  # noqa: E402
    Quiescence,
    SafePoints,
)
from gpumem_otel.yielding.scan.other_threads import who_else  # noqa: E402
from gpumem_otel.yielding.scan.torch_state import not_between_steps  # noqa: E402
from gpumem_otel.yielding.values import (  # noqa: E402
    Candidate,
    OperationState,
    RestoreRequest,
    ScanResult,
    YieldLevel,
    YieldRequest,
    YieldState,
)

pytestmark = pytest.mark.torch
nn = torch.nn
TENSORS = YieldRequest(level=YieldLevel.TENSORS)


class Training:
    """A few layers with tied weights, AdamW, and the loss of each step."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        self.tied = self.model[0].weight.t()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.x = torch.randn(16, 32)
        self.losses: list[float] = []

    def step(self) -> None:
        loss = (self.model(self.x) - self.x).square().mean() + (self.tied * 1e-3).sum()
        loss.backward()
        self.losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=len(self.losses) % 2 == 0)

    def tensors(self):
        for parameter in self.model.parameters():
            yield "parameter", parameter
            if parameter.grad is not None:
                yield "gradient", parameter.grad
        for state in self.optimizer.state.values():
            for name, one in state.items():
                if name != "step":
                    yield "optimizer_state", one

    def find(self, *, assume_private: bool) -> ScanResult:
        found = {}
        for tensor_class, tensor in self.tensors():
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            found.setdefault(
                storage._cdata,
                Candidate(storage, 0, storage.data_ptr(), size, size, 0, tensor_class),
            )
        return ScanResult(tuple(found.values()))

    def probable(self) -> tuple[Candidate, ...]:
        return self.find(assume_private=False).movables

    @property
    def empty(self) -> int:
        return sum(not one.untyped_storage().nbytes() for _, one in self.tensors())


class Rig:
    """The engine over that job, with torch's own hooks."""

    def __init__(self, folder, job: Training) -> None:
        devices = CpuDevices(torch)
        self.pool = HostPool(devices, piece_bytes=64 << 10, threads=2)
        self.host = HostReservations(
            f"{folder}/reservations", lambda: HostRoom(1 << 40, "the test")
        )
        self.offload = Offload(
            devices, self.pool, self.host, DeviceReservations(f"{folder}/reservations")
        )
        self.safe_points = SafePoints(not_between_steps)
        self.steps = StepCounter(on_boundary=self.safe_points.reached)
        self.participants: set[threading.Thread] = set()
        world = World(driver=False)
        clock = SystemClock()
        parts = replace(
            world.parts,
            finder=job,
            offload=self.offload,
            safe_points=self.safe_points,
            quiescence=Quiescence(
                participants=lambda: self.participants,
                who_else=lambda parked, known, glance: who_else(tuple, parked, known, glance),
                counters=dict,
                clock=clock,
            ),
            clock=clock,
        )
        self.engine = YieldEngine(parts, counters=Counters(), environ={})

    def close(self) -> None:
        self.engine._waiter.close()
        self.steps.stop()
        self.pool.give_back()
        self.host.close()


@pytest.fixture
def rig(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    job = Training()
    made = Rig(tmp_path, job)
    made.job = job
    made.steps.start()
    yield made
    made.close()
    torch.set_num_threads(threads)


def never_yields(steps: int) -> list[float]:
    job = Training()
    for _ in range(steps):
        job.step()
    return job.losses


def test_calls_of_the_job_itself_change_no_bit(rig):
    expected = never_yields(60)
    chance = random.Random(1)
    for _ in range(60):
        rig.job.step()
        if chance.random() < 0.4:
            gone = rig.engine.yield_(replace(TENSORS, verify=chance.random() < 0.5))
            assert rig.job.empty == sum(1 for _ in rig.job.tensors()) > 0
            assert gone.host_bytes >= sum(gone.moved_bytes.values()) > 0
            back = rig.engine.restore()
            assert back.state is YieldState.RUNNING
            assert back.checksums == ("equal" if rig.engine.phases.plan.request.verify else "")
            assert rig.job.empty == 0
    assert rig.job.losses == expected


def test_commands_from_outside_stop_it_at_a_step_and_change_no_bit(rig):
    steps_to_do: queue.SimpleQueue[bool] = queue.SimpleQueue()
    errors: list[str] = []
    wanted = 12

    def command() -> None:
        try:
            for turn in range(wanted):
                request = replace(TENSORS, verify=turn % 2 == 0, wait_seconds=30.0)
                operation = rig.engine.submit(request, "test")
                for _ in range(3):
                    steps_to_do.put(True)
                while operation.state is OperationState.RUNNING:
                    rig.engine.wait(rig.engine.status.version, 1.0)
                    operation = rig.engine.operation(operation.id)
                assert operation.state is OperationState.DONE, operation.error
                steps = len(rig.job.losses)
                assert rig.job.empty > 0
                if turn % 3 == 0:  # weights first
                    rig.engine.restore(RestoreRequest(classes=("parameter",)))
                    assert rig.job.empty > 0
                assert len(rig.job.losses) == steps, "it went on without its memory"
                rig.engine.restore()
        except BaseException as error:
            errors.append(repr(error))
            rig.engine.restore()
        finally:
            steps_to_do.put(False)

    rig.job.step()
    thread = threading.Thread(target=command, name="gpumem-test")
    thread.start()
    while steps_to_do.get():
        rig.job.step()
    thread.join()
    assert errors == []
    assert rig.job.losses == never_yields(1 + 3 * wanted)
    assert rig.job.empty == 0


def test_discarded_optimizer_state_is_zero_and_weights_are_untouched(rig):
    for _ in range(3):
        rig.job.step()
    weights = [one.detach().clone() for one in rig.job.model.parameters()]
    report = rig.engine.yield_(replace(TENSORS, discard=("optimizer_state",)))
    assert set(report.discarded_bytes) == {"optimizer_state"}
    rig.engine.restore()
    for before, now in zip(weights, rig.job.model.parameters(), strict=True):
        assert torch.equal(before, now)
    for tensor_class, tensor in rig.job.tensors():
        if tensor_class == "optimizer_state":
            assert not tensor.any()
    assert rig.job.tied.data_ptr() == rig.job.model[0].weight.data_ptr()


class AlarmError(Exception):
    """What the handler raises."""


def test_signals_at_any_moment_change_no_bit_and_leave_nothing_behind(rig, monkeypatch):
    """Real ones, of which some come when it is all over: those end in the test's own line."""

    def handler(number, frame):
        if armed:
            armed.clear()
            raise AlarmError

    armed, hits = [], []
    pinned, devices = set(), rig.offload._devices
    monkeypatch.setattr(devices, "register", lambda at, size, device: pinned.add(at) or "")
    monkeypatch.setattr(devices, "unregister", pinned.remove)
    chance, before = random.Random(3), signal.signal(signal.SIGALRM, handler)
    expected = never_yields(80)
    request = replace(TENSORS, release_host=True)  # so that each pins anew
    try:
        for turn in range(80):
            rig.job.step()
            for call in (partial(rig.engine.yield_, request), rig.engine.restore):
                try:
                    armed.append(turn)
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 2e-2))
                    call()
                except AlarmError:
                    hits.append(turn)
                armed.clear()
            if rig.engine.status.state is YieldState.YIELDED:
                rig.engine.restore()
            assert rig.engine.status.state is YieldState.RUNNING
            assert (rig.job.empty, rig.pool.capacity_bytes, pinned) == (0, 0, set())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rig.job.losses == expected
    assert len(hits) > 10
    ours = ("gpumem-pin", "gpumem-touch", "gpumem-copy")
    assert not [t for t in threading.enumerate() if t.name.startswith(ours)]


@pytest.mark.parametrize("where", ["empty", "empty_cache"])
def test_an_interrupt_while_it_is_emptied_changes_no_bit(rig, monkeypatch, where):
    for _ in range(3):
        rig.job.step()
    devices = rig.offload._devices
    owner = devices if where == "empty_cache" else rig.offload._reload
    real, calls = getattr(owner, where), []

    def interrupted(*arguments):
        calls.append(1)
        if where == "empty" and len(calls) == 1:
            real(arguments[0][: len(arguments[0]) // 2])
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.engine.yield_(TENSORS)
    assert rig.engine.status.state is YieldState.RUNNING
    assert rig.job.empty == 0
    rig.job.step()
    rig.engine.yield_(TENSORS)
    rig.engine.restore()
    rig.job.step()
    assert rig.job.losses == never_yields(5)


def test_optimizer_state_that_was_to_go_is_whole_where_the_driver_refuses(rig):
    for _ in range(3):
        rig.job.step()
    checkpoint = World().checkpoint
    checkpoint.faults.now["lock"] = YieldRefusedError("driver: no")
    rig.engine._parts.checkpoint = checkpoint
    request = YieldRequest(level=YieldLevel.AUTO, discard=("optimizer_state",))
    with pytest.raises(YieldRefusedError, match="driver: no"):
        rig.engine.yield_(request)
    rig.job.step()
    rig.job.step()
    assert rig.job.losses == never_yields(5)
    gone = rig.engine.yield_(request)
    assert set(gone.discarded_bytes) == {"optimizer_state"}
    assert "optimizer_state" not in gone.moved_bytes
    rig.engine.restore()
    assert not any(one.any() for name, one in rig.job.tensors() if name == "optimizer_state")


def test_optimizer_state_that_was_thrown_away_before_an_undo_is_named(rig, monkeypatch):
    rig.job.step()
    devices, raised = rig.offload._devices, []
    real = devices.empty_cache

    def fails() -> None:
        if not raised:
            raised.append(1)
            raise RuntimeError("CUDA error")
        real()

    monkeypatch.setattr(devices, "empty_cache", fails)
    weights = [one.detach().clone() for one in rig.job.model.parameters()]
    with pytest.raises(YieldFailedError, match="of optimizer_state were thrown away already and"):
        rig.engine.yield_(replace(TENSORS, discard=("optimizer_state",)))
    assert rig.engine.status.state is YieldState.RUNNING
    assert "optimizer_state" in rig.engine.status.reason
    assert rig.job.empty == 0
    assert not any(one.any() for name, one in rig.job.tensors() if name == "optimizer_state")
    now = rig.job.model.parameters()
    assert all(torch.equal(one, other) for one, other in zip(weights, now, strict=True))


def test_a_forked_child_that_collects_the_engine_lives_on(rig):
    """As the workers of a loader do: they forget the parent's engine and make objects of theirs."""
    rig.job.step()
    rig.engine.yield_(TENSORS)
    rig.engine.restore()
    child = os.fork()
    if not child:
        code = 1
        try:
            # where the parent has its host memory there is nothing: the kernel gives it out
            kept = [mmap.mmap(-1, 16 << 10) for _ in range(2000)]
            pool = weakref.ref(rig.pool)
            rig.engine = rig.offload = rig.pool = rig.host = None
            gc.collect()
            for one in kept:
                one[:1] = b"x"
            assert pool() is None, "something of the test holds it"
            code = 0 if all(one[:1] == b"x" for one in kept) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_never_within_backward(rig):
    """A loop that calls `step()` in a hook of autograd is not between two steps there."""
    rig.job.step()
    refused = []

    def within(gradient):
        try:
            rig.engine.yield_(TENSORS)
        except YieldRefusedError as error:
            refused.append(str(error))
        return gradient

    handle = rig.job.model[2].weight.register_hook(within)
    rig.job.step()
    handle.remove()
    assert refused == ["safe point: backward runs; try again between two steps"]
    assert rig.job.losses == never_yields(2)


def test_a_thread_that_trains_beside_it_is_refused_by_name_until_it_is_registered(rig):
    rig.job.step()
    end, begun = threading.Event(), threading.Event()

    def average() -> None:
        begun.set()
        while not end.is_set():
            torch.ones(64) @ torch.ones(64)

    thread = threading.Thread(target=average, name="ema")
    thread.start()
    try:
        assert begun.wait(10)
        with pytest.raises(YieldRefusedError, match=r"thread 'ema'.*participant"):
            rig.engine.yield_(TENSORS)
        assert rig.job.empty == 0
        rig.participants.add(thread)
        rig.engine.yield_(TENSORS)
        rig.engine.restore()
    finally:
        end.set()
        thread.join()


def test_of_several_optimizers_only_the_counted_boundary_stops(rig):
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    stops = []
    rig.steps._on_boundary = lambda: stops.append(1)
    rig.job.step()
    other.step()
    assert rig.steps.several
    other.step()
    rig.job.step()
    assert len(stops) == 2
    rig.steps.step()
    assert len(stops) == 3
    assert not rig.steps.several


def test_the_end_of_a_forward_without_gradients_of_a_watched_model_is_one(rig):
    reached = []
    table = TensorTable()
    table.on_forward = lambda: reached.append(threading.current_thread().name)
    table.start()
    try:
        model = nn.Sequential(nn.Linear(4, 4))
        table.watch("", model)
        model(torch.ones(1, 4))
        assert reached == [], "an optimizer steps later"
        with torch.no_grad():
            model(torch.ones(1, 4))
            model[0](torch.ones(1, 4))
        assert reached == ["MainThread"]
    finally:
        table.stop()


def test_an_error_of_a_signal_handler_at_a_safe_point_reaches_the_job(rig):
    """What the job's own handler raises while it stands still is no fault of counting steps."""

    class Stop(Exception):  # noqa: N818 - as jobs name it
        pass

    def reached() -> None:
        raise Stop

    rig.steps._on_boundary = reached
    with pytest.raises(Stop):
        rig.job.step()
    rig.steps._on_boundary = None
    rig.job.step()
    assert rig.steps.stats().steps == 2
