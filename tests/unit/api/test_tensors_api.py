"""The tensor report and its neighbours where there is no torch, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest

import gpumem_otel
from gpumem_otel.api.tensors import Report
from gpumem_otel.capture.objects import python_objects
from gpumem_otel.errors import ConfigError
from gpumem_otel.tensors import tracebacks

needs_no_torch = pytest.mark.skipif("torch" in sys.modules, reason="torch is imported here")


@needs_no_torch
def test_without_torch_there_is_an_empty_report_and_a_reason():
    report = gpumem_otel.report()
    assert report.tensors == ()
    assert "No tensors" in str(report)
    assert report._repr_html_().startswith("<pre>")
    assert isinstance(report, Report)
    with pytest.raises(ConfigError, match="torch is not imported"):
        gpumem_otel.holders(object())


@needs_no_torch
def test_a_traceback_is_released_without_torch():
    class Thing:
        pass

    kept = []

    def fail():
        thing = Thing()
        kept.append(weakref.ref(thing))
        raise ValueError(len(kept))

    try:
        fail()
    except ValueError as error:
        sys.last_value = error
    assert kept[0]() is not None
    assert gpumem_otel.release_traceback() == 0
    assert kept[0]() is None
    assert not hasattr(sys, "last_value")


def test_importing_the_package_imports_none_of_it():
    script = """
import sys, gpumem_otel
gpumem_otel.report, gpumem_otel.holders, gpumem_otel.release_traceback
late = {"torch", "pandas", "IPython", "gpumem_otel.tensors.walk", "gpumem_otel.tensors.holders",
        "gpumem_otel.tensors.join"} & set(sys.modules)
assert not late, late
gpumem_otel.report(); gpumem_otel.release_traceback()
assert not {"torch", "pandas", "IPython"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_variables_are_read_and_not_kept():
    class Thing:
        pass

    def work(names):
        thing = Thing()
        gone = weakref.ref(thing)
        names += [name for name, _ in python_objects.variables(sys._getframe())]
        del thing
        return gone() is None

    names = []
    assert work(names)
    assert {"gone", "names", "thing"} <= set(names)


def test_the_dict_that_a_caller_holds_is_left_alone():
    def work():
        first, second = 1, 2
        mine = locals()
        python_objects.variables(sys._getframe())
        return mine, first, second

    mine, first, second = work()
    assert (mine["first"], mine["second"]) == (first, second)


def test_no_frame_of_ours_keeps_itself_alive():
    class Thing:
        pass

    def work():
        thing = Thing()
        python_objects.running_frames()
        tracebacks.last_frames()
        return weakref.ref(thing)

    assert work()() is None


def test_kinds_ask_no_object():
    class Meta(type):
        def __hash__(cls):
            raise RuntimeError("asked")

    class Strange(metaclass=Meta):
        @property
        def __class__(self):
            raise RuntimeError("asked")

    kinds = python_objects.Kinds(error=BaseException, number=int)
    assert kinds.of(Strange()) == ""
    assert [kinds.of(True), kinds.of(KeyError()), kinds.of("x")] == ["number", "error", ""]
