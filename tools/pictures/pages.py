"""Make the pictures of our own page in docs/img: `make pictures`.

`page-flamegraph.png` and `page-timeline.png`, of recordings in tests/data. Needs chromium and a
built page. (`page-segments.png` and `page-difference.png` show a click, and are taken by hand.)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from make import IMAGES, ROOT, taken

DATA = ROOT / "tests" / "data"
PAGES = (
    ("page-flamegraph", "flamegraph", "h200-torch2.11-compiled-training.pickle.gz", "--kind=peak"),
    ("page-timeline", "timeline", "h200-torch2.11-oom.pickle.gz"),
)


def main() -> None:
    """Write each page and take its picture."""
    program = str(Path(sys.executable).with_name("gpumem-otel"))
    with tempfile.TemporaryDirectory() as folder:
        for name, verb, recording, *options in PAGES:
            page = Path(folder) / f"{name}.html"
            command = [program, verb, recording, "-o", str(page), *options]
            subprocess.run(command, check=True, cwd=DATA)  # noqa: S603
            taken(page, IMAGES / f"{name}.png", 1280, 800)


if __name__ == "__main__":
    main()
