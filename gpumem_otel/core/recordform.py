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

from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpumem_otel.core.classify import TensorClass
from gpumem_otel.core.model import BlockState, DeviceStats, Identity, StepStats

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CLASSES",
    "FORMAT",
    "MAX_BLOCKS",
    "MAX_DEVICES",
    "MAX_FILE_BYTES",
    "MAX_FRAMES",
    "MAX_FRAME_REFERENCES",
    "MAX_LINE_BYTES",
    "MAX_OBJECTS",
    "MAX_STACKS",
    "MAX_STRINGS",
    "MAX_TEXT_BYTES",
    "MAX_WINDOW_EVENTS",
    "STATES",
    "VERSION",
    "BadFormError",
    "device_of",
    "facts_of",
    "identity_form",
    "identity_of",
    "mapping",
    "number",
    "sequence",
    "stats_form",
    "stats_of",
    "steps_form",
    "steps_of",
    "text",
    "whole",
]

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
