"""Snapshots of strangers: types and bounds of all that is read, before anything is counted.

Columns are checked at once rather than entries one by one (a trace may have a million); the
first entry that is wrong is looked for only to name it.
"""

from __future__ import annotations

from itertools import chain
from operator import countOf
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumem_otel.core.rawform import ROOT_KEYS, state_of
from gpumem_otel.errors import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpumem_otel.core.rawform import RawEvent, RawSegment

__all__ = ["check", "warnings_for"]

_INT64_MAX = 2**63 - 1
_MAX_DEVICES = 4096
# Addresses and pools become keys, and of larger numbers many can be made that hash alike. Pool
# ids are counters; so many large ones are nothing that torch made.
_MAX_ADDRESS = 2**64
_LARGE_POOL_ID = 2**32
_MAX_LARGE_POOL_IDS = 1000
_KNOWN_STATES = frozenset(
    {"active_allocated", "active_pending_free", "active_awaiting_free", "inactive"}
)

# A stack that is shared costs nothing in a file and its full length each time it is walked. Real
# files hold each stack about once, so that no frame of it takes less than two bytes there.
_FRAMES_PER_BYTE = 4
_FRAMES_FLOOR = 1_000_000

_PIECE = 1024

_Kinds = frozenset[type]

_INT: _Kinds = frozenset({int})
_MAYBE_INT: _Kinds = frozenset({int, type(None)})
_TEXT: _Kinds = frozenset({str})
_MAYBE_TEXT: _Kinds = frozenset({str, type(None)})
_LIST: _Kinds = frozenset({list, tuple})
_MAYBE_LIST: _Kinds = frozenset({list, tuple, type(None)})
_DICT: _Kinds = frozenset({dict})
_MAYBE_DICT: _Kinds = frozenset({dict, type(None)})


class _What(NamedTuple):
    """What the entries are, for messages, and the number of the first of them."""

    name: str
    first: int = 0


class _Wrong(Exception):  # noqa: N818 (internal: leaves this module as a SnapshotError)
    """What is wrong."""


def check(raw: object, source: str, size_bytes: int) -> None:
    """Refuse what can not be read, or not in a time that fits its size.

    Pinned host memory is left out where it is not as torch 2.14 writes it: the file is about the
    device.

    Args:
        raw: the root of a snapshot.
        source: name for messages.
        size_bytes: of the file, uncompressed.

    Raises:
        SnapshotError: says which value is wrong.
    """
    most_frames = _FRAMES_FLOOR + _FRAMES_PER_BYTE * size_bytes
    try:
        _check(raw, most_frames)
    except _Wrong as wrong:
        raise SnapshotError(source, f"not a readable memory snapshot: {wrong}") from None
    if isinstance(raw, dict) and "host_segments" in raw:
        try:
            _check_host_segments(_list_of_dicts(raw, "host_segments"), most_frames)
        except _Wrong:
            raw["host_segments"] = ()


def _check(raw: object, most_frames: int) -> None:
    if type(raw) is list:
        raw = {"segments": raw}
    if type(raw) is not dict:
        raise _Wrong(f"its root is a {type(raw).__name__}")
    if not ROOT_KEYS.intersection(raw):
        raise _Wrong("it has neither 'segments' nor 'device_traces'")
    stacks: list[Sequence[Any]] = []
    _check_segments(_list_of_dicts(raw, "segments"), stacks)
    _check_traces(raw, most_frames - _check_stacks(stacks, most_frames))
    _list_of_dicts(raw, "external_annotations")
    settings = raw.get("allocator_settings")
    if type(settings) not in _MAYBE_DICT:
        raise _Wrong(f"allocator_settings is a {type(settings).__name__}")


