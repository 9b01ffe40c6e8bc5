"""Pauses the garbage collector during a yield, and resets state in forked children.

A collection runs on any thread that allocates, ours included. While memory is moved it would delay
the copies. While the driver has the process locked, a tensor that it frees goes to the allocator,
whose mutex may belong to a thread that the driver stopped: all Python threads would block.
"""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Inherited(Protocol):
    """Holds what belongs to one process only."""

    def forget_parent(self) -> None:
        """Called in a forked child: drop it, touching nothing of the parent's."""
        ...


_registered: Final[weakref.WeakSet[Inherited]] = weakref.WeakSet()
_hooked: Final[list[bool]] = []


def register_after_fork(holder: Inherited) -> None:
    """Call `forget_parent` in every child forked from now on, as long as the holder lives."""
    _registered.add(holder)
    if not _hooked:
        _hooked.append(True)
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for holder in list(_registered):
        holder.forget_parent()


class _Collector:
    """Whether we have turned the collector off; a child forked meanwhile turns it on again."""

    def __init__(self) -> None:
        self.off = False
        register_after_fork(self)

    def forget_parent(self) -> None:
        if self.off:
            self.off = False
            gc.enable()


_collector: Final[list[_Collector]] = []


@contextmanager
def uncollected() -> Iterator[None]:
    """No automatic collection in the block: one over a job's 300,000 objects takes 0.2 s.

    Used only while the job's thread is stopped and its memory is scanned or moved, never while
    waiting for a safe point, host memory or device memory. One thread at a time.
    """
    if not _collector:
        _collector.append(_Collector())
    collector = _collector[0]
    if collector.off or not gc.isenabled():
        yield
        return
    try:
        collector.off = True
        gc.disable()
        yield
    finally:
        if collector.off:
            collector.off = False
            gc.enable()


class HeldGarbage:
    """Excludes the objects that exist at `hold` from collection, until `let_go`.

    Objects made afterwards are collected as usual; none of them can be a tensor on a device. If the
    job has frozen objects itself (`gc.freeze`), this does nothing, since they cannot be
    distinguished afterwards: a lease still ends the yield then. If the job freezes objects
    meanwhile (a server before it forks), everything stays frozen as the job asked.
    """

    def __init__(self) -> None:
        self._held = False
        self._count = 0

    def hold(self) -> None:
        """Freeze all objects; takes some milliseconds per million, since they are counted."""
        if not self._held and not gc.get_freeze_count():
            gc.freeze()
            self._held = True
            self._count = gc.get_freeze_count()

    def let_go(self) -> None:
        """Return the objects to the collector, in its oldest generation."""
        if self._held:
            self._held = False
            # the count shrinks by itself; if it has grown, the job has frozen more objects
            if gc.get_freeze_count() <= self._count:
                gc.unfreeze()
