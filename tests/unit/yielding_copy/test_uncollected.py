"""The collector is off for a moment, and on again however that ends."""

from __future__ import annotations

import gc
import os

import pytest

from gpumem_otel.yielding.copy import gc_control
from gpumem_otel.yielding.copy.gc_control import uncollected


@pytest.fixture(autouse=True)
def on():
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_within_and_stays_off_where_the_job_had_it_off():
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with uncollected():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_an_error_or_an_interrupt_as_it_is_switched_off_leaves_it_on(monkeypatch):
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled()
    real = gc.disable

    def disable():
        real()
        raise KeyboardInterrupt  # as a signal handler does when the call returns

    monkeypatch.setattr(gc_control.gc, "disable", disable)
    with pytest.raises(KeyboardInterrupt), uncollected():
        pass
    assert gc.isenabled()


def test_a_child_that_is_forked_within_has_it_on():
    with uncollected():
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(writing, b"1" if gc.isenabled() else b"0")
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reading, 1) == b"1"
        assert not gc.isenabled()
        os.close(reading)
        os.close(writing)
    assert gc.isenabled()
