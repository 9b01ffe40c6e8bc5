"""Releases what the last error of this process and a notebook's outputs keep alive.

A traceback holds the frames of the call that failed, and with them every local variable. Python
keeps the last one in `sys`, IPython more copies and the results of cells. IPython is never imported
here.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.capture.objects.python_objects import instance_dict, running_frames

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

_MOST: Final = 1_000
_LAST: Final = ("last_exc", "last_value", "last_type", "last_traceback")
_SHELL_HOLDERS: Final = ("InteractiveTB", "SyntaxTB")
_RESULT_FIELDS: Final = ("result", "error_before_exec", "error_in_exec")


def shell() -> Any:
    """IPython's shell of this process, None without one."""
    ipython = sys.modules.get("IPython")
    try:
        return ipython.get_ipython() if ipython is not None else None
    except Exception:
        return None


def last_frames() -> list[FrameType]:
    """Frames that the last error keeps, innermost last; those that still run are left out."""
    running = set(map(id, running_frames()))
    frames: dict[int, FrameType] = {}
    for start in _tracebacks():
        level: TracebackType | None = start
        while level is not None and len(frames) < _MOST:
            if id(level.tb_frame) not in running:
                frames.setdefault(id(level.tb_frame), level.tb_frame)
            level = level.tb_next
    return list(frames.values())


def release() -> None:
    """Clear those frames, the places that keep the error, IPython's outputs; collect garbage.

    The exception itself stays printable, with its text and the lines of its traceback; it no longer
    keeps any variable of its frames.
    """
    starts = list(_tracebacks())
    frames = last_frames()
    for start in starts:
        traceback.clear_frames(start)
    for frame in frames:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            # Python 3.11 and older keep the dict of variables that was once asked for: asking
            # again removes from it what is no longer there
            frame.f_locals  # noqa: B018
    for name in _LAST:
        if hasattr(sys, name):
            delattr(sys, name)
    _release_shell(shell())
    del starts, frames
    gc.collect()


def _tracebacks() -> Iterator[TracebackType]:
    """Tracebacks of the last unhandled error and of the one being handled, with their causes."""
    kept = getattr(sys, "last_traceback", None)
    if kept is not None:
        yield kept
    todo = [getattr(sys, "last_exc", None), getattr(sys, "last_value", None), sys.exc_info()[1]]
    todo += _errors_of_shell(shell())
    seen: set[int] = set()
    while todo and len(seen) < _MOST:
        error = todo.pop()
        if not isinstance(error, BaseException) or id(error) in seen:
            continue
        seen.add(id(error))
        if error.__traceback__ is not None:
            yield error.__traceback__
        todo += [error.__cause__, error.__context__]
        inner = instance_dict(error).get("exceptions") or getattr(error, "exceptions", None)
        if isinstance(inner, tuple):  # an exception group
            todo += inner


def _errors_of_shell(ipython: Any) -> list[Any]:
    """Errors that IPython keeps of the last cell."""
    result = instance_dict(ipython).get("last_execution_result") if ipython is not None else None
    return [instance_dict(result).get(name) for name in _RESULT_FIELDS[1:]]


def _release_shell(ipython: Any) -> None:
    """Release IPython's outputs and its copies of the last traceback."""
    if ipython is None:
        return
    with contextlib.suppress(Exception):  # another kind of shell, or one that keeps no outputs
        ipython.displayhook.flush()  # releases most of the outputs, but not all
    own = instance_dict(ipython)
    for names in ("user_ns", "user_ns_hidden"):
        _forget_outputs(own.get(names))
    for name in _SHELL_HOLDERS:
        holder = own.get(name)
        for attribute in ("tb", "etype", "evalue"):
            if attribute in instance_dict(holder):
                setattr(holder, attribute, None)
    result = own.get("last_execution_result")
    for name in _RESULT_FIELDS:
        if name in instance_dict(result):
            setattr(result, name, None)


def _forget_outputs(names: Any) -> None:
    """Remove `Out`, `_5` and `_` from one of the shell's name spaces."""
    if type(names) is not dict:
        return
    for name in ("_oh", "Out"):
        outputs = names.get(name)
        if isinstance(outputs, dict):
            outputs.clear()
    for name in list(names):
        if isinstance(name, str) and name[:1] == "_" and name[1:].isdigit():
            del names[name]
    names.update((name, "") for name in ("_", "__", "___") if name in names)
