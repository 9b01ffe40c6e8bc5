"""Tables for people, in plain text. Bytes become GiB only here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
# C0, C1, DEL, and what turns or hides text: a name must not drive the reader's terminal
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2064\u2066-\u2069\ufeff]"
)


def human_bytes(size_bytes: int) -> str:
    """Bytes in the largest unit of 1024 that they fill, rounded half up: "75.8 GiB"."""
    sign = "-" if size_bytes < 0 else ""
    size = abs(size_bytes)
    if size < 1024:  # noqa: PLR2004 (the unit)
        return f"{sign}{size} B"
    power, tenths = 0, 10240
    while tenths >= 10240 and power < len(_UNITS):  # noqa: PLR2004 (1024.0 is 1 of the next)
        power += 1
        scale = 1024**power
        # whole numbers throughout: a float loses bytes beyond 8 PiB and rounds halves to even
        tenths = (size * 20 + scale) // (2 * scale)
    return f"{sign}{tenths // 10}.{tenths % 10} {_UNITS[power - 1]}"


def by_size(sizes: Mapping[str, int]) -> str:
    """Names with their bytes, the largest first: "gradient 4.0 GiB, parameter 2.0 GiB"."""
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {human_bytes(size)}" for name, size in ordered)


def percent(part: int, whole: int) -> str:
    """Share in percent with one digit; "-" where there is no whole."""
    if whole <= 0:
        return "-"
    return f"{100 * part / whole:.1f}%"


def printable(text: str) -> str:
    """The text without anything that a terminal would act on."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, left: frozenset[int]) -> str:
    """Columns under their headers, two blanks apart.

    Args:
        headers: one per column.
        rows: cells as text.
        left: columns aligned to the left; the others are numbers, aligned to the right.
    """
    lines = [list(headers), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        + "\n"
        for line in lines
    )
