"""The table of a request's fields: what each may hold, and what every interface says about it.

`YieldRequest` and `RestoreRequest` in `values.py` describe their fields with `described`. The check
(`validation.py`), the HTTP body and its JSON Schema (`control/schema.py`), the options of
`gpumem-otel ctl` and the rules for repeated commands (`engine/operations.py`) are made from that.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final, Protocol

_LONG_NUMBER: Final = 10**20
"""Python refuses to print numbers that are far longer."""


class FieldKind(Protocol):
    """What a field may hold."""

    def fault(self, name: str, value: Any) -> str:
        """Why a field of this name cannot hold the value, "" where it can."""
        ...

    def from_json(self, value: Any) -> Any:
        """The value as a request holds it; unchanged where it is not of this kind."""
        ...

    def schema(self) -> dict[str, Any]:
        """As JSON Schema, draft 2020-12, the one of OpenAPI 3.1."""
        ...


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def fault(self, name: str, value: Any) -> str:
        """See `FieldKind`."""
        return (
            "" if isinstance(value, bool) else f"{name} must be true or false, not {_shown(value)}"
        )

    def from_json(self, value: Any) -> Any:
        """See `FieldKind`."""
        return value

    def schema(self) -> dict[str, Any]:
        """See `FieldKind`."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Seconds:
    """A length of time, both ends included.

    Attributes:
        left_out: what a request without the field means, for messages.
    """

    low: float
    high: float
    left_out: str

    def fault(self, name: str, value: Any) -> str:
        """See `FieldKind`."""
        if not is_number(value):
            return f"{name} must be a number of seconds, not {_shown(value)}"
        if self.low <= value <= self.high:
            return ""
        return f"{name} must be {self}, not {_shown(value)}; leave it out for {self.left_out}"

    def from_json(self, value: Any) -> Any:
        """See `FieldKind`."""
        return float(value) if is_number(value) and self.low <= value <= self.high else value

    def schema(self) -> dict[str, Any]:
        """See `FieldKind`."""
        return {"type": "number", "minimum": self.low, "maximum": self.high}

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:.0f} seconds"


@dataclass(frozen=True, slots=True)
class OneOf:
    """A member of an enumeration of strings."""

    members: type[Enum]

    def fault(self, name: str, value: Any) -> str:
        """See `FieldKind`."""
        if isinstance(value, self.members):
            return ""
        return f"{name} must be one of {', '.join(self.words)}, not {_shown(value)}"

    def from_json(self, value: Any) -> Any:
        """See `FieldKind`."""
        return self.members(value) if isinstance(value, str) and value in self.words else value

    def schema(self) -> dict[str, Any]:
        """See `FieldKind`."""
        return {"type": "string", "enum": list(self.words)}

    @property
    def words(self) -> tuple[str, ...]:
        """The values of the members."""
        return tuple(member.value for member in self.members)


@dataclass(frozen=True, slots=True)
class Names:
    """Some of a few words, each once.

    Attributes:
        least: how many there must be.
    """

    words: tuple[str, ...]
    least: int = 0

    def fault(self, name: str, value: Any) -> str:
        """See `FieldKind`."""
        if not isinstance(value, tuple) or len(value) < self.least:
            return f"{name} must be a list of tensor classes, not {_shown(value)}"
        for word in value:
            if word not in self.words:
                return f"{name} holds {_shown(word)}, which is none of {', '.join(self.words)}"
        return _repetition(name, value)

    def from_json(self, value: Any) -> Any:
        """See `FieldKind`."""
        return tuple(value) if isinstance(value, list) else value

    def schema(self) -> dict[str, Any]:
        """See `FieldKind`."""
        item = {"type": "string", "enum": list(self.words)}
        return _list_schema(item, self.least, len(self.words))


