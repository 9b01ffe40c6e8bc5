"""Types and bounds of every value that is read from an untrusted snapshot, checked before use.

Whole columns are checked at once, since a trace may have a million entries; the first wrong entry
is only looked for to name it.
"""

from __future__ import annotations

from itertools import chain
from operator import countOf
from typing import TYPE_CHECKING, Any

from gpumem_otel.errors import SnapshotError
from gpumem_otel.snapshot.torch_format import ROOT_KEYS, state_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.snapshot.torch_format import RawEvent, RawSegment

_INT64_MAX = 2**63 - 1
_MAX_DEVICES = 4096
# Addresses and pools become keys, and many larger numbers with equal hashes can be made. Pool ids
# are counters; torch never writes so many large ones.
_MAX_ADDRESS = 2**64
_LARGE_POOL_ID = 2**32
_MAX_LARGE_POOL_IDS = 1000
_KNOWN_STATES = frozenset(
    {"active_allocated", "active_pending_free", "active_awaiting_free", "inactive"}
)

# A shared stack costs nothing in a file and its full length each time it is walked. Real files
# hold each stack about once, and a frame takes at least two bytes there.
_FRAMES_PER_BYTE = 4
_FRAMES_FLOOR = 1_000_000

# events checked at a time: their columns fit the processor's cache
_PIECE = 1024

_INT = frozenset({int})
_TEXT = frozenset({str})
_LIST = frozenset({list, tuple})
_NONE = frozenset({type(None)})
_MAYBE_INT, _MAYBE_TEXT, _MAYBE_LIST = _INT | _NONE, _TEXT | _NONE, _LIST | _NONE

_SEGMENT = {
    "device": _INT,
    "blocks": _LIST,
    "frames": _MAYBE_LIST,
    "segment_pool_id": _MAYBE_LIST,
    "total_size": _MAYBE_INT,
}
_BLOCK = {
    "size": _INT,
    "requested_size": _MAYBE_INT,
    "state": _TEXT,
    "address": _MAYBE_INT,
    "frames": _MAYBE_LIST,
    "history": _MAYBE_LIST,
}
_HISTORY = {"real_size": _MAYBE_INT, "frames": _MAYBE_LIST}
_HOST_SEGMENT = {
    "size": _MAYBE_INT,
    "total_size": _MAYBE_INT,
    "address": _MAYBE_INT,
    "frames": _MAYBE_LIST,
}
_EVENT = {
    "action": _MAYBE_TEXT,
    "size": _MAYBE_INT,
    "addr": _MAYBE_INT,
    "time_us": _MAYBE_INT,
    "device_free": _MAYBE_INT,
    "frames": _MAYBE_LIST,
}
_SIZES = ("size", "requested_size", "real_size", "total_size")
_ADDRESSES = ("address", "addr")


class _InvalidError(Exception):
    """The wrong value, for a SnapshotError."""


def check(raw: object, source: str, size_bytes: int) -> None:
    """Refuse what cannot be read, or not in a time that fits its size.

    Pinned host memory that is not as torch 2.14 writes it is left out: the file is about the
    device.

    Args:
        raw: the root of a snapshot.
        source: name for messages.
        size_bytes: of the file, uncompressed.

    Raises:
        SnapshotError: names the value that is wrong.
    """
    most_frames = _FRAMES_FLOOR + _FRAMES_PER_BYTE * size_bytes
    try:
        _check_root({"segments": raw} if type(raw) is list else raw, most_frames)
    except _InvalidError as invalid:
        raise SnapshotError(source, f"not a readable memory snapshot: {invalid}") from None
    if isinstance(raw, dict) and "host_segments" in raw:
        try:
            table = _Table("entry of host_segments", _HOST_SEGMENT)
            table.add(_list_of_dicts(raw, "host_segments"))
            _count_frames(table.stacks, most_frames)
        except _InvalidError:
            raw["host_segments"] = ()


