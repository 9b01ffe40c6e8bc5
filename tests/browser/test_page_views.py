"""The page in a real browser: every view, by mouse and by key, its numbers those of the files."""

from __future__ import annotations

import json

import pytest
from support.cli_process import cli
from support.recordings import make_recording

from gpumem_otel.page import html
from gpumem_otel.profiles import heap
from gpumem_otel.profiles.of_file import load_snapshot, open_bytes
from gpumem_otel.snapshot.stacks import file_function_namer

pytestmark = pytest.mark.browser

TRAIN = "h200-torch2.11-train-python-stacks.pickle.gz"
OOM = "h200-torch2.11-oom.pickle.gz"
CPP = "h200-torch2.11-train-cpp-stacks.pickle.gz"
GRAPH = "h200-torch2.11-cuda-graph.pickle.gz"
DDP = "h200-torch2.11-ddp-rank1-of-2.pickle.gz"


@pytest.fixture
def train(data_dir):
    return load_snapshot(data_dir / TRAIN)


@pytest.fixture
def oom(data_dir):
    return load_snapshot(data_dir / OOM)


def test_totals_are_those_of_the_command_line(open_page, data_dir):
    for name in (TRAIN, CPP, DDP):
        said = json.loads(cli("stats", "--json", str(data_dir / name)).stdout)
        shown = open_page(html.html(load_snapshot(data_dir / name)))
        for device in said["devices"]:
            if device["allocated_bytes"]:
                shown.call(f"a.setDevice({device['device']})")
                assert shown.state["total"] == device["allocated_bytes"]
                shown.press("s")
                assert shown.state["total"] == device["reserved_bytes"]
                shown.press("l")


def test_every_recording_opens_in_every_view(open_page, recordings):
    for path in recordings:
        found = load_snapshot(path)
        shown = open_page(html.html(found))
        for device in found.devices():
            shown.call(f"a.setDevice({device})")
            for key in "123":
                shown.press(key)
            state = shown.state
            if found.totals(device).segments:
                assert (
                    state["segments"]["totals"]["reserved"] == found.totals(device).reserved_bytes
                )
            shown.press("1")
            shown.press("l")
            assert (shown.state["total"] or 0) == found.totals(device).allocated_bytes
        shown.tab.close()


def test_kinds_by_button_and_by_key(open_page, train):
    shown = open_page(html.html(train))
    namer = file_function_namer
    expected = {
        "live": heap.live_profile(train, 0, namer=namer),
        "peak": heap.replayed_profile(train, 0, namer=namer),
        "allocated": heap.allocated_profile(train, 0, namer=namer, time_ns=0, duration_ns=0),
    }
    for kind, button, key in (
        ("peak", "Peak", "p"),
        ("allocated", "Allocated", "a"),
        ("live", "Live", "l"),
    ):
        shown.click(button)
        by_button = shown.state
        shown.press("s")
        assert shown.state["kind"] == "segment"
        shown.press(key)
        state = shown.state
        assert state == by_button
        assert (state["kind"], state["total"], state["objects"]) == (
            kind,
            expected[kind].total_bytes,
            expected[kind].total_objects,
        )
        assert shown.button(button).get_attribute("aria-pressed") == "true"


def test_a_click_zooms_and_escape_goes_back(open_page, train):
    shown = open_page(html.html(train))
    node = shown.node("train.py:<module>")
    assert 0 < node["total"] < shown.state["total"]
    shown.tab.mouse.click(node["place"]["x"], node["place"]["y"])
    shown.at_rest()
    assert shown.state["zoom"] == "train.py:<module>"
    whole_width = shown.node("train.py:<module>")["place"]
    assert whole_width["x"] == pytest.approx(1280 * 0.375, abs=2)  # in the middle of the canvas
    shown.tab.get_by_role("navigation").get_by_role("button", name="all").click()
    assert shown.state["zoom"] == "all"
    shown.tab.mouse.click(node["place"]["x"], node["place"]["y"])
    shown.press("Escape")
    assert shown.state["zoom"] == "all"


def test_arrows_and_enter_walk_the_graph(open_page, train):
    shown = open_page(html.html(train))
    shown.tab.get_by_role("application", name="Flame graph.").focus()
    shown.press("ArrowDown")
    assert shown.state["status"].startswith(shown.node(1)["name"])
    shown.press("ArrowRight")
    shown.press("ArrowDown")
    shown.press("Enter")
    below = shown.state["zoom"]
    assert below not in {"all", shown.node(1)["name"]}
    shown.press("Backspace")
    assert shown.state["zoom"] == "train.py:<module>"


