"""Which thread, other than the one that stands still, uses the GPU or may go on with it.

Two signs: it is at work in code that knows torch, or memory on a device was allocated in a thread
that began where a thread that lives now began (a prefetcher that waits for a place in its queue
does nothing just now, and goes on as soon as there is one).

Limits: a thread that waits or sleeps and holds no memory is taken to do neither; two threads that
began in the same function are taken for each other; memory without a recorded stack tells nothing.
"""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.capture.bystanders import work_of
from gpumem_otel.capture.objects import undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from types import FrameType

__all__ = ["who_else"]

_BOOTSTRAP: Final = "/threading.py"
_OURS: Final = "gpumem-"
_Root = tuple[str, str]
"""(file, function) in which a thread began, those of `threading` itself left out."""


def who_else(
    segments: Callable[[], Iterable[Any]],
    parked: threading.Thread,
    known: Collection[int],
    glance: bool = False,
) -> str:
    """One clause that names the thread, "" where there is none.

    Args:
        segments: gives those of a snapshot, as torch wrote them.
        parked: the thread that stands still.
        known: identities of threads that take care of themselves.
        glance: only what they do at this moment, without holding anybody up: 0.1 ms.
    """
    own_ident = threading.get_ident()
    threads = {thread.ident: thread for thread in threading.enumerate()}
    left_out = {parked.ident, own_ident, *known}
    left_out |= {ident for ident, thread in threads.items() if _is_ours(thread)}
    roots: dict[_Root, str] = {}
    works = ""
    with nullcontext() if glance else undisturbed():
        stacks = sys._current_frames()  # noqa: SLF001 - documented, for debuggers
        stacks.pop(own_ident, None)  # this very function must not keep itself alive
        for ident, frame in stacks.items():
            if ident in left_out:
                continue
            thread = threads.get(ident)
            name = repr(thread.name) if thread is not None else str(ident)
            work = work_of(frame)
            if work:
                works = works or f"thread {name}: {work}"
            root = _root_of(frame)
            if root is not None:
                roots.setdefault(root, name)
        stacks.clear()
    if works or glance or not roots:
        return works
    return _holder(segments(), roots)


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith(_OURS)


def _root_of(frame: FrameType) -> _Root | None:
    """Where a thread began that `threading` started; None of the main thread."""
    stack: list[FrameType] = []
    one: FrameType | None = frame
    while one is not None:
        stack.append(one)
        one = one.f_back
    return _first_own(
        [(inner.f_code.co_filename, inner.f_code.co_name) for inner in reversed(stack)]
    )


def _first_own(outermost_first: Iterable[_Root]) -> _Root | None:
    began = False
    for file, function in outermost_first:
        path = file.replace("\\", "/")
        if path.endswith(_BOOTSTRAP):
            began = True
        elif path.endswith(".py") or path.startswith("<"):
            return (path, function) if began else None
    return None


def _holder(segments: Iterable[Any], roots: dict[_Root, str]) -> str:
    seen: dict[tuple[int, ...], _Root | None] = {}
    for segment in segments:
        for block in segment.get("blocks") or ():
            frames = block.get("frames")
            if not frames or block.get("state") != "active_allocated":
                continue
            # frames are shared between stacks by identity
            key = tuple(map(id, frames[-8:]))
            if key not in seen:
                outermost = [(str(f.get("filename")), str(f.get("name"))) for f in frames[-32:]]
                seen[key] = _first_own(reversed(outermost))
            root = seen[key]
            if root is not None and root in roots:
                return f"thread {roots[root]} holds memory on the device ({root[1]})"
    return ""
