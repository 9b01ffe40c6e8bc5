"""The data of a page, read back without the page."""

from __future__ import annotations

import io
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.page_payload import Payload
from support.raw_snapshots import alloc, block, frame, raw_snapshots, segment, snapshot
from support.recordings import START_NS, make_recording

from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sample
from gpumem_otel.page import columns as pagestacks
from gpumem_otel.page import timeline as pagetime
from gpumem_otel.page.columns import Columns, packed
from gpumem_otel.page.payload import PageForm
from gpumem_otel.profiles import heap
from gpumem_otel.profiles.of_file import load_snapshot
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.stacks import file_function_namer

MADE = {"title": "t", "view": "flamegraph", "kind": ProfileKind.LIVE, "device": None}


def read(form: PageForm) -> Payload:
    return Payload(form.packed(**MADE, made_by="test"))


def page_of(found, **more) -> Payload:
    form = PageForm(**more)
    form.add_snapshot(found)
    return read(form)


def sums(profile: HeapProfile) -> dict:
    return {
        tuple((f.name, f.filename, f.line) for f in s.frames): (s.objects, s.size_bytes)
        for s in profile.samples
    }


def free(address, size):
    return {"action": "free_requested", "addr": address, "size": size, "stream": 0, "time_us": 2}


def alive_at(page: Payload, timeline: dict, moment: int) -> Counter:
    form = timeline["allocations"]
    node, size, born, life = (page[form[name]] for name in ("node", "bytes", "born", "life"))
    found: Counter = Counter()
    for n, s, b, length in zip(node, size, born, life, strict=True):
        if b <= moment < b + length:
            found[page.stack(n)] += s
    return found


