"""What a forked child has to be told: nothing that it inherited of a yield is its own."""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

__all__ = ["Inherited", "tell_in_child"]


class Inherited(Protocol):
    """Holds what belongs to one process alone."""

    def forget_parent(self) -> None:
        """Called in a forked child: let go of it, touching nothing of the parent's."""
        ...


_known: Final[weakref.WeakSet[Inherited]] = weakref.WeakSet()
_hooked: Final[list[bool]] = []


def tell_in_child(one: Inherited) -> None:
    """Have it told in every child forked from now on, for as long as it lives."""
    _known.add(one)
    if not _hooked:
        _hooked.append(True)
        os.register_at_fork(after_in_child=_tell_all)


def _tell_all() -> None:
    for one in list(_known):
        one.forget_parent()
