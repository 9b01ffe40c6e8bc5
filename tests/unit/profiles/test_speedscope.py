"""speedscope files, held against the rules of its format, and their sums read back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from support.heap_profiles import LEAF, PROFILES, ROOT, SMALL, live
from support.recordings import DATA

from gpumem_otel.base.profile import ProfileKind, Sample
from gpumem_otel.cli.main import main
from gpumem_otel.profiles.folded import speedscope_form
from gpumem_otel.profiles.of_file import open_file

FILES = sorted(DATA.glob("*.pickle.gz"))
FRAME_KEYS = {"name": str, "file": str, "line": int, "col": int}


def form_of(*profiles, kind=ProfileKind.LIVE):
    made = speedscope_form(profiles, name="a.pickle", exporter="gpumem-otel@1", kind=kind)
    return json.loads(json.dumps(made))


def check(form):
    """The rules of https://www.speedscope.app/file-format-schema.json."""
    assert form["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert set(form) <= {
        "$schema",
        "shared",
        "profiles",
        "name",
        "activeProfileIndex",
        "exporter",
    }
    assert isinstance(form["name"], str)
    assert isinstance(form["exporter"], str)
    assert 0 <= form["activeProfileIndex"] < len(form["profiles"])
    assert list(form["shared"]) == ["frames"]
    for frame in form["shared"]["frames"]:
        assert "name" in frame
        for key, value in frame.items():
            assert type(value) is FRAME_KEYS[key]
    for profile in form["profiles"]:
        assert set(profile) == {
            "type",
            "name",
            "unit",
            "startValue",
            "endValue",
            "samples",
            "weights",
        }
        assert profile["type"] == "sampled"
        assert profile["unit"] == "bytes"
        assert len(profile["samples"]) == len(profile["weights"])
        assert all(type(weight) is int and weight >= 0 for weight in profile["weights"])
        assert profile["startValue"] + sum(profile["weights"]) == profile["endValue"]
        for stack in profile["samples"]:
            assert all(0 <= index < len(form["shared"]["frames"]) for index in stack)


def test_a_profile_root_first():
    form = form_of(live(Sample((LEAF, ROOT), 3, 1536), Sample((ROOT,), 1, 64)))
    check(form)
    (profile,) = form["profiles"]
    frames = form["shared"]["frames"]
    assert [[frames[i]["name"] for i in stack] for stack in profile["samples"]] == [
        [ROOT.name, LEAF.name],
        [ROOT.name],
    ]
    assert frames[profile["samples"][1][0]] == {
        "name": "train.main",
        "file": "/job/train.py",
        "line": 20,
    }
    assert profile["weights"] == [1536, 64]
    assert profile["name"] == "device 0, live"


def test_a_named_root_has_neither_file_nor_line():
    form = form_of(SMALL)
    check(form)
    assert {"name": "[backward]"} in form["shared"]["frames"]


def test_devices_are_profiles_that_share_their_frames():
    form = form_of(live(Sample((ROOT,), 1, 5)), live(Sample((ROOT,), 1, 7), device=1))
    check(form)
    assert [profile["name"] for profile in form["profiles"]] == ["device 0, live", "device 1, live"]
    assert len(form["shared"]["frames"]) == 1


def test_no_device_is_an_empty_profile_that_opens():
    form = form_of(kind=ProfileKind.PEAK)
    check(form)
    assert form["profiles"][0]["name"] == "device 0, peak"
    assert form["profiles"][0]["endValue"] == 0


@given(PROFILES)
def test_any_profile(profile):
    form = form_of(profile)
    if all(0 <= f.line < 2**63 for sample in profile.samples for f in sample.frames):
        check(form)
    assert form["profiles"][0]["endValue"] == profile.total_bytes


@pytest.mark.parametrize("kind", ["live", "allocated", "peak"])
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_the_verb_writes_what_adds_up(tmp_path, path, kind):
    out = tmp_path / "out.json"
    arguments = ["convert", str(path), "-o", str(out), "--format", "speedscope", "--kind", kind]
    assert main(arguments) == 0
    form = json.loads(out.read_text())
    check(form)
    assert form["name"] == path.name
    profiles = open_file(path).profiles(ProfileKind(kind))
    assert [one["endValue"] for one in form["profiles"]] == [one.total_bytes for one in profiles]
