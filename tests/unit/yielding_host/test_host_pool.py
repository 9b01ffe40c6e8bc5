"""Host memory of our own: pinned by threads, kept, given back."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.hostmem import HostPool

MIB = 1 << 20


class Driver:
    """Pins what it is asked to, unless it is told not to."""

    def __init__(self):
        self.pinned = {}
        self.used = set()
        self.refuse_from = None
        self.asked = 0
        self.gate = None
        self.lock = threading.Lock()

    def use(self, device):
        self.used.add(device)

    def register(self, address, size_bytes, device):
        if self.gate is not None:
            self.gate.wait(20)
        with self.lock:
            self.asked += 1
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
        piece.wait()
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


def test_a_copy_can_begin_before_the_last_piece_is_ready(make, driver):
    first_is_ready = threading.Event()
    register = driver.register

    def slow(address, size_bytes, device):
        if driver.asked >= 1:
            first_is_ready.wait(20)
        return register(address, size_bytes, device)

    driver.register = slow
    pool = make(pin_threads=1)
    pool.grow_to(3 * MIB, 0)
    pool.piece_at(0).wait()
    assert not pool.piece_at(2 * MIB).ready.is_set()
    first_is_ready.set()
    pieces(pool)


def test_stopping_drops_what_is_not_ready_and_keeps_no_thread(make, driver):
    driver.gate = threading.Event()
    pool = make()
    pool.grow_to(20 * MIB, 0)
    threading.Timer(0.05, driver.gate.set).start()
    pool.stop()
    assert pool.capacity_bytes == pool.pinned_bytes <= 8 * MIB
    assert len(driver.pinned) == pool.capacity_bytes // MIB
    assert not [t for t in threading.enumerate() if t.name.startswith("gpumem")]


def test_memory_that_is_not_there_is_refused_and_dropped(make, monkeypatch):
    def touch(address, size_bytes):
        raise MemoryError

    monkeypatch.setattr("gpumem_otel.yielding.hostmem._populate", touch)
    pool = make()
    pool.grow_to(2 * MIB, 0)
    with pytest.raises(YieldRefusedError, match="host memory"):
        pool.piece_at(0).wait()
    pool.stop()
    assert pool.capacity_bytes == 0


def test_an_address_space_that_is_full_is_refused(make):
    pool = make(piece_bytes=1 << 60)
    with pytest.raises(YieldRefusedError, match="host memory"):
        pool.grow_to(1 << 60, 0)
    assert pool.capacity_bytes == 0


def test_threads_can_be_bound_to_where_a_device_is(make, driver):
    seen = []
    pool = make(bind=lambda device: seen.append((device, threading.current_thread().name)))
    pool.grow_to(3 * MIB, device=5)
    pieces(pool)
    pool.stop()
    assert {device for device, _ in seen} == driver.used == {5}
    assert {name.split("-")[1] for _, name in seen} == {"touch", "pin"}


def test_a_forked_child_has_none_of_it(make):
    pool = make()
    pool.grow_to(MIB, 0)
    (piece,) = pieces(pool)
    child = os.fork()
    if not child:
        with Path("/proc/self/maps").open() as file:
            there = any(
                int(line.split("-")[0], 16)
                <= piece.address
                < int(line.split()[0].split("-")[1], 16)
                for line in file
            )
        os._exit(1 if there else 0)
    assert os.waitpid(child, 0)[1] == 0
