"""The query of `GET /v1/state`, checked; the rules are the document's too."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from gpumem_otel.serve.control_rules import Field, InvalidError, Number, Whole

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MAX_WAIT_SECONDS", "STATE_QUERY", "state_query"]

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
