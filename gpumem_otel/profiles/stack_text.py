"""Stacks in few lines: which frames tell most, and the one line that says where memory was made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_otel.base.text import printable
from gpumem_otel.profiles.tables import stack_lines
from gpumem_otel.snapshot.stacks import basename

if TYPE_CHECKING:
    from gpumem_otel.base.profile import Frame, Stack

_ENDS = 2
"""With so few frames shown, only the ends are."""


def count_of(count: int, what: str) -> str:
    """`1 segment`, `2 segments`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def more(count: int, what: str) -> str:
    """The line that stands for what is not shown."""
    return f"... {count_of(count, f'more {what}')}"


def is_torch(frame: Frame) -> bool:
    """Whether a frame is of torch, or of no Python file."""
    parts = frame.filename.replace("\\", "/").split("/")
    inside = "torch" in parts[:-1] or frame.name.startswith("torch.")
    return inside or not frame.filename.endswith(".py")


def shown_frames(stack: Stack, number: int) -> list[int]:
    """Which frames of a stack tell most: the ends, and the first that is not torch's own."""
    if len(stack) <= number:
        return list(range(len(stack)))
    outer = min(2, number // 2)
    shown = set(range(len(stack) - outer, len(stack)))
    own = next((i for i, frame in enumerate(stack) if not is_torch(frame)), None)
    if own is not None and number > _ENDS:
        shown.add(own)
    for index in range(len(stack)):
        if len(shown) == number:
            break
        shown.add(index)
    return sorted(shown)


def short_stack(stack: Stack, number: int) -> list[str]:
    """At most so many frames in a line each, leaf first, and a line for each gap."""
    lines = []
    following = 0
    for index in shown_frames(stack, number):
        if index > following:
            lines.append(more(index - following, "frame"))
        lines += stack_lines(stack[index : index + 1])
        following = index + 1
    if len(stack) > following:
        lines.append(more(len(stack) - following, "frame"))
    return lines


def short_frame(frame: Frame) -> str:
    """`forward (linear.py:134)`: without the file twice."""
    if frame.filename in ("", "??"):
        return printable(frame.name)
    file = basename(frame.filename)
    place = f"{file}:{frame.line}" if frame.line else file
    return printable(f"{frame.name.removeprefix(f'{file}:')} ({place})")


def short_line(stack: Stack) -> str:
    """A stack in one line: the leaf, and the first frame that is not torch's own; "" for ()."""
    if not stack:
        return ""
    own = next((frame for frame in stack if not is_torch(frame)), stack[0])
    line = short_frame(stack[0])
    return line if own is stack[0] else f"{line}, from {short_frame(own)}"
