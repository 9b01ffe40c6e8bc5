"""The format of our own recordings: allocator states over time with final frame names, in one file.

A gzip of JSON lines, so that a process that is killed leaves a readable beginning:

    {"format": "gpumem-recording", "version": 1, "created_ns": N, "identity": {}, "facts": {}}
    {"strings": [text, ...]}                       appended to the table of strings
    {"frames": [[name, filename, line], ...]}      indexes of strings; appended to the frames
    {"stacks": [[frame, ...], ...]}                leaf first; appended; stack 0 is the empty one
    {"reading": {"time_ns", "stall_seconds", "before", "after", "steps", "traced", "segments"}}
    {"window": {"time_ns", "stall_seconds", "seconds", "before", "after", "groups"}}
    {"end": {"why": "full"}}                       a limit was reached: the job went on

`before` and `after` are lists of `DeviceStats` (`after` is null where both are equal), `traced` the
devices whose snapshot held events. A segment is

    {"d": device, "a": address, "n": size, "s": stream, "t": kind, "p": [pool], "x": expandable,
     "k": stack, "b": [[size, ...], [requested - size, ...] or null, "states", [stack, ...]],
     "A": [address or null, ...], "c": "classes"}

where "states" has a digit (`STATES`) for each block and "classes" a letter (`CLASSES`). "A" is
written only where blocks do not follow one another from the segment's address, "c" only where the
tensor classes are known. Groups are {"device": [[stack, ...], [objects, ...], [requested bytes,
...]]}. A block without a stack has its named root as a stack of one frame.

A field that has its default may be left out. Readers ignore unknown lines and keys; a change that
older readers would misread raises the version.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpumem_otel.base.profile import BlockState, DeviceStats
from gpumem_otel.snapshot.tensor_classes import TensorClass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Check = Callable[[Any, str], Any]
    """Takes a value and its name; returns the value, or raises `FormatError`."""

FORMAT: Final = "gpumem-recording"
VERSION: Final = 1

# The reader accepts no more than this, and the writer stops there.
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

STATES: Final = {
    BlockState.INACTIVE: "0",
    BlockState.ACTIVE_ALLOCATED: "1",
    BlockState.ACTIVE_PENDING_FREE: "2",
}
CLASSES: Final = dict(zip(TensorClass, "pubgoakitwcn", strict=True))
"""The letter of a block that is not allocated means nothing."""

INT64_MAX: Final = 2**63 - 1
UINT64_MAX: Final = 2**64 - 1


class FormatError(ValueError):
    """Content that does not fit the format; the message says which and quotes none of it."""


def whole(value: object, name: str, low: int = 0, high: int = INT64_MAX) -> int:
    """An integer in this range."""
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise FormatError(f"{name} is not a whole number from {low} to {high}")


def number(value: object, name: str) -> float:
    """A finite number that is not negative."""
    if isinstance(value, int | float) and 0 <= value <= INT64_MAX:
        return float(value)
    raise FormatError(f"{name} is not a number from 0 on")


def text(value: object, name: str) -> str:
    """A text; what UTF-8 cannot hold is replaced."""
    if not isinstance(value, str):
        raise FormatError(f"{name} is not text")
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def sequence(value: object, name: str, most: int) -> list[Any]:
    """A list of at most so many."""
    if not isinstance(value, list):
        raise FormatError(f"{name} is not a list")
    if len(value) > most:
        raise FormatError(f"more than {most} {name}")
    return value


def mapping(value: object, name: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise FormatError(f"{name} is not an object")
    return value


def device(value: object, name: str = "device") -> int:
    """A device index."""
    return whole(value, name, 0, MAX_DEVICES - 1)


def device_key(key: str) -> int:
    """A device index that is the key of an object."""
    # int() accepts much more than digits
    if not (key.isascii() and key.isdigit() and len(key) <= len(str(MAX_DEVICES))):
        raise FormatError("a device is not a whole number")
    return device(int(key))


def _by_device(check: Check) -> Check:
    def checked(value: object, name: str) -> Mapping[int, Any]:
        items = mapping(value, name).items()
        return MappingProxyType({device_key(key): check(item, name) for key, item in items})

    return checked


def _tags(value: object, name: str) -> tuple[tuple[str, str], ...]:
    pairs = [sequence(pair, "parts of a tag", 2) for pair in sequence(value, name, 1000)]
    return tuple((text(key, name), text(item, name)) for key, item in pairs)


def _facts(value: object, name: str) -> Mapping[str, str]:
    facts = mapping(value, name)
    return MappingProxyType({text(key, name): text(fact, name) for key, fact in facts.items()})


def _pool(value: object, name: str) -> tuple[int, int]:
    first, second = sequence(value, f"parts of {name}", 2)
    return whole(first, name), whole(second, name)


_REQUIRED: Final = object()
_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


class StoredField(NamedTuple):
    """One field of an object.

    Attributes:
        key: in the file.
        default: the value of a field that is left out.
        name: of the value in memory, where it is not the key.
    """

    key: str
    check: Check
    default: Any = _REQUIRED
    name: str = ""


HEADER: Final = (
    StoredField("version", partial(whole, low=1)),
    StoredField("created_ns", whole, 0),
    StoredField("facts", _facts, _NOTHING),
)
IDENTITY: Final = (
    *(StoredField(key, text, "") for key in ("service_name", "namespace", "run_id", "node")),
    *(StoredField(key, whole, 0) for key in ("restart", "rank", "local_rank", "pid")),
    StoredField("world_size", whole, 1),
    StoredField("tags", _tags, ()),
    StoredField("device_uuids", _by_device(text), _NOTHING),
)
STEP_STATS: Final = (
    StoredField("steps", whole, 0),
    StoredField("last_step_time_ns", whole, 0),
    StoredField("floor_bytes", _by_device(whole), _NOTHING),
)
DEVICE_STATS: Final = (
    StoredField("device", device),
    *(
        StoredField(
            field.name, partial(whole, low=-INT64_MAX), None if field.default is None else 0
        )
        for field in fields(DeviceStats)
        if field.name != "device"
    ),
)
SEGMENT: Final = (
    StoredField("d", device, name="device"),
    StoredField("a", partial(whole, high=UINT64_MAX), 0, name="address"),
    StoredField("n", whole, name="total_size"),
    StoredField("s", partial(whole, high=UINT64_MAX), 0, name="stream"),
    StoredField("t", text, "", name="segment_type"),
    StoredField("p", _pool, (0, 0), name="segment_pool_id"),
    StoredField("x", lambda value, _: value is True, default=False, name="is_expandable"),
)
"""Names as torch writes them."""


def decode(table: tuple[StoredField, ...], value: object, title: str) -> dict[str, Any]:
    """The checked values of an object, by their names in memory.

    Raises:
        FormatError: a value does not fit.
    """
    stored = mapping(value, title)
    values = {}
    for field in table:
        name = field.name or field.key
        is_left_out = field.key not in stored and field.default is not _REQUIRED
        values[name] = field.default if is_left_out else field.check(stored.get(field.key), name)
    return values


def encode(table: tuple[StoredField, ...], values: object, *, whole: bool = True) -> dict[str, Any]:
    """The object that `decode` reads; unless it is to be whole, without what has its default."""
    return {
        key: value
        for key, _, default, name in table
        if (value := getattr(values, name or key)) != default or whole
    }


def json_text(value: object) -> str:
    """JSON without blanks, ASCII only."""
    return json.dumps(value, separators=(",", ":"), default=dict)
