"""Windows of events: peaks, whole steps, true deltas, labels."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import fake_torch
from support.fake_clock import FakeClock

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.profile import ProfileKind, Sizes, StepStats
from gpumem_otel.capture.gil_pacing import Pacer
from gpumem_otel.capture.profile_reader import LiveProfileReader
from gpumem_otel.capture.source import TorchSource
from gpumem_otel.capture.window_profiles import WholeSteps
from gpumem_otel.errors import BusyError, CaptureError
from gpumem_otel.settings.config import ProfileConfig
from gpumem_otel.snapshot.labels import region_metadata
from gpumem_otel.snapshot.stacks import file_function_namer
from gpumem_otel.snapshot.tensor_classes import TensorClass

PEAK, ALLOCATED = ProfileKind.PEAK, ProfileKind.ALLOCATED
VERSIONS = ("2.3", "2.8", "2.11", "2.15")


def frame(name, line=1, filename="/job/model.py"):
    return {"name": name, "filename": filename, "line": line}


class Bench:
    """A fake torch with its reader; `then` runs in the window, one action per look at it."""

    def __init__(self, torch, **config):
        config.setdefault("class_as", "off")
        self.torch, self.allocator = torch, torch.allocators[0]
        self.clock, self.counters = FakeClock(), Counters()
        self.allocator.time_us = lambda: self.clock.time_ns() // 1000
        self.source = TorchSource(
            counters=self.counters, clock=self.clock, annotations=config.get("phases", False)
        )
        self.source.start()
        self.reader = LiveProfileReader(
            self.source,
            namer=file_function_namer,
            clock=self.clock,
            counters=self.counters,
            config=ProfileConfig(**config),
            pacer=Pacer(now=self.clock.monotonic, sleep=self.clock.advance),
        )
        self.actions = []
        self.clock.on_wait.append(lambda: self.actions.pop(0)() if self.actions else None)
        self.steps = StepStats()
        self.reader.windows.steps = lambda: self.steps

    def step(self):
        self.steps = StepStats(steps=self.steps.steps + 1, last_step_time_ns=self.clock.time_ns())

    def pushed(self, *kinds, limit=10.0, stop=None):
        made = self.reader.windows.pushed(kinds, limit, stop or threading.Event())
        return [made[kind][0] for kind in kinds]

    def peak(self):
        (profile,) = self.reader.windows.peak(0.2, threading.Event())
        return profile


def by_name(profile):
    return {s.frames[0].name: (s.objects, s.size_bytes) for s in profile.samples}


@pytest.fixture(params=VERSIONS)
def bench(request, monkeypatch):
    module = fake_torch.make(request.param)
    monkeypatch.setitem(sys.modules, "torch", module)
    made = Bench(module)
    yield made
    made.source.stop()


@pytest.fixture
def newest(monkeypatch):
    """Makes a bench of torch 2.15 with a config."""
    sources = []

    def make(**config):
        module = fake_torch.make("2.15")
        monkeypatch.setitem(sys.modules, "torch", module)
        made = Bench(module, **config)
        sources.append(made.source)
        return made

    yield make
    for source in sources:
        source.stop()


def test_the_peak_is_what_was_alive_at_the_highest_moment(bench):
    """What is older than the window has its stack, freed in it or not."""
    allocator = bench.allocator
    weights = allocator.alloc(1000, (frame("weights"),))
    old = allocator.alloc(300, (frame("old"),))
    held = []

    def forward():
        held.append(allocator.alloc(700, (frame("forward"),)))

    bench.actions += [
        forward,
        forward,
        lambda: allocator.free(old),
        lambda: allocator.free(held.pop()),
        lambda: allocator.alloc(50, (frame("later"),)),
    ]
    profile = bench.peak()
    assert by_name(profile) == {
        "model.py:forward": (2, 1400),
        "model.py:weights": (1, 1000),
        "model.py:old": (1, 300),
    }
    assert (profile.kind, profile.sizes) == (PEAK, Sizes.REQUESTED)
    assert profile.duration_ns == 0
    assert profile.total_bytes == allocator.peak_asked == 2700
    assert "highest moment of the window: 2700 bytes" in profile.comments
    assert (
        f"the allocator's own peak: 2700 bytes requested, {allocator.peak_held} in its blocks"
        in profile.comments
    )
    assert allocator.mode == "state"
    assert weights in allocator.blocks


def test_frees_are_recorded_for_a_peak_and_for_nothing_else(bench):
    bench.actions += [lambda: bench.allocator.free(bench.allocator.alloc(10))]
    seen = []
    bench.reader.windows.tap.append(lambda reading, _: seen.append(reading))
    bench.peak()
    bench.reader.windows.allocated(0.2, threading.Event())
    actions = [{event["action"] for event in reading.snapshot.raw_events(0)} for reading in seen]
    assert "free_requested" in actions[0]
    if bench.torch.__version__.startswith(("2.11", "2.15")):  # which can leave events out
        assert actions == [{"alloc", "free_requested"}, set()]


@given(
    steps=st.lists(st.one_of(st.integers(1, 5000), st.integers(-6, -1)), min_size=1, max_size=40),
    before=st.lists(st.integers(1, 5000), min_size=1, max_size=6),
)
def test_whatever_a_window_holds_the_peak_is_the_highest_moment(steps, before):
    """GIVEN any order of allocations and frees THEN the total is the counter's own maximum."""
    module = fake_torch.make("2.11")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", module)
        bench = Bench(module)
        alive = [bench.allocator.alloc(size, (frame(f"b{size}"),)) for size in before]
        highest = [bench.allocator.held("requested_size")]

        def one(action):
            if action > 0:
                alive.append(bench.allocator.alloc(action, (frame(f"f{action % 7}"),)))
            elif alive:
                bench.allocator.free(alive.pop(action % len(alive)))
            highest.append(bench.allocator.held("requested_size"))

        bench.actions = [lambda: [one(action) for action in steps]]
        profile = bench.peak()
        bench.source.stop()
    assert profile.total_bytes == max(highest)
    assert profile.total_bytes <= bench.allocator.peak_held
    assert all(s.frames[0].name != "[allocated before install]" for s in profile.samples)


