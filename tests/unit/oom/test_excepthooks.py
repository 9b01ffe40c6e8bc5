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
    monkeypatch.setattr(sys, "excepthook", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(threading, "excepthook", seen.append)
    return seen


def test_the_jobs_hooks_are_called_afterwards_with_the_same_objects(theirs):
    order = []
    hooks = ExceptHooks(lambda error, ending: order.append((error, ending, len(theirs))))
    before = sys.excepthook, threading.excepthook
    assert not hooks.is_open
    hooks.start()
    hooks.start()
    error = ValueError("x")
    sys.excepthook(ValueError, error, error.__traceback__)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    hooks.stop()
    assert theirs[0] == (ValueError, error, None)
    assert isinstance(theirs[1].exc_value, ZeroDivisionError)
    assert order == [(error, True, 0), (theirs[1].exc_value, False, 1)]
    assert (sys.excepthook, threading.excepthook) == before


@pytest.mark.parametrize("raised", [RuntimeError("ours"), KeyboardInterrupt()])
def test_an_error_of_ours_is_not_raised(theirs, raised):
    def before(error, ending):
        raise raised

    hooks = ExceptHooks(before)
    hooks.start()
    sys.excepthook(ValueError, ValueError(), None)
    hooks.stop()
    assert len(theirs) == 1


def test_a_hook_that_was_chained_on_ours_stays_and_ours_only_passes_on(theirs):
    seen = []
    hooks = ExceptHooks(lambda error, ending: seen.append(error))
    hooks.start()
    inner = sys.excepthook

    def outer(*arguments):
        inner(*arguments)

    sys.excepthook = outer
    hooks.stop()
    assert sys.excepthook is outer
    sys.excepthook(ValueError, ValueError(), None)
    assert seen == []
    assert len(theirs) == 1


def test_a_signal_handler_that_ends_the_process_while_we_wait_does_not_hide_the_error(theirs):
    def before(error, ending):
        raise SystemExit(7)

    hooks = ExceptHooks(before)
    hooks.start()
    error = ValueError()
    with pytest.raises(SystemExit):
        sys.excepthook(ValueError, error, None)
    with pytest.raises(SystemExit):
        threading.excepthook("arguments")
    hooks.stop()
    assert theirs == [(ValueError, error, None), "arguments"]
