"""Readers are held off while the gate is closed, and the closer waits for those inside."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from gpumem_otel.base.gate import QuietGate


def test_open_and_closed():
    gate = QuietGate()
    assert gate.enter()
    gate.leave()
    assert gate.close(0.1)
    assert (gate.closed, gate.enter()) == (True, False)
    assert gate.close(0.1), "closed already"
    gate.open()
    assert (gate.closed, gate.enter()) == (False, True)
    gate.leave()


def test_who_stays_inside_keeps_it_open():
    gate = QuietGate()
    gate.enter()
    assert not gate.close(0.01)
    assert not gate.closed
    assert gate.enter()
    gate.leave()
    gate.leave()
    assert gate.close(0.01)


def test_the_closer_waits_for_a_reader_who_sees_that_it_is_to_end():
    gate, inside, went = QuietGate(), threading.Event(), []

    def read():
        assert gate.enter()
        inside.set()
        while not gate.closed:
            pass
        went.append(True)
        gate.leave()

    reader = threading.Thread(target=read)
    reader.start()
    inside.wait(10)
    assert gate.close(30.0)
    assert went == [True]
    reader.join()


def test_a_reader_within_a_reader():
    gate = QuietGate()
    assert gate.enter()
    assert gate.enter()
    gate.leave()
    assert not gate.close(0.0)
    gate.leave()
    assert gate.close(0.0)


def test_nobody_is_inside_while_it_is_closed():
    """Readers of many threads, closed and opened again and again."""
    gate, over = QuietGate(), threading.Event()
    quiet, seen, reads = [False], [], [0]

    def read():
        while not over.is_set():
            if gate.enter():
                if quiet[0]:
                    seen.append("a reader was let in")
                reads[0] += 1
                gate.leave()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    readers = [threading.Thread(target=read) for _ in range(4)]
    try:
        for reader in readers:
            reader.start()
        for _ in range(300):
            assert gate.close(30.0)
            quiet[0] = True
            before = reads[0]
            assert reads[0] == before
            quiet[0] = False
            gate.open()
    finally:
        over.set()
        sys.setswitchinterval(interval)
        for reader in readers:
            reader.join()
    assert seen == []
    assert reads[0] > 0


def test_a_forked_child_has_no_readers():
    gate = QuietGate()
    gate.enter()
    gate.forget_parent()
    assert gate.close(0.0)


@pytest.mark.parametrize("closed", [False, True])
def test_it_makes_no_object_and_takes_no_lock(closed):
    """It stands on the job's own threads."""
    gate = QuietGate()
    if closed:
        gate.close(0.0)
    for _ in range(10):
        if gate.enter():
            gate.leave()
    gc.collect()
    before = gc.get_count()[0]
    for _ in range(200):
        if gate.enter():
            gate.leave()
    assert gc.get_count()[0] - before < 20
    assert set(QuietGate.__slots__) == {"_inside", "closed"}