def test_what_the_counter_rose_to_outside_of_a_window_is_named(bench):
    allocator = bench.allocator
    allocator.alloc(1000, (frame("weights"),))
    (first,) = bench.pushed(PEAK)
    assert first.total_bytes == 1000
    allocator.free(allocator.alloc(5000, (frame("evaluation"),)))
    (second,) = bench.pushed(PEAK)
    assert by_name(second) == {
        "[peak not recorded]": (0, 5000),
        "model.py:weights": (1, 1000),
    }
    assert second.total_bytes == allocator.peak_asked == 6000
    # the counter has not changed: the peak of this interval is unknown
    (third,) = bench.pushed(PEAK)
    assert by_name(third) == {"model.py:weights": (1, 1000)}
    assert not any("not recorded" in comment for comment in third.comments)


def test_the_first_profile_tells_of_all_that_was_before(bench):
    bench.allocator.free(bench.allocator.alloc(3000))
    bench.allocator.alloc(100)
    (first,) = bench.pushed(PEAK)
    assert first.total_bytes == 3000
    # a pull asks for its own window alone
    assert bench.peak().total_bytes == 100


def test_a_peak_that_the_job_reset_counts_anew(bench):
    allocator = bench.allocator
    allocator.free(allocator.alloc(9000))
    bench.pushed(PEAK)
    allocator.peak_held = allocator.peak_asked = 0  # torch.cuda.reset_peak_memory_stats()
    allocator.free(allocator.alloc(2000))
    (profile,) = bench.pushed(PEAK)
    assert by_name(profile) == {"[peak not recorded]": (0, 2000)}


def test_memory_that_waits_for_a_stream_is_no_peak_of_its_own(bench):
    """The counter of requested bytes goes on counting it, that of allocated bytes does not."""
    bench.allocator.alloc(512)
    bench.allocator.peak_asked = 4000
    (profile,) = bench.pushed(PEAK)
    assert profile.total_bytes == bench.allocator.peak_held == 512


