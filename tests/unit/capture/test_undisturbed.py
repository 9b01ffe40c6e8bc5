"""The switch interval of the interpreter is the job's own again, whoever asked at the same time."""

from __future__ import annotations

import sys
import threading

from gpumem_otel.capture.objects import python_objects


def test_two_that_ask_at_once_leave_the_switch_interval_as_it_was(monkeypatch):
    interval = sys.getswitchinterval()
    inside, main = threading.Event(), threading.get_ident()

    def sleep(_):
        if threading.get_ident() != main:
            inside.set()

    monkeypatch.setattr(python_objects.time, "sleep", sleep)

    def ask():
        with python_objects.undisturbed():
            pass

    other = threading.Thread(target=ask)
    try:
        with python_objects.undisturbed():
            assert sys.getswitchinterval() == 1
            other.start()
            assert not inside.wait(0.3)
        other.join(10)
        assert inside.is_set()
        assert sys.getswitchinterval() == interval
    finally:
        sys.setswitchinterval(interval)
