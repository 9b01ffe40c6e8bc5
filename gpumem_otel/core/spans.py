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


class Spans:
    """The ranges of one device.

    Attributes:
        ranges: (name, start_us, end_us), in order of their start; end is None where it is not in
            the file.
    """

    def __init__(self, annotations: Iterable[Annotation]) -> None:
        """Pair starts with ends: an end closes the innermost open range of its name.

        However deep they nest, a mark takes a constant time and keeps two numbers.

        Args:
            annotations: of the device, in any order.
        """
        self.ranges: list[tuple[str, int, int | None]] = []
        self._times: list[int] = []
        self._innermost: list[int] = []  # from each mark on; -1: none
        opened: list[int] = []  # some of them ended before what they hold did
        by_name: dict[str, list[int]] = {}
        for mark in sorted(annotations, key=_time):
            of_name = by_name.setdefault(mark.name, [])
            if mark.stage == "START":
                opened.append(len(self.ranges))
                of_name.append(len(self.ranges))
                self.ranges.append((mark.name, mark.time_us, None))
            elif of_name:
                place = of_name.pop()
                self.ranges[place] = (mark.name, self.ranges[place][1], mark.time_us)
                while opened and self.ranges[opened[-1]][2] is not None:
                    opened.pop()
            else:
                continue
            self._times.append(mark.time_us)
            self._innermost.append(opened[-1] if opened else -1)

    def innermost(self, time_us: int) -> str | None:
        """Name of the range that is open at a time and began last; None: no range is.

        A range holds its start and not its end.
        """
        index = bisect_right(self._times, time_us) - 1
        place = self._innermost[index] if index >= 0 else -1
        return self.ranges[place][0] if place >= 0 else None


def _time(mark: Annotation) -> int:
    return mark.time_us
