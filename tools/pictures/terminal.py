"""What a program wrote to a terminal, as an HTML page: `python terminal.py COMMAND... > page.html`.

The command runs in a pseudo terminal; the page shows its screen at the end, everything that
scrolled away included.
"""

from __future__ import annotations

import html
import os
import pty
import re
import struct
import sys
import termios
from fcntl import ioctl

COLUMNS, ROWS = 104, 60
_TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\r|\n|[^\x1b\r\n]+")


def run(command: list[str]) -> str:
    """All that it wrote."""
    pid, terminal = pty.fork()
    if pid == 0:
        size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)
        ioctl(1, termios.TIOCSWINSZ, size)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execvp(command[0], command)  # noqa: S606 - what we were asked to show
    written = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # its other end is closed
            break
        if not piece:
            break
        written += piece
    os.waitpid(pid, 0)
    return written.decode(errors="replace")


def screen(written: str) -> list[str]:
    """The lines at the end, after all movements of the cursor; colours are left out."""
    lines, row, column = [""], 0, 0
    for found in _TOKEN.finditer(written):
        text, (argument, action) = found.group(), found.groups()
        if text == "\r":
            column = 0
        elif text == "\n":
            row, column = row + 1, 0
        elif action == "A":
            row = max(row - int(argument or 1), 0)
        elif action == "K":
            lines[row] = "" if argument == "2" else lines[row][:column]
        elif action is None and not text.startswith("\x1b"):
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
        while row >= len(lines):
            lines.append("")
    return [line.rstrip() for line in lines]


def main() -> None:
    """See the module."""
    command = sys.argv[1:]
    lines = [f"$ {os.path.basename(command[0])} {' '.join(command[1:])}"]  # noqa: PTH119
    lines += screen(run(command))
    text = html.escape("\n".join(lines).rstrip())
    sys.stdout.write(
        "<!doctype html><meta charset=utf-8><style>body{margin:0;background:#14181d}"
        "pre{margin:0;padding:18px 22px;color:#d7dde4;font:14px/1.25 'DejaVu Sans Mono',monospace}"
        f"</style><body data-height={int(17.5 * text.count(chr(10)) + 60)}><pre>{text}</pre>\n"
    )


if __name__ == "__main__":
    main()
