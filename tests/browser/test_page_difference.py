"""Two files in one page: which devices are compared, and what is not."""

from __future__ import annotations

import base64
import gzip
import re

import pytest
from support.raw_snapshots import alloc, block, frame, segment, snapshot

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.page import html as page
from gpumem_otel.snapshot.snapshot import from_torch

pytestmark = pytest.mark.browser


def file_of(name, sizes, traces=()):
    """A snapshot with a block on each device: {device: bytes}."""
    segments = [
        segment([block(size, (frame("step"),))], device=device, address=(device + 1) << 24)
        for device, size in sizes.items()
    ]
    return from_torch(snapshot(segments, traces), source=name)


def compared(open_page, before, after, **more):
    return open_page(page.html(after, before=before, view="difference", **more))


def sides(shown, device):
    shown.tab.get_by_label("device").select_option(str(device))
    state = shown.state
    return state["before"], state["total"]


def test_devices_are_compared_with_those_of_their_number(open_page):
    shown = compared(
        open_page, file_of("a", {0: 1024, 1: 2048}), file_of("b", {0: 4096, 1: 8192, 2: 512})
    )
    assert sides(shown, 0) == (1024, 4096)
    assert shown.state["numbers"].endswith("; bytes as the allocator rounds them")
    assert sides(shown, 1) == (2048, 8192)
    assert sides(shown, 2) == (0, 512)
    assert "change +512 B" in shown.state["numbers"]


def test_a_device_that_one_file_lacks_is_all_new_or_all_gone(open_page):
    one, two = file_of("one", {0: 1024}), file_of("two", {0: 4096, 1: 8192})
    shown = compared(open_page, one, two)
    assert sides(shown, 1) == (0, 8192)
    assert shown.state["numbers"].endswith("; device 1 is in the later file only")
    assert shown.node("train.py:step")["before"] == 0
    back = compared(open_page, two, one)
    assert sides(back, 1) == (8192, 0)
    assert back.state["numbers"].endswith("; device 1 is in the earlier file only")


def test_two_ranks_with_a_device_each_are_compared(open_page):
    shown = compared(open_page, file_of("rank0", {0: 1024}), file_of("rank1", {1: 4096}))
    for device in (0, 1):
        assert sides(shown, device) == (1024, 4096)
        assert shown.state["numbers"].endswith("; device 0 before, device 1 after")


def test_what_one_file_did_not_record_is_not_shown_as_new(open_page):
    trace = [alloc(1 << 24, 4096, (frame("step"),)), alloc((1 << 24) + 4096, 512)]
    plain, traced = file_of("plain", {0: 4096}), file_of("traced", {0: 4096}, [trace])
    shown = compared(open_page, plain, traced, kind=ProfileKind.PEAK)
    assert shown.state["kind"] == "live"
    peak = shown.button("Peak")
    assert peak.is_disabled()
    assert peak.get_attribute("title") == "no peak profile in plain"
    shown.press("p")
    assert shown.state["kind"] == "live"
    shown.press("1")
    assert peak.is_enabled()


def test_different_units_are_said_and_not_compared(open_page):
    html = page.html(file_of("two", {0: 4096}), before=file_of("one", {0: 1024}), view="difference")
    shown = open_page(in_another_unit(html))
    told = shown.tab.locator(".empty").inner_text()
    assert told == (
        "The live memory of device 0 cannot be compared: one has bytes as nobody in here "
        "rounds ..., two bytes as the allocator rounds them."
    )
    assert shown.state["numbers"] == ""
    assert not shown.tab.get_by_role("application", name="Flame graph.").is_visible()
    shown.press("1")
    assert shown.state["total"] == 4096


def in_another_unit(html: str) -> str:
    """The page, with another unit in the first of its profiles."""
    found = re.search(r'id="payload">([^<]*)<', html)
    data = gzip.decompress(base64.b64decode(found[1]))
    old, new = (
        b"bytes as the allocator rounds them",
        b"bytes as nobody in here rounds ...",
    )  # of the same length
    assert len(old) == len(new)
    changed = base64.b64encode(gzip.compress(data.replace(old, new, 1))).decode()
    return html.replace(found[1], changed)