def check_file(path):
    """Every number of a page about a real file is that of the profiles and the replay."""
    found = load_snapshot(path)
    page = page_of(found)
    for device in found.devices():
        live = heap.live_profile(found, device, namer=file_function_namer)
        assert page.profile("live", device) == sums(live)
    for timeline in page.header["timelines"]:
        device = timeline["device"]
        replay = found.replay(device)
        assert page[timeline["allocated"]] == list(replay.allocated_bytes)
        assert page[timeline["reserved"]] == list(replay.reserved_bytes)
        if timeline["time"] is not None:
            assert page[timeline["time"]] == list(replay.time_us)
        assert timeline["peak"] == replay.peak_moment
        peak = heap.replayed_profile(found, device, namer=file_function_namer)
        at_peak = alive_at(page, timeline, timeline["peak"])
        assert at_peak == {stack: size for stack, (_, size) in sums(peak).items()}
        for moment in (0, replay.events // 3, replay.events):
            total = sum(alive_at(page, timeline, moment).values())
            assert total == replay.allocated_bytes[moment]
    for table in page.header["segments"]:
        totals = found.totals(table["device"])
        sizes, states = page[table["block"]["bytes"]], page[table["block"]["state"]]
        by_state = Counter()
        for size, state in zip(sizes, states, strict=True):
            by_state[state] += size
        assert sum(page[table["bytes"]]) == totals.reserved_bytes
        assert by_state[0] == totals.allocated_bytes
        assert by_state[1] == totals.pending_free_bytes
        assert sum(value for key, value in table["totals"].items() if key != "reserved") == (
            totals.reserved_bytes
        )
        assert page[table["first"]][-1] == len(sizes) == totals.blocks
        live = Counter()
        for node, size, state in zip(page[table["block"]["node"]], sizes, states, strict=True):
            if state == 0:
                live[page.stack(node)] += size
        profile = page.profile("live", table["device"])
        assert live == {stack: size for stack, (_, size) in profile.items()}


def test_shipped_files_come_back_byte_for_byte(data_dir):
    found = sorted(data_dir.glob("*.pickle.gz"))
    if not found:
        pytest.skip(f"no recording in {data_dir}")
    for path in found:
        check_file(path)


def test_every_recording_comes_back_byte_for_byte(recordings):
    for path in recordings:
        check_file(path)


@settings(max_examples=60)
@given(raw_snapshots())
def test_any_snapshot_keeps_its_sums(raw):
    found = from_torch(raw)
    page = page_of(found)
    for device in found.devices():
        total = sum(size for _, size in page.profile("live", device).values())
        assert total == found.totals(device).allocated_bytes


@given(
    st.sampled_from(["u8", "u32", "u64", "f64"]),
    st.lists(st.integers(0, 255) | st.integers(0, 2**32 - 1) | st.integers(0, 2**53)),
    st.booleans(),
)
def test_columns_come_back(kind, values, delta):
    largest = {"u8": 2**8, "u32": 2**32, "u64": 2**64, "f64": 2**53 + 1}[kind]
    values = [value % largest for value in values]
    columns = Columns()
    columns.add("u8", [1, 2, 3])
    index = columns.add(kind, values, delta=delta and kind in {"u32", "f64"})
    header = {"strings": [], "frames": dict.fromkeys(("name", "file", "line"), 0)}
    text = packed({**header, "trie": {"parent": 0, "frame": 0}, "strings": ["\0"] * 4}, columns)
    assert Payload.__getitem__(_Loose(text), index) == values


class _Loose(Payload):
    """Without frames and stacks."""

    def __init__(self, text: str) -> None:
        try:
            super().__init__(text)
        except IndexError:
            return


@pytest.mark.parametrize(
    "name", ["</script><script>alert(1)</script>", "<!--", "]]>", "\ud800", "\0", "\u202e", "'\"&"]
)
def test_no_name_means_anything_in_html(name):
    raw = snapshot([segment([block(512, (frame(name, name),))])], [[alloc(1, 2), alloc(2, 3)]])
    form = PageForm()
    form.add_snapshot(from_torch(raw, source=name))
    text = form.packed(**{**MADE, "title": name}, made_by="test")
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
    ((stack, (_, size)),) = Payload(text).profile("live").items()
    assert size == 512
    assert len(stack) == 1


def test_stacks_share_what_they_begin_with():
    stacks = pagestacks.PageStacks()
    main, left, right = (Frame(name, "f.py", 1) for name in ("main", "left", "right"))
    first = stacks.node((left, main))
    assert stacks.node((right, main)) == first + 1
    assert stacks.node((Frame("left", "f.py", 1), Frame("main", "f.py", 1))) == first
    assert stacks.node(()) == 0
    assert stacks.node((Frame("[other]"),)) == pagestacks.OTHER_NODE


def test_a_stack_without_room_is_other_and_one_that_is_there_is_found():
    stacks = pagestacks.PageStacks(max_nodes=4)
    a, b, c = (Frame(name) for name in "abc")
    there = stacks.node((b, a))
    assert there > pagestacks.OTHER_NODE
    assert stacks.node((c, b, a)) == pagestacks.OTHER_NODE
    assert stacks.node((c,)) == pagestacks.OTHER_NODE
    assert stacks.node((b, a)) == there


def test_a_budget_keeps_the_total_and_says_so():
    samples = tuple(Sample((Frame(f"f{i}"),), i, 100 - i) for i in range(1, 11))
    form = PageForm(max_samples=4)
    form.add_source("s", ())
    form.add_profile(HeapProfile(ProfileKind.LIVE, 0, samples))
    page = read(form)
    found = page.profile("live")
    assert len(found) == 5
    assert found[("[other]", "", 0),] == (sum(range(5, 11)), sum(100 - i for i in range(5, 11)))
    (written,) = page.header["profiles"]
    assert written["total_bytes"] == sum(size for _, size in found.values()) == 945
    assert written["comments"] == ["the 6 smallest of 10 stacks are in [other]"]


def test_labels_are_frames_above_the_root():
    form = PageForm()
    form.add_source("s", ())
    sample = Sample((Frame("leaf"), Frame("main")), 1, 8, (("pool", "(1, 0)"),))
    form.add_profile(HeapProfile(ProfileKind.LIVE, 0, (sample,)))
    ((stack, _),) = read(form).profile("live").items()
    assert [name for name, _, _ in stack] == ["leaf", "main", "pool: (1, 0)"]


def long_trace(number):
    """Allocations of growing size, every second one freed."""
    events = []
    for i in range(number):
        events.append(alloc(i + 1, 10 + i, (frame(f"f{i % 5}"),)))
        if i % 2:
            events.append(free(i + 1, 10 + i))
    return from_torch(snapshot([], [events]))


def timeline_of(found, **limits):
    stacks, columns = pagestacks.PageStacks(), Columns()
    form, told = pagetime.events_form(found, 0, stacks, columns, file_function_namer, **limits)
    header = {"timelines": [{"source": 0, **form}], "profiles": [], **stacks.form(columns)}
    return Payload(packed(header, columns)), form, told


def test_of_a_long_trace_the_largest_stay_and_the_rest_is_what_is_missing():
    found = long_trace(100)
    page, form, told = timeline_of(found, max_allocations=20)
    assert len(page[form["allocations"]["node"]]) == 20
    everything = sum(10 + i for i in range(100))
    assert form["allocations"]["left_out"] == everything - sum(90 + i for i in range(20))
    allocated = page[form["allocated"]]
    assert allocated == list(found.replay(0).allocated_bytes)
    for moment in range(len(allocated)):
        assert sum(alive_at(page, form, moment).values()) <= allocated[moment]
    assert "20 largest of 100" in told[0]


def test_of_a_long_trace_the_extremes_of_the_line_stay():
    found = long_trace(1000)
    page, form, told = timeline_of(found, max_moments=100)
    moments = page[form["moment"]]
    replay = found.replay(0)
    assert len(moments) <= 100
    assert moments == sorted(set(moments))
    assert (moments[0], moments[-1]) == (0, replay.events)
    assert [int(v) for v in page[form["allocated"]]] == [replay.allocated_bytes[m] for m in moments]
    assert moments[form["peak"]] == replay.peak_moment
    assert max(page[form["allocated"]]) == max(replay.allocated_bytes)
    assert told


def test_ranges_that_overlap_have_lanes_of_their_own():
    marks = [("a", "START", 10), ("b", "START", 20), ("b", "END", 30), ("a", "END", 40)]
    marks += [("c", "START", 40), ("d", "END", 41)]
    raw = snapshot([], [[alloc(1, 2), alloc(2, 3)]])
    raw["external_annotations"] = [
        {"name": name, "stage": stage, "device": 0, "time_us": time} for name, stage, time in marks
    ]
    spans = page_of(from_torch(raw)).header["timelines"][0]["spans"]
    assert [(s["name"], s["from_us"], s["to_us"], s["lane"]) for s in spans] == [
        ("a", 10, 40, 0),
        ("b", 20, 30, 1),
        ("c", 40, None, 0),
    ]


def test_a_failed_allocation_is_marked_in_words():
    oom = {"action": "oom", "size": 1 << 30, "device_free": 1 << 20, "stream": 0, "time_us": 9}
    found = from_torch(snapshot([], [[alloc(1, 2), oom]]))
    (mark,) = page_of(found).header["timelines"][0]["marks"]
    assert mark == {
        "moment": 2,
        "action": "oom",
        "text": "out of memory: 1.0 GiB asked for, 1.0 MiB free",
    }


def test_a_trace_without_times_has_none():
    events = [alloc(1, 2), alloc(2, 3)]
    for event in events:
        del event["time_us"]
    (timeline,) = page_of(from_torch(snapshot([], [events]))).header["timelines"]
    assert timeline["time"] is None


def test_without_events_there_is_no_timeline():
    page = page_of(from_torch(snapshot([segment([block(8)])], [[]])))
    assert page.header["timelines"] == []
    assert [p["kind"] for p in page.header["profiles"]] == ["live"]


def test_moments_of_a_recording_are_its_readings():
    names = ("h200-torch2.11-train-python-stacks.pickle.gz", "h200-torch2.11-oom.pickle.gz")
    recording = load_recording(io.BytesIO(make_recording(*names, names[0])), name="run.gpumem")
    form = PageForm()
    form.add_recording(recording)
    page = read(form)
    (timeline,) = page.header["timelines"]
    totals = [reading.snapshot.totals(0) for reading in recording.readings]
    assert page[timeline["time"]] == [START_NS // 1000 + 1_000_000 * i for i in range(3)]
    assert page[timeline["allocated"]] == [b.allocated_bytes for b in totals]
    assert page[timeline["reserved"]] == [b.reserved_bytes for b in totals]
    assert timeline["peak"] == 1
    start = page[timeline["readings"]["start"]]
    sizes = page[timeline["readings"]["bytes"]]
    for i, b in enumerate(totals):
        assert sum(sizes[start[i] : start[i + 1]]) == b.allocated_bytes
    peak = page.profile("peak")
    assert sum(size for _, size in peak.values()) == totals[1].allocated_bytes
    assert sum(size for _, size in page.profile("live").values()) == totals[2].allocated_bytes


def test_ranges_in_lanes_and_those_that_are_left_out():
    """GIVEN 300 ranges in one another WHEN shown THEN 256 lanes, and a sentence about the rest."""
    marks = [
        {"name": "n" * 500, "stage": "START", "device": 0, "time_us": number}
        for number in range(300)
    ]
    events = [{**alloc(number, 1), "time_us": number} for number in range(2)]
    page = page_of(from_torch({**snapshot([], [events]), "external_annotations": marks}))
    spans = page.header["timelines"][0]["spans"]
    assert [span["lane"] for span in spans] == list(range(256))
    assert {len(span["name"]) for span in spans} == {200}
    told = page.header["sources"][0]["warnings"]
    assert [text for text in told if text.startswith("device 0: 44 annotated ranges")] != []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["START", "END"])), max_size=40))
def test_each_range_is_in_the_first_lane_that_is_free(marks):
    raw = [
        {"name": name, "stage": stage, "device": 0, "time_us": time // 2}
        for time, (name, stage) in enumerate(marks)
    ]
    events = [{**alloc(number, 1), "time_us": number} for number in range(2)]
    page = page_of(from_torch({**snapshot([], [events]), "external_annotations": raw}))
    until = {}
    for span in page.header["timelines"][0]["spans"]:
        first = next(lane for lane in range(41) if until.get(lane, 0) <= span["from_us"])
        assert span["lane"] == first
        until[first] = 2**63 if span["to_us"] is None else span["to_us"]
