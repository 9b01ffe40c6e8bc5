"""Idempotency keys: what a command that is sent again began the first time."""

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
    """A key that was sent with another command."""


class Keys:
    """Key of a sender -> the command and the operation it began; the oldest is forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[bytes, Operation]] = OrderedDict()

    def find(self, who: str, key: str, request: YieldRequest | RestoreRequest) -> Operation | None:
        """What this command began before, None where it is new.

        Raises:
            KeyReusedError: the key came with another command.
        """
        found = self._known.get((who, key))
        if found is None:
            return None
        if found[0] != _fingerprint(request):
            raise KeyReusedError
        return found[1]

    def keep(
        self, who: str, key: str, request: YieldRequest | RestoreRequest, operation: Operation
    ) -> None:
        """Remember it."""
        self._known[who, key] = (_fingerprint(request), operation)
        if len(self._known) > MAX_KEYS:
            self._known.popitem(last=False)


def is_key(text: str) -> bool:
    """Whether a header's value may be a key."""
    return re.fullmatch(KEY_PATTERN, text) is not None


def _fingerprint(request: YieldRequest | RestoreRequest) -> bytes:
    """Of what is asked for, however the body was written."""
    text = json.dumps([type(request).__name__, as_json(request)], sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
