"""The page in a real browser: what is large, hostile, dark or small."""

from __future__ import annotations

import pytest
from support.page_sizes import many_blocks, many_events
from support.raw_snapshots import alloc, block, frame, segment, snapshot

from gpumem_otel.page import html as page
from gpumem_otel.profiles.of_file import load_snapshot
from gpumem_otel.snapshot.snapshot import from_torch

pytestmark = pytest.mark.browser

OOM = "h200-torch2.11-oom.pickle.gz"


@pytest.fixture
def oom(data_dir):
    return load_snapshot(data_dir / OOM)


HOSTILE = (
    "</script><script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 1'>",
    "<!--<script>",
    "javascript:window.broken=1",
    "a;b\nc\0\u202e",
    "",
    "x" * 4000,
    "\ud800",
    "__proto__",
    "constructor",
)


def test_no_name_can_break_it(open_page):
    blocks = [block(512 * (i + 1), (frame(name, name),)) for i, name in enumerate(HOSTILE)]
    raw = snapshot([segment(blocks)], [[alloc(7, 8, (frame(HOSTILE[0]),)), alloc(8, 8)]])
    shown = open_page(page.html(from_torch(raw, source=HOSTILE[1]), title=HOSTILE[0]))
    total = sum(512 * (i + 1) for i in range(len(HOSTILE)))
    for key in ("i", "i", "n", "s", "1", "p", "a", "2", "3", "l"):
        shown.press(key)
    assert shown.state["total"] == total
    assert shown.tab.evaluate("window.broken") is None
    assert shown.tab.title() == HOSTILE[0]
    assert shown.tab.locator("img, script[src]").count() == 0
    assert shown.tab.locator("script").count() == 1
    shown.press("/")
    shown.tab.keyboard.type("onerror")
    assert shown.state["match"]["matches"] >= 1


def test_it_may_not_ask_the_network(open_page, oom):
    shown = open_page(page.html(oom))
    asked = """() => new Promise((done) => {
        document.addEventListener("securitypolicyviolation", (event) =>
            done(event.effectiveDirective));
        fetch("http://127.0.0.1:9/").catch(() => 0);
    })"""
    assert shown.tab.evaluate(asked) == "connect-src"
    ran = """() => {
        const script = document.createElement("script");
        script.textContent = "window.broken = 1";
        document.head.append(script);
        return window.broken === undefined;
    }"""
    assert shown.tab.evaluate(ran)
    assert shown.said
    assert [
        line for line in shown.said if "Security Policy" not in line and "Fetch" not in line
    ] == []
    assert [line for line in shown.said if line.startswith("request")] == []
    shown.said.clear()


def test_damaged_data_are_said_to_be(open_page, oom):
    html = page.html(oom)
    place = html.index('id="payload">') + 2000
    shown = open_page(html[:place] + html[place + 4000 :], wait=False)
    alert = shown.tab.get_by_role("alert")
    alert.wait_for()
    assert "could not be read" in alert.inner_text()
    shown.said.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dark_and_light(open_page, oom, scheme):
    shown = open_page(page.html(oom), color_scheme=scheme)

    def brightness() -> int:
        color = shown.tab.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in color[4:-1].split(","))

    assert shown.state["theme"] == scheme
    assert (brightness() < 200) == (scheme == "dark")
    shown.press("t")
    assert shown.state["theme"] != scheme
    assert (brightness() < 200) == (scheme == "light")
    # a change of the system's theme wins again
    for wanted in ("light", "dark") if scheme == "dark" else ("dark", "light"):
        shown.tab.emulate_media(color_scheme=wanted)
        shown.tab.locator(f":root[data-theme={wanted}]").wait_for()
    shown.click("Light" if scheme == "dark" else "Dark")
    assert shown.state["theme"] != scheme


@pytest.mark.parametrize("size", [(1280, 800), (1920, 1080)])
def test_everything_fits(open_page, oom, size):
    width, height = size
    shown = open_page(page.html(oom, before=oom), viewport={"width": width, "height": height})
    for key in "1234":
        shown.press(key)
        shown.frames()
        boxes = shown.tab.locator("button:visible, select:visible, input:visible, h1").evaluate_all(
            "(all) => all.map((e) => e.getBoundingClientRect()).map((b) => [b.right, b.bottom])"
        )
        table = shown.tab.locator(".side:visible tbody button").count()
        assert all(right <= width for right, _ in boxes)
        assert sum(bottom > height for _, bottom in boxes) <= table  # rows below are scrolled to
        assert shown.tab.locator(".tools").bounding_box()["height"] < 45
        assert shown.tab.evaluate("document.documentElement.scrollWidth") <= width


