"""Whether what autograd keeps may be read now: gradients, and the nodes of its graph.

Its engine writes `.grad` without the interpreter lock and locks a node while that runs; setting
`.grad` to None frees the gradient first and forgets its address afterwards. So whoever reads these
while any other thread is in the midst of work with tensors may read freed memory, and crash the
job. A thread is taken to be out of it where it waits in the standard library, where it sleeps, or
where no function on its stack belongs to a module that knows torch. That it sleeps in the kernel
(`asleep`) is no such sign here: what waits in C, in a function of the job, may go on in C, without
the interpreter lock, while `.grad` is read; out of the standard library it needs that lock first.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.threads import copying_threads
from gpumem_otel.capture.objects.python_objects import frame_title, undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import TypeVar

    T = TypeVar("T")

_TRIES: Final = 4
_BACKWARD: Final = frozenset({"_engine_run_backward", "backward", "grad"})
_BACKWARD_FILES: Final = ("torch/autograd/graph.py", "torch/autograd/__init__.py")
_HARMLESS: Final = ("/gpumem_otel/", "/torch/_inductor/compile_worker/", "/site-packages/debugpy/")
_KNOWS: Final = (ModuleType, FunctionType, type)


def read_autograd(torch: Any, read: Callable[[], T]) -> tuple[T | None, str]:
    """What `read` gives, while no other thread is in the midst of work with tensors.

    Args:
        torch: the module.
        read: reads attributes of tensors and nodes, and calls no operation of torch.

    Returns:
        Its result and ""; or None and who works, where somebody does at each of a few moments.
    """
    who = ""
    for _ in range(_TRIES):
        with undisturbed():
            who = who_works(torch)
            if not who:
                return read(), ""
    return None, who


def who_works(torch: Any) -> str:
    """Who may be writing gradients; "" where nobody is. Call it within `undisturbed`."""
    task = getattr(torch._C, "_current_graph_task_id", None)  # noqa: SLF001
    if task is not None and task() != -1:
        return "backward runs"
    own = threading.get_ident()
    stacks = sys._current_frames()  # noqa: SLF001 - documented, for debuggers
    stacks.pop(own, None)  # of this very function, which must not keep itself alive
    found = ""
    ours = copying_threads()
    for ident, frame in stacks.items():
        if ident not in ours:
            found = found or work_of(frame)
    return found


def work_of(innermost: FrameType) -> str:
    """What a thread with this innermost frame does with tensors, "" where it does nothing."""
    frame: FrameType | None = innermost
    knows_torch = False
    while frame is not None:
        path = _path(frame)
        if frame.f_code.co_name in _BACKWARD and path.endswith(_BACKWARD_FILES):
            return "backward runs"
        knows_torch = knows_torch or "/torch/" in path or _knows_torch(frame.f_globals)
        frame = frame.f_back
    if not knows_torch or _is_waiting(innermost):
        return ""
    return f"another thread is at work in {frame_title(innermost)}"


def may_wait(innermost: FrameType) -> bool:
    """Whether a thread that is at work by `work_of` may as well wait, in a function of the job.

    In a function of torch it may sleep until a device is done; and backward's own threads run while
    the one that called it sleeps.
    """
    frame: FrameType | None = innermost
    while frame is not None:
        path = _path(frame)
        if frame.f_code.co_name in _BACKWARD and path.endswith(_BACKWARD_FILES):
            return False
        frame = frame.f_back
    return "/torch/" not in _path(innermost)


def _is_waiting(frame: FrameType) -> bool:
    path = _path(frame)
    if any(part in path for part in _HARMLESS):
        return True
    standard = sysconfig.get_path("stdlib").replace("\\", "/")
    if path.startswith(("<frozen ", f"{standard}/")) and "-packages/" not in path:
        return True
    return "sleep(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _knows_torch(names: dict[str, Any]) -> bool:
    for value in list(names.values()):
        if type(value) in _KNOWS:
            name = getattr(value, "__name__" if type(value) is ModuleType else "__module__", "")
            if type(name) is str and (name == "torch" or name.startswith("torch.")):
                return True
    return False


def _path(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/")
