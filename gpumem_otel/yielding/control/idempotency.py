"""Idempotency keys: the operation that a repeated command began the first time."""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from gpumem_otel.yielding.control.schema import as_json

if TYPE_CHECKING:
    from gpumem_otel.yielding.values import Operation, RestoreRequest, YieldRequest

MAX_KEYS: Final = 100
"""As many as operations are remembered."""

KEY_PATTERN: Final = "^[!-~]{1,128}$"


class KeyReusedError(Exception):
    """The key came with another command before."""


class Keys:
    """A sender's key -> the command and the operation that it began; the oldest is dropped."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[bytes, Operation]] = OrderedDict()

    def find(self, who: str, key: str, request: YieldRequest | RestoreRequest) -> Operation | None:
        """The operation that this command began before, None where it is new.

        Raises:
            KeyReusedError: the key came with another command.
        """
        known = self._known.get((who, key))
        if known is None:
            return None
        fingerprint, operation = known
        if fingerprint != _fingerprint(request):
            raise KeyReusedError
        return operation

    def keep(
        self, who: str, key: str, request: YieldRequest | RestoreRequest, operation: Operation
    ) -> None:
        """Store the operation that this command began."""
        self._known[who, key] = (_fingerprint(request), operation)
        if len(self._known) > MAX_KEYS:
            self._known.popitem(last=False)


def is_key(text: str) -> bool:
    """Whether a header's value may be a key."""
    return re.fullmatch(KEY_PATTERN, text) is not None


def _fingerprint(request: YieldRequest | RestoreRequest) -> bytes:
    """Hash of the request, independent of how its body was written."""
    text = json.dumps([type(request).__name__, as_json(request)], sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
