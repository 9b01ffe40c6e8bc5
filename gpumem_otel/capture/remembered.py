"""The large storages that the last look for movable memory found: what will probably go next time.

From one yield of a job to the next hardly anything changes, and a look takes a tenth of a second,
in which five GiB could be on their way. So the copy of these begins before the look, which alone
decides what goes. No storage is kept alive.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gpumem_otel.capture.storages import WeakStorage, address_of, storage_again

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpumem_otel.core.yields import Movable

__all__ = ["Remembered"]

_LARGE_BYTES: Final = 1 << 20


class Remembered:
    """Storages of at least 1 MiB, by weak references."""

    def __init__(self) -> None:
        self._entries: list[tuple[WeakStorage, Movable]] = []

    def keep(self, movables: Iterable[Movable]) -> None:
        """Forget the last ones for these."""
        self._entries = [
            (WeakStorage.of(one.storage), replace(one, storage=None, frames=()))
            for one in movables
            if one.size_bytes >= _LARGE_BYTES
        ]

    def alive(self) -> list[Movable]:
        """Those that live and are as large as they were, where they are now; frames left out."""
        torch = sys.modules.get("torch")
        found = []
        for weak, one in self._entries:
            storage = storage_again(torch, weak)
            if storage is None or storage.nbytes() != one.size_bytes:
                continue
            address = address_of(storage)
            if address:
                found.append(replace(one, storage=storage, address=address))
        return found
