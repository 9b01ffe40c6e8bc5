"""Loggers whose lines name this package, also where the job has set up no logging."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class NamedLogger(_Adapter):
    """Names the package where no handler will: the last resort of `logging` shows bare messages."""

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        """The message, with the package's name before it where it would be shown alone."""
        return (msg if self.logger.hasHandlers() else f"gpumem_otel: {msg}"), kwargs


def named_logger(name: str) -> NamedLogger:
    """The logger of this name, which begins with `gpumem_otel`."""
    return NamedLogger(logging.getLogger(name), {})
