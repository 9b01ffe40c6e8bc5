"""What is wrong with a request in itself, whoever makes it."""

from __future__ import annotations

import math

import pytest

from gpumem_otel.core.yieldcheck import restore_fault, seconds_fault, yield_fault
from gpumem_otel.core.yields import RestoreRequest, YieldLevel, YieldRequest

WRONG = [
    ({"level": "auto"}, "level must be one of tensors, process, auto, not 'auto'"),
    ({"devices": 0}, "devices must be a tuple"),
    ({"devices": ()}, "devices must be a tuple"),
    ({"devices": (-1,)}, "devices holds -1"),
    ({"devices": (True,)}, "devices holds True"),
    ({"devices": ("0",)}, "devices holds '0'"),
    ({"devices": (0.5,)}, "devices holds 0.5"),
    ({"classes": ("weights",)}, "classes holds 'weights', which is none of parameter, "),
    ({"classes": ()}, "classes must be a tuple"),
    ({"classes": "parameter"}, "classes must be a tuple"),
    ({"keep": ("weights",)}, "keep holds 'weights'"),
    ({"keep": None}, "keep must be a tuple"),
    ({"discard": ("weights",)}, "discard holds 'weights'"),
    ({"discard": (3,)}, "discard holds 3"),
    ({"discard": ("gradient",)}, "contents of 'gradient' can not be thrown away"),
    ({"keep": ("buffer",), "discard": ("buffer",)}, "'buffer' is both to stay and to go"),
    ({"keep": ("buffer",), "classes": ("buffer",)}, "'buffer' is both to stay and to go"),
    ({"lease_seconds": 0}, "lease_seconds must be more than 0 to 2678400 seconds, not 0"),
    ({"lease_seconds": -1}, "lease_seconds must be more than 0"),
    ({"lease_seconds": math.nan}, "lease_seconds must be more than 0"),
    ({"lease_seconds": 1e9}, "lease_seconds must be more than 0"),
    ({"lease_seconds": True}, "lease_seconds must be a number of seconds, not True"),
    ({"deadline_seconds": "5"}, "deadline_seconds must be a number of seconds, not '5'"),
    ({"deadline_seconds": math.inf}, "deadline_seconds must be more than 0"),
    ({"wait_seconds": -0.1}, "wait_seconds must be 0 to"),
    ({"wait_seconds": None}, "wait_seconds must be a number of seconds"),
    ({"dry_run": "no"}, "dry_run must be True or False, not 'no'"),
    ({"verify": 1}, "verify must be True or False"),
    ({"disk_dir": None}, "disk_dir must be the path of a folder"),
    *(
        ({"level": YieldLevel.PROCESS, name: value}, "the driver takes all devices and classes")
        for name, value in (
            ("devices", (0,)),
            ("classes", ("parameter",)),
            ("keep", ("parameter",)),
            ("discard", ("parameter",)),
        )
    ),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_what_is_wrong_is_named(given, said):
    fault = yield_fault(YieldRequest(**given))
    assert fault.startswith(said)
    assert "\n" not in fault


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"level": YieldLevel.PROCESS, "lease_seconds": 0.1, "deadline_seconds": 5, "verify": True},
        {"devices": (0, 1023), "classes": ("parameter",), "keep": ("buffer",)},
        {"discard": ("optimizer_state", "kv_cache"), "classes": ("optimizer_state",)},
        {"wait_seconds": 0, "disk_dir": "/scratch"},
    ],
)
def test_nothing_is_wrong(given):
    assert yield_fault(YieldRequest(**given)) == ""


def test_restores():
    assert restore_fault(RestoreRequest()) == ""
    assert restore_fault(RestoreRequest(classes=("parameter",), wait_seconds=0)) == ""
    assert restore_fault(RestoreRequest(classes=("weights",))).startswith("classes holds 'weights'")
    assert restore_fault(RestoreRequest(wait_seconds=math.nan)).startswith("wait_seconds must be 0")


def test_none_at_all_is_a_time_where_that_is_said():
    assert seconds_fault("x", 0) == ""
    assert seconds_fault("x", 0, zero=False) == "x must be more than 0 to 2678400 seconds, not 0"
