"""Parsers that turn a keyword's value or a variable's text into the value of a setting.

A parser raises `UnusableError`, whose text is one clause that follows the setting's name. Values
that may hold a secret never appear in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from urllib.parse import unquote, urlsplit


def parse_pairs(text: str, *, strict: bool = False) -> dict[str, str]:
    """Pairs of a comma separated list, both sides percent-decoded; of a repeated name the last.

    https://opentelemetry.io/docs/specs/otel/resource/sdk/#specifying-resource-information-via-an-environment-variable

    Args:
        text: the list; empty parts are ignored.
        strict: refuse a part that is not a pair instead of ignoring it.

    Raises:
        ValueError: such a part, in strict mode; the message omits its text, which may be secret.
    """
    pairs: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals and name.strip():
            pairs[unquote(name.strip())] = unquote(value.strip())
        elif strict and part.strip():
            raise ValueError("a part is not name=value")
    return pairs


class Secret:
    """A string that neither repr nor str shows."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The string itself, for the wire alone."""
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(("Secret", self._value))

    def __repr__(self) -> str:
        return "Secret('***')" if self._value else "Secret('')"


Parser = Callable[[object], object]
"""A keyword's value or a variable's text -> the field's value, or UnusableError."""


class UnusableError(ValueError):
    """What is wrong with a value, one clause that follows the option's name."""


def text(value: object) -> str:
    """A string as it is."""
    if not isinstance(value, str):
        raise UnusableError("must be a string")
    return value


def path(value: object) -> str:
    """An absolute path, since a job may change its folder later; "" stays as it is."""
    name = text(value)
    try:
        is_path = b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise UnusableError("must be a path, which this cannot be")
    if not name or os.path.isabs(name):  # noqa: PTH117 - of a name as it was given
        return name
    try:
        return os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118 - of a name as it was given
    except OSError:  # the folder is gone
        return name


def flag(value: object) -> bool:
    """A boolean, or a word for one."""
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"", "0", "false", "no", "off"}:
        return False
    raise UnusableError("must be true or false")


def integer(low: int, high: int) -> Parser:
    """A whole number within bounds."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise UnusableError("must be a whole number")
        try:
            parsed = int(value)
        except ValueError:
            raise UnusableError("must be a whole number") from None
        if not low <= parsed <= high:
            raise UnusableError(f"must be between {low} and {high}")
        return parsed

    return parse


def number(low: float, high: float, *, scale: float = 1.0) -> Parser:
    """A number within bounds; `scale` applies to text alone, as variables may have another unit."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise UnusableError("must be a number")
        try:
            parsed = float(value) * (scale if isinstance(value, str) else 1.0)
        except ValueError:
            raise UnusableError("must be a number") from None
        except OverflowError:
            parsed = float("inf")
        if not low <= parsed <= high:
            raise UnusableError(f"must be between {low:g} and {high:g}")
        return parsed

    return parse


def one_of(*allowed: str) -> Parser:
    """One of these words, in any case."""

    def parse(value: object) -> str:
        word = text(value).strip().lower()
        if word not in allowed:
            raise UnusableError(f"must be one of {', '.join(allowed)}")
        return word

    return parse


def words(*allowed: str) -> Parser:
    """Words, in a list or separated by commas: these, or any if none are given."""

    def parse(value: object) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple, set, frozenset)):
            raise UnusableError("must be a list of words")
        stripped = tuple(word for part in parts if (word := text(part).strip()))
        for word in stripped:
            if allowed and word not in allowed:
                raise UnusableError(f"{word!r} is none of {', '.join(allowed)}")
        return tuple(dict.fromkeys(stripped))

    return parse


def pairs(value: object) -> tuple[tuple[str, str], ...]:
    """A mapping, or `name=value,name=value` as in OTEL_RESOURCE_ATTRIBUTES; sorted."""
    if isinstance(value, Mapping):
        return tuple(sorted((text(name), str(item)) for name, item in value.items()))
    try:
        return tuple(sorted(parse_pairs(text(value), strict=True).items()))
    except UnusableError:
        raise
    except ValueError:
        raise UnusableError("must be name=value, comma separated") from None


def secret(value: object) -> Secret:
    """A string that is never shown."""
    return value if isinstance(value, Secret) else Secret(text(value).strip())


def secret_pairs(value: object) -> tuple[tuple[str, Secret], ...]:
    """Pairs whose values are never shown."""
    return tuple((name, Secret(item)) for name, item in pairs(value))


def url(value: object) -> str:
    """An absolute http or https URL, without credentials; slashes at its end are removed."""
    address = text(value).strip().rstrip("/")
    if not address:
        return ""
    try:
        parts = urlsplit(address)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # urlsplit's own message repeats the host and the credentials
        usable = False
    if not usable:
        raise UnusableError("must be an http:// or https:// URL, like http://host:4040")
    if "@" in parts.netloc:
        raise UnusableError("must not hold a user or password; use the basic auth settings")
    return address
