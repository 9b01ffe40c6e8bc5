"""Decides whether gradients and autograd's graph may be read now, by what other threads run.

The engine writes `.grad` without the interpreter lock and locks a node while it runs; setting
`.grad` to None frees the gradient before its address is cleared. So reading them while another
thread works with tensors may read freed memory and crash the job. A thread does no such work if it
waits in the standard library, sleeps, or has no function of a module that uses torch on its stack.
Sleeping in the kernel is not enough here: C code of the job may continue without the interpreter
lock while `.grad` is read; the standard library needs the lock to continue.
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
    """Call `read` while no other thread works with tensors.

    Args:
        torch: the module.
        read: reads attributes of tensors and nodes, and calls no operation of torch.

    Returns:
        Its result and ""; or None and a clause about the thread that works at every try.
    """
    busy = ""
    for _ in range(_TRIES):
        with undisturbed():
            busy = who_works(torch)
            if not busy:
                return read(), ""
    return None, busy


def who_works(torch: Any) -> str:
    """A clause about a thread that may write gradients; "" for none. Within `undisturbed`."""
    task = getattr(torch._C, "_current_graph_task_id", None)  # noqa: SLF001
    if task is not None and task() != -1:
        return "backward runs"
    own = threading.get_ident()
    stacks = sys._current_frames()  # noqa: SLF001 - documented, for debuggers
    stacks.pop(own, None)  # this function must not keep its own frame alive
    ours = copying_threads()
    return next((work for i, f in stacks.items() if i not in ours and (work := work_of(f))), "")


def work_of(innermost: FrameType) -> str:
    """A clause about the work with tensors of a thread with this innermost frame, "" for none."""
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
    """Whether a thread that works according to `work_of` may be waiting in a function of the job.

    False in a function of torch, where it may wait for a device, and in backward, whose own threads
    run while the caller sleeps.
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
