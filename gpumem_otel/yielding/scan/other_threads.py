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

# Whether a thread of this process slept in the kernel all the time between two looks at it.
#
# A thread that Linux reports as sleeping at both looks, and that was switched to the same number of
# times, did not run in between: to run it must be switched to, and to sleep again switched away
# from. Computing in C without the interpreter lock it would be running; waiting for that lock it
# wakes once per switch interval to ask for it. Format of the files: proc_pid_status(5); `schedstat`
# is Documentation/scheduler/sched-stats.rst of Linux.

PROC: Final = Path("/proc")
LONGEST_INTERVAL_SECONDS: Final = 0.0075
"""Of the interpreter's switch interval: with a longer one a thread that waits for the interpreter
lock might not wake between two looks."""
_STATE: Final = re.compile(r"^State:\t(\w)", re.MULTILINE)
_SWITCHES: Final = re.compile(r"^(?:non)?voluntary_ctxt_switches:\t(\d+)$", re.MULTILINE)

Naps: TypeAlias = "Mapping[int, tuple[int, int, str]]"
"""Native thread id -> how often a thread that sleeps was switched (of its own will, or not), and
its times in `schedstat` ("" where the kernel keeps none)."""


def naps(native_ids: Collection[int], proc: Path = PROC) -> Naps:
    """Those of the threads that sleep interruptibly now, for `slept_on`.

    One in an uninterruptible sleep (state D) is not among them: that is how a call of the GPU's
    driver may wait. Nor is any where `/proc` is not that of this process's PID namespace, does not
    say it, or the switch interval is too long.
    """
    found = {}
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
        # who sleeps has been switched away from: zeros are of something that does not count
        if state is not None and state[1] == "S" and len(switches) == 2 and any(switches):  # noqa: PLR2004
            found[native_id] = (switches[0], switches[1], _text(task / "schedstat"))
    # asked last: what began to wait for the lock after a longer one was set is not seen before it
    return found if sys.getswitchinterval() <= LONGEST_INTERVAL_SECONDS else {}


def slept_on(before: Naps, native_id: int | None, proc: Path = PROC) -> bool:
    """Whether this thread was asleep then, is now, and was so all the time."""
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