def test_search_tells_bytes_and_part(open_page, train):
    shown = open_page(html.html(train))
    profile = heap.live_profile(train, 0, namer=file_function_namer)
    wanted = sum(
        s.size_bytes
        for s in profile.samples
        if any("adam" in f.name or "adam" in f.filename for f in s.frames)
    )
    shown.press("/")
    shown.tab.keyboard.type("Adam")
    state = shown.state
    assert state["match"]["bytes"] == wanted > 0
    assert f"{100 * wanted / profile.total_bytes:.1f} %" in state["found"]
    shown.press("Escape")
    assert shown.state["match"] is None
    shown.tab.get_by_role("row", name="adam.py:_init_group").click()
    assert shown.state["match"]["bytes"] == wanted


def test_what_is_shown_stays_the_same_sum(open_page, train):
    shown = open_page(html.html(train))
    total, objects = shown.state["total"], shown.state["objects"]
    for key in ("i", "f", "n", "c", "c", "i", "f", "n"):
        shown.press(key)
        assert (shown.state["total"], shown.state["objects"]) == (total, objects)
    shown.press("i")
    assert shown.state["inverted"]
    leaf = max(
        heap.live_profile(train, 0, namer=file_function_namer).samples,
        key=lambda s: s.size_bytes,
    ).frames[0]
    assert shown.node(1)["name"] == leaf.name
    shown.tab.get_by_label("colour by").select_option("origin")
    assert shown.state["colorBy"] == "origin"


def test_the_tooltip_tells_all_of_a_frame(open_page, train):
    shown = open_page(html.html(train))
    node = shown.node("adam.py:_init_group")
    shown.tab.mouse.move(node["place"]["x"], node["place"]["y"])
    text = shown.tab.get_by_role("tooltip").inner_text()
    assert text.startswith("adam.py:_init_group\n")
    assert "/torch/optim/adam.py" in text
    assert f"{node['total']:,} bytes" in text
    assert f"{node['objects']:,} allocations" in text
    shown.tab.mouse.move(5, 790)
    assert shown.tab.get_by_role("tooltip").count() == 0


