"""The form of our own recordings: allocator states over time, final frame names, one file.

A gzip of JSON lines, so that a process that is killed leaves a readable beginning. Line by line:

    {"format": "gpumem-recording", "version": 1, "created_ns": N, "identity": {}, "facts": {}}
    {"strings": [text, ...]}                       appended to the table of strings
    {"frames": [[name, filename, line], ...]}      indexes of strings; appended to the frames
    {"stacks": [[frame, ...], ...]}                leaf first; appended; stack 0 is the empty one
    {"reading": {"time_ns", "stall_seconds", "before", "after", "steps", "traced", "segments"}}
    {"window": {"time_ns", "stall_seconds", "seconds", "before", "after", "groups"}}
    {"end": {"why": "full"}}                       a limit was reached: the job went on

`before` and `after` are lists of `DeviceStats` (`after` is null where nothing moved), `traced` the
devices whose snapshot held events. A segment is

    {"d": device, "a": address, "n": size, "s": stream, "t": kind, "p": [pool], "x": expandable,
     "k": stack, "b": [[size, ...], [requested - size, ...] or null, "states", [stack, ...]],
     "A": [address or null, ...], "c": "classes"}

where the states are digits (`STATES`), "A" is there only where blocks do not follow one another
from the segment's address, and "c" has a letter (`CLASSES`) for each block, where the tensor
classes are known. Groups are {"device": [[stack, ...], [objects, ...],
[requested bytes, ...]]}. A block without a stack has its named root as a stack of one frame.

Unknown lines and keys are ignored; a change that older readers would misread raises the version.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpumem_otel.base.profile import BlockState, DeviceStats, Identity, StepStats
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.tensor_classes import RecordedClassifier, TensorClass

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping

    from gpumem_otel.snapshot.snapshot import TorchSnapshot

FORMAT = "gpumem-recording"
VERSION = 1

# What a file may make its reader hold, and what the writer therefore stops at.
MAX_FILE_BYTES = 256 << 20
MAX_TEXT_BYTES = 256 << 20
MAX_LINE_BYTES = 16 << 20
MAX_OBJECTS = 2_000_000
MAX_BLOCKS = 10_000_000
MAX_STRINGS = 500_000
MAX_FRAMES = 500_000
MAX_STACKS = 500_000
MAX_FRAME_REFERENCES = 10_000_000
MAX_DEVICES = 4096
MAX_WINDOW_EVENTS = 1_000_000

STATES = {
    BlockState.INACTIVE: "0",
    BlockState.ACTIVE_ALLOCATED: "1",
    BlockState.ACTIVE_PENDING_FREE: "2",
}

CLASSES = dict(zip(TensorClass, "pubgoakitwcn", strict=True))
"""Of blocks that are not allocated the letter means nothing."""

_INT64_MAX = 2**63 - 1
_STATS = tuple(field.name for field in fields(DeviceStats))
_MAY_BE_NONE = frozenset(field.name for field in fields(DeviceStats) if field.default is None)


class BadFormError(ValueError):
    """Content that is not of the form; the message says which and holds nothing of it."""


def whole(value: object, what: str, low: int = 0, high: int = _INT64_MAX) -> int:
    """The value, if it is an integer in this range."""
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise BadFormError(f"{what} is no number from {low} to {high}")


def number(value: object, what: str) -> float:
    """The value, if it is a finite number that is not negative."""
    if isinstance(value, int | float) and 0 <= value <= _INT64_MAX:
        return float(value)
    raise BadFormError(f"{what} is no number")


def text(value: object, what: str) -> str:
    """The value, if it is text; what UTF-8 can not hold is replaced."""
    if not isinstance(value, str):
        raise BadFormError(f"{what} is no text")
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def sequence(value: object, what: str, most: int) -> list[Any]:
    """The value, if it is a list of at most so many."""
    if not isinstance(value, list):
        raise BadFormError(f"{what} is no list")
    if len(value) > most:
        raise BadFormError(f"more than {most} {what}")
    return value


def mapping(value: object, what: str) -> dict[str, Any]:
    """The value, if it is an object."""
    if not isinstance(value, dict):
        raise BadFormError(f"{what} is no object")
    return value


def stats_form(stats: DeviceStats) -> dict[str, int | None]:
    """Counters as an object; what is unknown, and zero where it may not be, is left out."""
    named = {name: getattr(stats, name) for name in _STATS}
    return {
        name: value
        for name, value in named.items()
        if value or (value is not None and (name == "device" or name in _MAY_BE_NONE))
    }


def stats_of(form: object) -> DeviceStats:
    """Counters from `stats_form`'s object.

    Raises:
        BadFormError: it is none.
    """
    given = mapping(form, "device counters")
    values: dict[str, Any] = {
        name: None if name in _MAY_BE_NONE else 0 for name in _STATS if name != "device"
    }
    for name in values:
        if given.get(name) is not None:
            values[name] = whole(given[name], name, -_INT64_MAX)
    device = whole(given.get("device"), "device", 0, MAX_DEVICES - 1)
    return DeviceStats(device=device, **values)


def steps_form(steps: StepStats) -> dict[str, Any]:
    """Steps as an object."""
    return {
        "steps": steps.steps,
        "last_step_time_ns": steps.last_step_time_ns,
        "floor_bytes": {str(device): size for device, size in steps.floor_bytes.items()},
    }


def steps_of(form: object) -> StepStats:
    """Steps from `steps_form`'s object.

    Raises:
        BadFormError: it is none.
    """
    given = mapping(form, "steps")
    floors = mapping(given.get("floor_bytes", {}), "floor_bytes")
    return StepStats(
        steps=whole(given.get("steps", 0), "steps"),
        last_step_time_ns=whole(given.get("last_step_time_ns", 0), "last_step_time_ns"),
        floor_bytes=MappingProxyType(
            {device_of(key): whole(value, "floor_bytes") for key, value in floors.items()}
        ),
    )


def identity_form(identity: Identity) -> dict[str, Any]:
    """An identity as an object."""
    form: dict[str, Any] = {f.name: getattr(identity, f.name) for f in fields(Identity)}
    form["tags"] = [list(tag) for tag in identity.tags]
    form["device_uuids"] = {str(k): v for k, v in identity.device_uuids.items()}
    return form


def identity_of(form: object) -> Identity:
    """An identity from `identity_form`'s object.

    Raises:
        BadFormError: it is none.
    """
    given = mapping(form, "identity")
    tags = sequence(given.get("tags", []), "tags", 1000)
    uuids = mapping(given.get("device_uuids", {}), "device_uuids")
    values: dict[str, Any] = {
        k: text(given.get(k, ""), k) for k in ("service_name", "namespace", "run_id", "node")
    }
    for k in ("restart", "rank", "local_rank", "pid"):
        values[k] = whole(given.get(k, 0), k)
    return Identity(
        world_size=whole(given.get("world_size", 1), "world_size"),
        tags=tuple(_tag(tag) for tag in tags),
        device_uuids=MappingProxyType(
            {device_of(key): text(value, "device_uuids") for key, value in uuids.items()}
        ),
        **values,
    )


def facts_of(form: object) -> Mapping[str, str]:
    """The facts of a header: short texts by name.

    Raises:
        BadFormError: they are none.
    """
    given = mapping(form, "facts")
    return MappingProxyType({text(k, "facts"): text(v, "facts") for k, v in given.items()})


def device_of(key: str) -> int:
    """A device index that is the key of an object.

    Raises:
        BadFormError: it is none.
    """
    # int() takes much more than digits
    if not (key.isascii() and key.isdigit() and len(key) <= len(str(MAX_DEVICES))):
        raise BadFormError("a device is no number")
    return whole(int(key), "device", 0, MAX_DEVICES - 1)


def _tag(form: object) -> tuple[str, str]:
    key, value = sequence(form, "a tag", 2)
    return text(key, "tags"), text(value, "tags")


# What a recording holds, as values; snapshots are made out of it as they are asked for.

STATE_WORDS = {ord(digit): state.value for state, digit in STATES.items()}
"""Byte of a column of states -> the allocator's word."""