def test_a_window_holds_two_whole_steps(newest):
    """GIVEN steps of 0.1 s WHEN a window is recorded THEN it ends after two of them, and what
    was allocated comes from the whole ones alone, scaled to the counters of all the time."""
    bench = newest()
    allocator = bench.allocator
    bench.step()

    def turn(name):
        def act():
            allocator.free(allocator.alloc(100, (frame(name),)))

        return act

    between = [turn("work")] * 4
    bench.actions += [turn("before")] * 3
    for _ in range(5):
        bench.actions += [bench.step, *between]
    bench.actions.insert(len(bench.actions), turn("after"))
    peak, allocated = bench.pushed(PEAK, ALLOCATED)
    sentence = next(c for c in allocated.comments if c.startswith("recorded in a window"))
    assert sentence.endswith(", 2 whole steps")
    assert sentence in peak.comments
    assert by_name(allocated) == {"model.py:work": (11, 1100)}
    assert allocated.total_bytes == allocator.requested_ever == 1100
    # three looks before, a boundary, then twice four and a boundary
    assert bench.clock.seconds == pytest.approx(0.02 * (3 + 1 + 5 + 5), abs=0.01)


def test_without_steps_a_window_lasts_a_time(newest):
    bench = newest(allocated_window_seconds=0.5)
    bench.allocator.alloc(1)
    bench.pushed(PEAK)
    assert bench.clock.seconds == pytest.approx(0.5, abs=0.01)
    bench.step()
    bench.clock.advance(20)  # that was long ago: no other is waited for
    bench.pushed(PEAK, limit=10.0)
    assert bench.clock.seconds == pytest.approx(21.0, abs=0.02)


def test_steps_that_take_long_are_waited_for_up_to_the_limit(newest):
    bench = newest()
    bench.allocator.alloc(1)
    bench.step()
    (profile,) = bench.pushed(PEAK, limit=5.0)
    assert bench.clock.seconds == pytest.approx(5.0, abs=0.03)
    assert any(c.endswith(", no whole step") for c in profile.comments)


def test_a_flush_ends_a_window(newest):
    bench = newest()
    bench.allocator.alloc(1)
    bench.step()
    stop = threading.Event()
    bench.actions += [lambda: None, stop.set]
    bench.pushed(PEAK, limit=60.0, stop=stop)
    assert bench.clock.seconds < 0.1


def test_events_end_a_window_early(newest):
    bench = newest()
    bench.source._reads._max_window_events = 100
    bench.step()
    for _ in range(20):
        bench.actions.append(
            lambda: [bench.allocator.free(bench.allocator.alloc(1)) for _ in range(10)]
        )
    (profile,) = bench.pushed(PEAK, limit=60.0)
    assert len(bench.actions) == 16  # 4 * 20 events are four fifths of the room
    assert profile.total_bytes == 1
    assert bench.counters.get("exporter_history_overflow") == 0


def test_a_job_that_records_itself_is_waited_for(bench):
    bench.torch._C._cuda_record_memory_history("all", "all", "python", 1000, *fake_rest(bench))
    with pytest.raises(BusyError, match="the job records memory history itself"):
        bench.pushed(PEAK)


def test_a_window_that_the_job_takes_over_is_not_ours(bench):
    bench.actions.append(
        lambda: bench.torch._C._cuda_record_memory_history(
            "all", "all", "python", 1000, *fake_rest(bench)
        )
    )
    with pytest.raises(CaptureError, match="memory history itself"):
        bench.pushed(PEAK)
    assert bench.allocator.mode == "all"


def fake_rest(bench):
    arity = fake_torch.ARITY[bench.torch.__version__.rpartition(".")[0]]
    return [False, False, False, [], False, True][: arity - 4]


def test_kinds_that_are_off_change_nothing(newest):
    bench = newest()
    bench.allocator.alloc(10)
    calls = list(bench.allocator.calls)
    bench.reader.live()
    assert bench.allocator.calls == calls
    assert all(call[6] is False and call[8] is False for call in calls)


