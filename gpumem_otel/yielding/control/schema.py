"""Requests, the query and answers of the control API as JSON, and their JSON Schemas.

Both are made from the same dataclasses, so the document that clients read and the checks that they
meet cannot drift apart.
"""

from __future__ import annotations

import json
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn

from gpumem_otel.yielding.request_fields import Folder, fields_of
from gpumem_otel.yielding.values import RestoreRequest, YieldRequest, YieldStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpumem_otel.base.profile import Identity

_MAX_BRACKETS: Final = 64
"""In a body: no request nests deeper than a list in an object."""


class InvalidError(ValueError):
    """A value that breaks a rule; one line that names it and says what it may be."""


class MalformedError(InvalidError):
    """A body that is no JSON at all, or JSON that two readers may read differently."""


class ForbiddenError(InvalidError):
    """A value that is right as such, and that the job does not allow."""


def parse_json(body: bytes) -> Any:
    """JSON as RFC 8259 has it, and no more: no NaN, no name twice, no deep nesting.

    Raises:
        MalformedError: it is something else.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedError("the body is not UTF-8") from None
    # before it is parsed: the parser recurses
    if text.count("[") + text.count("{") > _MAX_BRACKETS:
        raise MalformedError("the body is nested too deeply")
    try:
        return json.loads(
            text, object_pairs_hook=_no_name_twice, parse_constant=_no_constant, parse_float=_finite
        )
    except MalformedError:
        raise
    except (ValueError, RecursionError):
        raise MalformedError("the body is not JSON") from None


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedError("the body has a name twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise MalformedError(f"the body holds {text}, which is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise MalformedError("the body holds a number that is too large")
    return number


# The query of `GET /v1/state`.

MAX_WAIT_SECONDS: Final = 60.0

_MAX_VERSION: Final = 2**53

_DIGITS: Final = 15


def query_parameters() -> list[dict[str, Any]]:
    """The query of `GET /v1/state` for the OpenAPI document."""
    version = {"type": "integer", "minimum": -1, "maximum": _MAX_VERSION, "default": -1}
    wait = {"type": "number", "minimum": 0, "maximum": MAX_WAIT_SECONDS, "default": 0}
    return [
        {
            "name": "version",
            "in": "query",
            "description": "Answer once the version is another than this one.",
            "schema": version,
        },
        {"name": "wait_seconds", "in": "query", "description": "Or after so long.", "schema": wait},
    ]


def state_query(items: Iterable[tuple[str, str]]) -> tuple[int, float]:
    """(version, seconds to wait).

    Raises:
        InvalidError: a name that is unknown or comes twice, or a value that cannot be used.
    """
    given: dict[str, str] = {}
    for name, value in items:
        if name in given or name not in {"version", "wait_seconds"}:
            raise InvalidError("the query has version and wait_seconds, once each")
        given[name] = value
    version = _number(given.get("version", "-1"))
    if version is None or not -1 <= version <= _MAX_VERSION or version != int(version):
        raise InvalidError(f"version must be a whole number from -1 to {_MAX_VERSION}")
    wait = _number(given.get("wait_seconds", "0"))
    if wait is None or not 0 <= wait <= MAX_WAIT_SECONDS:
        raise InvalidError(f"wait_seconds must be a number from 0 to {MAX_WAIT_SECONDS:g}")
    return int(version), float(wait)


def _number(text: str) -> float | None:
    # float() alone takes spaces, underscores and digits of other scripts
    if not text.isascii() or "_" in text or text != text.strip() or not text:
        return None
    if text.lstrip("-").isdigit() and len(text) <= _DIGITS + 1:
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


# Requests and answers as JSON. Answers follow the dataclasses: a new field is in them, and in the
# OpenAPI document.


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


def as_json(value: Any) -> Any:
    """A value of `yielding.values` as JSON: every field by its name, in order."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(as_json(key)): as_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_json(item) for item in value]
    return value


def request_schema(request_type: type) -> dict[str, Any]:
    """JSON Schema of a request: no field must be there."""
    properties: dict[str, Any] = {}
    for name, field in fields_of(request_type).items():
        schema = field.kind.schema()
        if field.default is None:
            schema = {"anyOf": [schema, {"type": "null"}]}
        default = as_json(field.default)
        properties[name] = {**schema, "default": default, "description": field.description}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def read_yield(body: bytes, disk_dirs: tuple[str, ...]) -> YieldRequest:
    """A request; an empty body is one of defaults.

    Args:
        body: JSON.
        disk_dirs: folders that `disk_dir` may name, or a folder below them.

    Raises:
        InvalidError: it cannot be used.
    """
    return YieldRequest(**_read_fields(YieldRequest, body, disk_dirs))


def read_restore(body: bytes) -> RestoreRequest:
    """A request; an empty body is one of defaults.

    Raises:
        InvalidError: it cannot be used.
    """
    return RestoreRequest(**_read_fields(RestoreRequest, body, ()))


def _read_fields(request_type: type, body: bytes, folders: tuple[str, ...]) -> dict[str, Any]:
    given = parse_json(body or b"{}")
    if not isinstance(given, dict):
        raise InvalidError("the body must be a JSON object")
    known = fields_of(request_type)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            shown = json.dumps(name[:64])
            raise InvalidError(f"the body has no field {shown}: it has {', '.join(known)}")
        values[name] = known[name].kind.from_json(value)
        if fault := known[name].fault(name, values[name]):
            raise InvalidError(fault)
    # last, since it asks the file system: an invalid request is refused without that
    for name, value in values.items():
        kind = known[name].kind
        if isinstance(kind, Folder) and value:
            values[name] = _allowed_folder(name, value, kind, folders)
    return values


def _allowed_folder(name: str, path: str, kind: Folder, folders: tuple[str, ...]) -> str:
    """The folder without links, so that no name leads out of what is allowed."""
    if len(path) > kind.json_most or re.fullmatch(kind.json_pattern, path) is None:
        raise InvalidError(
            f"{name} must be an absolute path of at most {kind.json_most} characters of printable "
            "ASCII"
        )
    real = os.path.realpath(path)  # also of a folder that does not exist
    for allowed in map(os.path.realpath, folders):
        if os.path.commonpath((real, allowed)) == allowed:
            return real
    raise ForbiddenError(f"{name} must lie in a folder of the job's setting control_disk_dirs")


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
