"""Host memory of our own: pinned by threads, kept, given back."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.copy.host_memory import HostPool

MIB = 1 << 20
ROOT = Path(__file__).parents[3]


class Driver:
    """Pins memory, unless it is set to refuse."""

    def __init__(self):
        self.pinned = {}
        self.used = set()
        self.refuse_from = None
        self.asked = 0
        self.gate = None
        self.entered = threading.Event()
        self.inside = self.at_once = 0
        self.lock = threading.Lock()

    def use(self, device):
        self.used.add(device)

    def register(self, address, size_bytes, device):
        with self.lock:
            self.inside += 1
            self.at_once = max(self.at_once, self.inside)
        self.entered.set()
        if self.gate is not None:
            self.gate.wait(20)
        with self.lock:
            self.asked += 1
            self.inside -= 1
            if self.refuse_from is not None and len(self.pinned) >= self.refuse_from:
                return "the driver says no"
            self.pinned[address] = (size_bytes, device)
            return ""

    def unregister(self, address):
        with self.lock:
            del self.pinned[address]

    def host_bytes(self, address, size_bytes):
        return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def make(driver):
    made = []

    def pool(**more):
        more.setdefault("piece_bytes", MIB)
        made.append(HostPool(driver, threads=3, **more))
        return made[-1]

    yield pool
    for one in made:
        one.give_back()


def pieces(pool):
    found, at = [], 0
    while at < pool.capacity_bytes:
        piece = pool.piece_at(at)
        pool.wait_for(piece)
        found.append(piece)
        at += piece.size_bytes
    return found


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_one_line_of_pieces_without_gaps(make, driver):
    pool = make()
    pool.grow_to(3 * MIB + 5, device=2)
    found = pieces(pool)
    assert [piece.start for piece in found] == [0, MIB, 2 * MIB, 3 * MIB]
    assert [piece.size_bytes for piece in found] == [MIB, MIB, MIB, 4096]
    assert pool.capacity_bytes == pool.pinned_bytes == 3 * MIB + 4096
    assert {size for size, _ in driver.pinned.values()} == {MIB, 4096}
    assert {device for _, device in driver.pinned.values()} == {2}
    assert pool.piece_at(0) is found[0]
    assert pool.piece_at(MIB - 1) is found[0]
    assert pool.piece_at(MIB) is found[1]


def test_what_is_written_is_there_and_pieces_do_not_overlap(make):
    pool = make()
    pool.grow_to(4 * MIB, 0)
    found = pieces(pool)
    for number, piece in enumerate(found):
        ctypes.memset(piece.address, number + 1, piece.size_bytes)
    for number, piece in enumerate(found):
        assert bytes(piece.bytes) == bytes([number + 1]) * MIB


def test_kept_memory_is_used_again_and_grown_at_its_end(make, driver):
    pool = make()
    pool.grow_to(2 * MIB, 0)
    before = pieces(pool)
    assert pool.room_for(2 * MIB) == 0
    assert pool.room_for(3 * MIB) == MIB
    pool.grow_to(MIB, 0)
    assert pieces(pool) == before
    pool.grow_to(3 * MIB, 0)
    assert pieces(pool)[:2] == before
    assert driver.asked == 3


def test_giving_back_unpins_and_unmaps(make, driver):
    pool = make(piece_bytes=16 * MIB)
    before = resident()
    pool.grow_to(96 * MIB, 0)
    pieces(pool)
    assert resident() - before > 90 * MIB
    assert pool.give_back(keep_bytes=40 * MIB) == 64 * MIB
    assert pool.capacity_bytes == pool.pinned_bytes == 32 * MIB
    assert len(driver.pinned) == 2
    assert resident() - before < 40 * MIB
    assert pool.give_back() == 32 * MIB
    assert driver.pinned == {}
    assert resident() - before < 8 * MIB


def test_a_driver_that_refuses_leaves_pageable_memory(make, driver, caplog):
    driver.refuse_from = 2
    pool = make()
    pool.grow_to(6 * MIB, 0)
    found = pieces(pool)
    assert pool.capacity_bytes == 6 * MIB
    assert sum(piece.pinned for piece in found) == 2
    assert pool.why_pageable == "the driver says no"
    assert caplog.text.count("the driver says no") == 1
    for piece in found:
        ctypes.memset(piece.address, 7, piece.size_bytes)
    assert pool.give_back() == 6 * MIB
    assert driver.pinned == {}
    driver.refuse_from = None  # asked anew once all is given back
    pool.grow_to(2 * MIB, 0)
    pieces(pool)
    assert pool.pinned_bytes == 2 * MIB


def test_a_limit_for_pinned_memory_holds(make, driver):
    pool = make(pinned_limit_bytes=2 * MIB)
    pool.grow_to(5 * MIB, 0)
    pieces(pool)
    assert pool.pinned_bytes == 2 * MIB
    assert "limit" in pool.why_pageable


def test_each_piece_is_pinned_for_the_first_who_waits_for_it(make, driver):
    """Before its copies, and after those of the piece before: both want the driver."""
    pool = make()
    pool.grow_to(3 * MIB, 0)
    for number in range(3):
        piece = pool.piece_at(number * MIB)
        assert not piece.ready.is_set()
        pool.wait_for(piece)
        pool.wait_for(piece)
        assert list(driver.pinned)[number:] == [piece.address]
    assert driver.asked == 3


def test_pieces_are_touched_before_anybody_waits(make, driver):
    pool = make()
    pool.grow_to(8 * MIB, 0)
    assert all(pool.piece_at(at).touched.wait(20) for at in range(0, 8 * MIB, MIB))
    assert driver.asked == 0
    assert pool.pinned_bytes == pool.ready_bytes == 0


def test_what_nobody_waited_for_is_pinned_when_somebody_does(make):
    pool = make()
    pool.grow_to(2 * MIB, 0)
    pool.wait_for(pool.piece_at(0))
    pool.settle()
    assert pool.ready_bytes == MIB
    pieces(pool)
    assert pool.ready_bytes == 2 * MIB


def test_stopping_drops_what_is_not_ready_and_keeps_no_thread(make, driver):
    pool = make()
    pool.grow_to(20 * MIB, 0)
    pool.wait_for(pool.piece_at(0))
    driver.gate = threading.Event()
    driver.entered.clear()
    waits = threading.Thread(target=pool.wait_for, args=(pool.piece_at(MIB),))
    waits.start()
    assert driver.entered.wait(20)
    threading.Timer(0.05, driver.gate.set).start()
    pool.stop()
    waits.join(20)
    assert pool.capacity_bytes == pool.pinned_bytes == 2 * MIB
    assert len(driver.pinned) == 2
    assert not [t for t in threading.enumerate() if t.name.startswith("gpumem")]


def test_who_waits_for_a_piece_that_is_dropped_is_told(make, monkeypatch):
    """Its pinning waits for a touch that will never be."""
    gate, began = threading.Event(), threading.Event()

    def touch(address, size_bytes):
        began.set()
        gate.wait(20)

    monkeypatch.setattr("gpumem_otel.yielding.copy.host_memory._populate", touch)
    pool = make()
    pool.grow_to(20 * MIB, 0)
    last, reported = pool.piece_at(19 * MIB), []

    def wait():
        with pytest.raises(YieldRefusedError) as error:
            pool.wait_for(last)
        reported.append(str(error.value))

    assert began.wait(20)
    waits = threading.Thread(target=wait)
    waits.start()
    threading.Timer(0.05, gate.set).start()
    pool.stop()
    waits.join(20)
    assert len(reported) == 1
    assert "(InterruptedError: given up); nothing was moved" in reported[0]
    assert pool.capacity_bytes == 0


def test_one_piece_is_registered_at_a_time_and_what_waits_is_dropped(make, driver):
    """The driver does no two at once, and who registers ahead keeps the copies from it."""
    driver.gate = threading.Event()
    pool = make()
    pool.grow_to(3 * MIB, 0)
    first, *others = (pool.piece_at(at) for at in range(0, 3 * MIB, MIB))
    reported = []

    def wait(piece):
        try:
            pool.wait_for(piece)
        except YieldRefusedError as error:
            reported.append(str(error))

    waits = [threading.Thread(target=wait, args=(piece,)) for piece in (first, *others)]
    waits[0].start()
    assert driver.entered.wait(20)
    for one in waits[1:]:
        one.start()
    while not all(piece.pin_requested for piece in others):
        assert any(one.is_alive() for one in waits[1:])
    threading.Timer(0.05, driver.gate.set).start()
    pool.stop()
    for one in waits:
        one.join(20)
    assert driver.at_once == 1
    assert list(driver.pinned) == [first.address]
    assert [line.partition("(")[2] for line in reported] == [
        "InterruptedError: given up); nothing was moved"
    ] * 2
    assert pool.capacity_bytes == MIB


def test_without_a_thread_who_waits_is_told_and_memory_is_given_back(make, driver, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    pool = make()
    pool.grow_to(2 * MIB, 0)
    pool.wait_for(pool.piece_at(0))
    pool.settle()
    assert len(driver.pinned) == 1
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(YieldRefusedError, match="can't start new thread"):
            pool.wait_for(pool.piece_at(MIB))
        assert pool.give_back() == MIB
    assert driver.pinned == {}


def test_what_could_not_be_touched_is_not_pinned(make, driver, monkeypatch):
    def touch(address, size_bytes):
        raise MemoryError

    monkeypatch.setattr("gpumem_otel.yielding.copy.host_memory._populate", touch)
    pool = make()
    pool.grow_to(MIB, 0)
    with pytest.raises(YieldRefusedError, match="MemoryError"):
        pool.wait_for(pool.piece_at(0))
    assert driver.asked == 0


def test_a_log_filter_that_raises_stops_nobody(make, driver):
    def refuse(record):
        raise ValueError("a filter of the job")

    log = logging.getLogger("gpumem_otel.yielding")
    log.addFilter(refuse)
    try:
        driver.refuse_from = 0
        pool = make()
        pool.grow_to(3 * MIB, 0)
        found = pieces(pool)
    finally:
        log.removeFilter(refuse)
    assert not any(piece.pinned for piece in found)
    assert pool.why_pageable == "the driver says no"


def test_what_is_given_back_makes_room_for_pinning(make):
    pool = make(pinned_limit_bytes=2 * MIB)
    pool.grow_to(3 * MIB, 0)
    pieces(pool)
    assert "limit" in pool.why_pageable
    assert pool.give_back(keep_bytes=MIB) == 2 * MIB
    assert pool.why_pageable == ""
    pool.grow_to(2 * MIB, 0)
    assert [piece.pinned for piece in pieces(pool)] == [True, True]


def test_memory_that_is_not_there_is_refused_and_dropped(make, monkeypatch):
    def touch(address, size_bytes):
        raise MemoryError

    monkeypatch.setattr("gpumem_otel.yielding.copy.host_memory._populate", touch)
    pool = make()
    pool.grow_to(2 * MIB, 0)
    with pytest.raises(YieldRefusedError, match="host memory"):
        pool.wait_for(pool.piece_at(0))
    pool.stop()
    assert pool.capacity_bytes == 0


def test_an_address_space_that_is_full_is_refused(make):
    pool = make(piece_bytes=1 << 60)
    with pytest.raises(YieldRefusedError, match="host memory"):
        pool.grow_to(1 << 60, 0)
    assert pool.capacity_bytes == 0


def test_threads_work_for_the_device_that_it_is_for(make, driver):
    pool = make()
    pool.grow_to(3 * MIB, device=5)
    pieces(pool)
    pool.stop()
    assert driver.used == {5}


def is_mapped(address):
    with Path("/proc/self/maps").open() as file:
        return any(
            int(line.split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16)
            for line in file
        )


def test_a_forked_child_has_none_of_it(make):
    pool = make()
    pool.grow_to(MIB, 0)
    (piece,) = pieces(pool)
    child = os.fork()
    if not child:
        if is_mapped(piece.address) or pool.capacity_bytes:
            os._exit(1)
        pool.grow_to(MIB, 0)  # with threads of its own
        pool.wait_for(pool.piece_at(0))
        os._exit(0 if pool.pinned_bytes == MIB else 2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("how", ["collected", "closed"])
def test_a_forked_child_unmaps_and_unpins_nothing(driver, how):
    """The kernel gives the child's own memory the place of the parent's."""
    pool = HostPool(driver, piece_bytes=64 * MIB, threads=3)
    pool.grow_to(64 * MIB, 0)
    (piece,) = pieces(pool)
    address = piece.address
    pool.settle()
    child = os.fork()
    if not child:
        mine = [mmap.mmap(-1, 8 * MIB) for _ in range(64)]
        for one in mine:
            one[:4] = b"live"
        places = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in mine]
        inside = sum(address <= place < address + 64 * MIB for place in places)
        if how == "closed":
            piece.close()
            pool.give_back()
        del piece, pool
        gc.collect()
        still = all(is_mapped(place) for place in places)
        os._exit(0 if inside and still and len(driver.pinned) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert is_mapped(address)
    assert pool.give_back() == 64 * MIB
    assert driver.pinned == {}


def test_a_pool_that_is_collected_gives_all_of_it_back(driver):
    pool = HostPool(driver, piece_bytes=4 * MIB, threads=3)
    pool.grow_to(8 * MIB, 7)
    addresses = [piece.address for piece in pieces(pool)]
    pool.settle()
    driver.used.clear()
    assert len(driver.pinned) == 2
    del pool
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "gpumem-unpin":
            thread.join(20)
    assert driver.pinned == {}
    assert driver.used == {7}
    assert not any(is_mapped(address) for address in addresses)


def test_at_the_end_of_the_interpreter_nothing_is_unpinned():
    """CUDA may be gone by then."""
    script = """
import ctypes, os
from gpumem_otel.yielding.copy.host_memory import HostPool
class Driver:
    use = staticmethod(lambda device: None)
    register = staticmethod(lambda address, size_bytes, device: "")
    unregister = staticmethod(lambda address: os.write(1, b"unpinned"))
    host_bytes = staticmethod(lambda address, size_bytes: None)
pool = HostPool(Driver, piece_bytes=1 << 20)
pool.grow_to(1 << 20, 0)
pool.wait_for(pool.piece_at(0))
pool.settle()
cycle = [pool]
cycle.append(cycle)
print(pool.pinned_bytes, flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{MIB}\n", "")
