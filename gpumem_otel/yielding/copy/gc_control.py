"""Keeps the garbage collector out of the way of a yield.

A collection runs on whichever thread happens to allocate, ours too. While memory is moved it would
hold the copies up. While the driver holds the process a tensor that it frees goes to the allocator,
whose mutex a thread stopped by the driver may have: all Python would stand still.
"""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

# What a forked child has to be told: nothing that it inherited of a yield is its own.


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


class _Collector:
    """Whether the collector is off for us; a child that is forked meanwhile has it on again."""

    def __init__(self) -> None:
        self.off = False
        tell_in_child(self)

    def forget_parent(self) -> None:
        """See `inchild`."""
        if self.off:
            self.off = False
            gc.enable()


_collector: Final[list[_Collector]] = []


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, no collection begins by itself: one of a job's 300,000 objects takes 0.2 s.

    Only while the job's thread stands still and its memory is looked for or moved, never while a
    safe point, host memory or room on a device is waited for. By one thread at a time.
    """
    if not _collector:
        _collector.append(_Collector())
    one = _collector[0]
    if one.off or not gc.isenabled():
        yield
        return
    try:
        one.off = True
        gc.disable()
        yield
    finally:
        if one.off:
            one.off = False
            gc.enable()


class HeldGarbage:
    """What is there now is no more collected, until it is let go.

    Objects made meanwhile are collected as ever; none of them can be a tensor on a device. Where
    the job keeps objects from being collected itself (`gc.freeze`), nothing is done, since they
    could not be told apart afterwards: a lease is the way out then. Where it does so meanwhile (a
    server before it forks), all stays as it asked for.
    """

    def __init__(self) -> None:
        self._held = False
        self._count = 0

    def hold(self) -> None:
        """Takes some milliseconds for a million objects: they are counted."""
        if not self._held and not gc.get_freeze_count():
            gc.freeze()
            self._held = True
            self._count = gc.get_freeze_count()

    def let_go(self) -> None:
        """To the collector again, as objects that have been there for long."""
        if self._held:
            self._held = False
            # it can only become less by itself: more of them were added by the job
            if gc.get_freeze_count() <= self._count:
                gc.unfreeze()
