"""What a real tool said in a test, for the table of docs/internals/checked.md.

`make check-deploy` names a file in GPUMEM_SAID; tools/said.py makes the table of it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


def said(tool: str, asked: str, answer: str) -> None:
    """Note it, after the test has found it right.

    Args:
        tool: name of the program, as tools/said.py knows it.
        asked: what was done with which of our files.
        answer: the tool's own words, or what was seen of it; the same in each run.
    """
    path = os.environ.get("GPUMEM_SAID")
    if path:
        line = json.dumps({"tool": tool, "asked": asked, "answer": answer})
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
