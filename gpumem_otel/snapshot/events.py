"""A trace as lines: which of its events are asked for, and what each of them says.

One pass over torch's dicts, without an object per event that is not asked for: a trace may have a
million.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gpumem_otel.snapshot.torch_format import RawReader, frames_of, maybe_whole, pool_of, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gpumem_otel.snapshot.torch_format import RawEvent, RawFrame, RawSegment

ACTIONS: dict[str, tuple[str, ...]] = {
    "free": ("free_requested", "free_completed"),
    "segment": ("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
}
"""Words that stand for several actions."""
KNOWN_ACTIONS = frozenset(
    {
        "alloc",
        "oom",
        "snapshot",
        "annotate",
        *(word for words in ACTIONS.values() for word in words),
    }
)
"""Torch's words, of `TraceEntry` in `c10/cuda/CUDACachingAllocator.h`, up to torch 2.15."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGTP]?)(i?)(B?)\s*", re.IGNORECASE)
_NO_CONTEXT = "N/A"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events are asked for; None: any.

    Attributes:
        min_size_bytes, max_size_bytes: both ends belong to the range.
        stack: found in the name or file name of a frame of the event.
        since_us, until_us: microseconds since 1970, the end excluded; events without a time are
            left out where either is set.
        address: of the event itself, or anywhere in the memory of the event.
        actions: in torch's words.
    """

    min_size_bytes: int | None = None
    max_size_bytes: int | None = None
    stack: re.Pattern[str] | None = None
    since_us: int | None = None
    until_us: int | None = None
    address: int | None = None
    actions: frozenset[str] | None = None


class EventLine(NamedTuple):
    """An event that was asked for.

    Attributes:
        number: place in the trace, from 1, as moments are counted: see `replay`.
        unseen: it frees memory whose allocation is not in the trace.
        frames: as recorded, never to be changed.
    """

    number: int
    action: str
    size_bytes: int
    address: int | None
    stream: int
    pool_id: tuple[int, int] | None
    time_us: int | None
    device_free_bytes: int | None
    compile_context: str
    user_metadata: str
    unseen: bool
    frames: Sequence[RawFrame]


class _FrameSearch:
    """Whether a pattern is in a stack; each distinct frame is searched once."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._search = pattern.search
        self._text = RawReader().text
        self._known: dict[int, tuple[RawFrame, bool]] = {}

    def __call__(self, frames: Sequence[RawFrame]) -> bool:
        known, text = self._known, self._text
        for frame in frames:
            entry = known.get(id(frame))
            if entry is None:
                name, file = text(frame.get("name")), text(frame.get("filename"))
                found = self._search(name) is not None or self._search(file) is not None
                entry = known[id(frame)] = (frame, found)
            if entry[1]:
                return True
        return False


def pick(events: Sequence[RawEvent], wanted: EventFilter) -> Iterator[EventLine]:
    """The events of a trace that are asked for, in its order.

    Args:
        events: the trace of one device, oldest first.
        wanted: see there.
    """
    checks, text = _checks(wanted), RawReader().text
    # of each allocation that was seen and not freed to the end: whether its free was requested
    requested: dict[object, bool] = {}
    for index, event in enumerate(events, 1):
        action = event.get("action")
        unseen = False
        if action == "alloc":
            requested[event.get("addr")] = False
        elif action == "free_requested":
            address = event.get("addr")
            unseen = requested.get(address, True)
            if not unseen:
                requested[address] = True
        elif action == "free_completed":
            unseen = requested.pop(event.get("addr"), None) is None
        if not checks or all(check(event) for check in checks):
            yield _line(index, event, unseen, text)


def first_time_us(events: Sequence[RawEvent]) -> int | None:
    """The time of the first event that has one; None before torch 2.2."""
    return next((time for event in events if (time := event.get("time_us")) is not None), None)


def recorded_before(segments: Iterable[RawSegment], events: Sequence[RawEvent]) -> int:
    """Live blocks that carry a stack, and whose allocation is not in the trace.

    So recording was on then, and the event is lost: the ring was full, or was cleared.

    Args:
        segments: of a device, as torch wrote them.
        events: the trace of the device.
    """
    seen = {event.get("addr") for event in events if event.get("action") == "alloc"}
    return sum(
        block["state"] == "active_allocated"
        and bool(frames_of(block))
        and (address := block.get("address")) is not None
        and address not in seen
        for segment in segments
        for block in segment["blocks"]
    )


def size_from_text(value: str) -> int:
    """Bytes from "4096", "10MiB" or "10M" (1024 each) and "10MB" (1000 each).

    Raises:
        ValueError: it is none of these.
    """
    match = _SIZE.fullmatch(value)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{value!r} is no size: write it as 4096, 10MiB or 1.5GB")
    number, letter, binary, byte = match[1], match[2].upper(), match[3], match[4]
    unit = 1000 if byte and not binary else 1024
    power = " KMGTP".index(letter) if letter else 0
    whole_part, _, fraction = number.partition(".")
    scale = int(unit**power)
    return int(whole_part or 0) * scale + int(fraction or 0) * scale // int(10 ** len(fraction))


def _checks(wanted: EventFilter) -> list[Callable[[RawEvent], bool]]:
    """The cheap ones first."""
    checks: list[Callable[[RawEvent], bool]] = []
    low, high = wanted.min_size_bytes, wanted.max_size_bytes
    since, until, inside = wanted.since_us, wanted.until_us, wanted.address
    if (actions := wanted.actions) is not None:
        checks.append(lambda event: event.get("action") in actions)
    if low is not None:
        checks.append(lambda event: (event.get("size") or 0) >= low)
    if high is not None:
        checks.append(lambda event: (event.get("size") or 0) <= high)
    if since is not None:
        checks.append(lambda event: (time := event.get("time_us")) is not None and time >= since)
    if until is not None:
        checks.append(lambda event: (time := event.get("time_us")) is not None and time < until)
    if inside is not None:
        checks.append(lambda event: _holds(event, inside))
    if wanted.stack is not None:
        search = _FrameSearch(wanted.stack)
        checks.append(lambda event: search(event.get("frames") or ()))
    return checks


def _holds(event: RawEvent, address: int) -> bool:
    # a `snapshot` entry has address 0 and a size that belongs to nothing
    start = event.get("addr")
    if start is None or event.get("action") == "snapshot":
        return False
    return start <= address < start + max(1, event.get("size") or 0)


def _line(index: int, event: RawEvent, unseen: bool, text: Callable[[object], str]) -> EventLine:
    context, metadata = event.get("compile_context"), event.get("user_metadata")
    pool = event.get("pool_id")
    return EventLine(
        index,
        text(event.get("action")),
        event.get("size") or 0,
        event.get("addr"),
        whole(event.get("stream")),
        pool_of(pool) if pool else None,
        maybe_whole(event.get("time_us")),
        maybe_whole(event.get("device_free")),
        text(context) if context and context != _NO_CONTEXT else "",
        text(metadata) if metadata else "",
        unseen,
        event.get("frames") or (),
    )
