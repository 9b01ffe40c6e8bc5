"""Find words that a reader of plain English does not expect, and name what to write instead.

    python tools/words.py              the package and the docs
    python tools/words.py PATH...      these files and folders alone

Prints `file:line: word -> replacement` for each and exits with 1 if there is one. In Markdown, code
and output (indented or fenced blocks, inline code) are left out: their words come from the package.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
CHECKED = ("gpumem_otel", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "helm")

REPLACEMENTS = {
    r"can not": "cannot",
    r"for ever": "forever",
    r"likewise": "also, or the thing itself",
    r"books": "accounting, totals",
    r"keepers?": "helper",
    r"ledgers?": "reservations",
    r"headstart": "prefetch",
    r"docket": "operations",
    r"seams?": "protocol, dependency",
    r"stillness": "quiescence",
    r"bystanders?": "other threads",
    r"strangers?": "unknown, untrusted",
    r"nobody": "none, no thread, unknown",
    r"told": "reported, known, distinguished",
    r"speaks": "uses, is about",
    r"(?:stands?|stood|standing) still": "is stopped, stays the same",
    r"(?:stands?|stood) in line": "is queued",
    r"(?:holds?|held)(?: \w+){0,2} off": "prevents",
    r"needed (?:is|are)": "you need",
    r"doors?": "way, entry point",
    r"let be": "left alone",
}
"""Regular expression of a word -> what to write instead."""

PATTERN = re.compile(
    "|".join(rf"\b(?P<w{number}>{word})\b" for number, word in enumerate(REPLACEMENTS)),
    re.IGNORECASE,
)
MEANT = list(REPLACEMENTS.values())


def prose(text: str) -> Iterator[str]:
    """The lines of a Markdown page, those of code and output empty."""
    fenced = False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        code = fence or fenced or line.startswith("    ")
        yield "" if code else re.sub(r"`[^`]*`", "``", line)


def faults(path: Path) -> list[str]:
    """One line per word of a file that has a replacement."""
    text = path.read_text(encoding="utf-8")
    lines = prose(text) if path.suffix == ".md" else text.splitlines()
    return [
        f"{path}:{number}: {match.group()} -> {MEANT[int((match.lastgroup or 'w0')[1:])]}"
        for number, line in enumerate(lines, 1)
        for match in PATTERN.finditer(line)
    ]


def files(path: Path) -> list[Path]:
    """A file itself; of a folder its Python files and Markdown pages."""
    if path.is_file():
        return [path]
    return sorted(each for each in path.rglob("*") if each.suffix in {".py", ".md"})


def main(paths: list[str]) -> int:
    """0 if no such word is there."""
    chosen = [Path(path) for path in paths] or [ROOT / name for name in CHECKED]
    found = [fault for path in chosen for file in files(path) for fault in faults(file)]
    for fault in found:
        sys.stderr.write(fault.removeprefix(f"{ROOT}/") + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
