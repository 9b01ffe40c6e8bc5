"""The last error of this process and a notebook's outputs: what keeps their objects alive.

A traceback holds the frames of the call that failed, and these every local variable. Python keeps
the last one in `sys`, IPython a few more copies and the results of cells. Without IPython nothing
of it is touched, and it is never imported.
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
    found: dict[int, FrameType] = {}
    for start in _tracebacks():
        one: TracebackType | None = start
        while one is not None and len(found) < _MOST:
            if id(one.tb_frame) not in running:
                found.setdefault(id(one.tb_frame), one.tb_frame)
            one = one.tb_next
    return list(found.values())


def release() -> None:
    """Clear those frames, the places that keep the error, IPython's outputs; collect garbage.

    The exception itself stays printable: its text and the lines of its traceback. Whoever holds it
    keeps those, and no variable of its frames.
    """
    starts = list(_tracebacks())
    frames = last_frames()
    for start in starts:
        traceback.clear_frames(start)
    for frame in frames:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            # Python 3.11 and older keep the dict of variables that somebody once asked for:
            # asked again, it is emptied of what is no longer there
            frame.f_locals  # noqa: B018
    for name in _LAST:
        if hasattr(sys, name):
            delattr(sys, name)
    _release_shell(shell())
    del starts, frames
    gc.collect()


def _tracebacks() -> Iterator[TracebackType]:
    """Of the last unhandled error and of the one being handled, with their causes."""
    kept = getattr(sys, "last_traceback", None)
    if kept is not None:
        yield kept
    todo = [getattr(sys, "last_exc", None), getattr(sys, "last_value", None), sys.exc_info()[1]]
    todo += _of_shell(shell())
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


def _of_shell(found: Any) -> list[Any]:
    """Errors that IPython keeps of the last cell."""
    result = instance_dict(found).get("last_execution_result") if found is not None else None
    return [instance_dict(result).get(name) for name in _RESULT_FIELDS[1:]]


def _release_shell(found: Any) -> None:
    """IPython's outputs and its copies of the last traceback."""
    if found is None:
        return
    with contextlib.suppress(Exception):  # a shell of another make, or one that keeps no outputs
        found.displayhook.flush()  # IPython's own means, which forget some of its places
    for names in ("user_ns", "user_ns_hidden"):
        _forget_outputs(instance_dict(found).get(names))
    own = instance_dict(found)
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
    """`Out`, `_5` and `_` in one of the shell's name spaces."""
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
