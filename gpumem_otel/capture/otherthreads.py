"""Which thread, other than the one that stands still, uses the GPU or may go on with it.

Two signs: it is at work in code that knows torch, or memory on a device was allocated in a thread
that began where a thread that lives now began (a prefetcher that waits for a place in its queue
does nothing just now, and goes on as soon as there is one).

Whoever waits in a function of the job (`sys.stdin.readline()`, `conn.recv()`, a C library that
waits for a message) looks from Python like one that computes there. So such a thread is looked at
twice, and where the kernel shows that it slept all the time between, it is taken to wait: unless
it is in a function of torch, where a thread may sleep until a device is done.

Limits: a thread that waits or sleeps and holds no memory is taken to do neither; two threads that
began in the same function are taken for each other; memory without a recorded stack tells nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.capture.asleep import PROC, naps, slept_on
from gpumem_otel.capture.bystanders import may_wait, work_of
from gpumem_otel.capture.objects import undisturbed
from gpumem_otel.core.threads import copying_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path
    from types import FrameType

__all__ = ["who_else"]

_BOOTSTRAP: Final = "/threading.py"
_OURS: Final = "gpumem-"
_APART_SECONDS: Final = 0.015
"""Between two looks: three turns of whoever waits for the interpreter lock."""
_Root = tuple[str, str]
"""(file, function) in which a thread began, those of `threading` itself left out."""


def who_else(
    segments: Callable[[], Iterable[Any]],
    parked: threading.Thread,
    known: Collection[int],
    glance: bool = False,
    *,
    proc: Path = PROC,
) -> str:
    """One clause that names the thread, "" where there is none.

    Args:
        segments: gives those of a snapshot, as torch wrote them.
        parked: the thread that stands still.
        known: identities of threads that take care of themselves.
        glance: only what they do at this moment, without holding anybody up: 0.1 ms, and 15 ms
            more where one may be waiting in a function of the job.
        proc: where Linux tells of threads.
    """
    left_out = {parked.ident, threading.get_ident(), *known}
    first = _look(left_out)
    if glance and not first.works:
        return ""
    before = naps([thread.native_id for thread in first.waiting if thread.native_id], proc)
    if before:
        time.sleep(_APART_SECONDS)
    elif glance:
        return next(iter(first.works.values()))
    with nullcontext() if glance else undisturbed():
        second = _look(left_out)
    for thread in second.waiting:
        # asked after its frame was read: it slept with that one innermost
        if slept_on(before, thread.native_id, proc):
            second.works.pop(thread.ident, None)
    if second.works or glance or not second.roots:
        return next(iter(second.works.values()), "")
    return _holder(segments(), second.roots)


class _Look:
    """What the threads do.

    Attributes:
        works: identity -> who is at work, and where.
        waiting: of these, those that may as well be waiting.
        roots: where threads began -> the name of one.
    """

    def __init__(self) -> None:
        self.works: dict[int | None, str] = {}
        self.waiting: list[threading.Thread] = []
        self.roots: dict[_Root, str] = {}


def _look(left_out: Collection[int | None]) -> _Look:
    found = _Look()
    threads = {thread.ident: thread for thread in threading.enumerate()}
    stacks = sys._current_frames()  # noqa: SLF001 - documented, for debuggers
    stacks.pop(threading.get_ident(), None)  # this very function must not keep itself alive
    left_out = {*left_out, *copying_threads()}
    for ident, frame in stacks.items():
        thread = threads.get(ident)
        if ident in left_out or (thread is not None and _is_ours(thread)):
            continue
        name = repr(thread.name) if thread is not None else str(ident)
        work = work_of(frame)
        if work:
            found.works[ident] = f"thread {name}: {work}"
            if thread is not None and may_wait(frame):
                found.waiting.append(thread)
        root = _root_of(frame)
        if root is not None:
            found.roots.setdefault(root, name)
    stacks.clear()
    return found


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
