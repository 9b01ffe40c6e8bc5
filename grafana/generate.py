"""Write the dashboards as JSON, and their tables in docs/internals/panels.md.

    python grafana/generate.py            write
    python grafana/generate.py --check    exit 1 with one line per file that is not current

Needs the extra `dashboards` (the Grafana Foundation SDK, Python 3.11 or newer).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from boards import exporter, fleet, job, page

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "panels.md"


def wanted() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    boards = [made.board().json() for made in (job, fleet, exporter)]
    files = {
        ROOT / "grafana" / "dashboards" / f"{board['uid']}.json": json.dumps(board, indent=2) + "\n"
        for board in boards
    }
    return {**files, PAGE: page.with_tables(PAGE.read_text(), boards)}


def main() -> int:
    """0 where all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [
        (path, text)
        for path, text in wanted().items()
        if not path.exists() or path.read_text() != text
    ]
    for path, text in stale:
        if check:
            sys.stderr.write(f"{path.relative_to(ROOT)} is not current: run `make dashboards`\n")
        else:
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
