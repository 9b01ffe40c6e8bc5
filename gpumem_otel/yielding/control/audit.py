"""The audit log: a line for each command, and for refused requests within bounds."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.serve.rate_limit import Buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Warnings: a job that has set up no logging shows them.
_log = named_logger("gpumem_otel.audit")

_REFUSED_AT_ONCE: Final = 20
_REFUSED_PER_SECOND: Final = 1.0
"""For each kind, so that a flood of one kind does not hide another."""


class Audit:
    """Writes lines of `name=value`; values are JSON, so that none of them ends a line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets(_REFUSED_AT_ONCE, _REFUSED_PER_SECOND, clock)
        self._left_out: dict[str, int] = {}

    def command(self, values: Mapping[str, object]) -> None:
        """A command that was taken, or that the job's state refused.

        Always logged: a rate limit bounds the senders.
        """
        _log.warning("control: %s", _line(values))

    def refused(self, status: int, values: Mapping[str, object]) -> None:
        """A request that was refused; the next line says how many lines were left out."""
        self._bounded(str(status), {**values, "status": status})

    def cut(self, origin: str, reason: str) -> None:
        """A connection that ended before a whole request; bounded like `refused`."""
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