@dataclass(frozen=True, slots=True)
class DeviceNumbers:
    """torch's numbers of some devices, each once."""

    numbers: range

    def fault(self, name: str, value: Any) -> str:
        """See `FieldKind`."""
        if not isinstance(value, tuple) or not value:
            return f"{name} must be a list of torch's numbers, not {_shown(value)}; {_ALL}"
        for number in value:
            if (
                isinstance(number, bool)
                or not isinstance(number, int)
                or number not in self.numbers
            ):
                ends = f"{self.numbers[0]} to {self.numbers[-1]}"
                return f"{name} must be whole numbers from {ends}, not {_shown(number)}; {_ALL}"
        return _repetition(name, value)

    def from_json(self, value: Any) -> Any:
        """See `FieldKind`; 1.0 is a whole number, as JSON Schema has it."""
        if not isinstance(value, list):
            return value
        return tuple(int(item) if is_number(item) and item == item // 1 else item for item in value)

    def schema(self) -> dict[str, Any]:
        """See `FieldKind`."""
        item = {"type": "integer", "minimum": self.numbers[0], "maximum": self.numbers[-1]}
        return _list_schema(item, 1, len(self.numbers))


_ALL: Final = "leave it out for all"


@dataclass(frozen=True, slots=True)
class Folder:
    """The path of a folder, or "".

    Attributes:
        json_pattern: what it must match where it comes over HTTP.
        json_most: how many characters it may have there.
    """

    json_pattern: str
    json_most: int

    def fault(self, name: str, value: Any) -> str:
        """See `FieldKind`."""
        if isinstance(value, str):
            return ""
        return f'{name} must be the path of a folder, or "", not {_shown(value)}'

    def from_json(self, value: Any) -> Any:
        """See `FieldKind`; `control/schema.py` checks the pattern."""
        return value

    def schema(self) -> dict[str, Any]:
        """See `FieldKind`."""
        return {"type": "string", "maxLength": self.json_most, "pattern": self.json_pattern}


class Repeat(Enum):
    """When a command may be answered with an operation that has another value in this field."""

    ALWAYS = "always"
    NEVER = "never"
    LEFT_OUT = "left out"
    """Where the command leaves the field at its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField:
    """One field of a request.

    Attributes:
        default: None also says that the field may be None (null in JSON).
        description: of the field in the OpenAPI document, one line.
        help: of the option of `gpumem-otel ctl`; the range of a length of time is added.
        option: the name of that option; "" for the name of the field.
        repeat: whether an operation with another value is an answer to a repeated command.
    """

    kind: FieldKind
    default: Any
    description: str
    help: str
    option: str
    repeat: Repeat

    def fault(self, name: str, value: Any) -> str:
        """Why the field cannot hold the value, "" where it can."""
        return "" if value is None and self.default is None else self.kind.fault(name, value)


def described(
    kind: FieldKind,
    description: str,
    *,
    help: str = "",  # noqa: A002 - as click names it
    option: str = "",
    repeat: Repeat = Repeat.ALWAYS,
) -> dict[str, Any]:
    """The metadata of a field of a request's dataclass; see `RequestField`."""
    help = help or description  # noqa: A001 - as click names it
    return {
        "kind": kind,
        "description": description,
        "help": help,
        "option": option,
        "repeat": repeat,
    }


def fields_of(request_type: type) -> dict[str, RequestField]:
    """The table: each field of a request's dataclass by its name, in order."""
    return {
        one.name: RequestField(default=one.default, **one.metadata) for one in fields(request_type)
    }


def is_number(value: Any) -> bool:
    """Whether it is a number; for Python True and False are, too."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _repetition(name: str, items: tuple[Any, ...]) -> str:
    if len(set(items)) == len(items):
        return ""
    twice = next(item for i, item in enumerate(items) if item in items[:i])
    return f"{name} holds {twice!r} twice; name it once"


def _list_schema(item: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {
        "type": "array",
        "items": item,
        "minItems": least,
        "maxItems": most,
        "uniqueItems": True,
    }


def _shown(value: Any) -> str:
    """A number as a person writes it; the beginning of anything else: it may be of any length."""
    if is_number(value):
        if isinstance(value, int) and abs(value) >= _LONG_NUMBER:
            return "one of more than 20 digits"
        if isinstance(value, float) and value.is_integer() and abs(value) < _LONG_NUMBER:
            return f"{value:.0f}"
        return repr(value)
    return reprlib.repr(value)
