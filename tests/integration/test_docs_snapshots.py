"""What docs/snapshots.md and docs/out-of-memory.md show is what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.recordings import DATA

from gpumem_otel.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / name for name in ("snapshots.md", "out-of-memory.md")]
SHOWN = re.compile(
    r"^    \$ gpumem-otel ((?:stats|top|segments|trace|compare)\b.*)\n((?:    .*\n)+)", re.MULTILINE
)
BLOCKS = [block for page in PAGES for block in SHOWN.findall(page.read_text())]


def test_each_verb_is_shown():
    assert {command.split()[0] for command, _ in BLOCKS} == {
        "stats", "top", "segments", "trace", "compare",
    }  # fmt: skip


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_shown_is_printed(capsys, monkeypatch, command, shown):
    """GIVEN the output on the page WHEN its command runs THEN the lines come in that order.

    A line of three dots stands for any number of lines.
    """
    monkeypatch.chdir(DATA)
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    lines = [re.escape(line.removeprefix("    ")) for line in shown.splitlines()]
    pattern = "\n".join(lines).replace("\\.\\.\\.\n", "(?:.*\n)*?") + "\n"
    pattern = pattern.removesuffix("\\.\\.\\.\n") + "(?:.*\n)*?" * (lines[-1] == "\\.\\.\\.")
    assert re.fullmatch(pattern, printed), printed