def _check_root(raw: object, most_frames: int) -> None:
    if type(raw) is not dict:
        raise _InvalidError(f"its root is a {type(raw).__name__}")
    if not ROOT_KEYS.intersection(raw):
        raise _InvalidError("it has neither 'segments' nor 'device_traces'")
    stacks = _check_segments(_list_of_dicts(raw, "segments"))
    _check_traces(raw, most_frames - _count_frames(stacks, most_frames))
    _list_of_dicts(raw, "external_annotations")
    settings = raw.get("allocator_settings")
    if settings is not None and type(settings) is not dict:
        raise _InvalidError(f"allocator_settings is a {type(settings).__name__}")


def _check_segments(segments: Sequence[dict[str, Any]]) -> list[Sequence[Any]]:
    """The stacks of segments and blocks."""
    table = _Table("segment", _SEGMENT)
    columns = table.add(segments)
    if any(not 0 <= device < _MAX_DEVICES for device in columns["device"]):
        raise _InvalidError(f"a device that is not between 0 and {_MAX_DEVICES - 1}")
    pools = [pool for pool in columns["segment_pool_id"] if pool is not None]
    if any([type(part) for part in pool] != [int, int] for pool in pools):
        raise _InvalidError("a segment_pool_id that is not two numbers")
    if sum(max(map(abs, pool)) >= _LARGE_POOL_ID for pool in pools) > _MAX_LARGE_POOL_IDS:
        raise _InvalidError("too many memory pools")
    _check_distinct(columns["blocks"], "two segments have the same list of blocks")
    blocks = _Table("block", _BLOCK)
    histories = blocks.add(list(chain.from_iterable(columns["blocks"])))["history"]
    history = _Table("history entry", _HISTORY)
    history.add([entries[0] for entries in histories if entries])
    return table.stacks + blocks.stacks + history.stacks


def _check_traces(raw: dict[str, Any], most_frames: int) -> None:
    traces = raw.get("device_traces")
    if traces is None:
        return
    if type(traces) not in _LIST:
        raise _InvalidError(f"device_traces is a {type(traces).__name__}")
    if len(traces) > _MAX_DEVICES:
        raise _InvalidError(f"traces of {len(traces)} devices")
    for trace in traces:
        if type(trace) not in _LIST:
            raise _InvalidError(f"a trace is a {type(trace).__name__}")
    _check_distinct(traces, "two devices have the same trace")
    table = _Table("event", _EVENT)
    for trace in traces:
        for start in range(0, len(trace), _PIECE):
            table.add(trace[start : start + _PIECE], start)
            most_frames -= _count_frames(table.stacks, most_frames)
            table.stacks.clear()


class _Table:
    """Checks entries of one kind.

    Attributes:
        stacks: those of all entries that have one.
    """

    def __init__(self, name: str, columns: dict[str, frozenset[type]]) -> None:
        self.stacks: list[Sequence[Any]] = []
        self._name = name
        self._columns = columns
        self._total_bytes = dict.fromkeys(_SIZES, 0)

    def add(self, entries: Sequence[dict[str, Any]], first: int = 0) -> dict[str, list[Any]]:
        """Check entries of which the first has this number; their columns, None for missing."""
        _check_dicts(entries, self._name, first)
        columns = {key: [entry.get(key) for entry in entries] for key in self._columns}
        for key, column in columns.items():
            if not self._columns[key].issuperset(map(type, column)):
                self._refuse(key, entries, first)
            if key in _SIZES:
                self._add_sizes(key, column)
            elif key in _ADDRESSES:
                addresses = list(filter(None, column))
                if (
                    addresses
                    and not -_MAX_ADDRESS <= min(addresses) <= max(addresses) <= _MAX_ADDRESS
                ):
                    raise _InvalidError(f"{key} of one {self._name} does not fit 64 bits")
        self.stacks += filter(None, columns["frames"])
        return columns

    def _add_sizes(self, key: str, column: list[int | None]) -> None:
        sizes = list(filter(None, column))
        if sizes and min(sizes) < 0:
            raise _InvalidError(f"{key} of one {self._name} is negative")
        self._total_bytes[key] += sum(sizes)
        if self._total_bytes[key] > _INT64_MAX:
            raise _InvalidError(f"the sum of {key} over all of its kind does not fit 64 bits")

    def _refuse(self, key: str, entries: Sequence[dict[str, Any]], first: int) -> None:
        for number, entry in enumerate(entries, first):
            if type(entry.get(key)) not in self._columns[key]:
                wrong = f"a {type(entry[key]).__name__}" if key in entry else "missing"
                raise _InvalidError(f"{key} of {self._name} {number} is {wrong}")


