"""What is wrong with a request in itself, whoever makes it."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from gpumem_otel.api.yields import YieldOptions
from gpumem_otel.yielding.request_fields import Seconds, fields_of
from gpumem_otel.yielding.validation import restore_fault, yield_fault
from gpumem_otel.yielding.values import RestoreRequest, YieldLevel, YieldRequest

SECONDS = {
    name: field.kind
    for name, field in fields_of(YieldRequest).items()
    if isinstance(field.kind, Seconds)
}

LEASE = "lease_seconds must be 0.1 to 2678400 seconds, not "
DEADLINE = "deadline_seconds must be 0.1 to 86400 seconds, not "
WAIT = "wait_seconds must be 0 to 86400 seconds, not "
DEVICE = "devices must be whole numbers from 0 to 1023, not "

WRONG = [
    ({"level": "auto"}, "level must be one of tensors, process, auto, not 'auto'"),
    ({"devices": 0}, "devices must be a list"),
    ({"devices": ()}, "devices must be a list"),
    ({"devices": (-1,)}, f"{DEVICE}-1; leave it out for all"),
    ({"devices": (0, 1024)}, f"{DEVICE}1024; leave it out for all"),
    ({"devices": (True,)}, f"{DEVICE}True"),
    ({"devices": ("0",)}, f"{DEVICE}'0'"),
    ({"devices": (0.5,)}, f"{DEVICE}0.5"),
    ({"devices": (1, 0, 1)}, "devices holds 1 twice; name it once"),
    ({"classes": ("buffer",) * 2}, "classes holds 'buffer' twice; name it once"),
    ({"keep": ("buffer",) * 2}, "keep holds 'buffer' twice; name it once"),
    ({"discard": ("buffer",) * 2}, "discard holds 'buffer' twice; name it once"),
    ({"classes": ("weights",)}, "classes holds 'weights', which is none of parameter, "),
    ({"classes": ()}, "classes must be a list"),
    ({"classes": "parameter"}, "classes must be a list"),
    ({"keep": ("weights",)}, "keep holds 'weights'"),
    ({"keep": None}, "keep must be a list"),
    ({"discard": ("weights",)}, "discard holds 'weights'"),
    ({"discard": (3,)}, "discard holds 3"),
    ({"discard": ("gradient",)}, "discard holds 'gradient', which is none of "),
    ({"keep": ("buffer",), "discard": ("buffer",)}, "'buffer' is both to stay and to go"),
    ({"keep": ("buffer",), "classes": ("buffer",)}, "'buffer' is both to stay and to go"),
    ({"lease_seconds": 0}, f"{LEASE}0; leave it out for no lease"),
    ({"lease_seconds": 0.09}, f"{LEASE}0.09; leave it out for no lease"),
    ({"lease_seconds": -1}, f"{LEASE}-1; "),
    ({"lease_seconds": math.nan}, f"{LEASE}nan; "),
    ({"lease_seconds": 2_678_401.0}, f"{LEASE}2678401; "),
    ({"lease_seconds": 1e30}, f"{LEASE}1e+30; "),
    ({"lease_seconds": 10**5000}, f"{LEASE}one of more than 20 digits; "),
    ({"lease_seconds": True}, "lease_seconds must be a number of seconds, not True"),
    ({"deadline_seconds": "5"}, "deadline_seconds must be a number of seconds, not '5'"),
    ({"deadline_seconds": math.inf}, f"{DEADLINE}inf; leave it out for no deadline"),
    ({"deadline_seconds": 86_401}, f"{DEADLINE}86401; leave it out for no deadline"),
    ({"wait_seconds": -0.1}, f"{WAIT}-0.1; leave it out for 60"),
    ({"wait_seconds": 86_400.5}, f"{WAIT}86400.5; leave it out for 60"),
    ({"wait_seconds": None}, "wait_seconds must be a number of seconds"),
    ({"dry_run": "no"}, "dry_run must be true or false, not 'no'"),
    ({"verify": 1}, "verify must be true or false"),
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
        *({name: value} for name, known in SECONDS.items() for value in (known.low, known.high)),
        {"devices": (0, 1023)},
    ],
)
def test_nothing_is_wrong(given):
    assert yield_fault(YieldRequest(**given)) == ""


def test_restores():
    assert restore_fault(RestoreRequest()) == ""
    assert restore_fault(RestoreRequest(classes=("parameter",), wait_seconds=0)) == ""
    assert restore_fault(RestoreRequest(classes=("weights",))).startswith("classes holds 'weights'")
    assert restore_fault(RestoreRequest(wait_seconds=math.nan)).startswith(f"{WAIT}nan")
    assert restore_fault(RestoreRequest(wait_seconds=86_401)).startswith(f"{WAIT}86401")
    assert restore_fault(RestoreRequest(classes=("buffer", "buffer"))).startswith("classes holds")


def test_what_leaving_it_out_means_is_the_default():
    assert {name: known.left_out for name, known in SECONDS.items()} == {
        "lease_seconds": "no lease",
        "deadline_seconds": "no deadline",
        "wait_seconds": f"{YieldRequest().wait_seconds:g}",
    }
    assert YieldRequest().lease_seconds is YieldRequest().deadline_seconds is None
    assert RestoreRequest().wait_seconds == YieldRequest().wait_seconds


def test_the_keywords_of_the_jobs_own_call_are_the_fields():
    types = {one.name: one.type for one in fields(YieldRequest)}
    assert {name: of.__forward_arg__ for name, of in YieldOptions.__annotations__.items()} == {
        **types,
        "level": "str",
    }