_CLASS_WORDS = {letter: found.value for found, letter in CLASSES.items()}
_ALLOCATED = BlockState.ACTIVE_ALLOCATED.value
_INACTIVE = BlockState.INACTIVE.value


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingHeader:
    """First line of a recording.

    Attributes:
        facts: what the writer knew about its surroundings, for instance `torch`.
    """

    version: int
    created_ns: int
    facts: Mapping[str, str]


@dataclass(slots=True)
class Tables:
    """Frames and stacks as torch would write them, shared by all readings; stack 0 is empty."""

    strings: list[str] = field(default_factory=list)
    frames: list[dict[str, Any]] = field(default_factory=list)
    stacks: list[list[dict[str, Any]]] = field(default_factory=lambda: [[]])
    references: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSegment:
    """A segment with its blocks in columns, a few bytes for each.

    Attributes:
        stack: index of its own stack.
        slack: requested minus allocated size of each block, None where all are equal.
        states: a digit for each block, see `recordform.STATES`.
        addresses: of the blocks, None where they follow one another.
        classes: a letter for each block, see `recordform.CLASSES`; None where none was written.
    """

    device: int
    address: int
    size_bytes: int
    stream: int
    kind: str
    pool_id: tuple[int, int]
    is_expandable: bool
    stack: int
    sizes: array[int]
    slack: array[int] | None
    states: bytes
    stacks: array[int]
    addresses: tuple[int | None, ...] | None
    classes: str | None = None

    def raw(self, tables: Tables) -> dict[str, Any]:
        """The segment as torch writes it."""
        stacks = tables.stacks
        blocks = []
        allocated = active = requested = 0
        address: int | None = self.address
        for index, size in enumerate(self.sizes):
            if self.addresses is not None:
                address = self.addresses[index]
            asked = size + self.slack[index] if self.slack is not None else size
            state = STATE_WORDS[self.states[index]]
            if state != _INACTIVE:
                active += size
                requested += asked
            if state == _ALLOCATED:
                allocated += size
            block = {"size": size, "requested_size": asked, "state": state}
            if address is not None:
                block["address"] = address
                address += size
            block["frames"] = stacks[self.stacks[index]]
            if self.classes is not None and state == _ALLOCATED:
                block["tensor_class"] = _CLASS_WORDS[self.classes[index]]
            blocks.append(block)
        return {
            "device": self.device,
            "address": self.address,
            "total_size": self.size_bytes,
            "allocated_size": allocated,
            "active_size": active,
            "requested_size": requested,
            "stream": self.stream,
            "segment_type": self.kind,
            "segment_pool_id": self.pool_id,
            "is_expandable": self.is_expandable,
            "frames": stacks[self.stack],
            "blocks": blocks,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReading:
    """One recorded state of the allocators.

    Attributes:
        time_ns: when it was read, nanoseconds since 1970.
        steps: the steps counted by then.
    """

    source: str
    time_ns: int
    before: tuple[DeviceStats, ...]
    after: tuple[DeviceStats, ...]
    stall_seconds: float
    steps: StepStats
    _segments: tuple[RecordedSegment, ...] = field(repr=False)
    _traced: tuple[int, ...] = field(repr=False)
    _tables: Tables = field(repr=False)

    @property
    def snapshot(self) -> TorchSnapshot:
        """The snapshot, made anew at each call; keep it as long as it is needed."""
        traces: list[list[dict[str, Any]]] = [[] for _ in range(max(self._traced, default=-1) + 1)]
        for device in self._traced:
            # says that events were recorded, without being one that counts
            traces[device].append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0})
        raw = {
            "segments": [segment.raw(self._tables) for segment in self._segments],
            "device_traces": traces,
        }
        return from_torch(raw, source=self.source, resolved=True)

    def allocated_bytes(self, device: int) -> int:
        """What was allocated on a device, counted without making the snapshot."""
        return sum(
            size
            for segment in self._segments
            if segment.device == device
            for size, state in zip(segment.sizes, segment.states, strict=True)
            if STATE_WORDS[state] == _ALLOCATED
        )

    def classifier(self) -> RecordedClassifier:
        """Tells the tensor classes of the snapshot's blocks."""
        known = any(segment.classes is not None for segment in self._segments)
        return RecordedClassifier(by_stack_alone=not known)

    def reading(self) -> Reading:
        """The reading, as the live source gave it."""
        return Reading(
            snapshot=self.snapshot,
            time_ns=self.time_ns,
            before=self.before,
            after=self.after,
            stall_seconds=self.stall_seconds,
            classifier=self.classifier(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWindow:
    """Events that were recorded for a while.

    Attributes:
        time_ns: end of the window, nanoseconds since 1970.
        seconds: its length.
        before: counters at its beginning; `after` those at its end.
    """

    source: str
    time_ns: int
    seconds: float
    before: tuple[DeviceStats, ...]
    after: tuple[DeviceStats, ...]
    stall_seconds: float
    _groups: Mapping[int, tuple[array[int], array[int], array[int]]] = field(repr=False)
    _tables: Tables = field(repr=False)

    def reading(self) -> Reading:
        """The reading, with as many events of each stack as were recorded, of equal sizes."""
        traces: list[list[dict[str, Any]]] = [[] for _ in range(max(self._groups, default=-1) + 1)]
        for device, (stacks, objects, sizes) in self._groups.items():
            for stack, count, size in zip(stacks, objects, sizes, strict=True):
                traces[device] += _events(self._tables.stacks[stack], count, size)
        raw = {"segments": [], "device_traces": traces}
        return Reading(
            snapshot=from_torch(raw, source=self.source, resolved=True),
            time_ns=self.time_ns,
            before=self.before,
            after=self.after,
            stall_seconds=self.stall_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recording, whole.

    Attributes:
        warnings: what a reader should know, one sentence each, for instance a cut end.
    """

    source: str
    header: RecordingHeader
    identity: Identity
    readings: tuple[RecordedReading, ...]
    windows: tuple[RecordedWindow, ...] = ()
    warnings: tuple[str, ...] = ()


def _events(frames: list[dict[str, Any]], count: int, size: int) -> list[dict[str, Any]]:
    """So many allocations that add up to the size; equal ones are one shared object."""
    if not count:
        return []
    each, more = divmod(size, count)
    large, small = (
        {"action": "alloc", "addr": 0, "size": each + extra, "stream": 0, "frames": frames}
        for extra in (1, 0)
    )
    return [large] * more + [small] * (count - more)
