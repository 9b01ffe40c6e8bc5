"""Hooks of mkdocs: files outside docs/ that pages link to become part of the site.

A page of docs/ may link to any file of the checkout (`../deploy/...`), which works while browsing
the checkout. In the site such a file is below `files/`, Markdown as a page, and the link leads
there.
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
    """Add the files that pages link to."""
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
    """Change the links to these files."""
    here = page.file.src_uri
    if here.startswith("files/"):
        # other links of such a page are not in the site: keep their text
        return re.sub(r"\[([^\]]+)\]\((?![a-z]+://|#)[^)]+\)", r"\1", markdown)

    def replaced(found: re.Match[str]) -> str:
        path = _outside(here, found["target"])
        if path is None:
            return found["target"]
        return posixpath.relpath(f"files/{path}", posixpath.dirname(here))

    return LINK.sub(replaced, markdown)
