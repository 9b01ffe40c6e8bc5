"""tools/words.py: which words it finds, where it looks, and what it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def words(*paths: Path) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "words.py", *paths],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("line", "word", "instead"),
    [
        ("# it can not be read", "can not", "cannot"),
        ('"""Likewise."""', "Likewise", "also"),
        ("the books close", "books", "accounting"),
        ("what holds it off", "holds it off", "prevents"),
        ("nobody knows", "nobody", "unknown"),
        ("Needed are git and make", "Needed are", "you need"),
        ("a file of a stranger", "stranger", "untrusted"),
    ],
)
def test_a_word_is_named_with_its_place_and_its_replacement(tmp_path, line, word, instead):
    path = tmp_path / "module.py"
    path.write_text(f"first = 1\n{line}\n")
    code, (fault,) = words(path)
    assert code == 1
    assert fault.startswith(f"{path}:2: {word} -> ")
    assert instead in fault


@pytest.mark.parametrize("line", ["it cannot be read", "notebooks", "a_keeper_of", "you need git"])
def test_other_words_stay(tmp_path, line):
    path = tmp_path / "module.py"
    path.write_text(f"# {line}\n")
    assert words(path) == (0, [])


def test_code_and_output_in_a_page_are_not_prose(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "The `books` here.\n\n    it can not be loaded\n\n```\nnobody\n```\n\nbooks, keeper\n"
    )
    code, found = words(tmp_path)
    assert code == 1
    assert [line.partition(" -> ")[0] for line in found] == [
        f"{page}:9: books",
        f"{page}:9: keeper",
    ]


def test_pages_that_are_written_by_hand_are_plain():
    generated = {"configuration.md", "metrics.md", "panels.md"}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
    assert words(*[page for page in pages if page.name not in generated]) == (0, [])
