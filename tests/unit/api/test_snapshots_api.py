"""Snapshot files in Python: what load_snapshot gives, in numbers, tables and notebooks."""

from __future__ import annotations

import html
import io
import pickle
import re
import subprocess
import sys

import pytest
from support import raw_snapshots as raw_form
from support.recordings import DATA, make_recording

import gpumem_otel
from gpumem_otel import errors
from gpumem_otel.api import snapshots
from gpumem_otel.page import html as page
from gpumem_otel.profiles import pprof
from gpumem_otel.profiles.of_file import load_snapshot as core_load

pytest.importorskip("pandas")  # here, since its first import may leave hooks of its own

FILES = sorted(DATA.glob("*.pickle.gz"))
PATH = DATA / "h200-torch2.11-train-cpp-stacks.pickle.gz"
TWO_DEVICES = DATA / "h200-torch2.11-ddp-rank1-of-2.pickle.gz"
KINDS = ["live", "allocated", "peak"]


@pytest.fixture(scope="module")
def snapshot():
    return gpumem_otel.load_snapshot(PATH)


def of(*blocks, traces=()):
    raw = raw_form.snapshot([raw_form.segment(list(blocks))], traces)
    return gpumem_otel.load_snapshot(io.BytesIO(pickle.dumps(raw, 4)), name="made")


A, B = raw_form.frame("a"), raw_form.frame("b", line=2)


# profiles


def test_a_snapshot_says_what_it_is(snapshot):
    assert repr(snapshot) == f"<gpumem_otel.Snapshot {str(PATH)!r} devices=[0]>"
    assert snapshot.devices == (0,)
    assert snapshot.warnings == core_load(PATH).warnings
    assert snapshot.core.totals(0).reserved_bytes == 1140850688


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_totals_are_those_of_the_core(path):
    loaded = gpumem_otel.load_snapshot(path)
    core = core_load(path)
    for device in core.devices():
        live = loaded.profile(device=device)
        assert live.total_bytes == core.totals(device).allocated_bytes
        if any(event["action"] == "alloc" for event in core.raw_events(device)):
            peak = loaded.profile("peak", device)
            assert peak.total_bytes == max(core.replay(device).allocated_bytes)
    whole = loaded.profile()
    assert whole.total_bytes == sum(core.totals(d).allocated_bytes for d in core.devices())
    assert whole.device == (core.devices()[0] if len(core.devices()) == 1 else -1)


def test_a_label_tells_apart_what_has_one_stack(snapshot):
    labelled = snapshot.profile("live", 0, label="pool")
    assert {sample.labels for sample in labelled.samples} == {(("pool", "default"),)}
    assert labelled.total_bytes == snapshot.profile("live", 0).total_bytes


def test_top(snapshot):
    profile = snapshot.profile()
    rows = profile.top(3)
    assert [row.self_bytes for row in rows] == [s.size_bytes for s in profile.samples[:3]]
    assert profile.top(1, by="function")[0].self_bytes <= profile.total_bytes
    with pytest.raises(errors.ConfigError, match="top by 'colour'"):
        profile.top(1, by="colour")


def test_what_is_not_there_is_said(snapshot):
    with pytest.raises(errors.ConfigError, match="kind 'dead': not one of live, allocated, peak"):
        snapshot.profile("dead")
    with pytest.raises(errors.ConfigError, match=r"device 7 is not in .* \(devices: 0\)"):
        snapshot.profile("live", 7)
    with pytest.raises(errors.ConfigError, match="label 'colour': not one of pool"):
        snapshot.profile("live", 0, label="colour")
    with pytest.raises(errors.ConfigError, match="table 'rows': not one of blocks"):
        snapshot.to_pandas("rows")
    with pytest.raises(errors.NoHistoryError, match="made: holds no allocation events"):
        of(raw_form.block(512)).profile("peak")
    with pytest.raises(errors.SnapshotError, match="nowhere: no such file"):
        gpumem_otel.load_snapshot("nowhere")


def test_a_file_without_any_memory_has_an_empty_profile():
    empty = gpumem_otel.load_snapshot(io.BytesIO(pickle.dumps(raw_form.snapshot([]), 4)))
    profile = empty.profile()
    assert (profile.total_bytes, profile.samples, profile.kind) == (0, (), "live")
    assert profile.diff(profile).total_bytes == 0


