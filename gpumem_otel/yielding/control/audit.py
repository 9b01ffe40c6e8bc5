"""The audit log: one line per command, and one per request that was turned away, within bounds."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.serve.rate_limit import Buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Warnings, since that is what a job without logging of its own shows.
_log = named_logger("gpumem_otel.audit")

_REFUSED_AT_ONCE: Final = 20
_REFUSED_PER_SECOND: Final = 1.0
"""Of each kind, so that a flood of one kind hides none of another."""


class Audit:
    """Writes `name=value` lines whose values are JSON: nothing in them ends a line or a value."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets(_REFUSED_AT_ONCE, _REFUSED_PER_SECOND, clock)
        self._left_out: dict[str, int] = {}

    def command(self, values: Mapping[str, object]) -> None:
        """A command that was taken, or refused by the state of the job.

        Always logged: who may command is held by a rate limit.
        """
        _log.warning("control: %s", _line(values))

    def refused(self, status: int, values: Mapping[str, object]) -> None:
        """A request that was turned away; how many were left out is on the next line."""
        self._bounded(str(status), {**values, "status": status})

    def cut(self, origin: str, reason: str) -> None:
        """A connection that never came to a whole request; likewise."""
        self._bounded("cut", {"from": origin, "outcome": "refused", "reason": reason})

    def _bounded(self, kind: str, values: Mapping[str, object]) -> None:
        if self._buckets.take(kind):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        left_out = self._left_out.pop(kind, 0)
        more = {"not_logged": left_out} if left_out else {}
        _log.warning("control: %s", _line({**values, **more}))


def _line(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={json.dumps(value)}" for name, value in values.items())
