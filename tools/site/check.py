"""Check a built site: `python tools/site/check.py build/site`; one line per fault, exit 1.

Every link, picture, script and style of every page must lead to a file of the site and to an
existing anchor; nothing may be loaded from another host. Links to other hosts are not checked.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that a browser loads by itself."""


class Page(HTMLParser):
    """The links and anchors of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See `HTMLParser`."""
        given = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        if tag == "a" and (target := given.get("href")):
            self.links.append(target)
        if (target := given.get(LOADED.get(tag, ""))) and given.get("rel") != "canonical":
            self.loaded.append(target)


def faults(site: Path) -> list[str]:
    """The faults of the pages of a site."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: no page in it"]
    for path, page in pages.items():
        where = path.relative_to(site)
        elsewhere = [target for target in page.loaded if urlsplit(target).netloc]
        found += [f"{where}: loads {target} from another host" for target in elsewhere]
        for target in page.links + page.loaded:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue  # another host; and 404.html is shown at any address
            to = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            to = to / "index.html" if to.is_dir() else to
            if not to.is_file() or site.resolve() not in to.resolve().parents:
                found.append(f"{where}: {target}: there is no such file")
            elif parts.fragment and to.suffix == ".html":
                there = pages[next(one for one in pages if one.resolve() == to.resolve())]
                if unquote(parts.fragment) not in there.anchors | {"__top"}:
                    found.append(f"{where}: {target}: there is no such anchor")
    return found


def main() -> int:
    """See the module."""
    problems = faults(Path(sys.argv[1]))
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
