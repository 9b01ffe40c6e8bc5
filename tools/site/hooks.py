"""Hooks of mkdocs: files of the repository that pages link to come with the site.

A page of docs/ may link to any file of the checkout (`../deploy/...`), since that is right where
the checkout is browsed. In the site such a file lies below `files/`, Markdown as a page, and the
link leads there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(?P<target>[^)#\s]+)(?=[)#])")


def _outside(page: str, target: str) -> str | None:
    """Path in the checkout of a link that leads out of docs/; None for all others."""
    if "://" in target:
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") or not (ROOT / path).is_file() else path


def on_files(files: Files, config: Any) -> Files:
    """Take in what pages link to."""
    wanted = {
        path
        for file in files.documentation_pages()
        for found in LINK.finditer(Path(file.abs_src_path).read_text(encoding="utf-8"))
        if (path := _outside(file.src_uri, found["target"]))
    }
    for path in sorted(wanted):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Let those links lead there."""
    here = page.file.src_uri
    if here.startswith("files/"):
        # links of a page from elsewhere that the site does not have stay words
        return re.sub(r"\[([^\]]+)\]\((?![a-z]+://|#)[^)]+\)", r"\1", markdown)

    def changed(found: re.Match[str]) -> str:
        path = _outside(here, found["target"])
        if path is None:
            return found["target"]
        return posixpath.relpath(f"files/{path}", posixpath.dirname(here))

    return LINK.sub(changed, markdown)
