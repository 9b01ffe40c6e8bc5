"""Real Chromium. Skipped where something is missing, failed where GPUMEM_REQUIRE_BROWSER is set."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support.chromium import chromium, missing

if TYPE_CHECKING:
    from pathlib import Path

WAIT_MS = 30_000
"""Bound of every wait: reached only where a test fails."""


@pytest.fixture(scope="session")
def browser():
    problem = missing()
    if problem and os.environ.get("GPUMEM_REQUIRE_BROWSER"):
        pytest.fail(problem)
    if problem:
        pytest.skip(problem)
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=options)
        yield started
        started.close()


class Opened:
    """A page in the browser.

    Attributes:
        tab: playwright's page.
        said: errors and warnings of its console, and its network requests.
    """

    def __init__(self, tab, path: Path) -> None:
        self.tab = tab
        self.said: list[str] = []
        tab.set_default_timeout(WAIT_MS)
        tab.on("console", self._console)
        tab.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        tab.on("request", lambda request: self._request(request.url, path.as_uri()))
        tab.goto(path.as_uri())

    def _console(self, message) -> None:
        if message.type in {"error", "warning"}:
            self.said.append(f"console: {message.text}")

    def _request(self, url: str, own: str) -> None:
        if url != own:
            self.said.append(f"request: {url}")

    def ready(self) -> Opened:
        self.tab.evaluate("gpumem.ready.then(() => true)")
        return self

    def call(self, code: str):
        """The value of an expression about `a`, the page."""
        self.frames()
        return self.tab.evaluate(f"gpumem.app.then((a) => ({code}))")

    def frames(self) -> None:
        """Wait until the page has drawn."""
        self.tab.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    @property
    def state(self) -> dict:
        return self.call("a.state()")

    def button(self, name: str):
        return self.tab.get_by_role("button", name=name, exact=True)

    def click(self, name: str) -> None:
        self.button(name).click()

    def press(self, key: str) -> None:
        self.tab.keyboard.press(key)

    def node(self, wanted: str | int) -> dict:
        found = self.call(f"a.node({wanted!r})")
        assert found, f"no node {wanted!r}"
        return found

    def at_rest(self) -> None:
        """Wait until a zoom has ended."""
        self.tab.wait_for_function("() => gpumem.app.then((a) => !a.panel || a.panel.flame.atRest)")


@pytest.fixture
def open_page(browser, tmp_path):
    """Writes a page to a file and opens it; it must have reported nothing."""
    opened: list[Opened] = []
    contexts = []

    def open_html(html: str, *, wait: bool = True, **options) -> Opened:
        path = tmp_path / f"page{len(opened)}.html"
        path.write_text(html, encoding="utf-8")
        given = {"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce", **options}
        contexts.append(browser.new_context(**given))
        opened.append(Opened(contexts[-1].new_page(), path))
        return opened[-1].ready() if wait else opened[-1]

    yield open_html
    said = [line for one in opened for line in one.said]
    for context in contexts:
        context.close()
    assert said == []