def _check_segments(segments: Sequence[dict[str, Any]], stacks: list[Sequence[Any]]) -> None:
    _kinds(segments, "device", _INT, _What("segment"))
    _kinds(segments, "blocks", _LIST, _What("segment"))
    _kinds(segments, "frames", _MAYBE_LIST, _What("segment"))
    _kinds(segments, "segment_pool_id", _MAYBE_LIST, _What("segment"))
    _sizes(segments, "total_size", _MAYBE_INT, _What("segment"))
    if any(not 0 <= segment["device"] < _MAX_DEVICES for segment in segments):
        raise _Wrong(f"a device that is not between 0 and {_MAX_DEVICES - 1}")
    pools = [pool for segment in segments if (pool := segment.get("segment_pool_id")) is not None]
    if any([type(part) for part in pool] != [int, int] for pool in pools):
        raise _Wrong("a segment_pool_id that is not two numbers")
    if sum(max(map(abs, pool)) >= _LARGE_POOL_ID for pool in pools) > _MAX_LARGE_POOL_IDS:
        raise _Wrong("too many memory pools")
    lists = [segment["blocks"] for segment in segments]
    _distinct(lists, "two segments have the same list of blocks")
    blocks = list(chain.from_iterable(lists))
    _all_dicts(blocks, _What("block"))
    _sizes(blocks, "size", _INT, _What("block"))
    _sizes(blocks, "requested_size", _MAYBE_INT, _What("block"))
    _kinds(blocks, "state", _TEXT, _What("block"))
    _addresses(blocks, "address", _What("block"))
    _kinds(blocks, "frames", _MAYBE_LIST, _What("block"))
    _kinds(blocks, "history", _MAYBE_LIST, _What("block"))
    stacks += [frames for entry in chain(segments, blocks) if (frames := entry.get("frames"))]
    present = [history[0] for block in blocks if (history := block.get("history"))]
    _all_dicts(present, _What("history entry"))
    _sizes(present, "real_size", _MAYBE_INT, _What("history entry"))
    _kinds(present, "frames", _MAYBE_LIST, _What("history entry"))
    stacks += [frames for entry in present if (frames := entry.get("frames"))]


def _check_host_segments(segments: Sequence[dict[str, Any]], most_frames: int) -> None:
    """Of pinned host memory, torch 2.14 and newer."""
    what = _What("entry of host_segments")
    for key in ("size", "total_size"):
        _sizes(segments, key, _MAYBE_INT, what)
    _addresses(segments, "address", what)
    stacks = list(filter(None, _kinds(segments, "frames", _MAYBE_LIST, what)))
    _check_stacks(stacks, most_frames)


def _check_traces(raw: dict[str, Any], most_frames: int) -> None:
    traces = raw.get("device_traces")
    if traces is None:
        return
    if type(traces) not in _LIST:
        raise _Wrong(f"device_traces is a {type(traces).__name__}")
    if len(traces) > _MAX_DEVICES:
        raise _Wrong(f"traces of {len(traces)} devices")
    for trace in traces:
        if type(trace) not in _LIST:
            raise _Wrong(f"a trace is a {type(trace).__name__}")
    _distinct(traces, "two devices have the same trace")
    frames = size_bytes = 0
    for events, what in _pieces(traces):
        _all_dicts(events, what)
        _kinds(events, "action", _MAYBE_TEXT, what)
        size_bytes = _sizes(events, "size", _MAYBE_INT, what, size_bytes)
        _addresses(events, "addr", what)
        _kinds(events, "time_us", _MAYBE_INT, what)
        _kinds(events, "device_free", _MAYBE_INT, what)
        stacks = list(filter(None, _kinds(events, "frames", _MAYBE_LIST, what)))
        frames += _check_stacks(stacks, most_frames - frames)


def _pieces(traces: Sequence[Sequence[Any]]) -> Iterator[tuple[Sequence[Any], _What]]:
    """All events, in pieces that the processor's cache holds while their columns are checked."""
    for trace in traces:
        for start in range(0, len(trace), _PIECE):
            yield trace[start : start + _PIECE], _What("event", start)


def _check_stacks(stacks: Sequence[Sequence[Any]], most_frames: int) -> int:
    """How many frames the stacks have."""
    frames = sum(map(len, stacks))
    if frames > most_frames:
        raise _Wrong("its stacks are longer than its size allows")
    if countOf(map(type, chain.from_iterable(stacks)), dict) != frames:
        raise _Wrong("a frame that is no dict")
    return frames


def _list_of_dicts(raw: dict[str, Any], key: str) -> Sequence[dict[str, Any]]:
    found: Sequence[dict[str, Any]] | None = raw.get(key)
    if found is None:
        return ()
    if type(found) not in _LIST:
        raise _Wrong(f"{key} is a {type(found).__name__}")
    _all_dicts(found, _What(f"entry of {key}"))
    return found


