"""The values of `core.yields` on the wire: requests read by rules, answers written field by field.

Answers follow the dataclasses themselves: a field that is added there is in the answers and in the
OpenAPI document. Requests have a table, since a rule says more than a type; a test holds its names
and defaults to those of the dataclasses.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Final

from gpumem_otel.core.classify import TensorClass
from gpumem_otel.core.yields import (
    DEVICES,
    DISCARDABLE,
    SECONDS,
    RestoreRequest,
    YieldLevel,
    YieldRequest,
    YieldStatus,
)
from gpumem_otel.serve.control_rules import (
    Choice,
    Device,
    Duration,
    Field,
    Flag,
    Folder,
    ForbiddenError,
    Items,
    Optional,
    Record,
    Rule,
    parse_json,
)

if typing.TYPE_CHECKING:
    from gpumem_otel.core.model import Identity

__all__ = [
    "RESTORE_RULE",
    "YIELD_RULE",
    "ControlState",
    "Process",
    "as_json",
    "object_schema",
    "process_of",
    "read_restore",
    "read_yield",
    "schema_of",
]

_CLASSES: Final = tuple(one.value for one in TensorClass)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Who answers: a rank of a job."""

    service_name: str
    namespace: str
    run_id: str
    rank: int
    local_rank: int
    world_size: int
    node: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """The answer to `GET /v1/state`."""

    process: Process
    status: YieldStatus


def process_of(identity: Identity) -> Process:
    """What of an identity goes on the wire."""
    return Process(**{one.name: getattr(identity, one.name) for one in fields(Process)})


def _default(request: type, name: str) -> Any:
    """As JSON."""
    field = next(one for one in fields(request) if one.name == name)
    assert field.default is not MISSING  # noqa: S101 - of tables of our own
    return as_json(field.default)


def _record(request: type, rows: tuple[tuple[str, Rule, str], ...]) -> Record:
    return Record(
        tuple(Field(name, rule, _default(request, name), meaning) for name, rule, meaning in rows)
    )


def as_json(value: Any) -> Any:
    """A value of `core.yields` as JSON: every field by its name, in order."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(as_json(key)): as_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_json(item) for item in value]
    return value


def _classes(low: int = 0) -> Rule:
    return Items(Choice(_CLASSES), low, len(_CLASSES))


YIELD_RULE: Final = _record(
    YieldRequest,
    (
        (
            "level",
            Choice(tuple(level.value for level in YieldLevel)),
            "tensors (the context stays), process (all, by the driver), or auto (both, if it can).",
        ),
        (
            "devices",
            Optional(Items(Device(), 1, len(DEVICES))),
            "Devices of the process, by torch's number; null for all.",
        ),
        ("classes", Optional(_classes(1)), "Tensor classes that go; null for all."),
        ("keep", _classes(), "Tensor classes that stay on the device."),
        (
            "discard",
            Items(Choice(DISCARDABLE), 0, len(DISCARDABLE)),
            "Tensor classes whose contents are thrown away: zeros after the restore.",
        ),
        (
            "lease_seconds",
            Optional(Duration(SECONDS["lease_seconds"])),
            "Restore by itself after so long; null for never.",
        ),
        (
            "deadline_seconds",
            Optional(Duration(SECONDS["deadline_seconds"])),
            "Rolled back where it takes longer, the wait for a safe point included.",
        ),
        (
            "wait_seconds",
            Duration(SECONDS["wait_seconds"]),
            "How long to wait for a safe point.",
        ),
        ("dry_run", Flag(), "Only say what would happen."),
        ("verify", Flag(), "Compare checksums made on the device before and after."),
        (
            "assume_private",
            Flag(),
            "Move also what may be shared with another process or library.",
        ),
        ("release_host", Flag(), "Give the pinned host memory back after the restore."),
        (
            "disk_dir",
            Folder(4096),
            'Folder, one that the job allows, for what host memory can not hold; "" for none.',
        ),
    ),
)

RESTORE_RULE: Final = _record(
    RestoreRequest,
    (
        ("classes", Optional(_classes(1)), "Tensor classes to bring back now; null for all."),
        (
            "wait_seconds",
            Duration(SECONDS["wait_seconds"]),
            "How long to wait for device memory; then it stays yielded and says what is missing.",
        ),
    ),
)


def read_yield(body: bytes, disk_dirs: tuple[str, ...]) -> YieldRequest:
    """A request; an empty body is one of defaults.

    Args:
        body: JSON.
        disk_dirs: folders that `disk_dir` may name, or a folder below them.

    Raises:
        InvalidError: it can not be used.
    """
    found = YIELD_RULE.check(parse_json(body or b"{}"), "the body")
    if "level" in found:
        found["level"] = YieldLevel(found["level"])
    if found.get("disk_dir"):
        found["disk_dir"] = _allowed_dir(found["disk_dir"], disk_dirs)
    return YieldRequest(**found)


def read_restore(body: bytes) -> RestoreRequest:
    """Likewise.

    Raises:
        InvalidError: it can not be used.
    """
    return RestoreRequest(**RESTORE_RULE.check(parse_json(body or b"{}"), "the body"))


def _allowed_dir(path: str, disk_dirs: tuple[str, ...]) -> str:
    """The folder without links, so that no name leads out of what is allowed."""
    real = os.path.realpath(path)  # also of what is not there
    for allowed in map(os.path.realpath, disk_dirs):
        if os.path.commonpath((real, allowed)) == allowed:
            return real
    raise ForbiddenError("disk_dir must lie in a folder of the job's setting control_disk_dirs")


@lru_cache(maxsize=32)
def _hints(kind: type) -> dict[str, Any]:
    # Mapping is imported for type checkers alone there
    return typing.get_type_hints(kind, localns={"Mapping": Mapping})


def schema_of(kind: Any) -> dict[str, Any]:
    """JSON Schema of what `as_json` makes of a type; dataclasses by reference."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {typing.Union, types.UnionType}:
        others = [schema_of(one) for one in inner if one is not type(None)]
        return {"anyOf": [*others, {"type": "null"}]}
    if origin is tuple:
        return {"type": "array", "items": schema_of(inner[0])}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": schema_of(inner[1])}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"type": "string", "enum": [one.value for one in kind]}
    if is_dataclass(kind):
        return {"$ref": f"#/components/schemas/{kind.__name__}"}  # type: ignore[union-attr]
    return {"type": _PLAIN[kind]}


_PLAIN: Final = {str: "string", bool: "boolean", int: "integer", float: "number"}


def object_schema(kind: type) -> dict[str, Any]:
    """JSON Schema of a dataclass itself: every field is there."""
    hints = _hints(kind)
    return {
        "type": "object",
        "properties": {field.name: schema_of(hints[field.name]) for field in fields(kind)},
        "required": [field.name for field in fields(kind)],
        "additionalProperties": False,
    }