def test_a_recording_gives_all_kinds(tmp_path):
    path = tmp_path / "run.gpumem"
    path.write_bytes(make_recording(PATH.name, windows=1))
    loaded = gpumem_otel.load_snapshot(path)
    assert [loaded.profile(kind, 0).total_bytes for kind in KINDS] == [
        690192384,
        10**9,
        690192384,
    ]


# diff and merge


def test_a_difference_adds_up():
    before = of(raw_form.block(10 << 20, (A,)), raw_form.block(512, (B,)))
    after = of(raw_form.block(10 << 30, (A,)))
    change = after.diff(before)
    assert len(change) == 2
    assert [entry.size_bytes for entry in change.entries] == [(10 << 30) - (10 << 20), -512]
    assert change.total_bytes == sum(entry.size_bytes for entry in change.entries)
    assert repr(change) == f"<gpumem_otel.Difference live bytes=+{change.total_bytes} stacks=2>"
    assert (
        str(change)
        == "10.0 GiB in 2 stacks that changed\n  10.0 GiB  train.py:a\n    -512 B  train.py:b\n"
    )
    assert len(after.diff(after)) == 0


def test_merging_adds_up(snapshot):
    other = gpumem_otel.load_snapshot(TWO_DEVICES)
    first, second = snapshot.profile(), other.profile("live", 1)
    both = first.merge(second)
    assert both.total_bytes == first.total_bytes + second.total_bytes
    assert both.device == -1
    with pytest.raises(errors.ConfigError, match="different kinds"):
        first.merge(other.profile("peak", 1))


def test_pprof_is_read_back(snapshot):
    decoded = pprof.decode(snapshot.profile("peak").pprof())
    assert [name for name, _ in decoded.sample_types][:2] == ["peak_objects", "peak_space"]
    total = sum(sample.values[1] for sample in decoded.samples)
    assert total == snapshot.profile("peak").total_bytes


# pandas


def test_a_profile_as_a_table(snapshot):
    profile = snapshot.profile(label="pool")
    table = profile.to_pandas()
    assert list(table.columns) == [
        "size_bytes",
        "objects",
        "function",
        "file",
        "line",
        "stack",
        "pool",
    ]
    assert table["size_bytes"].sum() == profile.total_bytes
    assert table["objects"].sum() == profile.total_objects
    assert set(table["pool"]) == {"default"}
    assert table["stack"][0].rsplit(";", 1)[-1] == table["function"][0]


def test_blocks_and_segments_as_tables(snapshot):
    totals = snapshot.core.totals(0)
    blocks, segments = snapshot.to_pandas(), snapshot.to_pandas("segments")
    assert (len(blocks), len(segments)) == (totals.blocks, totals.segments)
    assert segments["size_bytes"].sum() == totals.reserved_bytes
    assert segments["allocated_bytes"].sum() == totals.allocated_bytes
    assert blocks["size_bytes"].sum() == totals.reserved_bytes
    by_state = blocks.groupby("state")["size_bytes"].sum()
    assert by_state["active_allocated"] == totals.allocated_bytes
    assert blocks["requested_bytes"].sum() == totals.requested_bytes
    stackless = blocks[(blocks["stack"] == "") & (blocks["state"] == "active_allocated")]
    assert stackless["size_bytes"].sum() == totals.bytes_without_stack
    assert set(blocks["segment"]) == set(segments["address"])


def test_events_as_a_table(snapshot):
    replay = snapshot.core.replay(0)
    events = snapshot.to_pandas("events")
    assert len(events) == replay.events == 4000
    assert events["allocated_bytes"].max() == snapshot.profile("peak").total_bytes
    assert events["allocated_bytes"].iloc[-1] == replay.allocated_bytes[-1]
    allocs = events[events["action"] == "alloc"]
    assert allocs["size_bytes"].sum() == snapshot.profile("allocated").total_bytes


def test_addresses_stay_whole_where_some_are_unknown():
    raw = raw_form.snapshot([], [[raw_form.alloc(2**62 + 1, 8), {"action": "oom", "size": 9}]])
    loaded = gpumem_otel.load_snapshot(io.BytesIO(pickle.dumps(raw, 4)))
    addresses = loaded.to_pandas("events")["address"]
    assert addresses[0] == 2**62 + 1  # a float would have lost the 1
    assert addresses.isna().tolist() == [False, True]