def _all_dicts(entries: Sequence[object], what: _What) -> None:
    if countOf(map(type, entries), dict) != len(entries):
        for number, entry in enumerate(entries, what.first):
            if type(entry) is not dict:
                raise _Wrong(f"{what.name} {number} is a {type(entry).__name__}")


def _kinds(entries: Sequence[dict[str, Any]], key: str, kinds: _Kinds, what: _What) -> list[Any]:
    """The values of a key, None where it is missing."""
    values = [entry.get(key) for entry in entries]
    if not set(map(type, values)) <= kinds:
        for number, entry in enumerate(entries, what.first):
            if type(entry.get(key)) not in kinds:
                wrong = f"a {type(entry[key]).__name__}" if key in entry else "missing"
                raise _Wrong(f"{key} of {what.name} {number} is {wrong}")
    return values


def _sizes(
    entries: Sequence[dict[str, Any]], key: str, kinds: _Kinds, what: _What, before: int = 0
) -> int:
    """The sum, of these and what came before."""
    sizes = list(filter(None, _kinds(entries, key, kinds, what)))
    if sizes and min(sizes) < 0:
        raise _Wrong(f"{key} of one {what.name} is negative")
    total: int = before + sum(sizes)
    if total > _INT64_MAX:
        raise _Wrong(f"the sum of {key} over all of its kind does not fit 64 bits")
    return total


def _addresses(entries: Sequence[dict[str, Any]], key: str, what: _What) -> None:
    found = list(filter(None, _kinds(entries, key, _MAYBE_INT, what)))
    if found and not -_MAX_ADDRESS <= min(found) <= max(found) <= _MAX_ADDRESS:
        raise _Wrong(f"{key} of one {what.name} does not fit 64 bits")


def _distinct(lists: Sequence[Sequence[Any]], message: str) -> None:
    filled = [id(entries) for entries in lists if entries]
    if len(set(filled)) != len(filled):
        raise _Wrong(message)


def warnings_for(
    segments: Sequence[RawSegment], traces: Sequence[Sequence[RawEvent]]
) -> tuple[str, ...]:
    """What a reader of the numbers should know, one sentence each."""
    found: list[str] = []
    events = sum(map(len, traces))
    blocks = [block for segment in segments for block in segment["blocks"]]
    stacks = any(block.get("frames") or block.get("history") for block in blocks)
    if segments and not events and not stacks:
        found.append(
            "no history recorded: no block carries a stack and no event was kept; call "
            "torch.cuda.memory._record_memory_history() before the memory is allocated"
        )
    unlike = 0
    for segment in segments:
        size = segment.get("total_size")
        unlike += size is not None and size != sum(block["size"] for block in segment["blocks"])
    if unlike:
        found.append(
            f"{unlike} of {len(segments)} segments differ in size from the sum of their blocks; "
            "the larger of the two is counted as reserved"
        )
    strange = sorted({block["state"] for block in blocks} - _KNOWN_STATES)
    found += [f"block state {word[:40]!r} is read as {state_of(word).value}" for word in strange]
    for device, trace in enumerate(traces):
        unseen = _unseen_frees(trace)
        if unseen:
            found.append(
                f"device {device}: {unseen} frees of memory whose allocation is not in the trace: "
                "recording began after it, or its ring was full"
            )
    return tuple(found)


def _unseen_frees(trace: Sequence[RawEvent]) -> int:
    """How many allocations are freed that the trace did not see being made."""
    if len(trace) < 2:  # noqa: PLR2004 (what record mode `state` leaves is no trace)
        return 0
    actions = {event.get("action") for event in trace}
    # each free is requested first, then completed; some writers keep the second alone
    free = "free_requested" if "free_requested" in actions else "free_completed"
    if "alloc" not in actions:
        return sum(event.get("action") == free for event in trace)
    live: set[object] = set()
    unseen = 0
    for event in trace:
        action = event.get("action")
        if action == "alloc":
            live.add(event.get("addr"))
        elif action == free:
            address = event.get("addr")
            if address in live:
                live.discard(address)
            else:
                unseen += 1
    return unseen
