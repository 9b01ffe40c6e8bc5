"""The tools behind `make docs-site` and `make check-deploy`: what they find, and let be."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def tool(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "tools" / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WHOLE = {
    "index.html": '<a id="top" href="sub/page.html#there">x</a><img src="a.png">'
    '<a href="https://example.com/nowhere">people</a><a href="#top">up</a><a href="sub/">s</a>',
    "sub/page.html": '<h1 id="there">x</h1><a href="../index.html">back</a>',
    "sub/index.html": "<p>x</p>",
    "a.png": "",
}


@pytest.fixture
def site(tmp_path):
    def make(**changed: str) -> list[str]:
        files = {**WHOLE, **{name.replace("__", "/") + ".html": v for name, v in changed.items()}}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        done = subprocess.run(
            [sys.executable, ROOT / "tools" / "site" / "check.py", tmp_path],
            capture_output=True,
            text=True,
            timeout=60,
        )
        lines = done.stderr.splitlines()
        assert done.returncode == int(bool(lines))
        return lines

    return make


def test_a_site_whose_links_lead_somewhere(site):
    assert site() == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('<a href="gone.html">x</a>', "gone.html: there is no such file"),
        ('<a href="page.html#gone">x</a>', "page.html#gone: there is no such anchor"),
        ('<a href="#gone">x</a>', "#gone: there is no such anchor"),
        ('<img src="../b.png">', "../b.png: there is no such file"),
        ('<a href="../../elsewhere">x</a>', "../../elsewhere: there is no such file"),
        ('<script src="https://cdn.example.com/a.js"></script>', "loads https://cdn.example.com"),
        ('<link rel="stylesheet" href="//fonts.example.com/x">', "loads //fonts.example.com/x"),
    ],
)
def test_what_is_wrong_with_a_page_is_said(site, text, fault):
    (line,) = site(sub__other=text)
    assert line.startswith("sub/other.html: ")
    assert fault in line


def test_a_folder_without_a_page_is_no_site(tmp_path):
    assert tool("site/check.py").faults(tmp_path) == [f"{tmp_path}: no page in it"]


def test_the_table_has_the_pinned_versions_and_each_row_once():
    said = tool("said.py")
    row = {"tool": "Helm", "asked": "`lint`", "answer": "fine"}
    other = {"tool": "promtool", "asked": "check", "answer": "nothing"}
    lines = said.table([json.dumps(one) for one in (row, other, row)]).splitlines()
    assert lines[1:3] == ["| tool | question | answer |", "| --- | --- | --- |"]
    first, second = lines[3:5]
    assert lines[5:] == [""]
    assert first.startswith("| promtool 3.")
    assert second == f"| Helm {said.version('Helm')} | `lint` | fine |"


def test_every_tool_that_the_tests_name_is_pinned():
    said = tool("said.py")
    assert all(said.version(name)[0].isdigit() for name in said.TOOLS)
    page = (ROOT / "docs" / "internals" / "checked.md").read_text()
    rows = [line for line in page.partition("<!-- end -->")[0].splitlines() if line[:2] == "| "]
    told = {line.split(" | ")[0][2:].rsplit(" ", 1)[0] for line in rows[2:]}
    assert told == set(said.TOOLS)


def test_the_menu_has_every_page_once():
    """mkdocs says what is missing from it; not what is in it twice."""

    def leaves(value):
        if isinstance(value, str):
            yield value
        else:
            for one in value.values() if isinstance(value, dict) else value:
                yield from leaves(one)

    text = (ROOT / "mkdocs.yml").read_text()
    menu = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    found = list(leaves(menu))
    assert len(found) == len(set(found))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert pages <= set(found)
