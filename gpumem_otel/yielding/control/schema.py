"""What a value may be: each rule checks JSON and says the same as a JSON Schema.

So the document that clients read and the checks that they meet can not drift apart.
"""

from __future__ import annotations

import json
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from gpumem_otel.snapshot.tensor_classes import TensorClass
from gpumem_otel.yielding.validation import device_fault, seconds_fault, twice_fault
from gpumem_otel.yielding.values import (
    DEVICES,
    DISCARDABLE,
    SECONDS,
    RestoreRequest,
    YieldLevel,
    YieldRequest,
    YieldStatus,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpumem_otel.yielding.values import Seconds

_PATH: Final = "^(/[ -~]*)?$"

_MAX_BRACKETS: Final = 64
"""In a body: no request nests deeper than a list in an object."""


class InvalidError(ValueError):
    """A value that breaks a rule; one line that names it and says what it may be."""


class MalformedError(InvalidError):
    """A body that is no JSON at all, or JSON that two readers may read differently."""


class ForbiddenError(InvalidError):
    """A value that is right as such, and that the job does not allow."""


class Rule(Protocol):
    """One kind of value."""

    def schema(self) -> dict[str, Any]:
        """As JSON Schema, draft 2020-12, the one of OpenAPI 3.1."""
        ...

    def check(self, value: Any, name: str) -> Any:
        """The value as the request holds it.

        Raises:
            InvalidError: it is another kind of value.
        """
        ...


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def schema(self) -> dict[str, Any]:
        """JSON Schema."""
        return {"type": "boolean"}

    def check(self, value: Any, name: str) -> bool:
        """The value."""
        if not isinstance(value, bool):
            raise InvalidError(f"{name} must be true or false")
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A number from `low` to `high`."""

    low: float
    high: float

    def schema(self) -> dict[str, Any]:
        """JSON Schema."""
        return {"type": "number", "minimum": self.low, "maximum": self.high}

    def check(self, value: Any, name: str) -> float:
        """The value as a float."""
        if _is_number(value) and self.low <= value <= self.high:
            return float(value)
        raise InvalidError(f"{name} must be a number from {self.low:g} to {self.high:g}")


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `low` to `high`; 1.0 is one, as JSON Schema has it."""

    low: int
    high: int

    def schema(self) -> dict[str, Any]:
        """JSON Schema."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def check(self, value: Any, name: str) -> int:
        """The value as an int."""
        if _is_number(value) and self.low <= value <= self.high and value == int(value):
            return int(value)
        raise InvalidError(f"{name} must be a whole number from {self.low} to {self.high}")


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of time of a request, in the words of every other door."""

    known: Seconds

    def schema(self) -> dict[str, Any]:
        """JSON Schema."""
        return {"type": "number", "minimum": self.known.low, "maximum": self.known.high}

    def check(self, value: Any, name: str) -> float:
        """Seconds as a float."""
        if not _is_number(value):  # not repeated: it may be of any length
            raise InvalidError(f"{name} must be a number of seconds")
        if fault := seconds_fault(name, value, self.known):
            raise InvalidError(fault)
        return float(value)


@dataclass(frozen=True, slots=True)
class Device:
    """torch's number of a device, likewise; 1.0 is one, as JSON Schema has it."""

    def schema(self) -> dict[str, Any]:
        """JSON Schema."""
        return {"type": "integer", "minimum": DEVICES[0], "maximum": DEVICES[-1]}

    def check(self, value: Any, name: str) -> int:
        """The number."""
        if not _is_number(value):
            raise InvalidError(f"{name} must be a whole number")
        found = int(value) if value == value // 1 else value
        if fault := device_fault(found):
            raise InvalidError(fault)
        return int(found)


@dataclass(frozen=True, slots=True)
class Choice:
    """One word of a few."""

    words: tuple[str, ...]

    def schema(self) -> dict[str, Any]:
        """JSON Schema."""
        return {"type": "string", "enum": list(self.words)}

    def check(self, value: Any, name: str) -> str:
        """The word."""
        if not isinstance(value, str) or value not in self.words:
            raise InvalidError(f"{name} must be one of {', '.join(self.words)}")
        return value


@dataclass(frozen=True, slots=True)
class Folder:
    """The absolute path of a folder in printable ASCII, or nothing."""

    max_characters: int

    def schema(self) -> dict[str, Any]:
        """JSON Schema."""
        return {"type": "string", "maxLength": self.max_characters, "pattern": _PATH}

    def check(self, value: Any, name: str) -> str:
        """The path."""
        right = isinstance(value, str) and len(value) <= self.max_characters
        if not right or re.fullmatch(_PATH, value) is None:
            raise InvalidError(
                f"{name} must be an absolute path of at most {self.max_characters} characters of "
                "printable ASCII"
            )
        return str(value)


@dataclass(frozen=True, slots=True)
class Items:
    """A list without repetitions."""

    item: Rule
    low: int
    high: int

    def schema(self) -> dict[str, Any]:
        """JSON Schema."""
        return {
            "type": "array",
            "items": self.item.schema(),
            "minItems": self.low,
            "maxItems": self.high,
            "uniqueItems": True,
        }

    def check(self, value: Any, name: str) -> tuple[Any, ...]:
        """The items as a tuple."""
        if not isinstance(value, list) or not self.low <= len(value) <= self.high:
            raise InvalidError(f"{name} must be a list of {self.low} to {self.high} items")
        found = tuple(self.item.check(one, f"{name}[{i}]") for i, one in enumerate(value))
        if fault := twice_fault(name, found):
            raise InvalidError(fault)
        return found


@dataclass(frozen=True, slots=True)
class Optional:
    """The value of another rule, or null."""

    rule: Rule

    def schema(self) -> dict[str, Any]:
        """JSON Schema."""
        return {"anyOf": [self.rule.schema(), {"type": "null"}]}

    def check(self, value: Any, name: str) -> Any:
        """The value or None."""
        return None if value is None else self.rule.check(value, name)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an object.

    Attributes:
        default: what a request without the field holds; as JSON.
        meaning: for people, one line.
    """

    name: str
    rule: Rule
    default: Any
    meaning: str


@dataclass(frozen=True, slots=True)
class Record:
    """An object of known fields, none of which must be there."""

    fields: tuple[Field, ...]

    def schema(self) -> dict[str, Any]:
        """JSON Schema."""
        properties = {
            field.name: {
                **field.rule.schema(),
                "default": field.default,
                "description": field.meaning,
            }
            for field in self.fields
        }
        return {"type": "object", "properties": properties, "additionalProperties": False}

    def check(self, value: Any, name: str) -> dict[str, Any]:
        """The fields that are there."""
        if not isinstance(value, dict):
            raise InvalidError(f"{name} must be a JSON object")
        rules = {field.name: field.rule for field in self.fields}
        for key in value:
            if key not in rules:
                shown = json.dumps(key[:64])
                raise InvalidError(f"{name} has no field {shown}: it has {', '.join(rules)}")
        return {key: rules[key].check(item, key) for key, item in value.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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


# The query of `GET /v1/state`, checked; the rules are the document's too.

MAX_WAIT_SECONDS: Final = 60.0

_DIGITS: Final = 15

STATE_QUERY: Final = (
    Field("version", Whole(-1, 2**53), -1, "Answer once the version is another than this one."),
    Field("wait_seconds", Number(0, MAX_WAIT_SECONDS), 0, "Or after so long."),
)


def state_query(items: Iterable[tuple[str, str]]) -> tuple[int, float]:
    """(version, seconds to wait).

    Raises:
        InvalidError: a name that is unknown or comes twice, or a value that can not be used.
    """
    found: dict[str, str] = {}
    for name, value in items:
        if name in found or name not in {field.name for field in STATE_QUERY}:
            raise InvalidError("the query has version and wait_seconds, once each")
        found[name] = value
    version, wait = STATE_QUERY
    return (
        version.rule.check(_number(found.get("version", "-1")), "version"),
        wait.rule.check(_number(found.get("wait_seconds", "0")), "wait_seconds"),
    )


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


# The values of `core.yields` on the wire: requests read by rules, answers written field by field.
#
# Answers follow the dataclasses themselves: a field that is added there is in the answers and in
# the OpenAPI document. Requests have a table, since a rule says more than a type; a test holds its
# names and defaults to those of the dataclasses.

if typing.TYPE_CHECKING:
    from gpumem_otel.base.profile import Identity


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