def test_one_device_of_two():
    loaded = gpumem_otel.load_snapshot(TWO_DEVICES)
    assert set(loaded.to_pandas("events", 1)["device"]) == {1}
    assert set(loaded.to_pandas("segments")["device"]) == {1}
    with pytest.raises(errors.ConfigError, match=r"device 0 is not in .* \(devices: 1\)"):
        loaded.to_pandas("blocks", 0)


def test_a_difference_as_a_table():
    change = of(raw_form.block(512, (A,))).diff(of(raw_form.block(1024, (B,))))
    table = change.to_pandas()
    assert list(table["size_bytes"]) == [-1024, 512]
    assert list(table["function"]) == ["train.py:b", "train.py:a"]


def test_names_that_would_break_a_stack_apart():
    table = of(raw_form.block(512, (raw_form.frame("x;y"),))).to_pandas()
    assert list(table["stack"]) == ["train.py:x\\x3by"]


def test_without_pandas_it_says_what_to_install():
    script = (
        "import sys; sys.modules['pandas'] = None\n"
        "import gpumem_otel\n"
        f"profile = gpumem_otel.load_snapshot({str(PATH)!r}).profile()\n"
        "try:\n    profile.to_pandas()\n"
        "except ImportError as error:\n"
        "    assert isinstance(error, gpumem_otel.GpumemError)\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("to_pandas() needs pandas: pip install pandas\n", "")


def test_reading_a_file_imports_neither_torch_nor_pandas():
    script = (
        "import sys, gpumem_otel\n"
        "assert 'gpumem_otel.snapshot.snapshot' not in sys.modules\n"
        f"gpumem_otel.load_snapshot({str(PATH)!r}).profile('peak').top()\n"
        "print(sorted({'torch', 'pandas', 'numpy', 'click', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# notebooks


@pytest.fixture
def things(snapshot):
    profile = snapshot.profile()
    return [snapshot, profile, profile.diff(profile)]


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(things, monkeypatch):
    monkeypatch.setattr(page, "_template", lambda: "<p title='\"&'>@@payload@@</p>")
    monkeypatch.setattr(page, "available", lambda: True)
    for thing in things:
        shown = thing._repr_html_()
        (found,) = re.findall(r'^<iframe srcdoc="([^"]*)" sandbox="allow-scripts[ a-z-]*"', shown)
        assert html.unescape(found) == thing.html()
        assert thing.html().startswith("<p title='\"&'>")


def test_without_the_page_a_notebook_shows_text(things, monkeypatch):
    monkeypatch.setattr(page, "available", lambda: False)
    for thing in things:
        assert thing._repr_html_() == f"<pre>{html.escape(str(thing))}</pre>"
    whole, profile, change = things
    assert str(whole).startswith(f"{PATH}\ndevice  reserved")
    assert str(profile).startswith("device 0, live: 658.2 MiB in ")
    assert str(change) == "0 B in 0 stacks that changed\n"


def test_the_real_page(things):
    if not page.available():
        pytest.skip("the page is not built in: needs npm when the package is installed")
    for thing in things:
        assert thing._repr_html_().startswith("<iframe srcdoc=")


def test_kinds_and_tables_are_those_of_the_signatures():
    assert list(snapshots.get_args(snapshots.SnapshotKind)) == [*KINDS, "pinned"]
    assert list(snapshots.get_args(snapshots.SnapshotTable)) == ["blocks", "segments", "events"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: gpumem_otel.load_snapshot(5),
        lambda: gpumem_otel.load_snapshot(TWO_DEVICES).diff(5),
        lambda: gpumem_otel.load_snapshot(TWO_DEVICES).profile().diff(5),
        lambda: gpumem_otel.participant(5),
        lambda: gpumem_otel.profile(columns=5)(len),
        lambda: gpumem_otel.profile(columns="active_bytes.all.peak")(len),
    ],
)
def test_a_wrong_type_is_named_in_one_line(call):
    with pytest.raises(gpumem_otel.ConfigError, match=r"^[^\n]*(int|5|active_bytes)[^\n]*$"):
        call()