def test_every_control_has_a_name_and_the_keys_are_told(open_page, oom):
    shown = open_page(page.html(oom, before=oom))
    nameless = shown.tab.locator("button, select, input, canvas").evaluate_all(
        """(all) => all.filter((e) => !e.hidden && !e.closest("[hidden]") && e.checkVisibility() &&
            !(e.textContent.trim() || e.getAttribute("aria-label"))).map((e) => e.outerHTML)"""
    )
    assert nameless == []
    shown.press("?")
    keys = shown.tab.get_by_role("dialog", name="keys")
    assert {"/", "i", "t", "Esc"} <= set(keys.locator("kbd").all_inner_texts())
    shown.press("Escape")
    assert not keys.is_visible()
    assert oom.warnings
    shown.tab.get_by_role("button", name="warning").click()
    notes = shown.tab.get_by_role("dialog", name="notes").inner_text()
    assert all(warning in notes for warning in oom.warnings)


def test_a_hundred_thousand_nodes(open_page):
    raw = many_blocks()
    shown = open_page(page.html(from_torch(raw)), viewport={"width": 1920, "height": 1080})
    total = sum(b["size"] for s in raw["segments"] for b in s["blocks"])
    state = shown.state
    assert state["nodes"] > 95_000
    assert state["total"] == total
    assert len(shown.call("a.drawTimes(20)")) == 20
    node = shown.node(5)
    shown.tab.mouse.click(node["place"]["x"], node["place"]["y"])
    shown.at_rest()
    assert shown.state["zoom"] == node["name"]
    shown.press("/")
    shown.tab.keyboard.type("function_12")
    assert shown.state["match"]["matches"] > 100
    shown.press("Escape")
    shown.press("i")
    assert shown.state["total"] == total
    shown.press("s")
    assert shown.state["total"] == total
    shown.press("3")
    assert shown.state["segments"]["rows"] == 400


def test_what_is_shown_again_adds_no_names(open_page, oom):
    shown = open_page(page.html(oom))
    shown.press("s")
    known = shown.call("a.texts()")
    for key in ("i", "n", "l", "s", "i", "n", "2"):
        shown.press(key)
    shown.tab.get_by_role("application", name="Memory over time.").focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "End"):
        shown.press(key)
    shown.press("s")
    assert shown.state["kind"] == "segment"
    assert shown.call("a.texts()") == known


def annotated(ranges: int):
    trace = [{**alloc(1 << 20 | i << 9, 512), "time_us": 1000 * i} for i in range(1000)]
    raw = snapshot([], [trace])
    raw["external_annotations"] = [
        {"name": f"step {i}", "stage": stage, "device": 0, "time_us": time}
        for i in range(ranges)
        for stage, time in (
            ("START", 999_000 * i // ranges),
            ("END", 999_000 * (i + 1) // ranges - 1),
        )
    ]
    return from_torch(raw)


def test_styles_are_read_once_however_many_ranges_there_are(open_page):
    def asked(ranges: int) -> int:
        shown = open_page(page.html(annotated(ranges), view="timeline"))
        assert shown.state["moment"]["spans"] == ranges
        shown.tab.evaluate("""() => {
            const read = window.getComputedStyle;
            window.asked = 0;
            window.getComputedStyle = (...given) => { window.asked += 1; return read(...given); };
        }""")
        for key in ("+", "-", "+"):
            shown.press(key)
            shown.frames()
        return shown.tab.evaluate("window.asked")

    assert asked(800) == asked(1) == 0


@pytest.mark.timeout(300)
def test_a_million_events(open_page):
    found = from_torch(many_events(1_000_000))
    html = page.html(found, view="timeline")
    assert len(html) < 25_000_000
    shown = open_page(html)
    replay = found.replay(0)
    state = shown.state
    assert state["moment"]["moments"] == 1_000_001
    assert state["moment"]["points"] < 12 * 1280
    assert state["moment"]["highest"] == state["total"] == max(replay.allocated_bytes)
    for moment in (123_456, 900_000):
        place = shown.call(f"a.placeOfMoment({moment})")
        shown.tab.mouse.click(place["x"], place["y"])
        state = shown.state
        index = state["moment"]["index"]
        assert abs(index - moment) < 5000
        assert state["total"] == replay.allocated_bytes[index]
    shown.tab.get_by_role("application", name="Memory over time.").focus()
    shown.press("ArrowRight")
    assert shown.state["total"] == replay.allocated_bytes[index + 1]
    for _ in range(6):
        shown.press("+")
    first, last = shown.state["moment"]["range"]
    assert 0 < last - first < (replay.time_us[-1] - replay.time_us[0]) / 1e6 / 60
