"""Hooks for uncaught exceptions: chained, passed the same objects, put back."""

from __future__ import annotations

import sys
import threading

import pytest

from gpumem_otel.oom.observer import ExceptHooks


@pytest.fixture
def theirs(monkeypatch):
    """Hooks of the job; what they were called with."""
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *told: seen.append(told))
    monkeypatch.setattr(threading, "excepthook", seen.append)
    return seen


def test_the_jobs_hooks_are_called_afterwards_with_the_same_objects(theirs):
    order = []
    way_out = ExceptHooks(lambda error, ending: order.append((error, ending, len(theirs))))
    hooks = sys.excepthook, threading.excepthook
    assert not way_out.is_open
    way_out.start()
    way_out.start()
    error = ValueError("x")
    sys.excepthook(ValueError, error, error.__traceback__)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    way_out.stop()
    assert theirs[0] == (ValueError, error, None)
    assert isinstance(theirs[1].exc_value, ZeroDivisionError)
    assert order == [(error, True, 0), (theirs[1].exc_value, False, 1)]
    assert (sys.excepthook, threading.excepthook) == hooks


@pytest.mark.parametrize("raised", [RuntimeError("ours"), KeyboardInterrupt()])
def test_what_ours_raises_is_nobodys_business(theirs, raised):
    def before(error, ending):
        raise raised

    way_out = ExceptHooks(before)
    way_out.start()
    sys.excepthook(ValueError, ValueError(), None)
    way_out.stop()
    assert len(theirs) == 1


def test_a_hook_that_was_chained_on_ours_stays_and_ours_only_passes_on(theirs):
    seen = []
    way_out = ExceptHooks(lambda error, ending: seen.append(error))
    way_out.start()
    inner = sys.excepthook

    def outer(*told):
        inner(*told)

    sys.excepthook = outer
    way_out.stop()
    assert sys.excepthook is outer
    sys.excepthook(ValueError, ValueError(), None)
    assert seen == []
    assert len(theirs) == 1


def test_a_signal_handler_that_ends_the_process_while_we_wait_does_not_hide_the_error(theirs):
    def before(error, ending):
        raise SystemExit(7)

    way_out = ExceptHooks(before)
    way_out.start()
    error = ValueError()
    with pytest.raises(SystemExit):
        sys.excepthook(ValueError, error, None)
    with pytest.raises(SystemExit):
        threading.excepthook("arguments")
    way_out.stop()
    assert theirs == [(ValueError, error, None), "arguments"]
