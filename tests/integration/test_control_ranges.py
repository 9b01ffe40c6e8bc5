"""What a request may hold is the same by every door: the job's own call, HTTP, the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.controlling import call, controlling
from support.yield_double import YieldDouble

from gpumem_otel import ConfigError, restore, yield_memory
from gpumem_otel.yielding.control.openapi import document
from gpumem_otel.yielding.request_fields import Seconds, fields_of
from gpumem_otel.yielding.validation import yield_fault
from gpumem_otel.yielding.values import YieldRequest

OUT_OF_RANGE = [
    # as the API has it, as the command line has it
    ("yield", "deadline_seconds", 86_401, "--deadline", "86401"),
    ("yield", "deadline_seconds", 0.05, "--deadline", "0.05"),
    ("yield", "lease_seconds", 2_764_800, "--lease", "32d"),
    ("yield", "lease_seconds", 0.05, "--lease", "0.05"),
    ("yield", "wait_seconds", 90_000, "--wait-seconds", "25h"),
    ("restore", "wait_seconds", 90_000, "--wait-seconds", "25h"),
    ("yield", "devices", (1024,), "--device", "1024"),
    ("yield", "devices", (1, 1), "--device", "1"),
]


@pytest.mark.parametrize("case", OUT_OF_RANGE, ids=lambda case: f"{case[0]}-{case[-1]}")
def test_every_door_says_the_same_of_what_is_out_of_range(run_dir, ctl, case):
    verb, name, value, option, given = case
    double = YieldDouble()
    said = restore if verb == "restore" else yield_memory
    with pytest.raises(ConfigError) as caught:
        said(**{name: value})
    line = str(caught.value).removeprefix(f"{verb}: ")
    with controlling(double, run_dir) as listener:
        answer = call(listener.socket_path, "POST", f"/v1/{verb}", body={name: value})
        assert (answer.status, answer.detail) == (422, line)
        options = (option, given) * (len(value) if isinstance(value, tuple) else 1)
        code, out, err = ctl(verb, *options)
        assert (code, out) == (2, "")
        assert err == f"gpumem-otel: error: {line} (see 'gpumem-otel ctl {verb} --help')\n"
    assert double.submitted == []


SECONDS = {
    name: field.kind
    for name, field in fields_of(YieldRequest).items()
    if isinstance(field.kind, Seconds)
}


@pytest.mark.parametrize("name", SECONDS)
def test_every_door_takes_the_ends_of_each_range(run_dir, ctl, name):
    known = SECONDS[name]
    option = {"lease_seconds": "--lease", "deadline_seconds": "--deadline"}.get(
        name, "--wait-seconds"
    )
    schema = document()["components"]["schemas"]["YieldRequest"]["properties"][name]
    number = schema["anyOf"][0] if "anyOf" in schema else schema
    assert (number["minimum"], number["maximum"]) == (known.low, known.high)
    page = Path(__file__, "../../../docs/yield.md").resolve().read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
    assert f"{known.low:g} to {known.high:.0f}" in row
    double = YieldDouble()
    with controlling(double, run_dir) as listener:
        for value in (known.low, known.high):
            assert yield_fault(YieldRequest(**{name: value})) == ""
            body = {name: value, "dry_run": True}
            assert call(listener.socket_path, "POST", "/v1/yield", body=body).status == 200
            assert ctl("yield", "--dry-run", option, f"{value:.1f}s")[0] == 0
            assert getattr(double.submitted[-1][0], name) == value
