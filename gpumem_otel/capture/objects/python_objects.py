"""Looking at the objects of this process without running their code or keeping them alive.

`isinstance` asks an object for its `__class__`, which proxies answer with code of their own (and
lazy modules with warnings), so kinds are told by the method resolution order of the exact type.
Reading the local variables of a running function makes Python 3.12 and older keep a dict of them in
the frame, and with it every object, until the function ends: it is emptied again.
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
"""References to the dict of a frame: the frame's, our variable's, and the argument's."""
_MOST_FRAMES: Final = 64
_UNDISTURBED_SECONDS: Final = 1.0
_locks: Final[dict[int, threading.RLock]] = {}
"""By process: a forked child may inherit one held by a thread that is not there."""


class Kinds:
    """Whether objects are of some base type, by their exact type alone.

    Args:
        bases: kind -> type.
    """

    def __init__(self, **bases: type) -> None:
        self._bases = bases
        self._known: dict[int, tuple[type, str]] = {}

    def of(self, item: object) -> str:
        """The first kind that the object is of, "" where it is of none."""
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

        A tuple that another thread is just filling may be referred to by nobody else: `tuple()`
        fails there if it is. So all objects are let go again, but those asked for, before another
        thread has a turn; what goes through them is C code.
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
    """Within, no other thread runs Python code, for as long as that takes less than a second.

    What runs without the interpreter lock goes on; no thread can start it. A thread that waits for
    the lock asks for it once the switch interval is over: so that is made long, the waits that
    began before are let end, and the lock is taken anew, from when on all waits count. Nothing
    within may let go of the lock: no operation of torch, only attributes. A thread that computes in
    Python alone may have to be waited for, a second at most.
    """
    # one at a time: of two that overlap, the second would put back what the first had set
    with _locks.setdefault(os.getpid(), threading.RLock()):
        interval = sys.getswitchinterval()
        sys.setswitchinterval(max(interval, _UNDISTURBED_SECONDS))
        try:
            time.sleep(2 * interval)
            yield
        finally:
            sys.setswitchinterval(interval)


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame of this thread and its callers, innermost first, at most 64."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def variables(frame: FrameType) -> list[tuple[str, Any]]:
    """Local variables of a frame of this thread or of one that has ended.

    The frame holds no more references afterwards than before, unless a tracer or debugger is at
    work on this thread: it writes the frame's dict back, so that this is left alone.
    """
    namespace = frame.f_locals
    found = list(namespace.items())
    if (
        type(namespace) is dict
        and frame.f_code.co_flags & inspect.CO_OPTIMIZED  # else it is the real namespace
        and sys.gettrace() is None
        and sys.getrefcount(namespace) == _ONLY_FRAME_AND_US  # nobody's `locals()` result
    ):
        namespace.clear()
    return found


def is_module_level(frame: FrameType) -> bool:
    """Whether the frame's variables are the global names of its module."""
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function: asking would make its dict
        return False
    return frame.f_locals is frame.f_globals


def frame_title(frame: FrameType) -> str:
    """`function (file.py:12)`."""
    code = frame.f_code
    file = code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f"{getattr(code, 'co_qualname', code.co_name)} ({file}:{frame.f_lineno})"


def instance_dict(item: object) -> dict[str, Any]:
    """An object's own attributes, {} where it has none; runs no code of its class."""
    try:
        found = object.__getattribute__(item, "__dict__")
    except Exception:
        return {}
    return found if type(found) is dict else {}


def running_frames() -> list[FrameType]:
    """Every frame of Python that runs now, on all threads; that of this function is not among them.

    Whoever keeps one of his own frames in a variable keeps himself and all his callers alive.
    """
    found: list[FrameType] = []
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - documented, for debuggers
        one = frame.f_back if ident == threading.get_ident() else frame
        while one is not None:
            found.append(one)
            one = one.f_back
    frame = None  # type: ignore[assignment]  # it may be this function's own
    return found