def test_the_class_is_the_root_of_a_peak(newest):
    """GIVEN a table of what lives WHEN a window is read THEN it was wanted while that was open."""
    bench = newest(class_as="root")
    allocator, tensors = bench.allocator, bench.source.tensors
    weights = allocator.alloc(1000, (frame("weights"),))
    alive = SimpleNamespace(expired=lambda: False)
    tensors._entries = {weights: (1000, TensorClass.PARAMETER, alive)}
    tensors.want(3600)
    before, within = tensors._wanted_from, []
    call = frame("_call_impl", filename="/v/torch/nn/modules/module.py")
    bench.actions += [
        lambda: allocator.alloc(500, (frame("linear"), call)),
        lambda: within.append(tensors._wanted_from),
    ]
    profile = bench.peak()
    assert {tuple(f.name for f in s.frames): s.size_bytes for s in profile.samples} == {
        ("model.py:weights", "parameter"): 1000,
        ("model.py:linear", "module.py:_call_impl", "activation"): 500,
    }
    assert within == [float("-inf")]
    assert tensors._wanted_from == before
    bench.actions.append(lambda: tensors.want(7))  # by somebody else, meanwhile
    bench.peak()
    assert tensors._wanted_from not in {before, float("-inf")}
    within.clear()
    bench.actions.append(lambda: within.append(tensors._wanted_from))
    bench.reader.windows.allocated(0.2, threading.Event())
    assert within != [float("-inf")]  # what was allocated has no class


def test_a_source_without_windows_is_waited_for(newest):
    bench = newest()
    bench.reader.windows._source = object()
    with pytest.raises(BusyError, match="records no events"):
        bench.pushed(PEAK)


@contextmanager
def somebody_records(bench, seconds, *, until):
    """A request for so many seconds, which ends then."""
    with ExitStack() as stack:
        turn = bench.reader.windows.turns.turn(seconds, threading.Event(), wait_seconds=0)
        stack.enter_context(turn)

        def look():
            if bench.clock.seconds >= until:
                stack.close()

        bench.clock.on_wait.append(look)
        yield
        bench.clock.on_wait.remove(look)


def test_a_window_of_ours_waits_for_that_of_a_request(newest):
    """GIVEN 5 s of a request WHEN ours is due THEN it follows, of what is left of its time."""
    bench = newest(allocated_window_seconds=2.0)
    bench.allocator.alloc(10)
    with somebody_records(bench, 5, until=5):
        (profile,) = bench.pushed(ALLOCATED, limit=8.0)
    assert any("a window of 2.000 s" in comment for comment in profile.comments)
    assert bench.clock.seconds == pytest.approx(7, abs=0.11)


def test_whole_steps_are_counted_in_what_is_left_after_a_wait(newest):
    """GIVEN steps of 3 s, one of them while ours waits THEN it has its own, in its whole limit."""
    bench = newest()
    bench.allocator.alloc(10)

    def work():
        if bench.clock.seconds >= 3 * bench.steps.steps:
            bench.step()

    bench.step()
    bench.clock.on_wait.append(work)
    with somebody_records(bench, 5, until=5):
        (profile,) = bench.pushed(PEAK, limit=60.0)
    assert any("2 whole steps" in comment for comment in profile.comments)
    assert bench.clock.seconds == pytest.approx(12, abs=0.15)


@pytest.mark.parametrize(("window_seconds", "waits_seconds"), [(2.0, 6.0), (60.0, 4.0)])
def test_a_window_of_ours_waits_while_enough_is_left_for_it(newest, window_seconds, waits_seconds):
    bench = newest(allocated_window_seconds=window_seconds)
    with (
        somebody_records(bench, 300, until=300),
        pytest.raises(BusyError, match=r"another one is open; try again when it is over"),
    ):
        bench.pushed(ALLOCATED, limit=8.0)
    assert bench.clock.seconds == pytest.approx(waits_seconds, abs=0.11)


