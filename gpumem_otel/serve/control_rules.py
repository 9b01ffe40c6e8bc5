"""What a value may be: each rule checks JSON and says the same as a JSON Schema.

So the document that clients read and the checks that they meet can not drift apart.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from gpumem_otel.core.yieldcheck import device_fault, seconds_fault, twice_fault
from gpumem_otel.core.yields import DEVICES

if TYPE_CHECKING:
    from gpumem_otel.core.yields import Seconds

__all__ = [
    "Choice",
    "Device",
    "Duration",
    "Field",
    "Flag",
    "Folder",
    "ForbiddenError",
    "InvalidError",
    "Items",
    "MalformedError",
    "Number",
    "Optional",
    "Record",
    "Rule",
    "Whole",
    "parse_json",
]

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