def _count_frames(stacks: Sequence[Sequence[Any]], most_frames: int) -> int:
    frames = sum(map(len, stacks))
    if frames > most_frames:
        raise _InvalidError("its stacks are longer than its size allows")
    if countOf(map(type, chain.from_iterable(stacks)), dict) != frames:
        raise _InvalidError("a frame that is no dict")
    return frames


def _list_of_dicts(raw: dict[str, Any], key: str) -> Sequence[dict[str, Any]]:
    entries: Sequence[dict[str, Any]] | None = raw.get(key)
    if entries is None:
        return ()
    if type(entries) not in _LIST:
        raise _InvalidError(f"{key} is a {type(entries).__name__}")
    _check_dicts(entries, f"entry of {key}")
    return entries


def _check_dicts(entries: Sequence[object], name: str, first: int = 0) -> None:
    if countOf(map(type, entries), dict) != len(entries):
        for number, entry in enumerate(entries, first):
            if type(entry) is not dict:
                raise _InvalidError(f"{name} {number} is a {type(entry).__name__}")


def _check_distinct(lists: Sequence[Sequence[Any]], message: str) -> None:
    filled = [id(entries) for entries in lists if entries]
    if len(set(filled)) != len(filled):
        raise _InvalidError(message)


def warnings_for(
    segments: Sequence[RawSegment], traces: Sequence[Sequence[RawEvent]]
) -> tuple[str, ...]:
    """What a reader of the numbers should know, one sentence each."""
    warnings: list[str] = []
    blocks = [block for segment in segments for block in segment["blocks"]]
    stacks = any(block.get("frames") or block.get("history") for block in blocks)
    if segments and not any(traces) and not stacks:
        warnings.append(
            "no history recorded: no block carries a stack and no event was kept; call "
            "torch.cuda.memory._record_memory_history() before the memory is allocated"
        )
    unequal = 0
    for segment in segments:
        size = segment.get("total_size")
        unequal += size is not None and size != sum(block["size"] for block in segment["blocks"])
    if unequal:
        warnings.append(
            f"{unequal} of {len(segments)} segments differ in size from the sum of their blocks; "
            "the larger of the two is counted as reserved"
        )
    unknown = sorted({block["state"] for block in blocks} - _KNOWN_STATES)
    warnings += [f"block state {word[:40]!r} is read as {state_of(word).value}" for word in unknown]
    for device, trace in enumerate(traces):
        unmatched = _unmatched_frees(trace)
        if unmatched:
            warnings.append(
                f"device {device}: {unmatched} frees of memory whose allocation is not in the "
                "trace: recording began after it, or its ring was full"
            )
    return tuple(warnings)


def _unmatched_frees(trace: Sequence[RawEvent]) -> int:
    """How many allocations are freed that are not in the trace."""
    if len(trace) < 2:  # noqa: PLR2004 (what record mode `state` leaves is no trace)
        return 0
    actions = {event.get("action") for event in trace}
    # each free is requested first, then completed; some writers keep the second alone
    free = "free_requested" if "free_requested" in actions else "free_completed"
    live: set[object] = set()
    unmatched = 0
    for event in trace:
        action = event.get("action")
        if action == "alloc":
            live.add(event.get("addr"))
        elif action == free:
            address = event.get("addr")
            unmatched += address not in live
            live.discard(address)
    return unmatched