def test_a_click_in_the_timeline_shows_that_moment(open_page, oom):
    shown = open_page(html.html(oom, view="timeline"))
    replay = oom.replay(0)
    state = shown.state
    assert state["moment"]["index"] == replay.peak_moment
    assert state["moment"]["highest"] == state["total"] == max(replay.allocated_bytes)
    assert state["moment"]["marks"] == len(replay.marks) == 1
    shown.click("Order")
    for moment in (replay.events // 4, replay.events - 20):
        place = shown.call(f"a.placeOfMoment({moment})")
        shown.tab.mouse.click(place["x"], place["y"])
        state = shown.state
        index = state["moment"]["index"]
        assert abs(index - moment) < replay.events / 500
        assert state["total"] == state["moment"]["allocated"] == replay.allocated_bytes[index]
        assert state["moment"]["reserved"] == replay.reserved_bytes[index]
        profile = heap.replayed_profile(oom, 0, namer=file_function_namer, moment=index)
        assert state["objects"] == profile.total_objects


def test_moments_by_keys_and_zoom_by_dragging(open_page, oom):
    shown = open_page(html.html(oom, view="timeline"))
    shown.click("Order")
    events = oom.replay(0).events
    shown.tab.get_by_role("application", name="Memory over time.").focus()
    shown.press("Home")
    assert shown.state["moment"]["index"] == 0
    shown.press("ArrowRight")
    assert shown.state["moment"]["index"] == 1
    shown.press("End")
    assert shown.state["moment"]["index"] == events
    left, right = (shown.call(f"a.placeOfMoment({m})") for m in (1000, 2000))
    shown.tab.mouse.move(left["x"], left["y"])
    shown.tab.mouse.down()
    shown.tab.mouse.move(right["x"], right["y"], steps=4)
    shown.tab.mouse.up()
    first, last = shown.state["moment"]["range"]
    assert (first, last) == (pytest.approx(1000, abs=8), pytest.approx(2000, abs=8))
    shown.press("0")
    assert shown.state["moment"]["range"] == [0, events]
    shown.press("+")
    first, last = shown.state["moment"]["range"]
    assert last - first == pytest.approx(events / 2)


def test_a_difference_has_both_totals(open_page, train, oom):
    shown = open_page(html.html(oom, before=train, view="difference"))
    state = shown.state
    assert (state["before"], state["total"]) == (121323520, 129712128)
    assert "change +8.0 MiB" in state["numbers"]
    grown = shown.node("train.py:bigger")
    assert (grown["before"], grown["total"]) == (0, 8388608)
    row = shown.tab.get_by_role("row", name="train.py:bigger")
    assert row.locator("td.red").all_inner_texts() == ["+8.0 MiB", "+8.0 MiB"]
    for key in ("w", "i", "w"):
        shown.press(key)
        assert (shown.state["before"], shown.state["total"]) == (121323520, 129712128)
    shown.click("Peak")
    peaks = [max(s.replay(0).allocated_bytes) for s in (train, oom)]
    assert [shown.state["before"], shown.state["total"]] == peaks
    same = open_page(html.html(train, before=train, view="difference"))
    assert "change 0 B" in same.state["numbers"]
    assert same.tab.locator(".side tbody tr:visible").count() == 0


def test_segments_with_their_blocks(open_page, data_dir):
    found = load_snapshot(data_dir / GRAPH)
    shown = open_page(html.html(found, view="segments"))
    totals = found.totals(0)
    state = shown.state["segments"]
    assert state["rows"] == totals.segments
    assert state["totals"]["reserved"] == totals.reserved_bytes
    assert state["totals"]["private_pools_free"] == totals.private_pool_free_bytes
    shown.tab.get_by_label("pool", exact=True).select_option("pool (1, 0)")
    private = [s for s in found.segments(0) if s.pool_id == (1, 0)]
    assert shown.state["segments"]["rows"] == len(private)
    shown.tab.get_by_label("pool", exact=True).select_option("all")
    shown.click("Address")
    first = min(found.segments(0), key=lambda s: s.address)
    with_stack = next(i for i, b in enumerate(first.blocks) if b.frames)
    shown.click("Full width")
    place = shown.call(f"a.placeOfBlock(0, {with_stack})")
    shown.tab.mouse.click(place["x"], place["y"])
    detail = shown.tab.get_by_role("region", name="block").inner_text()
    assert f"{first.address:#x}" in detail
    frame = first.blocks[with_stack].frames[0]
    assert f":{frame.name}" in detail or frame.name in detail
    shown.tab.get_by_role("application", name="Segments").focus()
    shown.press("ArrowDown")
    assert shown.state["segments"]["chosen"][0] == 1
    shown.press("ArrowRight")
    assert "allocated | at 0x" in shown.state["status"]


def test_devices_are_chosen(open_page, data_dir):
    found = load_snapshot(data_dir / DDP)
    shown = open_page(html.html(found))
    assert shown.state["device"] == 1
    assert shown.tab.get_by_label("device").input_value() == "1"
    assert shown.state["total"] == found.totals(1).allocated_bytes


def test_moments_of_a_recording_are_its_readings(open_page):
    opened = open_bytes(make_recording(TRAIN, OOM, TRAIN), "run.gpumem")
    recording = opened.recording
    shown = open_page(html.file_html(opened, view="timeline"))
    totals = [reading.snapshot.totals(0) for reading in recording.readings]
    state = shown.state
    assert state["view"] == "timeline"
    assert (state["moment"]["moments"], state["moment"]["index"]) == (3, 1)
    shown.tab.get_by_role("application", name="Memory over time.").focus()
    for index, key in ((0, "Home"), (2, "End"), (1, "ArrowLeft")):
        shown.press(key)
        state = shown.state
        assert state["total"] == state["moment"]["allocated"] == totals[index].allocated_bytes
        assert state["moment"]["reserved"] == totals[index].reserved_bytes
    assert "2027-01-15 08:00:01.000 UTC" in state["status"]


def test_profiles_alone_are_a_page_too(open_page, train, oom):
    before, after = (heap.live_profile(s, 0, namer=file_function_namer) for s in (train, oom))
    shown = open_page(html.profiles_html([after], title="two"))
    assert shown.state["total"] == after.total_bytes
    shown.press("2")
    assert "holds no trace" in shown.tab.locator(".empty").inner_text()
    compared = open_page(html.profiles_html([after], before=[before]))
    assert (compared.state["before"], compared.state["total"]) == (
        before.total_bytes,
        after.total_bytes,
    )
