"""Protocols between the components, of at most three methods, and the values they pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable


Pause: TypeAlias = "Callable[[], None]"
"""Called every few dozen items of a long pure-Python loop, so that the caller can give up the
interpreter lock (hazard: a thread that holds it stalls the job). The core itself has no clock."""


def no_pause() -> None:
    """A `Pause` that does nothing, for work on the job's own thread."""


FrameNamer: TypeAlias = "Callable[[str, str, int], str]"
"""(function name, file name, line) as recorded -> the unique name shown in flame graphs."""

StacklessRule: TypeAlias = "Callable[[int, int | None], str]"
"""(device, block address) -> the named root of memory that carries no stack."""


class Pacing(Protocol):
    """Slices one piece of our own work at a time, and measures it."""

    def begin(self) -> None:
        """Start a piece of work."""
        ...

    def pause(self) -> None:
        """Give up the interpreter lock where it is due."""
        ...

    def end(self) -> float:
        """Finish; seconds spent working, the pauses left out."""
        ...


class Waitable(Protocol):
    """An event, of whatever kind."""

    def is_set(self) -> bool:
        """Whether it was set."""
        ...

    def wait(self, seconds: float, /) -> bool:
        """At most so long; True if it is set."""
        ...


class Clock(Protocol):
    """Time, injected so that tests need none."""

    def time_ns(self) -> int:
        """Wall clock, nanoseconds since 1970."""
        ...

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    def wait(self, event: Waitable, seconds: float) -> bool:
        """Wait for the event, at most so long; True if it is set."""
        ...