def test_requests_wait_for_each_other_and_each_has_its_whole_time(bench):
    bench.allocator.alloc(10)
    with somebody_records(bench, 5, until=5):
        (profile,) = bench.reader.windows.allocated(3.0, threading.Event())
    assert any("a window of 3.000 s" in comment for comment in profile.comments)
    assert profile.duration_ns == 3_000_000_000
    assert bench.clock.seconds == pytest.approx(8, abs=0.11)
    with somebody_records(bench, 5, until=bench.clock.seconds + 5):
        bench.peak()
    with (
        somebody_records(bench, 300, until=1000),
        pytest.raises(BusyError, match="others come first, for 300 s at most"),
    ):
        bench.peak()


def test_regions_are_labels(newest):
    bench = newest()
    allocator = bench.allocator

    def labelled(text, name):
        def act():
            allocator.metadata = text
            allocator.alloc(10, (frame(name),))
            allocator.metadata = ""

        return act

    bench.actions += [
        labelled(region_metadata("loss"), "f"),
        labelled(region_metadata("loss"), "f"),
        labelled("the job's own", "f"),
        labelled("", "g"),
    ]
    (profile,) = bench.reader.windows.allocated(0.3, threading.Event())
    assert {(s.frames[0].name, s.labels, s.objects) for s in profile.samples} == {
        ("model.py:f", (("region", "loss"),), 2),
        ("model.py:f", (), 1),
        ("model.py:g", (), 1),
    }
    assert profile.total_bytes == 40


def test_phases_are_labels_on_request(newest):
    bench = newest(phases=True)
    assert all(call[6] is True for call in bench.allocator.calls)  # annotations of all threads
    call = frame("_call_impl", filename="/venv/torch/nn/modules/module.py")
    engine = frame("_engine_run_backward", filename="/venv/torch/autograd/graph.py")
    marks = bench.torch.annotations

    def mark(name, stage):
        now = bench.clock.time_ns() // 1000
        return lambda: marks.append({"name": name, "stage": stage, "device": 0, "time_us": now})

    def alloc(*frames):
        return lambda: bench.allocator.alloc(10, frames)

    def annotated(name, *frames):
        def act():
            mark(name, "START")()
            bench.allocator.alloc(10, frames)
            bench.clock.advance(0.001)
            mark(name, "END")()

        return act

    bench.actions += [
        alloc(frame("linear"), call),
        alloc(frame("hook"), engine),
        alloc(frame("data")),
        annotated("Optimizer.step#AdamW.step", frame("adamw")),
        annotated("Optimizer.zero_grad#AdamW.zero_grad", frame("zeros")),
        annotated("evaluation 17", frame("eval"), call),
    ]
    (profile,) = bench.reader.windows.allocated(0.4, threading.Event())
    assert {s.frames[0].name: dict(s.labels)["phase"] for s in profile.samples} == {
        "model.py:linear": "forward",
        "model.py:hook": "backward",
        "model.py:data": "[none]",
        "model.py:adamw": "optimizer.step",
        "model.py:zeros": "zero_grad",
        "model.py:eval": "evaluation",
    }


def test_two_boundaries_are_one_whole_step():
    now = [StepStats(steps=5, last_step_time_ns=1_000_000)]
    steps = WholeSteps(lambda: now[0], 2_000_000, 1.0)
    assert steps.ticking
    assert not steps.enough()
    assert (steps.number, steps.between_us) == (0, None)
    now[0] = StepStats(steps=6, last_step_time_ns=5_000_000)
    assert not steps.enough()
    assert (steps.number, steps.between_us) == (0, None)
    now[0] = StepStats(steps=7, last_step_time_ns=9_000_000)
    assert not steps.enough()
    assert (steps.number, steps.between_us) == (1, (5000, 9000))
    now[0] = StepStats(steps=9, last_step_time_ns=20_000_000)  # two since the last look
    assert steps.enough()
    assert (steps.number, steps.between_us) == (3, (5000, 20000))


@pytest.mark.parametrize(
    ("steps", "last_ns", "ticking"), [(0, 0, False), (3, 10**9, False), (3, 5 * 10**9, True)]
)
def test_steps_are_expected_where_one_was_lately(steps, last_ns, ticking):
    stats = StepStats(steps=steps, last_step_time_ns=last_ns)
    assert WholeSteps(lambda: stats, 6 * 10**9, 2.0).ticking is ticking
