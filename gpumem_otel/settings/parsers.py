"""From a keyword's value or a variable's text to the value of a setting.

A parser raises `UnusableError`, whose text is one clause that follows the setting's name. Values
that may hold a secret are never repeated in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from urllib.parse import unquote, urlsplit

from gpumem_otel.settings.config import Secret

# `name=value,name=value`: how OpenTelemetry's variables hold resource attributes and headers.


def parse_pairs(text: str, *, strict: bool = False) -> dict[str, str]:
    """Pairs of a comma separated list, both sides percent-decoded; of a repeated name the last.

    https://opentelemetry.io/docs/specs/otel/resource/sdk/#specifying-resource-information-via-an-environment-variable

    Args:
        text: the list; empty parts of it are nothing.
        strict: refuse a part that is no pair, instead of leaving it out.

    Raises:
        ValueError: such a part, in strict mode; its text is not repeated, it may be a secret.
    """
    pairs: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals and name.strip():
            pairs[unquote(name.strip())] = unquote(value.strip())
        elif strict and part.strip():
            raise ValueError("a part is not name=value")
    return pairs


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
    """A path, from the root on: a job may go to another folder later. "" as it is."""
    name = text(value)
    try:
        possible = b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise UnusableError("must be a path, this can not be one")
    if not name or os.path.isabs(name):  # noqa: PTH117 - of a name as it was given
        return name
    try:
        return os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118 - likewise
    except OSError:  # the folder is gone
        return name


def flag(value: object) -> bool:
    """True or false, and the words for it."""
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
            found = int(value)
        except ValueError:
            raise UnusableError("must be a whole number") from None
        if not low <= found <= high:
            raise UnusableError(f"must be between {low} and {high}")
        return found

    return parse


def number(low: float, high: float, *, scale: float = 1.0) -> Parser:
    """A number within bounds; scale is for text alone: variables may have another unit."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise UnusableError("must be a number")
        try:
            found = float(value) * (scale if isinstance(value, str) else 1.0)
        except ValueError:
            raise UnusableError("must be a number") from None
        except OverflowError:
            found = float("inf")
        if not low <= found <= high:
            raise UnusableError(f"must be between {low:g} and {high:g}")
        return found

    return parse


def one_of(*allowed: str) -> Parser:
    """One word of a few, in any case."""

    def parse(value: object) -> str:
        word = text(value).strip().lower()
        if word not in allowed:
            raise UnusableError(f"must be one of {', '.join(allowed)}")
        return word

    return parse


def words(*allowed: str) -> Parser:
    """Words, in a list or separated by commas; any where none are named."""

    def parse(value: object) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple, set, frozenset)):
            raise UnusableError("must be a list of words")
        found = tuple(word for part in parts if (word := text(part).strip()))
        for word in found:
            if allowed and word not in allowed:
                raise UnusableError(f"{word!r} is none of {', '.join(allowed)}")
        return tuple(dict.fromkeys(found))

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
    """Absolute, http or https, without credentials and without a slash at the end."""
    found = text(value).strip().rstrip("/")
    if not found:
        return ""
    try:
        parts = urlsplit(found)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the text of urlsplit's own errors repeats the host, and what is before it
        usable = False
    if not usable:
        raise UnusableError("must be an http:// or https:// URL, like http://host:4040")
    if "@" in parts.netloc:
        raise UnusableError("must not hold a user or password; use the basic auth settings")
    return found
