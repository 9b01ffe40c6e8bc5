"""Stacks of before a restore in what a source reads; storages and allocator are the test's own."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref

import pytest
from support import fake_torch
from support.fake_clock import FakeClock

from gpumem_otel.base.counters import Counters
from gpumem_otel.capture.gil_pacing import Pacer
from gpumem_otel.capture.objects.storages import WeakStorage
from gpumem_otel.capture.restored import Restored
from gpumem_otel.capture.source import TorchSource
from gpumem_otel.capture.tensor_table import TensorTable
from gpumem_otel.profiles.heap import live_profile
from gpumem_otel.profiles.window_peak import PeakCounter, window_peak
from gpumem_otel.snapshot.stacks import BACKWARD, BEFORE_INSTALL, identity_namer
from gpumem_otel.snapshot.tensor_classes import TensorClass, classes_of
from gpumem_otel.yielding.copy import reload
from gpumem_otel.yielding.copy.reload import Reload
from gpumem_otel.yielding.values import Candidate

RESTORING = Reload._allocated.__code__.co_filename
OURS = (
    {"name": "_allocated", "filename": RESTORING, "line": 360},
    {"name": "copy_back", "filename": RESTORING, "line": 290},
    {"name": "main", "filename": "/job/train.py", "line": 9},
)


def frame(name, file="/job/train.py"):
    return {"name": name, "filename": file, "line": 3}


MODEL = (frame("build"), frame("main"))
ADAM = (frame("_init_group", "/site/torch/optim/adamw.py"), frame("main"))
FORWARD = (frame("_call_impl", "/site/torch/nn/modules/module.py"), frame("main"))


class Storage:
    """As `torch.UntypedStorage`: an identity, weak references to it, memory of the allocator."""

    known: dict[int, weakref.ref[Storage]] = {}  # noqa: RUF012
    numbers = itertools.count(1)

    def __init__(self, allocator, size, frames):
        self.allocator, self.size = allocator, size
        self.address = allocator.alloc(size, frames)
        self._cdata = next(Storage.numbers)
        Storage.known[self._cdata] = weakref.ref(self)

    def __del__(self):
        if self.size:
            self.allocator.free(self.address)

    def data_ptr(self):
        return self.address if self.size else 0

    def nbytes(self):
        return self.size

    def resize_(self, size, frames=OURS):
        if self.size:
            self.allocator.free(self.address)
        self.size = size
        if size:
            self.address = self.allocator.alloc(size, frames)

    def _weak_ref(self):
        return self._cdata

    @classmethod
    def _expired(cls, identity):
        return cls.known[identity]() is None

    @staticmethod
    def _free_weak_ref(identity):
        pass


@pytest.fixture(params=["2.3", "2.8", "2.11", "2.15"])
def torch(request, monkeypatch):
    module = fake_torch.make(request.param)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """Autograd has threads."""
    monkeypatch.setattr("gpumem_otel.capture.stackless.autograd_has_threads", lambda: True)


class Pieces(Pacer):
    """Counts its pieces of work and pauses."""

    def __init__(self):
        super().__init__()
        self.begun = self.pauses = 0

    def begin(self):
        self.begun += 1
        super().begin()

    def pause(self):
        self.pauses += 1
        super().pause()


class Job:
    """A source, and what stands for finder and offload over its storages."""

    def __init__(self, torch, *, late=()):
        self.torch, self.allocator = torch, torch.allocators[0]
        self.late = [Storage(self.allocator, size, ()) for size in late]
        self.pacer = Pieces()
        self.source = TorchSource(counters=Counters(), clock=FakeClock(), pacer=self.pacer)
        self.source.prepare(torch)
        self.source.start()

    def classes(self, **named):
        """An address table: class -> storages."""
        self.source.tensors._entries = {
            one.data_ptr(): (
                one.nbytes(),
                TensorClass(name),
                WeakStorage(one, Storage._expired, Storage._free_weak_ref),
            )
            for name, storages in named.items()
            for one in storages
        }

    def find(self, storages):
        """As `CandidateFinder` does."""
        raw = self.source.recorder.snapshot(traces=False)
        roots = self.source.as_before_restores(raw)
        blocks = {b["address"]: b for segment in raw["segments"] for b in segment["blocks"]}
        return [
            Candidate(
                one, 0, one.address, one.size, blocks[one.address]["size"], 0, "any",
                frames=blocks[one.address]["frames"] or (), root=roots.get((0, one.address), ""),
            )
            for one in storages
        ]  # fmt: skip

    def free(self, candidates):
        for one in candidates:
            one.storage.resize_(0)
        self.source.restored.settled(candidates)

    def fill(self, candidates, at=()):
        for one, address in itertools.zip_longest(candidates, at):
            if address is not None:
                self.allocator.next_address = address
            with self.source.restored.placing(one, RESTORING):
                one.storage.resize_(one.size_bytes)
        self.source.restored.settled(candidates)

    def cycle(self, storages, at=()):
        candidates = self.find(storages)
        self.free(candidates)
        self.fill(candidates, at)

    def profile(self, reading=None):
        reading = reading or self.source.read()
        return live_profile(
            reading.snapshot, 0, namer=identity_namer, stackless=reading.stackless,
            classifier=reading.classifier,
        )  # fmt: skip

    def shown(self, reading=None):
        """(leaf, class) -> (objects, bytes)."""
        return {
            (one.frames[0].name, one.frames[-1].name): (one.objects, one.size_bytes)
            for one in self.profile(reading).samples
        }

    def ours(self):
        return sum(list(OURS) == block["frames"] for block in self.allocator.blocks.values())


@pytest.fixture
def job(torch):
    made = Job(torch)
    yield made
    made.source.stop()


def test_the_file_that_allocates_is_the_one_that_frames_name():
    assert reload._HERE == RESTORING


def test_stacks_and_classes_are_the_same_before_and_after(job):
    weights = [Storage(job.allocator, 1000 + 500 * n, MODEL) for n in range(3)]
    moments = [Storage(job.allocator, 1000 + 500 * n, ADAM) for n in range(3)]
    hidden, gradient = Storage(job.allocator, 700, FORWARD), Storage(job.allocator, 1000, ())
    stays = Storage(job.allocator, 300, FORWARD)
    job.classes(parameter=weights, gradient=[gradient])
    before, profile = job.shown(), job.profile()
    assert before == {
        ("build", "parameter"): (3, 1024 + 1536 + 2048),
        ("_init_group", "optimizer_state"): (3, 1024 + 1536 + 2048),
        ("_call_impl", "activation"): (2, 1024 + 512),
        (BACKWARD, "gradient"): (1, 1024),
    }
    moved = [*weights, *moments, hidden, gradient]
    for _ in range(2):
        job.cycle(moved)
        assert job.ours() == len(moved)
        assert job.shown() == before
        assert job.profile().samples == profile.samples
        assert classes_of(job.profile()) == classes_of(profile)
    assert stays.data_ptr()


def test_addresses_that_change_hands_keep_their_classes(job):
    """Each comes back where another of its size has been."""
    weight, moment = Storage(job.allocator, 900, MODEL), Storage(job.allocator, 900, FORWARD)
    job.classes(parameter=[weight], optimizer_state=[moment])
    before, at = job.shown(), [moment.address, weight.address]
    job.cycle([weight, moment], at)
    assert [weight.address, moment.address] == at
    assert job.shown() == before
    assert before == {
        ("build", "parameter"): (1, 1024),
        ("_call_impl", "optimizer_state"): (1, 1024),
    }


def test_what_is_back_first_is_not_taken_for_what_is_still_away(job):
    weight, moment = Storage(job.allocator, 900, MODEL), Storage(job.allocator, 900, ADAM)
    job.classes(parameter=[weight], optimizer_state=[moment])
    before, there = job.shown(), weight.address
    first, second = job.find([weight, moment])
    job.free([first, second])
    assert job.shown() == {}
    job.fill([second], [there])
    assert job.shown() == {("_init_group", "optimizer_state"): (1, 1024)}
    job.fill([first])
    assert job.shown() == before


def test_a_later_allocation_at_the_address_is_its_own(job):
    storage = Storage(job.allocator, 900, MODEL)
    job.cycle([storage])
    address = storage.address
    assert set(job.source.restored.entries()) == {address}
    del storage
    job.allocator.next_address = address
    other = Storage(job.allocator, 900, FORWARD)
    assert other.address == address
    assert job.shown() == {("_call_impl", "activation"): (1, 1024)}
    assert not job.source.restored.entries()


@pytest.mark.parametrize(
    "frames",
    [
        (frame("pause", "/job/callbacks.py"), *OURS),
        (frame("sums", "/gpumem_otel/checksums.py"), *OURS),
        (),
    ],
)
def test_only_what_the_restore_itself_allocates_is_anothers(job, frames):
    """A callback of the job under a restore; sums of ours; a thread without Python."""
    storage = Storage(job.allocator, 900, MODEL)
    job.cycle([storage])
    address = storage.address
    storage.resize_(0)
    job.allocator.next_address = address
    storage.resize_(900, frames)
    ((leaf, _),) = job.shown()
    assert leaf == (frames[0]["name"] if frames else BACKWARD)


def test_of_another_size_it_is_another(job):
    storage = Storage(job.allocator, 900, MODEL)
    job.cycle([storage])
    address = storage.address
    storage.resize_(0)
    job.allocator.next_address = address
    storage.resize_(901)
    assert job.shown() == {("_allocated", "unattributed"): (1, 1024)}


def test_frames_of_cpp_may_stand_before_ours(job):
    cpp = {"name": "at::native::resize_bytes_cuda", "filename": "??", "line": 0}
    storage = Storage(job.allocator, 900, (cpp, *MODEL))
    (one,) = job.find([storage])
    job.free([one])
    with job.source.restored.placing(one, RESTORING):
        storage.resize_(900, (cpp, *OURS))
    job.source.restored.settled([one])
    ((shown,),) = [job.profile().samples]
    assert [frame.name for frame in shown.frames[:2]] == [cpp["name"], "build"]


def test_what_is_freed_after_the_restore_is_forgotten_and_kept_alive_by_nobody(job):
    gone, stays = (Storage(job.allocator, 900, MODEL) for _ in range(2))
    job.cycle([gone, stays])
    identity = gone._cdata
    del gone
    assert Storage._expired(identity)
    assert job.shown() == {("build", "unattributed"): (1, 1024)}
    assert set(job.source.restored.entries()) == {stays.address}


def test_without_a_reading_nothing_piles_up(job):
    storages = [Storage(job.allocator, 900, MODEL) for _ in range(3)]
    for _ in range(5):
        job.cycle(storages)
    del storages[0]
    job.cycle(storages)
    assert set(job.source.restored.entries()) == {one.address for one in storages}


def test_frames_are_shared_and_none_is_kept_for_memory_without(job):
    storages = [Storage(job.allocator, 900, MODEL) for _ in range(2)]
    bare = Storage(job.allocator, 900, ())
    job.cycle([*storages, bare])
    job.cycle([*storages, bare])
    first, second, third = job.source.restored.entries().values()
    assert first.frames[0] is second.frames[0] is MODEL[0]
    assert third.frames == ()


def test_a_yield_that_came_to_nothing_changes_nothing(job):
    storage = Storage(job.allocator, 900, MODEL)
    job.classes(parameter=[storage])
    before = job.shown()
    (one,) = job.find([storage])
    job.source.restored.settled([one])  # where it was
    with job.source.restored.placing(one, RESTORING):
        pass
    assert job.shown() == before == {("build", "parameter"): (1, 1024)}
    assert not job.source.restored.entries()


# memory without a stack


def test_memory_of_before_install_is_still_that(torch):
    job = Job(torch, late=[900, 800])
    gradient = Storage(job.allocator, 700, ())
    before = job.shown()
    assert before == {
        (BEFORE_INSTALL, "unattributed"): (2, 2048),
        (BACKWARD, "gradient"): (1, 1024),
    }
    old = job.late[0].address
    for _ in range(2):
        # the gradient comes back where something older has been
        candidates = job.find([*job.late, gradient])
        job.free(candidates)
        assert job.shown() == {}
        job.fill(candidates, [None, None, old])
        at_once = job.source.read_at_once(float("inf"))
        assert job.shown(at_once) == before
        assert job.shown() == before
        assert job.shown() == before
    job.source.stop()


# other readings


def test_a_reading_at_once_on_the_jobs_own_thread(job):
    weight, hidden = Storage(job.allocator, 900, MODEL), Storage(job.allocator, 900, FORWARD)
    job.classes(parameter=[weight])
    before = job.shown()
    job.cycle([weight, hidden])
    begun = job.pacer.begun
    reading = job.source.read_at_once(float("inf"))
    assert job.pacer.begun == begun, "no pauses on the job's thread"
    assert job.shown(job.source.completed(reading)) == before


@pytest.mark.parametrize("beside", [False, True])
def test_a_window_shows_whose_memory_was_freed_in_it(job, beside):
    """The frees carry the stack of the restore, and what lives to the end has its block.

    A reading beside it, after the free, forgets that storage.
    """
    gone, stays = Storage(job.allocator, 900, MODEL), Storage(job.allocator, 400, ADAM)
    job.cycle([gone, stays])
    held = [gone]
    del gone
    clock = job.source._clock

    def wait(event, seconds):
        if held:
            address = held.pop().address
            job.allocator.next_address = address
            held_now.append(Storage(job.allocator, 300, FORWARD))
            if beside:
                job.source.read()
        clock.advance(seconds)
        return event.is_set()

    held_now: list[Storage] = []
    clock.wait = wait
    reading = job.source.window(1.0, threading.Event(), frees=True)
    peak = window_peak(
        reading, 0, namer=identity_namer, counter=PeakCounter(0, None), class_as=None
    )
    assert {one.frames[0].name: one.size_bytes for one in peak.samples} == {
        "build": 900,
        "_init_group": 400,
    }
    assert job.shown(reading) == {
        ("_init_group", "optimizer_state"): (1, 512),
        ("_call_impl", "activation"): (1, 512),
    }
    assert set(job.source.restored.entries()) == {stays.address}


def test_what_comes_back_while_a_snapshot_is_made_is_not_forgotten(job):
    first, second = Storage(job.allocator, 900, MODEL), Storage(job.allocator, 800, ADAM)
    one, two = job.find([first, second])
    job.free([one, two])
    job.fill([one])
    once = [lambda: job.fill([two])]
    job.torch.on_snapshot.append(lambda: once.pop()() if once else None)
    assert job.shown() == {("build", "unattributed"): (1, 1024)}
    assert job.shown() == {
        ("build", "unattributed"): (1, 1024),
        ("_init_group", "optimizer_state"): (1, 1024),
    }


# costs


def test_before_the_first_restore_and_after_the_last_storage_it_costs_nothing(job):
    storages = [Storage(job.allocator, 900, MODEL) for _ in range(100)]
    job.source.read()
    assert (job.pacer.begun, job.pacer.pauses) == (0, 0)
    job.cycle(storages)
    job.source.read()
    assert job.pacer.begun == 1
    assert job.pacer.pauses == 100 // 32 + 100 // 32
    del storages
    job.source.read()
    job.pacer.begun = 0
    job.source.read()
    assert job.pacer.begun == 0


def test_stop_and_a_forked_child_know_nothing_of_it(job):
    storage = Storage(job.allocator, 900, MODEL)
    job.cycle([storage])
    job.source.stop()
    assert not job.source.restored.entries()


def test_what_can_not_be_noted_is_said_once_and_never_raised(caplog):
    restored = Restored(TensorTable())
    one = Candidate(object(), 0, 0x1000, 900, 1024, 0, "parameter")
    for _ in range(2):
        with restored.placing(one, RESTORING):
            pass
        restored.settled([one])
    assert caplog.text.count("under our own stack") == 1


def test_what_fails_while_memory_is_asked_for_is_whoever_asked_fors(job):
    storage = Storage(job.allocator, 900, MODEL)
    (one,) = job.find([storage])
    job.free([one])

    def fail():
        # an observer of failures takes a snapshot on this very thread
        assert job.shown(job.source.read_at_once(float("inf"))) == {}
        raise MemoryError("none left")

    with pytest.raises(MemoryError, match="none"), job.source.restored.placing(one, RESTORING):
        fail()
    assert not job.source.restored.entries()
    assert job.shown() == {}


class Noticed:
    """A lock that tells when somebody asks for it."""

    def __init__(self, lock):
        self.lock, self.asked = lock, threading.Event()

    def __enter__(self):
        self.asked.set()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def test_a_snapshot_waits_for_the_storage_that_is_just_given_memory(job):
    storage = Storage(job.allocator, 900, MODEL)
    (one,) = job.find([storage])
    job.free([one])
    restored, seen = job.source.restored, []
    restored.lock = noticed = Noticed(restored.lock)
    reader = threading.Thread(target=lambda: seen.append(job.shown()))
    with restored.placing(one, RESTORING):
        storage.resize_(900)
        noticed.asked.clear()
        taken = len(job.torch.snapshots)
        reader.start()
        assert noticed.asked.wait(30)
        assert len(job.torch.snapshots) == taken
    reader.join()
    assert seen == [{("build", "unattributed"): (1, 1024)}]
