"""The hook that builds the page and packs the docs: without npm, where npm fails, in a wheel."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = ("build.mjs", "package.json", "package-lock.json")


@pytest.fixture(scope="module")
def hook():
    specification = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    """The sources of the page, in a folder of their own."""
    web = tmp_path / "tree" / "web"
    shutil.copytree(ROOT / "web" / "src", web / "src")
    for name in KEPT:
        shutil.copy(ROOT / "web" / name, web / name)
    return web.parent


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A PATH of its own, and a way to put commands there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "mkdir", "cat"):
        (folder / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(folder))

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put


WRITES = """\
mkdir -p "${2%/*}"
echo "<meta content=\\"$4\\"> built" > "$2"
"""


def test_without_npm_it_says_so_and_makes_nothing(hook, tree, tools):
    assert hook.build(tree) == "npm (Node.js 18 or newer) is not installed"
    assert not (tree / hook.PAGE).exists()


def test_what_npm_complains_of_is_told_in_one_line(hook, tree, tools):
    tools("node", "exit 0")
    tools("npm", "echo 'npm error ENOTFOUND no such host' >&2; echo more >&2; exit 1")
    assert hook.build(tree) == "npm failed: npm error ENOTFOUND no such host"


def test_it_builds_once_and_again_when_a_source_changes(hook, tree, tools):
    tools("npm", "mkdir -p node_modules; echo run >> npm.log")
    tools("node", WRITES)
    page = tree / hook.PAGE
    assert hook.build(tree) == ""
    assert hook.sources_hash(tree / "web") in page.read_text()
    page.write_text(page.read_text() + "kept")
    assert hook.build(tree) == ""
    assert page.read_text().endswith("kept")
    (tree / "web" / "src" / "style.css").write_text("body {}")
    assert hook.build(tree) == ""
    assert not page.read_text().endswith("kept")
    # the packages are as package-lock.json says: not installed a second time
    assert (tree / "web" / "npm.log").read_text() == "run\n"


@pytest.mark.parametrize(
    ("npm", "node", "said"),
    [
        (None, None, "npm (Node.js 18 or newer) is not installed"),
        ("echo no such host >&2; exit 1", "exit 0", "npm failed: no such host"),
        ("mkdir -p node_modules", "echo no esbuild >&2; exit 1", "npm failed: no esbuild"),
        ("mkdir -p node_modules", "exit 0", "its build made no page of these sources"),
    ],
)
def test_an_older_page_is_not_taken_for_the_current_one(hook, tree, tools, npm, node, said):  # noqa: PLR0917
    for name, script in (("npm", npm), ("node", node)):
        if script is not None:
            tools(name, script)
    page = tree / hook.PAGE
    page.parent.mkdir(parents=True)
    page.write_text('<meta content="of other sources">')
    assert hook.build(tree) == said
    assert not page.exists()


def test_a_page_that_is_current_needs_no_npm(hook, tree, tools):
    page = tree / hook.PAGE
    page.parent.mkdir(parents=True)
    page.write_text(f'<meta content="{hook.sources_hash(tree / "web")}">')
    assert hook.build(tree) == ""


def test_a_page_without_its_sources_is_taken_as_it_is(hook, tmp_path, tools):
    page = tmp_path / hook.PAGE
    page.parent.mkdir(parents=True)
    page.write_text("anything")
    assert hook.build(tmp_path) == ""
    page.unlink()
    assert hook.build(tmp_path) == "its sources are not here"


@pytest.mark.parametrize("target", ["wheel", "sdist"])
@pytest.mark.parametrize(("required", "fails"), [("1", True), ("0", False), ("", False)])
def test_a_release_may_not_lack_its_page(hook, tree, tools, monkeypatch, required, fails, target):  # noqa: PLR0917
    said = []
    app = type("App", (), {"display_warning": staticmethod(said.append)})
    made = hook.CustomBuildHook(str(tree), {}, None, None, "", target, app)
    stale = tree / hook.PAGE
    stale.parent.mkdir(parents=True)
    stale.write_text("older")
    monkeypatch.setitem(os.environ, "GPUMEM_OTEL_REQUIRE_PAGE", required)
    if fails:
        with pytest.raises(RuntimeError, match=r"npm .* is not installed"):
            made.initialize("standard", {})
        assert said == []
        return
    made.initialize("editable" if target == "wheel" else "standard", {})
    (line,) = said
    assert not stale.exists()
    assert line.startswith("gpumem-otel is built without its page")
    assert "npm (Node.js 18 or newer) is not installed" in line


def test_a_wheel_has_the_pages_for_users(hook, tree, tools):
    for name in ("docs/yield.md", "docs/runbooks/leak.md", "docs/internals/hazards.md"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("text")
    app = type("App", (), {"display_warning": staticmethod(lambda line: None)})
    included = {}
    for target, version in (("wheel", "standard"), ("wheel", "editable"), ("sdist", "standard")):
        made = hook.CustomBuildHook(str(tree), {}, None, None, "", target, app)
        build_data = included.setdefault((target, version), {})
        made.initialize(version, build_data)
    pages = included.pop(("wheel", "standard"))["force_include"]
    assert set(pages.values()) == {
        "gpumem_otel/docs/yield.md",
        "gpumem_otel/docs/runbooks/leak.md",
    }
    assert all(Path(page).read_text() == "text" for page in pages)
    assert list(included.values()) == [{}, {}]
