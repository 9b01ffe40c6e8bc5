"""Finds a thread, other than the stopped one, that uses the GPU or may do so any moment.

Two signs: the thread runs code that uses torch, or device memory was allocated by a thread that
started in the same function as a living thread (a prefetcher that waits for its queue is idle, but
continues as soon as there is space).

From Python, a thread that waits in a function of the job (`sys.stdin.readline()`, `conn.recv()`, a
C library) looks like one that computes. So such a thread is checked twice, and counts as waiting if
the kernel shows that it slept all the time in between, unless it is in a function of torch, where
it may be waiting for a device.

Limits: a waiting thread that holds no memory is ignored; threads that started in the same function
are not distinguished; memory without a recorded stack proves nothing.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpumem_otel.base.threads import copying_threads
from gpumem_otel.capture.objects.python_objects import undisturbed
from gpumem_otel.capture.objects.thread_activity import may_wait, work_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from types import FrameType

# A thread that sleeps at two checks with the same number of context switches did not run in
# between. A thread that computes in C without the interpreter lock would be running; one that waits
# for the lock wakes once per switch interval. Formats: proc_pid_status(5), and `schedstat` in
# Documentation/scheduler/sched-stats.rst of Linux.

PROC: Final = Path("/proc")
LONGEST_INTERVAL_SECONDS: Final = 0.0075
"""With a longer switch interval, a thread that waits for the interpreter lock might not wake
between two checks."""
_STATE: Final = re.compile(r"^State:\t(\w)", re.MULTILINE)
_SWITCHES: Final = re.compile(r"^(?:non)?voluntary_ctxt_switches:\t(\d+)$", re.MULTILINE)

Naps: TypeAlias = "Mapping[int, tuple[int, int, str]]"
"""Native id of a sleeping thread -> its voluntary and involuntary context switches, and its
`schedstat` ("" if the kernel has none)."""


def naps(native_ids: Collection[int], proc: Path = PROC) -> Naps:
    """The threads in interruptible sleep now, for `slept_on`.

    Uninterruptible sleep (state D) does not count, since a call of the GPU driver may wait that
    way. Empty if `/proc` belongs to another PID namespace or lacks the fields, or if the switch
    interval is too long.
    """
    sleeping = {}
    try:
        if os.readlink(proc / "self") != str(os.getpid()):  # noqa: PTH115 - a string as it is
            return {}
    except OSError:
        return {}
    for native_id in native_ids:
        task = proc / "self" / "task" / str(native_id)
        status = _text(task / "status")
        state = _STATE.search(status)
        switches = [int(count) for count in _SWITCHES.findall(status)]
        # a sleeping thread has been switched at least once: zeros mean that nothing is counted
        if state is not None and state[1] == "S" and len(switches) == 2 and any(switches):  # noqa: PLR2004
            sleeping[native_id] = (switches[0], switches[1], _text(task / "schedstat"))
    # last, so that a longer interval set meanwhile is noticed
    return sleeping if sys.getswitchinterval() <= LONGEST_INTERVAL_SECONDS else {}


def slept_on(before: Naps, native_id: int | None, proc: Path = PROC) -> bool:
    """Whether this thread has slept without a break since `before`."""
    if native_id is None or native_id not in before:
        return False
    return naps((native_id,), proc).get(native_id) == before[native_id]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


_BOOTSTRAP: Final = "/threading.py"
_OURS: Final = "gpumem-"
_CHECK_INTERVAL_SECONDS: Final = 0.015
"""Between two checks: three switch intervals."""
_Root = tuple[str, str]
"""(file, function) in which a thread started, without those of `threading`."""


def who_else(
    segments: Callable[[], Iterable[Any]],
    parked: threading.Thread,
    known: Collection[int],
    glance: bool = False,
    *,
    proc: Path = PROC,
) -> str:
    """One clause that names the thread, "" if there is none.

    Args:
        segments: returns the segments of a snapshot, as torch wrote them.
        parked: the stopped thread.
        known: ids of threads that need no check.
        glance: check only what threads run now, without pausing any: 0.1 ms, and 15 ms more if one
            may be waiting in a function of the job.
        proc: the proc file system.
    """
    left_out = {parked.ident, threading.get_ident(), *known}
    first = _look(left_out)
    if glance and not first.works:
        return ""
    before = naps([thread.native_id for thread in first.waiting if thread.native_id], proc)
    if before:
        time.sleep(_CHECK_INTERVAL_SECONDS)
    elif glance:
        return next(iter(first.works.values()))
    with nullcontext() if glance else undisturbed():
        second = _look(left_out)
    for thread in second.waiting:
        # after its frame was read: it slept in that frame
        if slept_on(before, thread.native_id, proc):
            second.works.pop(thread.ident, None)
    if second.works or glance or not second.roots:
        return next(iter(second.works.values()), "")
    return _holder(segments(), second.roots)


class _Look:
    """What the threads do.

    Attributes:
        works: id -> a clause about a thread that is at work.
        waiting: of these, the threads that may only be waiting.
        roots: function in which threads started -> the name of one.
    """

    def __init__(self) -> None:
        self.works: dict[int | None, str] = {}
        self.waiting: list[threading.Thread] = []
        self.roots: dict[_Root, str] = {}


def _look(left_out: Collection[int | None]) -> _Look:
    look = _Look()
    threads = {thread.ident: thread for thread in threading.enumerate()}
    stacks = sys._current_frames()  # noqa: SLF001 - documented, for debuggers
    stacks.pop(threading.get_ident(), None)  # this function must not keep its own frame alive
    left_out = {*left_out, *copying_threads()}
    for ident, frame in stacks.items():
        thread = threads.get(ident)
        if ident in left_out or (thread is not None and _is_ours(thread)):
            continue
        name = repr(thread.name) if thread is not None else str(ident)
        work = work_of(frame)
        if work:
            look.works[ident] = f"thread {name}: {work}"
            if thread is not None and may_wait(frame):
                look.waiting.append(thread)
        root = _root_of(frame)
        if root is not None:
            look.roots.setdefault(root, name)
    stacks.clear()
    return look


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith(_OURS)


def _root_of(frame: FrameType) -> _Root | None:
    """Where a thread of `threading` started; None for the main thread."""
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
