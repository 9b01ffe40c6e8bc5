"""Annotated ranges of time: `external_annotations` of a snapshot (torch 2.5 and newer).

Format: `[{name, stage: START or END, device, time_us}]`, START and END in pairs, nested, from
`record_function` under `_record_memory_history(global_record_annotations=True)`. Real files have
a lone END too.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpumem_otel.core.model import Annotation

__all__ = ["Spans"]


_MAX_DEPTH = 256
"""Real ranges nest ten deep; a start beyond this is left out."""


class Spans:
    """The ranges of one device.

    Attributes:
        ranges: (name, start_us, end_us), in order of their start; end is None where it is not in
            the file.
    """

    def __init__(self, annotations: Iterable[Annotation], device: int) -> None:
        """Pair starts with ends: an end closes the innermost open range of its name.

        Args:
            annotations: of all devices, in any order.
            device: whose.
        """
        self.ranges: list[tuple[str, int, int | None]] = []
        self._times: list[int] = []
        self._open: list[tuple[str, ...]] = []
        opened: list[tuple[str, int]] = []
        for mark in sorted((a for a in annotations if a.device == device), key=_time):
            if mark.stage == "START":
                if len(opened) == _MAX_DEPTH:
                    continue
                opened.append((mark.name, len(self.ranges)))
                self.ranges.append((mark.name, mark.time_us, None))
            else:
                index = _last(opened, mark.name)
                if index is None:
                    continue
                _, place = opened.pop(index)
                self.ranges[place] = (mark.name, self.ranges[place][1], mark.time_us)
            self._times.append(mark.time_us)
            self._open.append(tuple(name for name, _ in opened))

    def at(self, time_us: int) -> tuple[str, ...]:
        """Names of the ranges that are open at a time, outermost first.

        A range holds its start and not its end.
        """
        index = bisect_right(self._times, time_us) - 1
        return self._open[index] if index >= 0 else ()


def _time(mark: Annotation) -> int:
    return mark.time_us


def _last(opened: list[tuple[str, int]], name: str) -> int | None:
    for index in range(len(opened) - 1, -1, -1):
        if opened[index][0] == name:
            return index
    return None
