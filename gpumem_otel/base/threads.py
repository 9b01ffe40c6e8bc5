"""Threads of ours that call torch and neither read nor write a gradient."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_COPYING: Final[set[int]] = set()


@contextmanager
def copying() -> Iterator[None]:
    """Within, this thread copies memory of the job and does nothing else with torch."""
    ident = threading.get_ident()
    _COPYING.add(ident)
    try:
        yield
    finally:
        _COPYING.discard(ident)


def copying_threads() -> Collection[int]:
    """The identities of those threads, at this moment."""
    return frozenset(_COPYING)
