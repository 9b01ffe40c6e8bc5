"""Inspects the objects of this process without running their code or keeping them alive.

`isinstance` reads an object's `__class__`, which runs code of proxies (and warns in lazy modules),
so kinds are decided by the method resolution order of the exact type. Reading the local variables
of a running function makes Python 3.12 and older keep a dict of them, and so every object, in the
frame until the function ends: that dict is emptied again.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_mro_of: Final = type.__dict__["__mro__"].__get__
_ONLY_FRAME_AND_US: Final = 3
"""References to a frame's dict: by the frame, our variable, and the argument."""
_MOST_FRAMES: Final = 64
_UNDISTURBED_SECONDS: Final = 1.0
_locks: Final[dict[int, threading.RLock]] = {}
"""By pid: a forked child may inherit one held by a thread that does not exist there."""


class Kinds:
    """Classifies objects by base type, using only their exact type.

    Args:
        bases: kind -> type.
    """

    def __init__(self, **bases: type) -> None:
        self._bases = bases
        self._known: dict[int, tuple[type, str]] = {}

    def of(self, item: object) -> str:
        """The first kind that matches, "" for none."""
        exact = type(item)
        known = self._known.get(id(exact))  # by id, since a metaclass may define __hash__
        if known is None:
            order = _mro_of(exact)
            kind = next(
                (kind for kind, base in self._bases.items() if any(one is base for one in order)),
                "",
            )
            known = self._known[id(exact)] = (exact, kind)
        return known[1]

    def collected(self) -> dict[str, list[Any]]:
        """Every object of these kinds that the collector tracks, by kind.

        `tuple()` fails on another thread if the tuple that it is filling has more than one
        reference. So all objects but the requested ones are released before another thread runs;
        only C code goes through them.
        """
        wanted: dict[int, str] = {}
        for kind, base in self._bases.items():
            todo = [base]
            while todo:
                one = todo.pop()
                if id(one) not in wanted:
                    wanted[id(one)] = kind
                    todo += type.__subclasses__(one)
        with undisturbed():
            everything = gc.get_objects()
            asked_for = map(wanted.__contains__, map(id, map(type, everything)))
            found = list(itertools.compress(everything, asked_for))
            everything.clear()
            del asked_for
        by_kind: dict[str, list[Any]] = {}
        for item in found:
            by_kind.setdefault(wanted[id(type(item))], []).append(item)
        return by_kind


@contextmanager
def undisturbed() -> Iterator[None]:
    """No other thread runs Python code in the block, as long as it takes less than a second.

    Code without the interpreter lock continues, but no thread can start any. A thread that waits
    for the lock requests it after the switch interval: so the interval is made long, and the sleep
    lets earlier waits end. The block must not release the lock: no operation of torch, only
    attributes. A thread that computes in pure Python may delay this by a second at most.
    """
    # one at a time: of two overlapping ones the second would restore the interval of the first
    with _locks.setdefault(os.getpid(), threading.RLock()):
        interval = sys.getswitchinterval()
        sys.setswitchinterval(max(interval, _UNDISTURBED_SECONDS))
        try:
            time.sleep(2 * interval)
            yield
        finally:
            sys.setswitchinterval(interval)


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame of this thread and its callers, innermost first, 64 at most."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def variables(frame: FrameType) -> list[tuple[str, Any]]:
    """Local variables of a frame of this thread, or of an ended one.

    The frame keeps no additional references, unless a tracer or debugger is active on this thread:
    that writes the frame's dict back, so the dict is left alone.
    """
    namespace = frame.f_locals
    items = list(namespace.items())
    if (
        type(namespace) is dict
        and frame.f_code.co_flags & inspect.CO_OPTIMIZED  # else it is the real namespace
        and sys.gettrace() is None
        and sys.getrefcount(namespace) == _ONLY_FRAME_AND_US  # not a result of `locals()`
    ):
        namespace.clear()
    return items


def is_module_level(frame: FrameType) -> bool:
    """Whether the frame's variables are the global names of its module."""
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function: f_locals would make its dict
        return False
    return frame.f_locals is frame.f_globals


def frame_title(frame: FrameType) -> str:
    """`function (file.py:12)`."""
    code = frame.f_code
    file = code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f"{getattr(code, 'co_qualname', code.co_name)} ({file}:{frame.f_lineno})"


def instance_dict(item: object) -> dict[str, Any]:
    """An object's own attributes, {} if it has none; runs no code of its class."""
    try:
        attributes = object.__getattribute__(item, "__dict__")
    except Exception:
        return {}
    return attributes if type(attributes) is dict else {}


def running_frames() -> list[FrameType]:
    """All running Python frames of all threads, except that of this function.

    A function that keeps its own frame in a variable keeps itself and all its callers alive.
    """
    frames: list[FrameType] = []
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - documented, for debuggers
        one = frame.f_back if ident == threading.get_ident() else frame
        while one is not None:
            frames.append(one)
            one = one.f_back
    frame = None  # type: ignore[assignment]  # it may be this function's own
    return frames
