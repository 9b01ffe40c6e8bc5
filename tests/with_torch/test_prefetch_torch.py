"""A copy that begins before it is known what goes: what it may change, and what it may not."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from support.offload_parts import (  # noqa: E402
    PIECE,
    Asked,
    candidates_of,
    never,
    tensor,
)

from gpumem_otel.errors import YieldRefusedError  # noqa: E402
from gpumem_otel.yielding.copy import offload as offload_module  # noqa: E402
from gpumem_otel.yielding.copy import placement, prefetch  # noqa: E402
from gpumem_otel.yielding.scan.candidates import Remembered  # noqa: E402
from gpumem_otel.yielding.values import YieldRequest  # noqa: E402

pytestmark = pytest.mark.torch


class Lane(Asked):
    """Copies at a mark, on whichever thread; `gate` holds that up."""

    def __init__(self, log, gate):
        super().__init__()
        self.log, self.gate = log, gate

    def mark(self):
        asked, self.asked = self.asked, []
        if threading.current_thread().name == "gpumem-copy":
            assert self.gate.wait(20)
        for to, source in asked:
            to.copy_(source)
            self.log.append((threading.current_thread().name, source.numel()))
        return self

    def wait(self):
        pass


@pytest.fixture
def begun(make):
    """Parts whose pool is pinned, three storages, and a log of all copies from now on."""
    parts = make()
    tensors = [tensor(size, seed) for seed, size in enumerate((PIECE * 3, PIECE + 5, 300))]
    parts.out(candidates_of(tensors))
    parts.back()
    parts.log, parts.gate = [], threading.Event()
    parts.devices.lane = lambda device: Lane(parts.log, parts.gate)
    return parts, tensors


def again(parts, tensors, goes, **request):
    """Yield, break what was freed, restore; whether all is as it was."""
    before = [one.clone() for one in tensors]
    parts.offload.admit(goes, YieldRequest(**request))
    parts.offload.copy_out(parts.progress, never)
    parts.offload.free()
    parts.back()
    return all(torch.equal(one, was) for one, was in zip(tensors, before, strict=True))


def copied(parts):
    return sum(size for _, size in parts.log)


@pytest.mark.parametrize("verify", [False, True])
def test_what_is_on_its_way_is_copied_once_and_first(begun, verify):
    parts, tensors = begun
    goes = candidates_of(tensors)
    tensors[2].add_(1)  # after the last yield: what goes is what is there now
    parts.offload.begin(candidates_of(tensors[:2]))
    parts.gate.set()
    before = [one.clone() for one in tensors]
    parts.offload.admit(goes, YieldRequest(verify=verify))
    assert parts.offload.copies_ahead
    phase = parts.offload.copy_out(parts.progress, never)
    size = sum(one.size_bytes for one in goes)
    assert (copied(parts), phase.size_bytes, parts.said[-1]) == (size, size, (size, size))
    ahead = sum(n for thread, n in parts.log if thread == "gpumem-copy")
    assert ahead == goes[0].size_bytes + goes[1].size_bytes
    parts.offload.free()
    parts.back()
    assert parts.offload.verify() == ("equal" if verify else "")
    assert all(torch.equal(one, was) for one, was in zip(tensors, before, strict=True))


def test_nothing_begins_before_host_memory_is_pinned(make):
    parts, one = make(), tensor(PIECE)
    parts.offload.begin(candidates_of([one]))
    assert not parts.offload.copies_ahead
    parts = make(limit=0)
    parts.out(candidates_of([one]))
    parts.back()
    parts.offload.begin(candidates_of([one]))
    assert not parts.offload.copies_ahead


def test_what_does_not_go_any_more_was_copied_for_nothing(begun):
    """The job let go of a tensor, or the request leaves it: the rest is whole."""
    parts, tensors = begun
    parts.offload.begin(candidates_of(tensors))
    parts.gate.set()
    assert again(parts, tensors, candidates_of(tensors[1:]))
    assert not parts.offload.copies_ahead
    parts.offload.begin(candidates_of(tensors[:1]))
    moved = [replace(one, address=one.address + 64) for one in candidates_of(tensors[:1])]
    parts.offload.admit([*moved, *candidates_of(tensors[1:])], YieldRequest())
    assert not parts.offload.copies_ahead  # not where it was
    parts.offload.abandon()
    parts.offload.begin(candidates_of(tensors))
    classes = ["optimizer_state", "parameter", "parameter"]
    goes = [
        replace(m, tensor_class=c) for m, c in zip(candidates_of(tensors), classes, strict=True)
    ]
    parts.offload.admit(goes, YieldRequest(discard=("optimizer_state",)))
    assert not parts.offload.copies_ahead  # thrown away
    parts.offload.abandon()


@pytest.mark.parametrize("then", ["abandoned", "no room"])
def test_what_is_given_up_ends_before_anything_else_happens(begun, monkeypatch, then):
    parts, tensors = begun
    before = [one.clone() for one in tensors]
    real, dropping = prefetch.Prefetch.drop, threading.Event()

    def drop(head):
        dropping.set()
        real(head)

    monkeypatch.setattr(prefetch.Prefetch, "drop", drop)
    opener = threading.Thread(target=lambda: dropping.wait(20) and parts.gate.set())
    opener.start()
    parts.offload.begin(candidates_of(tensors))
    if then == "no room":
        with monkeypatch.context() as patch:
            patch.setattr(parts.host, "reserve", refuse)
            with pytest.raises(YieldRefusedError, match="no room"):
                parts.offload.admit(candidates_of(tensors), YieldRequest())
    assert parts.offload.copies_ahead
    parts.offload.abandon()
    opener.join()
    assert copied(parts) == sum(one.numel() for one in tensors)
    assert not [t for t in threading.enumerate() if t.name == "gpumem-copy"]
    assert all(torch.equal(one, was) for one, was in zip(tensors, before, strict=True))
    assert again(parts, tensors, candidates_of(tensors))


def refuse(*_arguments, **_options):
    raise YieldRefusedError("host memory: no room")


def test_an_error_of_the_thread_refuses_the_yield_and_leaves_the_job(begun):
    parts, tensors = begun
    before = [one.clone() for one in tensors]

    class Broken(Lane):
        def mark(self):
            if threading.current_thread().name == "gpumem-copy":
                raise RuntimeError("CUDA error: unknown")
            return super().mark()

    working, parts.devices.lane = parts.devices.lane, lambda device: Broken(parts.log, parts.gate)
    parts.offload.begin(candidates_of(tensors))
    parts.offload.admit(candidates_of(tensors), YieldRequest())
    with pytest.raises(RuntimeError, match="CUDA error"):
        parts.offload.copy_out(parts.progress, never)
    parts.offload.abandon()
    assert all(torch.equal(one, was) for one, was in zip(tensors, before, strict=True))
    parts.devices.lane = working
    parts.gate.set()
    assert again(parts, tensors, candidates_of(tensors))


TRACED = ("/copy/prefetch.py", "/copy/offload.py")


def interrupted_at(number):
    """A tracer that raises at the so manieth line of these files, and where it did."""
    seen, where = itertools.count(1), []

    def local(frame, event, argument):
        if event == "line" and next(seen) == number:
            where.append(f"{frame.f_code.co_name}, line {frame.f_lineno}")
            raise KeyboardInterrupt
        return local

    def tracer(frame, event, argument):
        return local if frame.f_code.co_filename.endswith(TRACED) else None

    return tracer, where


def test_an_interrupt_in_any_line_leaves_no_copy_under_way(make, monkeypatch):
    """Else a device writes into memory that was given back, or a thread goes on beside the job."""
    parts = make()
    tensors = [tensor(size, seed) for seed, size in enumerate((PIECE * 3, PIECE + 5))]
    before = [one.clone() for one in tensors]
    gate, wait = threading.Event(), prefetch.Prefetch._wait
    give_back, found = parts.pool.give_back, []

    def waited_for(head):
        gate.set()
        wait(head)

    def given_back(keep_bytes=0):
        if any(t.name == "gpumem-copy" for t in threading.enumerate()):
            found.append("memory was given back under a copy")
            gate.set()
        return give_back(keep_bytes)

    monkeypatch.setattr(prefetch.Prefetch, "_wait", waited_for)
    monkeypatch.setattr(parts.pool, "give_back", given_back)
    lanes = parts.devices.lane
    for number in itertools.count(1):
        parts.devices.lane = lanes
        parts.out(candidates_of(tensors))
        parts.back()
        parts.devices.lane = lambda device: Lane([], gate)
        gate.clear()
        tracer, where = interrupted_at(number)
        traced = sys.gettrace()
        sys.settrace(tracer)
        try:
            parts.offload.begin(candidates_of(tensors))
            parts.offload.admit(candidates_of(tensors), YieldRequest(release_host=True))
            parts.offload.copy_out(parts.progress, never)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(traced)
        parts.offload.abandon()
        found += [f"{where}: a thread" for t in threading.enumerate() if t.name == "gpumem-copy"]
        found += [f"{where}: no collector"] * (not gc.isenabled())
        gate.set()
        if not where:
            break
    assert found == []
    assert number > 40
    assert all(torch.equal(one, was) for one, was in zip(tensors, before, strict=True))


def test_an_interrupt_while_it_is_dropped_waits_and_is_raised(begun, monkeypatch):
    parts, tensors = begun
    parts.offload.begin(candidates_of(tensors))
    head, calls = parts.offload._prefetch, []
    wait = head._done.wait

    def interrupted():
        calls.append(1)
        if len(calls) < 3:
            raise KeyboardInterrupt
        parts.gate.set()
        return wait()

    monkeypatch.setattr(head._done, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parts.offload.abandon()
    assert (len(calls), copied(parts)) == (3, sum(one.numel() for one in tensors))
    assert not parts.offload.copies_ahead
    parts.offload.abandon()
    assert again(parts, tensors, candidates_of(tensors))


def test_host_memory_stays_while_it_is_written_to(begun):
    parts, tensors = begun
    parts.offload.begin(candidates_of(tensors))
    held = parts.pool.capacity_bytes
    assert parts.offload.give_back() == 0
    assert not parts.offload.close()
    assert parts.pool.capacity_bytes == held > 0
    parts.gate.set()
    parts.offload.abandon()
    assert parts.offload.give_back() == held


def test_where_no_thread_can_be_started_the_copy_begins_later(begun, monkeypatch):
    parts, tensors = begun

    def refuse_thread(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        parts.offload.begin(candidates_of(tensors))
    assert again(parts, tensors, candidates_of(tensors))
    assert {thread for thread, _ in parts.log} == {"MainThread"}
    assert copied(parts) == 2 * sum(one.numel() for one in tensors)  # there and back


def test_devices_of_which_nothing_was_known_are_waited_for_too(make):
    """Their last step may still run, and its result is what goes."""
    parts = make()
    known, fresh = tensor(PIECE * 3), tensor(PIECE, 1)
    parts.out([*candidates_of([known]), *candidates_of([tensor(PIECE * 2, 2)], device=1)])
    parts.back()
    pending = [lambda: fresh.fill_(77)]
    waited = []

    def synchronize(device):
        waited.append(device)
        if device == 1 and pending:
            pending.pop()()

    parts.devices.synchronize = synchronize
    parts.offload.begin(candidates_of([known]))
    parts.offload.admit(
        [*candidates_of([known]), *candidates_of([fresh], device=1)], YieldRequest()
    )
    parts.offload.copy_out(parts.progress, never)
    assert waited == [0, 1]
    parts.offload.free()
    parts.back()
    assert bool((fresh == 77).all())


def test_a_look_makes_no_measured_speed_slower(begun, monkeypatch):
    """A deadline would be refused for it, and a refused yield measures nothing."""
    monkeypatch.setattr(offload_module, "_MEASURED_BYTES", PIECE)
    parts, tensors = begun
    parts.gate.set()
    now = [0.0]

    def monotonic():
        now[0] += 0.001
        return now[0]

    parts.offload._now = monotonic
    parts.offload._out_speed = 1e9
    parts.offload.begin(candidates_of(tensors))
    now[0] += 50
    assert again(parts, tensors, candidates_of(tensors))
    assert parts.offload.bytes_per_second == 1e9


def test_no_device_gets_more_than_its_share_ahead():
    large, tiny = tensor(PIECE * 3), tensor(PIECE)
    goes = [*candidates_of([large]), *candidates_of([tiny], device=1)]
    first = placement.place_first(goes, PIECE * 10, PIECE * 2)
    assert [item.candidate.device for item in first] == [1]
    assert placement.place_first(goes, PIECE, PIECE * 5) == []
    assert len(placement.place_first(goes, PIECE * 10, PIECE * 5)) == 2


def test_no_more_is_asked_for_ahead_than_the_last_look_left_time_for(begun, monkeypatch):
    monkeypatch.setattr(prefetch, "_FIRST_BYTES", PIECE)
    parts, tensors = begun
    parts.gate.set()
    now = [0.0]
    parts.offload._now = lambda: now[0]
    parts.offload._out_speed = PIECE * 2
    for look_seconds in (0.0, 1.25, 1.25):  # of this yield: the next one goes by it
        parts.log.clear()
        parts.offload.begin(candidates_of(tensors))
        now[0] += look_seconds
        assert again(parts, tensors, candidates_of(tensors))
        ahead = [size for thread, size in parts.log if thread == "gpumem-copy"]
        assert sum(ahead) == (PIECE * 3 + 300 if now[0] > 2 else 300)


@pytest.mark.parametrize(
    ("devices", "look_seconds", "bytes_per_second", "expected"),
    [
        (1, 0.0, 0.0, 12 << 30),
        (2, 0.1, 50e9, 24 << 30),
        (1, 0.5, 50e9, 31_250_000_000),
    ],
)
def test_how_much_that_is(devices, look_seconds, bytes_per_second, expected):
    assert prefetch.prefetch_bytes(devices, look_seconds, bytes_per_second) == expected


def test_large_storages_are_remembered_without_being_kept_alive():
    large, small, gone = tensor(1 << 20), tensor(100), tensor(2 << 20)
    remembered = Remembered()
    assert remembered.alive() == []
    remembered.keep([*candidates_of([large, small], stream=7), *candidates_of([gone])])
    del gone
    gc.collect()
    (found,) = remembered.alive()
    assert found.storage._cdata == large.untyped_storage()._cdata
    assert (found.address, found.size_bytes, found.stream) == (large.data_ptr(), 1 << 20, 7)
    large.untyped_storage().resize_(0)
    assert remembered.alive() == []
    large.untyped_storage().resize_(1 << 20)
    (found,) = remembered.alive()
    assert found.address == large.data_ptr()  # where it is now
    del found, large
    gc.collect()
    assert remembered.alive() == []


def test_what_is_not_pinned_goes_on_through_the_offloads_own_ring(make):
    """A run that began ahead is one of its own, with its buffers."""
    parts = make(limit=PIECE * 3)
    first = tensor(PIECE * 3)
    parts.out(candidates_of([first]))
    parts.back()
    rings, ring_of = [], parts.offload._staging

    def counted(devices, device):
        rings.append(device)
        return ring_of(devices, device)

    parts.offload._staging = counted
    tensors = [first, tensor(PIECE * 2, 1)]
    parts.offload.begin(candidates_of([first]))
    assert again(parts, tensors, candidates_of(tensors))
    assert rings == [0, 0]  # there and back
