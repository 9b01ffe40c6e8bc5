"""The query of the pprof route."""

from __future__ import annotations

import pytest

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.serve.read_api import ProfileQuery, profile_query

LIVE, ALLOCATED = ProfileKind.LIVE, ProfileKind.ALLOCATED


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], ProfileQuery(LIVE, None, None)),
        ([("kind", "live")], ProfileQuery(LIVE, None, None)),
        ([("kind", "allocated")], ProfileQuery(ALLOCATED, None, None)),
        ([("seconds", "4")], ProfileQuery(ALLOCATED, None, 4.0)),
        ([("seconds", "0.5"), ("kind", "allocated")], ProfileQuery(ALLOCATED, None, 0.5)),
        ([("seconds", "300")], ProfileQuery(ALLOCATED, None, 300.0)),
        ([("device", "0")], ProfileQuery(LIVE, 0, None)),
        ([("device", "1023")], ProfileQuery(LIVE, 1023, None)),
        ([("debug", "1"), ("debug", "2"), ("gc", "1")], ProfileQuery(LIVE, None, None)),
    ],
)
def test_what_is_taken(items, expected):
    assert profile_query(items) == expected


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "300.1", "nan", "inf", "-inf", "1e9", "abc", "1_0", "0x10", "\u0661", "5s"],
)
def test_seconds_that_are_refused(text):
    with pytest.raises(ValueError, match=r"^seconds must be a number above 0 and at most 300$"):
        profile_query([("seconds", text)])


@pytest.mark.parametrize("text", ["", "-1", "+1", "1024", "99999", " 1", "1_0", "\u0661", "all"])
def test_devices_that_are_refused(text):
    with pytest.raises(ValueError, match=r"^device must be a number from 0 to 1023$"):
        profile_query([("device", text)])


@pytest.mark.parametrize("text", ["", "peaks", "LIVE", "heap"])
def test_kinds_that_are_refused(text):
    message = r"^kind must be one of live, allocated, peak, pinned, growth$"
    with pytest.raises(ValueError, match=message):
        profile_query([("kind", text)])


def test_every_kind_is_served():
    asked = [profile_query([("kind", kind.value)]).kind for kind in ProfileKind]
    assert asked == list(ProfileKind)
    assert profile_query([("kind", "peak"), ("seconds", "4")]).seconds == 4


@pytest.mark.parametrize("kind", ["live", "pinned", "growth"])
def test_a_window_of_a_moment_is_refused(kind):
    with pytest.raises(ValueError, match=rf"^seconds goes with kind=allocated .* kind {kind} is"):
        profile_query([("kind", kind), ("seconds", "4")])


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"^device is given twice$"):
        profile_query([("device", "1"), ("device", "1")])
